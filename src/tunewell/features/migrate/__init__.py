"""Turn the config, script or job of another tool into `tunewell.yaml`, with a ledger of every key.

`read.py` finds the kind of a file; `configs.py`, `script.py` and `shell.py` read its keys without running anything;
`rows.py` reads its data sets; `translate.py` translates the keys by the tables in `config/foreign*`; `workflow.py`
writes the config. The ledger closes: each key is kept, translated, not needed here, or lost.
"""
