"""The config: one frozen tree of keys, each with its doc, its unit, its aliases and its origin.

Owns the schema, the loading of `tunewell.yaml`, flags and `--set`, and the glossary. Knows no hardware and no data; the
registries here name implementations in higher packages as import paths only. Start with `schema.py`, then `load.py`.
"""
