"""Local web servers: listening, tokens, allowed origins, and limits on connections. Needs starlette and uvicorn.

Imported only by features that serve something. Start with `access.py`.
"""
