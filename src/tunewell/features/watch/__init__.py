"""A local page from a file to a verdict, an export and a chat: it reads records, and starts work as commands.

The page has no state. What it shows is read from the run folders; what it starts are commands of the command line in
processes of their own, which go on without the server. Start with `app.py` (routes), `views.py` and `jobs.py`.
"""
