"""The command line: arguments in, text out.

Owns the parser, help texts, tables, live panels and exit codes. It makes no decisions: each command calls one function
of `workflows` and prints the result. Nothing else in tunewell prints to the terminal.

Start with `main.py` (find and run a command), then `commands/train.py` and `render.py` (tables and folded text).
"""
