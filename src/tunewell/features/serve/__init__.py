"""An HTTP server for one model with OpenAI's chat completions API.

Contains routes, request parsing, streaming, the queue and access control. The model's interface is
`queue.ServedModel`. Start with `server.py`, then `requests.py`, `queue.py` and `access.py`.
"""
