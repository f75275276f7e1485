"""Export targets: one module for each value of `export.to` and `--to`.

Each target declares its requirements, estimates its size, writes its files and verifies them. Start with `base.py`,
which defines the protocol; `merged.py` is the shortest example. Targets are registered in `config/extensions.py`.
"""
