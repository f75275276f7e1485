"""Export targets: one module for each value of `export.to` and `--to`.

Each target says what it requires, estimates its size, writes its files and proves them. Start with `base.py`, which
holds the protocol; `merged.py` is the shortest example. Targets are registered in `config/extensions.py`.
"""
