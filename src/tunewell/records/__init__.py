"""The files that the stages exchange: manifest, plan, run folder, events, checkpoints, report, parity proof.

Each module has the types of one file, reads it and writes it. Records contain no logic: other packages compute the
content. Start with `rundir.py` for a run and `manifest.py` for a corpus.
"""
