"""Runs: the run folder with its config, plan, result and README; supervision, resume, and loading a run as a model.

It depends on training, but not on evaluation or export. Start with `config.py` (how a run is started), `folder.py`
(what it writes first) and `result.py` (what it returns). `supervisor.py` restarts a run that crashes or hangs.
"""
