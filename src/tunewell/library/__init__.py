"""The Python library: what `import tunewell` offers to scripts and notebooks.

Owns the public functions (`train`, `prepare`, `validate`, `export`, `load`), rows given from memory, progress in a
notebook, and results with an HTML view. The work itself is done by `workflows/`; nothing below imports this
package. Start with `functions.py`.
"""
