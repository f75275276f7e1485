"""Turn the config, script or job of another tool into `tunewell.yaml`, with a ledger of every key.

`read.py` finds the kind of each file, and reads all kinds into one list of settings with their lines, with the help of
`script.py` and `shell.py`; nothing is run. `rows.py` reads the data sets, `translate.py` the other settings, both by
the rows in `config/foreign*`; `workflow.py` writes the config. Each key is kept, translated, not needed here, or lost.
"""
