"""Diagnosis: parse the training logs of tunewell and other trainers for the health rules.

This package knows the formats of training logs. It does not import torch and executes nothing. The rules are in
`training/health.py` and `training/log_rules.py`. Start with `read_log` and `read_run` in `readers.py`.
"""
