"""A machine replayed from a recorded file: what it has in /proc, its variables, and what its programs print."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunewell.machine.system import System

_FOLDER = Path(__file__).parent / "recorded"
NAMES = sorted(path.stem for path in _FOLDER.glob("*.json"))


class RecordedSystem(System):
    """Answers with recorded facts only."""

    def __init__(self, name: str) -> None:
        self._facts = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        self.platform = self._facts["platform"]

    def read(self, path: str) -> str:
        """Return the recorded text of a file."""
        return self._facts["files"].get(path, "")

    def variable(self, name: str) -> str | None:
        """Return a recorded variable."""
        return self._facts["variables"].get(name)

    def run(self, command: Sequence[str], *, seconds: float) -> str | None:
        """Return the recorded output of a program."""
        line = " ".join(command)
        return next((text for start, text in self._facts["commands"].items() if line.startswith(start)), None)

    def free_disk(self, path: str) -> int | None:
        """Return the recorded free bytes."""
        return self._facts["free_disk"].get(path, 50 << 30)

    def total_disk(self, path: str) -> int | None:
        """Return the recorded bytes; an idle machine has nothing in them."""
        return None if self.platform == "darwin" else self.free_disk(path)

    @property
    def doctor(self) -> dict[str, Any]:
        """The packages of the machine, and what `doctor` finds there; empty if they were not recorded."""
        return self._facts.get("doctor", {})

    def installed(self, package: str) -> str | None:
        """Return the recorded version of torch."""
        return self._facts["torch"] if package == "torch" else None

    def cores(self) -> int:
        """Return the recorded number of cores."""
        return self._facts["cores"]

    def load(self) -> float | None:
        """Return the recorded load."""
        return self._facts["load"]
