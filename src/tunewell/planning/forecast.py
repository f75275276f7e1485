"""Predict a run: memory, time and disk space, from the architecture or corrected by real steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunewell.config.load import LoadedConfig
from tunewell.core.units import count
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus
from tunewell.machine.facts import DeviceFacts, cpu_flops
from tunewell.model_files.shape import ModelShape, read_shape
from tunewell.planning.memory import Memory, compute_memory
from tunewell.planning.speed import MeasuredSpeed, Speed, checkpoint_bytes, compute_speed
from tunewell.planning.workload import EVERYDAY_TOKENS, Workload, sampled_steps
from tunewell.records.plan import Plan
from tunewell.records.prediction import DiskPrediction, MemoryPrediction, Prediction, TimePrediction
from tunewell.scoring.questions import find_measure

_SPREAD = {"cuda": 0.18, "mps": 0.3, "cpu": 0.18}
"""Relative uncertainty of the computed memory, by device."""
_MEASURED_SPREAD = 0.06
_EVERYDAY_BYTES, _LARGE_VOCABULARY = 11_829, 16_384
_MARGIN = 0.02
"""Share of the free memory that must remain for a run that is said to fit."""


@dataclass(frozen=True)
class MeasuredRun:
    """What real steps in a child process held and took."""

    peak_bytes: int
    needed_bytes: int
    """Allocated tensors and the context, without memory that the allocator holds but does not use."""
    micro_tokens: int
    """Tokens of the largest micro-batch among these steps."""
    is_compiled: bool
    speed: MeasuredSpeed
    because: str


@dataclass(frozen=True)
class Outlook:
    """A prediction, with the workload and the computed parts behind it."""

    prediction: Prediction
    work: Workload
    memory: Memory
    speed: Speed


def shape_of(loaded: LoadedConfig, corpus: Corpus) -> ModelShape:
    """Return the shape of the model of a config, with the vocabulary of its corpus."""
    assert loaded.config.model is not None
    return read_shape(loaded.seen(loaded.config.model), vocab_size=corpus.manifest.tokenizer.vocab_size)


def workload_of(
    plan: Plan, loaded: LoadedConfig, corpus: Corpus, order: DataOrder, *, device: DeviceFacts, shape: ModelShape
) -> Workload:
    """Return the workload of a planned run."""
    split = corpus.manifest.splits["train"]
    held_out, selection = (
        np.asarray(own.index["length"] if len(own) else [], dtype=np.int64)
        for own in (corpus.held_out, corpus.selection)
    )
    return Workload(
        shape=shape,
        config=loaded.config,
        plan=plan,
        device=device,
        lengths=order.lengths,
        step_lengths=sampled_steps(order),
        supervised_share=split.supervised / max(1, split.tokens),
        held_out_lengths=held_out,
        micro_tokens=plan.micro_batch_tokens.value,
        everyday_tokens=_everyday_tokens(corpus),
        selection_lengths=selection,
        measure=find_measure(corpus, loaded.config.verdict.task, loaded.base),
    )


def _everyday_tokens(corpus: Corpus) -> int:
    """Estimate the tokens of the everyday text. A small vocabulary needs up to one for each byte, as for the rows."""
    manifest = corpus.manifest
    if manifest.tokenizer.vocab_size >= _LARGE_VOCABULARY:
        return EVERYDAY_TOKENS  # the rows can be compressed, or in a language with more tokens per byte
    size = sum(source.bytes for source in manifest.sources)
    share = sum(split.tokens for split in manifest.splits.values()) / size if size else 0.0
    return int(min(max(EVERYDAY_TOKENS, share * _EVERYDAY_BYTES), _EVERYDAY_BYTES))


def predict(
    work: Workload, *, measured: MeasuredRun | None = None, free_disk: int | None = None, flops: float | None = None
) -> Outlook:
    """Predict the run. With `measured`, computed memory and time are corrected by what real steps needed.

    `flops` is the rate of the CPU of another machine; the default is this one's.
    """
    speed = compute_speed(work, flops or cpu_flops(), measured=measured.speed if measured else None)
    largest = work.halved() if speed.is_halved else work
    memory = compute_memory(largest, is_compiled=speed.is_compiled)
    peak, needed, spread = memory.peak_bytes, memory.needed_bytes, _SPREAD[work.device.kind]
    if measured is not None:
        peak, needed = _corrected(largest, measured, memory, is_compiled=speed.is_compiled)
        spread = _MEASURED_SPREAD
    cached = max(0, memory.with_cache_bytes - peak)
    peak += cached
    free, host = work.device.free_bytes, work.device.host_bytes
    basis = [measured.because if measured else _architecture(work), *speed.basis]
    prediction = Prediction(
        fits=(free is None or needed <= (1 - _MARGIN) * free) and (host is None or (memory.host_bytes or 0) <= host),
        is_measured=measured is not None,
        memory=MemoryPrediction(
            peak_bytes=peak,
            needed_bytes=needed,
            low_bytes=int(peak * (1 - spread)),
            high_bytes=int(peak * (1 + spread)),
            free_bytes=free,
            parts=memory.parts,
            phases=memory.phases,
            host_bytes=memory.host_bytes,
            cached_bytes=cached,
        ),
        seconds=TimePrediction(
            low=round(speed.seconds * (1 - speed.spread), 1),
            high=round(speed.seconds * (1 + speed.spread), 1),
            expected=round(speed.seconds, 1),
            phases={name: round(seconds, 2) for name, seconds in speed.phases.items()},
        ),
        disk=_disk(work, free_disk),
        is_compiled=speed.is_compiled,
        basis=basis,
    )
    return Outlook(prediction, work, memory, speed)


def _corrected(work: Workload, measured: MeasuredRun, memory: Memory, *, is_compiled: bool) -> tuple[int, int]:
    """Return peak and needed bytes: those of the real steps, and the computed difference to the whole run."""
    is_like_run = work.largest_micro_batch <= measured.micro_tokens <= work.micro_tokens
    if measured.is_compiled == is_compiled and is_like_run:
        # On a CPU, the verdict after the steps needs more.
        later = max(0, memory.phases["verdict"] - memory.phases["steps"]) if not work.is_gpu else 0
        return measured.peak_bytes + later, measured.needed_bytes + later
    sampled = compute_memory(work.with_micro_tokens(measured.micro_tokens), is_compiled=measured.is_compiled)
    peak = measured.peak_bytes + memory.peak_bytes - sampled.peak_bytes
    return max(peak, 0), max(measured.needed_bytes + memory.needed_bytes - sampled.needed_bytes, 0)


def _architecture(work: Workload) -> str:
    source = "its weight files" if work.shape.is_exact else "its config"
    return f"memory from the architecture: {count(work.shape.num_weights)} weights in {source}"


def export_bytes(target: str, weights: int, types: Sequence[str], adapter_weights: int = 0) -> int:
    """Return the size of an export of a model with so many weights, with these GGUF types."""
    bits = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.7, "q4_k_m": 4.8}
    size = sum(weights * bits.get(kind, 16) / 8 for kind in types) if target in ("gguf", "ollama") else 0
    return int(size) + {"merged": 2 * weights, "adapter": 4 * adapter_weights}.get(target, 0)


def _disk(work: Workload, free_bytes: int | None) -> DiskPrediction:
    size = checkpoint_bytes(work)
    kept = work.config.checkpoints.keep + (1 if len(work.selection_lengths) else 0) + 1
    to, weights = work.config.export, work.shape.num_weights
    exports = sum(export_bytes(target, weights, to.gguf, work.num_adapter_weights) for target in to.to)
    return DiskPrediction(
        checkpoint_bytes=size, checkpoints_bytes=size * kept, export_bytes=exports, free_bytes=free_bytes
    )
