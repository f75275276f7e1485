"""Stores: where the passages and vectors of an index lie. `base.py` is the extension point."""
