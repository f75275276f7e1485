"""Start the process that takes a few real steps (`workflows/probe.py`), and read what it measured. No torch here.

Results are cached by config, corpus, machine and versions, so that `train` after `plan` starts with them.
"""

import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from tunewell import __version__
from tunewell.config.load import LoadedConfig, as_request
from tunewell.core.cache import DiskCache
from tunewell.core.child import ChildDied, call
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener
from tunewell.core.units import count
from tunewell.machine.facts import installed_versions
from tunewell.planning.fit import Planner
from tunewell.planning.forecast import MeasuredRun, Outlook
from tunewell.planning.memory import CONTEXT_BYTES
from tunewell.planning.speed import CACHED_COMPILE_SECONDS, MeasuredSpeed
from tunewell.records.plan import Chosen, Plan

_CACHE = DiskCache("probes")
_MAX_SECONDS, _RUN_SHARE = 120.0, 0.05
"""A sweep over micro-batch sizes takes at most this long, and at most this share of the run."""
_STEP_SECONDS = 45.0
"""Time for the steps without a sweep; a single step may take longer."""
_TIMEOUT = 600.0
_NEAR_BEST = 0.97
"""The smallest micro-batch with this share of the best speed is chosen."""
_CONTEXT_RANGE = (200 << 20, 2 << 30)
_OUTSIDE = ("run", "plan", "verdict", "export", "evaluate", "checkpoints", "healing")
"""Config sections that do not change a step."""


@dataclass(frozen=True)
class Size:
    """The measured speed of a micro-batch size."""

    tokens: int
    tokens_per_second: float
    loss: float | None
    peak_bytes: int


@dataclass(frozen=True)
class ProbeResult:
    """What the child process measured."""

    measured: MeasuredRun
    sizes: list[Size]

    @property
    def knee(self) -> Size | None:
        """The smallest size within 3% of the fastest."""
        if len(self.sizes) < 2:
            return None
        best = max(size.tokens_per_second for size in self.sizes)
        return next(size for size in self.sizes if size.tokens_per_second >= _NEAR_BEST * best)


def sweep_sizes(outlook: Outlook) -> list[int]:
    """Return the micro-batch sizes to measure. None if the size is set, or if measuring takes over 5% of the run."""
    work, seconds = outlook.work, outlook.prediction.seconds.expected
    if work.config.train.micro_batch_tokens != "auto":
        return []
    # With a limit in tokens, other steps can be larger than the sampled ones, and must not need a second micro-batch.
    largest = work.plan.batch_tokens.value or max(
        [int(step.sum()) for step in work.step_lengths] or [work.micro_tokens]
    )
    longest, planned = int(work.lengths.max(initial=1)), work.micro_tokens
    sizes = {planned}
    sizes |= {size for factor in (2, 4, 8) if longest <= (size := planned // factor) and size >= 128}
    sizes |= {min(size, largest) for factor in (2, 4) if (size := planned * factor) < 2 * largest}
    sizes = {size for size in sizes if size <= max(largest, planned)}
    is_affordable = 4 * outlook.speed.step_seconds * len(sizes) <= min(_MAX_SECONDS, _RUN_SHARE * seconds)
    return sorted(sizes) if len(sizes) > 1 and is_affordable else []


def probe_run(
    loaded: LoadedConfig, plan: Plan, outlook: Outlook, progress: ProgressListener
) -> tuple[ProbeResult | None, str]:
    """Measure a planned run, or return the cached result. Without a result, return the reason.

    Raises UserError if the engine refuses the run, for example because no layer has a name of `method.targets`.
    """
    sizes = sweep_sizes(outlook)
    key = _key(loaded, plan, outlook)
    if (known := _CACHE.read(key)) is not None and (known.get("sizes") or not sizes):
        return _result(known, outlook), ""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return None, "torch is not installed"
    if outlook.work.shape.file_bytes is None and not (loaded.config.model or "").startswith("preset:"):
        return None, "the weights are not on this machine yet"
    progress(Progress("taking a few steps in a child process"))
    report, reason = _run_child(loaded, plan, outlook, sizes)
    if report is None:
        return None, reason
    _CACHE.write(key, report)
    return _result(report, outlook), ""


def with_probe(planner: Planner, found: ProbeResult) -> Planner:
    """Return a planner that uses what was measured, and the fastest micro-batch if sizes were compared."""
    knee, measured = found.knee, found.measured
    rates = tuple((size.tokens, round(size.tokens_per_second, 1)) for size in found.sizes)
    planner = replace(planner, measured=measured, sizes=rates)
    if knee is None or planner.loaded.config.train.micro_batch_tokens != "auto":
        return planner
    work = planner.outlook.work
    speed = measured.speed
    step = {"compiled_step" if speed.compiled_step else "eager_step": work.mean_step_tokens / knee.tokens_per_second}
    measured = replace(
        measured,
        # What the largest micro-batch of the run needs beyond that of the sweep, in proportion.
        peak_bytes=knee.peak_bytes,
        needed_bytes=measured.needed_bytes + knee.peak_bytes - measured.peak_bytes,
        micro_tokens=knee.tokens,
        speed=replace(speed, **step),
    )
    shown = ", ".join(f"{count(tokens)}: {rate:,.0f}" for tokens, rate in rates)
    because = f"the smallest within 3% of the fastest, in tokens/s: {shown}"
    chosen = Chosen[int](value=knee.tokens, because=because)
    return replace(planner, measured=measured, micro_batch=chosen, sizes=rates)


def cached_probe(loaded: LoadedConfig, plan: Plan, outlook: Outlook) -> ProbeResult | None:
    """Return what an earlier `plan` or run measured with the same settings on this machine, or None."""
    known = _CACHE.read(_key(loaded, plan, outlook))
    return None if known is None else _result(known, outlook)


def _run_child(
    loaded: LoadedConfig, plan: Plan, outlook: Outlook, sizes: list[int]
) -> tuple[dict[str, Any] | None, str]:
    device = outlook.work.device
    used = device.memory_bytes - device.free_bytes if device.memory_bytes and device.free_bytes is not None else None
    with tempfile.TemporaryDirectory(prefix="tunewell-probe-") as folder:
        request = {
            **as_request(loaded),
            "folder": folder,
            "micro_batch_tokens": outlook.work.micro_tokens,
            "compile": plan.compile.value,
            "sizes": sizes,
            "seconds": _STEP_SECONDS + (_MAX_SECONDS if sizes else 0),
            "used_bytes": used if device.kind == "cuda" else None,
            "started_at": time.time(),
        }
        try:
            report = call("tunewell.workflows.probe", request, seconds=_TIMEOUT)
        except TimeoutError:
            return None, f"the measuring process did not finish within {_TIMEOUT:.0f} s"
        except ChildDied as died:
            return None, f"the measuring process {died}"
        except UserError as error:
            if folder in str(error):
                return None, error.what
            raise  # `train` would raise it too
    return (None, report["problem"]) if "problem" in report else (report, "")


def _result(report: dict[str, Any], outlook: Outlook) -> ProbeResult:
    """Convert the report of the child to what a prediction uses."""
    work = outlook.work
    eager, compiled, largest = report["eager"], report.get("compiled"), report["largest"]
    shown, answers = compiled or eager, report.get("answers", 0)
    context, peak, needed = 0, report["peak_rss"], report["peak_rss"]
    if work.device.kind == "cuda":
        low, high = _CONTEXT_RANGE
        context = eager.get("context_bytes") or 0
        context = context if low <= context <= high else CONTEXT_BYTES
        peak, needed = (max(shown[name], largest[name]) + context for name in ("reserved", "allocated"))

    def step_seconds(steps: dict[str, Any]) -> float:
        return steps["seconds"] * work.mean_step_tokens / max(1.0, steps["tokens"])

    speed = MeasuredSpeed(
        start=report["start"],
        load=report["load"],
        check=report["check"],
        eager_step=step_seconds(eager),
        warm_up=eager["warm_up"],
        compiled_step=step_seconds(compiled) if compiled else 0.0,
        compile=CACHED_COMPILE_SECONDS if compiled else 0.0,  # the probe filled torch's cache
        forward_token=report.get("forward_token", 0.0),
        answer_token=report["answer_token"] if answers else 0.0,
        num_answers=max(1, answers),
        because=f"speed from real steps: {shown['rate']:,.0f} tokens/s",
    )
    measured = MeasuredRun(
        peak_bytes=peak,
        needed_bytes=needed,
        micro_tokens=largest["tokens"],
        is_compiled=compiled is not None,
        speed=speed,
        because=f"memory from real steps with up to {count(largest['tokens'])} tokens at once",
    )
    sizes = [Size(own["tokens"], own["rate"], own["loss"], own["peak"] + context) for own in report["sizes"]]
    return ProbeResult(measured, sorted(sizes, key=lambda size: size.tokens))


def _key(loaded: LoadedConfig, plan: Plan, outlook: Outlook) -> list[Any]:
    """Return everything on which a step depends: settings, documents, machine and versions."""
    config = loaded.config.model_dump(mode="json", exclude=set(_OUTSIDE))
    device = outlook.work.device
    versions = installed_versions(["torch", "transformers", "bitsandbytes"]) | {"tunewell": __version__}
    own = [plan.precision.value, plan.attention.value, outlook.work.micro_tokens, asdict(outlook.work.shape)]
    machine = [device.kind, device.label, device.memory_bytes]
    return [config, plan.corpus_sha256, own, machine, versions]
