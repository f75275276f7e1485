"""The config: one immutable tree of keys, each with its description, type, aliases and origin.

The package contains the schema, the loading of `tunewell.yaml`, flags and `--set`, and the glossary. It does not depend
on hardware or data. Its registries refer to implementations in higher packages by import path only. Start with
`schema.py`, then `load.py`.
"""
