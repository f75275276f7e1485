"""Tools that every package may use: errors, atomic files, locks, registries, units, model files, secret redaction.

Owns nothing of the field but file formats of models (`model_files`, `gguf`). Knows no other package of tunewell.
Start with `errors.py` (`UserError`) and `files.py`.
"""
