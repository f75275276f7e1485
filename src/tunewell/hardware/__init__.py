"""Hardware: facts about this machine and its devices, and the fastest number of CPU threads.

Start with `facts.py` (facts without torch) and `probe.py` (torch devices). `threads.py` measures. Only the command line
uses `allocator.py`. The package does not depend on models, data or runs.
"""
