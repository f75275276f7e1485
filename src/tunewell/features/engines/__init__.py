"""Train with the trainer of another library: `engine: trl` or `engine: unsloth`.

The trainer runs in a child process, in an environment of its own if `engine_python` names one. `engines.py` is the side
of tunewell: it checks the settings, writes the rows with their labels, and reports what the child sends. `worker.py`
and `observer.py` run in the child, which may have no tunewell: they import torch, transformers, the engine, the
standard library, and `training/health.py`, which is copied with them. Start with `engines.py`.
"""
