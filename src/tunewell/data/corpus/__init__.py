"""The corpus: build it from row files, write it as Arrow shards with a manifest, open it for training.

row files -> tokenized blocks (cached) -> assembly (duplicates, held-out rows) -> packing -> shards -> manifest

Start with `build.py`; `reader.py` opens a finished corpus; `page.py` shows it as an HTML page.
"""
