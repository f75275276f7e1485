"""Tools that every package may use: errors, atomic files, locks, registries, units, model files, secret redaction.

The only domain knowledge here is about model files (`model_files`, `gguf`). It imports no other package of tunewell.
Start with `errors.py` (`UserError`) and `files.py`.
"""
