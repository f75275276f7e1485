"""One module per command, each with a `command` function. Its parameters are the flags, its docstring is the help.

To add a command, add a module here and a line in `cli/main.py`. Imports are inside functions, so that `--help` is fast.
Start with `prepare.py`.
"""
