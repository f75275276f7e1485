"""Write `features/demo/base.zip` and `training/replay.zip`: what the base model answers, measured on this machine.

Run it after a change of the demo's rows, of the everyday texts, instructions or prompts: `python pack_base.py`.
"""

import io
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

FOLDER = Path(__file__).parents[3] / "src" / "tunewell" / "features" / "demo"
TARGET = FOLDER / "base.zip"
REPLAY = FOLDER.parents[1] / "training" / "replay.zip"


def main() -> None:
    """Run the demo with an empty cache, and keep what it measured of the base model."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        for path in (TARGET, REPLAY):
            with ZipFile(path, "w"):
                pass
        os.environ["TUNEWELL_CACHE"] = str(cache)
        command = [sys.executable, "-m", "tunewell", "demo", "--out", f"{folder}/demo"]
        subprocess.run(command, check=False)
        [measured], [replay] = [*(cache / "base").glob("*.npz")], [*(cache / "replay").glob("*.json")]
        with np.load(measured) as file:
            arrays = {name: file[name] for name in file.files if name not in ("logits", "shipped")}
            name = str(file["shipped"])
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays, made_at=np.array(datetime.now(UTC).isoformat(timespec="seconds")))
        with ZipFile(TARGET, "w", ZIP_DEFLATED) as archive:
            archive.writestr(f"base/{name}.npz", buffer.getvalue())
        with ZipFile(REPLAY, "w", ZIP_DEFLATED) as archive:
            archive.writestr(replay.name, replay.read_bytes())


if __name__ == "__main__":
    main()
