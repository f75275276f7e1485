"""The files that stages exchange: manifest, plan, run folder, events, checkpoints, report, export verification.

Each module defines the types of one file and reads and writes it. Records contain no logic: other packages compute the
content. Start with `rundir.py` for a run and `manifest.py` for a corpus.
"""
