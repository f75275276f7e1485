"""Hardware: facts about this machine and its devices, GPU cards, and the fastest number of CPU threads.

Start with `facts.py` and `machine.py` (facts without torch) and `device.py` (torch devices, and a measurement of
threads). `cards.json` lists GPU cards. Only the command line uses `allocator.py`. The package does not depend on
models, data or runs.
"""
