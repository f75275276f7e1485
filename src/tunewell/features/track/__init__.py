"""Experiment trackers: a separate process follows the files of a run and sends its metrics on.

The modules use the standard library and the package of their tracker, so that they run in another environment. Start
with `follow.py`; `base.py` has the protocol of a tracker.
"""
