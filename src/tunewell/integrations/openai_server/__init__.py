"""An HTTP server for one model with OpenAI's chat completions API.

Owns routes, request parsing, streaming, the queue and access control. It knows a model only as `queue.ServedModel`.
Start with `server.py`; then `requests.py`, `queue.py` and `access.py`.
"""
