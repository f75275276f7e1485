"""Experiment trackers: a thread sends the metrics of a run while it trains, and `tunewell track` those of any run.

Start with `sender.py`; `base.py` has the protocol of a tracker, and `live.py` the thread of a run.
"""
