"""The environment of a run: installed packages, GPU driver, disks and model files, and the checks of `tunewell doctor`.

Facts are collected first (`packages.py`, `machine.py`, `model_files.py`, `imports.py`), then `checks/` reads them and
returns findings. Nothing here imports torch: imports are tried in a child process. `shield.toml` lists combinations of
versions that do not work. Start with `facts.py` (all facts) and `registry.py` (all checks).
"""
