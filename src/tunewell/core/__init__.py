"""Tools that every package may use: errors, atomic files, locks, registries, units, model files, secret redaction.

The only domain knowledge here is the file formats of models (`model_files`, `gguf`). Imports no other package of tunewell.
Start with `errors.py` (`UserError`) and `files.py`.
"""
