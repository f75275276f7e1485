"""Train, disturb, resume and evaluate a tiny model in a loop, and compare every end with an undisturbed run.

    python tests/hardening/soak.py --minutes 40 --seed 1 --out soak

Each life of a run is disturbed one to four times: killed at a step or at a write, signalled, crashed, out of memory in
an evaluation, on a full disk, with a slow disk, a damaged checkpoint or a torn log. The last part of each life, and its
evaluation, run in this process, whose memory, file handles, threads and disk use are measured. Final weights and
optimizer states must be equal to the bit. Prints one line of JSON per life, and writes `soak.jsonl` and `soak.svg`.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), *(str(TESTS / name) for name in ("data", "faults"))]

import torch  # noqa: E402
from tiny import write_tiny_model  # noqa: E402
from write_faults import disk_with, kill_this_process_at  # noqa: E402

import tunewell  # noqa: E402
from corpora import write_sums  # noqa: E402
from forked import Command  # noqa: E402

NUM_STEPS = 24
SETTINGS = {
    "device": "cpu",
    "train.max_steps": str(NUM_STEPS),
    "train.batch_documents": "4",
    "train.threads": "1",
    "train.learning_rate": "5e-3",
    "evaluate.every_steps": "8",
    "evaluate.samples": "2",
    "evaluate.sample_tokens": "4",
    "checkpoints.every_steps": "3",
    "checkpoints.keep": "3",
    "data.held_out": "0.2",
    "verdict.after_training": "false",
}
ENDINGS = {  # how a process ends, or is told to
    "kill": "kill@step:step={step}",
    "crash": "crash@step:step={step}",
    "sigterm": "",
    "sigint": "",
    "sigkill": "",
    "kill at a write": "",
    "full disk": "",
}
COMPANIONS = ["", "", "oom@held_out:tokens=40", "oom@generation:prompts=1", "slow@read:seconds=0.002"]
DAMAGES = ["", "", "flip", "delete", "torn log", "leftover"]
MAX_GROWTH_BYTES = 48 << 20
"""Allowed growth of memory between the first and the last third of the lives, after a warm-up."""
NUM_WARM_UP = 3


@dataclass
class Soak:
    """The state of a soak: its project, its reference and its measurements."""

    project: Path
    draw: random.Random
    reference: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    num_faults: int = 0
    lives: list[dict[str, Any]] = field(default_factory=list)

    def undisturbed(self) -> None:
        """Train once without a fault, and remember the weights and the evaluation."""
        tunewell.train(sets=sets("undisturbed"), progress=False)
        self.reference = digest(self.project / "undisturbed")
        self.report = evaluation(self.project / "undisturbed")

    def live(self, number: int) -> dict[str, Any]:
        """Disturb one run until it may finish; return what was done and measured."""
        started, run = time.monotonic(), self.project / "life"
        faults: list[str] = []
        for _ in range(self.draw.randint(1, 4)):
            faults += self.disturb(run)
        result = tunewell.train(sets=sets("life"), progress=False, resume=has_begun(run))
        same = digest(run) == self.reference
        report = evaluation(run)
        assert same, f"life {number}: the weights differ after {faults}; kept in {run}"
        assert report == self.report, f"life {number}: the evaluation differs: {report}"
        assert result.steps == NUM_STEPS
        shutil.rmtree(run)
        self.num_faults += len(faults)
        life = {"life": number, "faults": faults, "seconds": round(time.monotonic() - started, 1), **self.measure()}
        self.lives.append(life)
        return life

    def disturb(self, run: Path) -> list[str]:
        """Start or resume the run in a child that ends early, and damage what it left."""
        ending, companion = self.draw.choice(list(ENDINGS)), self.draw.choice(COMPANIONS)
        step = self.draw.randint(1, NUM_STEPS)
        specs = [spec for spec in (ENDINGS[ending].format(step=step), companion) if spec]
        before = None
        if ending == "kill at a write":
            at = self.draw.randint(0, 400)
            before = lambda: kill_this_process_at(at)  # noqa: E731
        elif ending == "full disk":
            stack, room = contextlib.ExitStack(), self.draw.randint(0, 3_000_000)
            before = lambda: stack.enter_context(disk_with(room))  # noqa: E731
        child = Command(
            *("train", "--enable-fault-injection", *(["--resume"] if has_begun(run) else [])),
            *(part for setting in sets("life") for part in ("--set", setting)),
            cwd=self.project,
            env={"TUNEWELL_FAULTS": ";".join(specs)},
            before=before,
        )
        if ending.startswith("sig"):
            time.sleep(self.draw.uniform(0.0, 4.0))
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(getattr(signal, ending.upper()))
        done = child.wait(timeout=240)
        assert done.returncode != 1, f"{ending}: {done.stderr}"
        damage = self.damage(run)
        return [name for name in (ending, companion.partition(":")[0], damage) if name]

    def damage(self, run: Path) -> str:
        """Damage a file of the run as a disk might, unless nothing would be left."""
        kind = self.draw.choice(DAMAGES)
        saved = sorted((run / "checkpoints").glob("step-??????")) if run.is_dir() else []
        if kind in ("flip", "delete") and len(saved) >= 2:
            file = self.draw.choice(sorted(path for path in saved[-1].iterdir() if path.is_file()))
            if kind == "delete":
                file.unlink()
            else:
                data = bytearray(file.read_bytes())
                data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
                file.write_bytes(data)
            return kind
        if kind == "torn log" and (run / "events.jsonl").is_file():
            with (run / "events.jsonl").open("ab") as file:
                file.write(b'{"kind": "step", "st')
            return kind
        if kind == "leftover" and saved:
            (run / "checkpoints" / "step-000999.tmp").mkdir(exist_ok=True)
            return kind
        return ""

    def measure(self) -> dict[str, Any]:
        """Return memory, file handles, threads and disk use of this process."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = [path for path in self.project.rglob("*") if path.is_file()]
        return {
            "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "handles": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
            "disk_bytes": sum(path.stat().st_size for path in files),
            "temporary": len(list(Path(tempfile.gettempdir()).iterdir())),
        }


def sets(run: str) -> list[str]:
    """Return the settings of a run as `KEY=VALUE`."""
    return [f"{key}={value}" for key, value in SETTINGS.items()] + [f"run={run}"]


def has_begun(run: Path) -> bool:
    """Return whether a run must be resumed. A folder with nothing but a lock is empty."""
    return run.is_dir() and any(not path.name.startswith(".") for path in run.iterdir())


def digest(run: Path) -> str:
    """Hash the tensors of the last checkpoint: the adapter and the optimizer states."""
    folder = run / "checkpoints" / f"step-{NUM_STEPS:06d}"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) >= 2, f"{folder} has {len(files)} files of tensors"
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def evaluation(run: Path) -> dict[str, Any]:
    """Validate a run in this process; return its losses and answers."""
    report = tunewell.validate(run, progress=False).report
    assert report.held_out is not None
    answers = [exchange.model_dump() for exchange in report.exchanges]
    return {"verdict": report.verdict, "held_out": report.held_out.model_dump(), "answers": answers}


def problems(lives: list[dict[str, Any]]) -> list[str]:
    """Return what grew between the first and the last third of the lives after the warm-up."""
    rest = lives[NUM_WARM_UP:]
    third = max(1, len(rest) // 3)
    if len(rest) < 3:
        return []
    found = []
    for name, allowed in (("rss_bytes", MAX_GROWTH_BYTES), ("handles", 0), ("threads", 0), ("disk_bytes", 1 << 20)):
        first, last = (statistics.median(life[name] for life in part) for part in (rest[:third], rest[-third:]))
        if last - first > allowed:
            found.append(f"{name} grew from {first:,.0f} to {last:,.0f}")
    return found


def plot(lives: list[dict[str, Any]], path: Path) -> None:
    """Write a picture of memory, handles and threads over the lives."""
    width, height, left, panels = 720, 110, 90, [("rss_bytes", "memory, MiB", 1 << 20), ("handles", "file handles", 1)]
    panels += [("threads", "threads", 1), ("disk_bytes", "disk, MiB", 1 << 20)]
    total = len(panels) * height + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for row, (name, label, unit) in enumerate(panels):
        values = [life[name] / unit for life in lives]
        top, bottom = row * height + 14, (row + 1) * height - 10
        limit = max(values) * 1.5 or 1  # room for the label above the line
        step = (width - left - 20) / max(1, len(values) - 1)
        points = " ".join(
            f"{left + index * step:.1f},{bottom - value / limit * (bottom - top):.1f}"
            for index, value in enumerate(values)
        )
        parts.append(
            f'<path d="M{left} {top}V{bottom}H{width - 20}" stroke="#999" fill="none"/>'
            f'<polyline points="{points}" stroke="#1f6feb" stroke-width="1.5" fill="none"/>'
            f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>'
            f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{limit:,.0f}</text>'
            f'<text x="{left + 6}" y="{top + 10}">{label}: {values[0]:,.0f} at first, {values[-1]:,.0f} at last</text>'
        )
    faults = sum(len(life["faults"]) for life in lives)
    parts.append(
        f'<text x="{width / 2}" y="{total - 8}" text-anchor="middle">{len(lives)} runs, {faults} kills and faults; '
        "all final weights equal to the bit</text></svg>"
    )
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> int:
    """Soak for a time; return 1 if something leaked or differed."""
    parser = argparse.ArgumentParser(description="Train, disturb, resume and evaluate in a loop.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--lives", type=int, default=10**9, help="end after so many runs")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--out", type=Path, default=Path("soak"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    options.out.mkdir(parents=True, exist_ok=True)
    out, began = options.out.resolve(), time.monotonic()
    print(f"soak: seed {seed}, {options.minutes:g} minutes, into {out.name}/", flush=True)
    with tempfile.TemporaryDirectory(prefix="tunewell-soak-") as folder:
        project = Path(folder)
        tempfile.tempdir = str(project / "tmp")
        Path(tempfile.tempdir).mkdir()
        os.environ["TUNEWELL_CACHE"] = str(project / "cache")
        write_sums(project, write_tiny_model(project / "tokenizer"), model="preset:tiny-1m", num_rows=40)
        os.chdir(project)
        soak = Soak(project, random.Random(seed))
        soak.undisturbed()
        with (out / "soak.jsonl").open("w", encoding="utf-8") as log:
            while time.monotonic() - began < options.minutes * 60 and len(soak.lives) < options.lives:
                line = json.dumps(soak.live(len(soak.lives) + 1))
                print(line, flush=True)
                log.write(line + "\n")
                log.flush()
        os.chdir(out)
    plot(soak.lives, out / "soak.svg")
    found = problems(soak.lives)
    print(
        f"{len(soak.lives)} runs, {soak.num_faults} kills and faults in {(time.monotonic() - began) / 60:.1f} minutes: "
        f"weights, optimizer states and evaluations equal to the undisturbed run's; {'; '.join(found) or 'no leak'}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
