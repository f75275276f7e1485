"""Embedders: turn texts into vectors of length one. `base.py` has the protocol and the registry."""
