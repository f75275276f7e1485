"""Benchmark training on one GPU, compared with TRL: real tokens per second, memory and time to the first step.

    python benchmarks/gpu.py                              23M, 1.1B and 8B, each contender in a fresh process
    python benchmarks/gpu.py --cases 8b --rounds 2        one case, everything twice, the second time in reverse
    python benchmarks/gpu.py --cases smoke                a minute on any CPU: do the scripts run?

    python benchmarks/gpu.py --variant qlora --cases 1.1b 8b     a base in NF4; `qlora-lean`: 2,048 tokens, recomputed

Bars, without more memory: `VARIANTS` in `loads.py`, at least 2 times the best peer for LoRA at 23M, for example.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clock import RESULT
from loads import CASES, VARIANTS, draw_documents, flops_of, serial_ceiling
from setting import setting, table

HERE = Path(__file__).parent
PEERS, OURS = ("trl-liger", "trl"), ("ours-compiled", "ours-eager", "ours-auto")
DEFAULT = ("trl-liger", "trl", "ours-compiled", "ours-eager")
EXPECTED_SECONDS = {"23m": 45, "135m": 60, "1.1b": 55, "8b": 80, "smoke": 30}
"""What a contender took on an H200, roughly; one that would not end before the deadline is not begun."""
NAMES = {
    "trl": "TRL, packed, flash",
    "trl-liger": "TRL, packed, flash, Liger",
    "ours-eager": "tunewell, eager",
    "ours-compiled": "tunewell, compiled",
    "ours-auto": "tunewell, `compile: auto`",
}


@dataclass(frozen=True)
class Job:
    """One contender on one case."""

    case: str
    contender: str
    variant: str = "lora"


def jobs_in_order(cases: list[str], contenders: list[str], rounds: int, variant: str) -> list[Job]:
    """Put what the bars need first, the rest after; every other round goes backwards."""
    first = next((name for name in OURS if name in contenders), None)
    needed = [Job(case, name) for case in cases for name in contenders if name in ("trl-liger", first)]
    # Without Liger, TRL was the faster one at 23M alone.
    also = [Job(case, "trl") for case in cases if "trl" in contenders and case not in ("1.1b", "8b")]
    rest = [Job(case, name) for case in cases for name in contenders if name in OURS and name != first]
    # Liger's kernels run on a GPU only.
    order = [job for job in needed + also + rest if job != Job("smoke", "trl-liger")]
    order = [replace(job, variant=variant) for job in order]
    return [job for number in range(rounds) for job in (order if number % 2 == 0 else reversed(order))]


def run(job: Job, *, log: Path, limit_seconds: float) -> dict[str, Any]:
    """Run a contender in a process of its own; give what it measured, or why it did not."""
    is_peer = job.contender in PEERS
    script = HERE / ("gpu_peers.py" if is_peer else "gpu_ours.py")
    environment = dict(os.environ)
    if is_peer and importlib.util.find_spec("flash_attn") is None:
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(HERE / "stand_in"), *filter(None, [environment.get("PYTHONPATH")])]
        )
    line = [sys.executable, script, job.case, job.contender, "--variant", job.variant]
    line += ["--started-at", str(time.time())]
    with log.open("a", encoding="utf-8") as said:
        print(f"\n=== {job.case} {job.contender}", file=said, flush=True)
        try:
            done = subprocess.run(
                line, env=environment, stdout=subprocess.PIPE, stderr=said, text=True, timeout=limit_seconds
            )
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {limit_seconds:.0f} s"}
        said.write(done.stdout)
    found = [text for text in done.stdout.splitlines() if text.startswith(RESULT)]
    if found:
        return json.loads(found[-1].removeprefix(RESULT))
    own = log.read_text(encoding="utf-8").rpartition("\n=== ")[2]
    last = [text for text in own.splitlines() if text.strip()][-12:]
    print("\n".join(last), file=sys.stderr)
    return {"error": f"exit code {done.returncode}: {last[-1]}"}


def pool(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the rounds of one contender together: all windows, the greatest memory, the first start."""
    good = [result for result in results if "error" not in result]
    if not good:
        return results[0]
    rates = [rate for result in good for rate in result["tokens_per_second"]]
    return good[0] | {
        "tokens_per_second": rates,
        "rate": statistics.median(rates),
        "peak_gib": max(result["peak_gib"] for result in good),
        "held_gib": max(result["held_gib"] for result in good),
    }


def complaints(case: str, found: dict[str, dict[str, Any]]) -> list[str]:
    """List what makes a case's figures void: a loss off its start, one that rises or ends elsewhere, no gradient."""
    good = {name: result for name, result in found.items() if "error" not in result}
    starts = {name: result["losses"][0][1] for name, result in good.items()}
    wrong = [f"{name}: {result['error']}" for name, result in found.items() if "error" in result]
    least = math.log(CASES[case].shape.vocabulary)
    for name, result in good.items():
        losses, norms = [loss for _, loss in result["losses"]], result["grad_norms"]
        if not all(math.isfinite(value) for value in losses + norms):
            wrong.append(f"{name}: a loss or a norm is not finite")
        if not 0.98 * least < starts[name] < least + 2:
            wrong.append(f"{name}: starts at a loss of {starts[name]:.3f}, a guess costs {least:.3f}")
        if not all(norm > 0 for norm in norms):
            wrong.append(f"{name}: a gradient is zero")
        # In so few steps the loss of a large model moves less than the documents differ.
        if case != "smoke" and losses[-1] > 1.001 * losses[0]:
            wrong.append(f"{name}: the loss rises ({losses[0]:.3f} to {losses[-1]:.3f})")
    if starts and max(starts.values()) > 1.02 * min(starts.values()):
        wrong.append(f"starts differ: {', '.join(f'{name} {loss:.3f}' for name, loss in starts.items())}")
    ends = {name: result["losses"][-1][1] for name, result in good.items()}
    if case != "smoke" and ends and max(ends.values()) > 1.02 * min(ends.values()):
        wrong.append(f"ends differ: {', '.join(f'{name} {loss:.3f}' for name, loss in ends.items())}")
    return [f"{case}, {text}" for text in wrong]


def rows_of(case: str, found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Compare a case's contenders with its best peer."""
    peers = [result for name, result in found.items() if name in PEERS and "error" not in result]
    best = max(peers, key=lambda peer: peer["rate"], default=None)
    index = draw_documents(CASES[case], steps=8).index
    flops, ceiling = sum(flops_of(CASES[case].shape, index).values()), serial_ceiling(CASES[case].shape, index)
    peak = next((result["matmul_flops"] for result in found.values() if result.get("matmul_flops")), None)
    rows = []
    for name, result in sorted(found.items(), key=lambda item: (item[0] not in PEERS, item[0])):
        if "error" in result:
            rows.append([case, NAMES[name], result["error"][:60], *["-"] * 9])
            continue
        rates, rate = result["tokens_per_second"], result["rate"]
        rows.append(
            [
                case,
                NAMES[name],
                f"{rate:,.0f}",
                f"{min(rates):,.0f} to {max(rates):,.0f}",
                f"{rate / best['rate']:.2f}" if best else "-",
                f"{result['peak_gib']:.1f}",
                f"{result['held_gib']:.1f}",
                f"{rate * flops / peak:.0%}" if peak else "-",
                f"{rate / ceiling:.0%}",
                f"{result['call_seconds']:.1f}",
                f"{result['first_step_seconds']:.1f}",
                f"{result['losses'][0][1]:.3f} to {result['losses'][-1][1]:.3f}",
            ]
        )
    return rows


def verdicts(case: str, found: dict[str, dict[str, Any]], bars: dict[str, float]) -> list[str]:
    """Report whether our best contender reaches its bar with no more memory than the best peer."""
    good = {name: result for name, result in found.items() if "error" not in result}
    peers = [result for name, result in good.items() if name in PEERS]
    own = {name: result for name, result in good.items() if name in OURS}
    if case not in bars or not peers or not own:
        return []
    best, (name, ours) = max(peers, key=lambda x: x["rate"]), max(own.items(), key=lambda x: x[1]["rate"])
    ratio = ours["rate"] / best["rate"]
    is_small = all(ours[kind] <= best[kind] for kind in ("peak_gib", "held_gib"))
    reached = ratio >= bars[case] and is_small
    memory = f"{ours['peak_gib']:.1f} GiB against {best['peak_gib']:.1f}"
    memory += f", held {ours['held_gib']:.1f} against {best['held_gib']:.1f}"
    return [
        f"{case}: {NAMES[name]} {ratio:.2f} times the best peer (bar {bars[case]}), {memory}: "
        + ("reached" if reached else "NOT reached")
    ]


HEADER = [
    "case",
    "contender",
    "real tokens/s",
    "windows",
    "of the best peer",
    "peak GiB",
    "held GiB",
    "of the matmul rate",
    "of the H200's serial ceiling",
    "first step after the call, s",
    "after the start, s",
    "loss",
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the speed of training on one GPU.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["23m", "1.1b", "8b"])
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(DEFAULT))
    parser.add_argument("--variant", choices=VARIANTS, default="lora", help="the training method")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit: start no case that would end later")
    parser.add_argument("--out", type=Path, default=Path("demo/gpu"), help="folder for logs and figures")
    wanted = parser.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wanted.minutes * 60
    results: dict[Job, list[dict[str, Any]]] = {}
    left_out = []
    for job in jobs_in_order(wanted.cases, wanted.contenders, wanted.rounds, wanted.variant):
        left = deadline - time.monotonic()
        if left < EXPECTED_SECONDS[job.case]:
            left_out.append(job)
            continue
        started = time.monotonic()
        # One that hangs must not take the time of all the others.
        limit = min(left, 60 + 3 * EXPECTED_SECONDS[job.case])
        result = run(job, log=wanted.out / "gpu.log", limit_seconds=limit)
        results.setdefault(job, []).append(result)
        shown = result.get("error") or f"{statistics.median(result['tokens_per_second']):,.0f} tokens/s"
        print(f"{job.case} {job.contender}: {shown} ({time.monotonic() - started:.0f} s)", flush=True)
        figures = [{"case": job.case, "contender": job.contender, "rounds": runs} for job, runs in results.items()]
        (wanted.out / "gpu.json").write_text(json.dumps(figures))
    pooled = {job: pool(runs) for job, runs in results.items()}
    return report(wanted.cases, pooled, left_out, VARIANTS[wanted.variant].bars)


def report(cases: list[str], pooled: dict[Job, dict[str, Any]], left_out: list[Job], bars: dict[str, float]) -> int:
    """Print the table and the verdicts; give 1 when something makes the figures void."""
    print("\n" + setting("torch", "triton", "transformers", "peft", "trl", "liger-kernel", "tunewell"))
    print(gpu_name() + "\n")
    by_case = {case: {job.contender: result for job, result in pooled.items() if job.case == case} for case in cases}
    print(table(HEADER, [row for case, found in by_case.items() for row in rows_of(case, found)]))
    print("\n" + "\n".join(line for case, found in by_case.items() for line in verdicts(case, found, bars)))
    if left_out:
        print("not started, not enough time: " + ", ".join(f"{job.case} {job.contender}" for job in left_out))
    wrong = [line for case, found in by_case.items() for line in complaints(case, found)]
    print("\n".join(f"INVALID {line}" for line in wrong) if wrong else "every run is valid")
    return 1 if wrong else 0


def gpu_name() -> str:
    """Name the GPU and its driver, without starting CUDA here."""
    try:
        question = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        return subprocess.run(question, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no GPU"


if __name__ == "__main__":
    sys.exit(main())
