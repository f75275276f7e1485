"""Diagnosis: name the failure in the log of any trainer, with evidence, cause and fix.

Owns the readers of logs, notebooks, state files and configs, the signature files, their pattern language, and the
ranking of findings. It imports no torch, executes nothing and loads no pickle. The rules on series of losses are in
`training/health.py` and `training/log_rules.py`. Start with `diagnose.py`, then `signatures/` (one file per failure).
"""
