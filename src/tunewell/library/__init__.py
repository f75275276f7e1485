"""The Python library: the public API of `import tunewell` for scripts and notebooks.

Owns the public functions (`train`, `prepare`, `validate`, `export`, `load`), rows from memory, progress in notebooks,
and results with an HTML view. The work is done by `workflows/`; no package below imports this one. Start with
`functions.py`.
"""
