"""Row files: find them, open them through a `Source`, and read their rows in blocks.

The package handles storage (local files; others are added in `base.py`), file formats and compression. It does not
interpret rows. Start with `base.py` (the extension point) and `blocks.py`.
"""
