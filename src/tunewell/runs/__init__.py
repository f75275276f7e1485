"""A training run as a folder: its config, supervisor, heartbeat, resume, result and README; resolving it to a model.

Knows training, but neither evaluation nor export. Start with `config.py` (how a run is started), `folder.py` (what it
writes first) and `result.py` (what it returns); `supervisor.py` restarts it when it dies.
"""
