"""The commands as functions: one file per command, at most 200 lines, wiring only.

A workflow calls the packages below it in order and contains no logic. If two workflows need the same thing, it
belongs in a package below. Start with `train.py`.
"""
