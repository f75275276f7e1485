"""One module per command, each with a `command` function: its parameters are the flags, its docstring the help.

A new command is one module here and one line in `cli/main.py`. Imports are inside functions, so that `--help` is fast.
Start with `prepare.py`.
"""
