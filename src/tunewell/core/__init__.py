"""Utilities for all packages: errors, atomic files, locks, registries, units, model files, redaction of secrets,
HTML pages.

The only domain knowledge here is about model files (`model_files`, `gguf`). `core` imports no other tunewell package.
Start with `errors.py` (`UserError`) and `files.py`.
"""
