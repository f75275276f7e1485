"""Hardware: facts about this machine and its devices, and the fastest number of CPU threads.

Start with `facts.py` (read without torch) and `probe.py` (devices as torch sees them); `threads.py` measures.
`allocator.py` runs only if the command line asks for it. The package knows nothing about models, data or runs.
"""
