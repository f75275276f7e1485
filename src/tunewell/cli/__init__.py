"""The command line: parse arguments, call a workflow, and print the result.

Owns the parser, help texts, tables, live panels and exit codes. It contains no logic: each command calls one function
of `workflows` and prints the result. No other package prints to the terminal.

Start with `main.py` (find and run a command), then `commands/train.py` and `render.py` (tables and wrapped text).
"""
