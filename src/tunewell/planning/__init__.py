"""Planning: choose every value of a run from the config, the corpus and the machine, each with its reason.

Start with `plan.py`, which also chooses the values that `init` writes; `compute.py` chooses device, precision,
attention and threads. Every reason is shown to the user as a sentence after the value.
Planning uses only facts and records: it imports no torch, loads no model and measures nothing.
"""
