"""Planning: choose every value of a run from the config, the corpus and the machine, each with its reason.

Start with `plan.py`, which also chooses the values that `init` writes. `compute.py` chooses device, precision,
attention and threads. Screens show the reason after each value.
This package uses only facts and records: it does not import torch, load a model or measure anything.
"""
