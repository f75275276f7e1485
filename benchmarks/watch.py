"""How fast and how large the page's server is: 100 runs of 100,000 steps, a live run of 10 steps per second.

python benchmarks/watch.py [--runs 100] [--steps 100000] [--seconds 30]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

_LIMITS = {"list": 1.0, "curve": 1.5, "memory": 300e6, "lag p95": 1.0, "processor": 0.02}


def _step(number: int, loss: float) -> dict[str, Any]:
    numbers = {
        "epoch": number / 1e4,
        "grad_norm": 1.39,
        "learning_rate": 3.3e-4,
        "tokens": 245,
        "supervised_tokens": 66,
    }
    more = {"documents": 4, "seconds": 0.1432264, "memory_bytes": 1469796352, "batch_sha256": "1f957229698e70b9"}
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        **numbers,
        **more,
        "was_skipped": False,
        "scale": None,
        "micro_batches": 1,
    }


def _write_runs(root: Path, num_runs: int, num_steps: int) -> None:
    lines = []
    for number in range(1, num_steps + 1):
        lines.append(json.dumps(_step(number, 2 + (number % 97) / 100)))
        if number % (num_steps // 10) == 0:
            lines.append(
                json.dumps({"kind": "held_out", "step": number, "loss": 2.0, "seconds": 1.0, "is_best": False})
            )
    log = ("\n".join(lines) + "\n").encode()
    chosen = {
        name: {"value": value, "because": "a benchmark"}
        for name, value in {"num_steps": num_steps, "device": "cpu"}.items()
    }
    for number in range(num_runs):
        run = root / f"run{number:03}"
        run.mkdir()
        (run / "plan.json").write_text(json.dumps({**chosen, "model": "m", "config": {}}))
        (run / "config.yaml").write_text("model: m\n")
        (run / "events.jsonl").write_bytes(log)
        if number % 2:  # every other one was killed, so its state must be read from its log
            outcome = {
                "status": "finished",
                "reason": "finished",
                "steps": num_steps,
                "planned_steps": num_steps,
                "last_loss": 2.0,
            }
            (run / "outcome.json").write_text(json.dumps(outcome))
    print(f"{num_runs} runs of {num_steps:,} steps, {len(log) / 1e6:.0f} MB of events each")


def _get(url: str, token: str, path: str) -> Any:
    request = urllib.request.Request(f"{url}/api/v1/{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def _memory(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(name))) * 1024


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _lags(url: str, token: str, run: Path, seconds: float) -> list[float]:
    """Append 10 steps per second, and return the time until the stream has each."""
    written: dict[int, float] = {}
    lags: list[float] = []
    after = _get(url, token, f"curve?id={run.name}&points=10")["cursor"]
    request = urllib.request.Request(
        f"{url}/api/v1/stream?run={run.name}&after={after}", headers={"Authorization": f"Bearer {token}"}
    )
    is_over = threading.Event()

    def write() -> None:
        first = 10**6
        with (run / "events.jsonl").open("a") as file:
            for number in range(first, first + int(10 * seconds)):
                written[number] = time.monotonic()
                file.write(json.dumps(_step(number, 1.9)) + "\n")
                file.flush()
                time.sleep(0.1)
        is_over.set()

    with urllib.request.urlopen(request) as answer:
        threading.Thread(target=write, daemon=True).start()
        kind = ""
        while not is_over.is_set() or len(lags) < len(written):
            line = answer.readline().decode()
            kind = line[7:].strip() if line.startswith("event: ") else kind
            if kind == "steps" and line.startswith("data: "):
                now = time.monotonic()
                lags += [now - written[row["step"]] for row in json.loads(line[6:])["rows"]]
    return sorted(lags)


def main() -> int:
    """Measure, print each figure beside its limit, and return 1 if one is above it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    found: dict[str, float] = {}
    spent: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="watch-") as folder:
        root = Path(folder)
        _write_runs(root, options.runs, options.steps)
        words = [sys.executable, "-m", "tunewell", "watch", folder, "--port", "0", "--json", "--no-open"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url, _, token = json.loads(server.stdout.readline())["url"].partition("/#token=")
            for name, path in (
                ("list", "runs"),
                ("curve", "curve?id=run007&points=1500"),
                ("list again", "runs"),
                ("curve again", "curve?id=run007"),
            ):
                started, before = time.monotonic(), _processor_seconds(server.pid)
                _get(url, token, path)
                found[name] = time.monotonic() - started
                spent[name] = _processor_seconds(server.pid) - before
            for number in range(0, min(40, options.runs), 2):
                _get(url, token, f"curve?id=run{number:03}")
            before, started = _processor_seconds(server.pid), time.monotonic()
            lags = _lags(url, token, root / "run000", options.seconds)
            found["processor"] = (_processor_seconds(server.pid) - before) / (time.monotonic() - started)
            found["lag p95"] = lags[int(0.95 * len(lags))]
            found["memory"] = _memory(server.pid, "VmHWM")
            server.terminate()
    for name, value in found.items():
        limit = _LIMITS.get(name)
        shown = (
            f"{value / 1e6:.0f} MB"
            if name == "memory"
            else f"{value:.1%} of a core"
            if name == "processor"
            else f"{value:.2f} s"
        )
        shown += f" ({spent[name]:.2f} s of a core)" if name in spent else ""
        print(f"{name:12} {shown:>30}   {'' if limit is None else 'ok' if value <= limit else 'TOO MUCH'}")
    return int(any(value > _LIMITS.get(name, value) for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
