"""Planning: choose every value of a run with its reason, and predict its memory, time and disk space.

Start with `plan.py`, which also chooses the values that `init` writes; `compute.py` chooses device, precision,
attention and threads. `workload.py` has the run in numbers, `memory.py` and `speed.py` compute from them, `forecast.py`
combines both with what real steps measured, and `fit.py` makes a run fit. `advice.py` inspects the rows.
This package uses only facts and records: it does not import torch or load a model.
"""
