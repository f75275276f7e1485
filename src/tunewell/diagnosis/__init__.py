"""Diagnosis: parse training logs, ours or another trainer's, for the health rules.

Owns the formats of training logs. It imports no torch and runs nothing. The rules themselves are in
`training/health.py` and `training/log_rules.py`. Start with `readers.py`: `read_log` and `read_run`.
"""
