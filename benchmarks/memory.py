"""Benchmark the memory of `tunewell prepare`: it should depend on the shard size, not on the number of rows.

    python benchmarks/memory.py                     100,000 and 800,000 rows
    python benchmarks/memory.py --rows 5000 10000

Measures RssAnon, memory that the system cannot drop and read again; mapped files are not included. Linux only.
Bar: with eight times the rows, at most 1.5 times the memory.
"""

import argparse
import re
import subprocess
import tempfile
import time
from pathlib import Path

from setting import MODEL, setting, table, tunewell_command, write_rows

POLL_SECONDS = 0.005


def peak_of_prepare(rows: int) -> tuple[int, int, float]:
    """Prepare so many rows in a process of its own; give the peaks of RssAnon and of all it held, and the seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", rows)
        line = [*tunewell_command(), "prepare", "--model", MODEL, "--data", folder / "rows.jsonl"]
        started = time.perf_counter()
        with (folder / "said.txt").open("w", encoding="utf-8") as said:
            process = subprocess.Popen([*line, "--out", folder / "corpus"], stdout=said, stderr=said)
        anonymous = resident = 0
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:  # it ended between the two lines
                break
            found = {key: int(value) for key, value in re.findall(r"(RssAnon|VmHWM):\s+(\d+) kB", status)}
            anonymous = max(anonymous, found.get("RssAnon", 0))
            resident = max(resident, found.get("VmHWM", 0))
            time.sleep(POLL_SECONDS)
        if process.wait():
            raise SystemExit((folder / "said.txt").read_text(encoding="utf-8"))
        return anonymous * 1024, resident * 1024, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how the memory of prepare grows with the rows.")
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 800_000])
    wanted = parser.parse_args().rows
    print(setting("tunewell", "tokenizers", "numpy", "pyarrow") + "\n")
    peaks = {rows: peak_of_prepare(rows) for rows in wanted}
    least = peaks[wanted[0]][0]
    lines = [
        [
            f"{rows:,}",
            f"{anon / 2**20:,.0f} MiB",
            f"{anon / least:.2f}x",
            f"{resident / 2**20:,.0f} MiB",
            f"{seconds:.0f}",
        ]
        for rows, (anon, resident, seconds) in peaks.items()
    ]
    print(table(["rows", "peak RssAnon", "relative to the first", "peak resident", "seconds"], lines))
    if len(wanted) > 1:
        slope = (peaks[wanted[-1]][0] - least) / (wanted[-1] - wanted[0])
        print(f"\n{slope:,.0f} bytes of RssAnon per additional row.")


if __name__ == "__main__":
    main()
