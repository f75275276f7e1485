"""The files that the stages exchange: manifest, plan, run folder, events, checkpoints, report, parity proof.

Each module has the types of one file, reads it and writes it. There is no logic here: records do not know how the content is computed.
Start with `rundir.py` for a run and `manifest.py` for a corpus.
"""
