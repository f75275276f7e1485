"""Workflows: each command as a function, in one file that only wires packages together.

A workflow calls the packages below it in order and contains no logic of its own. Code that two workflows need belongs
in a package below. Start with `train.py`.
"""
