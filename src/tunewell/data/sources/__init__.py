"""Row files: find them, open them through a `Source`, and read their rows in blocks.

Owns storage (local files; others are added in `base.py`), file formats and compression. Does not know what a row means.
Start with `base.py` (the extension point) and `blocks.py`.
"""
