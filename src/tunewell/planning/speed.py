"""Duration of a run by phase, computed from the work of a token and the rates of the device.

    seconds of a micro-batch = products / rate + passes over activations / bandwidth, and at least the kernel launches

The constants were fitted to the H200 rows in `benchmarks/RESULTS.md` (2026-11-16: 84,867 tokens/s at 1.1B, 15,920 at 8B
and 1,255,673 at 23M compiled; 0.28 s a step at 1.1B uncompiled) and, on CPUs, to its share of the rate of products (57
to 71%). On other cards the rates of their makers are used, so the range is wider.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tunewell.config.extensions import OPTIMIZERS
from tunewell.core.units import percent
from tunewell.data.replay import ANSWER_TOKENS, NUM_PROMPTS
from tunewell.machine.cards import match_card
from tunewell.planning.recommendation import has_shipped_replay
from tunewell.planning.workload import Workload
from tunewell.records.plan import Chosen

_PRODUCT_SHARE = 0.64
"""Share of the maker's rate that products of a training step reach: 790 of 989 TFLOP/s alone, 0.8 of that in a step."""
_BANDWIDTH_SHARE = 0.73
_PASSES = {"compiled": 12.0, "eager": 21.0}
"""Passes over the saved activations of a step, forward and backward."""
_LAUNCH_SECONDS = 7.4e-3
"""Kernel launches of an uncompiled layer, forward and backward. 0.65 s for 4 micro-batches of 22 layers (H200)."""
_COMPILED_LAYER_SECONDS = 6e-4
"""Host time of a compiled layer that the GPU does not hide: 23M took 24 ms a step, its kernels 18 ms."""
_CPU_SHARE = 0.62
_CPU_STEP_SECONDS, _CPU_LAYER_SECONDS = 6e-2, 2e-3
"""Time of a step and of a layer that does not depend on their size. Processor time of runs on 2 cores (2026-11-17): a
step took 0.06 to 0.07 s more than its products with 260K (5 layers) and 31M (6 layers), 0.1 s with 135M (30 layers)."""
_CPU_BANDWIDTH = 1.2e10
_DECODE_SECONDS = 8e-3
"""Seconds per generated token on a GPU, for all answers together: 8.2 ms at 135M and 1.1B, 19 ms at 8B (H200)."""
_CPU_DECODE_SECONDS = 1.5e-2
_COMPILE_SECONDS, _AHEAD_SECONDS, _SWITCH_SECONDS = 20.0, 35.0, 3.0
"""Compiling, compiling by a second process beside the steps, and the switch to compiled steps (H200)."""
_SAVED_SHARE = 0.3
"""Share of the time that `training/compile.py` expects compiled steps to save."""
CACHED_COMPILE_SECONDS = 4.5
"""Seconds until the first compiled step with torch's cache filled: 4.5 s at 1.1B (H200)."""
_MIN_SAVED_SECONDS = 5.0
_MIN_FREE_SHARE = 0.2
_START_SECONDS = {"cuda": 10.0, "mps": 6.0, "cpu": 5.0}
"""Imports of torch and transformers, and the start of the process."""
_READ_BYTES, _CACHED_BYTES, _WRITE_BYTES = 1.5e9, 5e9, 5e8
"""Bytes per second at which weights are read from disk, read from the file cache, and checkpoints written."""
_DEQUANTISED_WEIGHTS = 6e7
"""Weights of a quantised GGUF file that are dequantised in a second: 135M took 2.2 s."""
_EVALUATION_SHARE = 0.05
_ANSWERS, _MIN_EVALUATIONS = (100, 50, 20), 4
"""Answers of an evaluation, which are at least as many as can be compared, and evaluations that a run should have."""
_MIN_EVALUATION_SECONDS = 5.0
_ANSWER_COST = 0.14
"""Time that each answer adds to a token, as a share of the fixed time, on a CPU: 135M took 109 ms for 2, 180 for 8."""
_VERDICT_SECONDS = 1.0
"""Questions, keys and report of a verdict."""
_MIN_ANSWER_TOKENS, _MAX_ANSWER_TOKENS = 32, 512
_ANSWER_BATCH_TOKENS = {"cpu": 8_192, "mps": 8_192, "cuda": 262_144}
"""Tokens of prompts and answers that are decoded together."""
_MACS = {"Max": 1.0e13, "Ultra": 2.0e13, "Pro": 5e12}
"""FLOP/s of Apple GPUs in fp32 by class; 2.6e12 for the others."""


@dataclass(frozen=True)
class Rates:
    """The speed of a device."""

    flops: float
    """FLOP/s of the matrix products of a training step."""
    bytes_per_second: float
    because: str
    spread: float
    """Relative uncertainty of the predicted seconds."""


@dataclass(frozen=True)
class Speed:
    """Seconds by phase, and what they are made of."""

    phases: dict[str, float]
    step_seconds: float
    tokens_per_second: float
    is_compiled: bool
    spread: float
    basis: list[str] = field(default_factory=list[str])
    answers: Chosen[int] | None = None
    """Questions that are answered at each evaluation; None if the task of the rows has no measure."""
    is_halved: bool = False
    """Whether all steps use half the micro-batch, because compiling does not end before the run."""

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def device_rates(work: Workload, cpu_flops: float) -> Rates:
    """Return the rates of the device. `cpu_flops` is the measured rate of fp32 products on this CPU."""
    device = work.device
    if device.kind == "cpu":
        share = _CPU_SHARE * (1.6 if work.precision == "bf16" else 1.0)
        return Rates(share * cpu_flops, _CPU_BANDWIDTH, f"{cpu_flops / 1e9:,.0f} GFLOP/s on this CPU", 0.35)
    if device.kind == "mps":
        flops = next((rate for name, rate in _MACS.items() if name in device.label), 2.6e12)
        return Rates(0.3 * flops, 1e11, "a rough rate of Apple GPUs: none was measured", 0.6)
    card = match_card(device.label)
    if card is None:
        return Rates(5e13, 5e11, f"{device.label} is not in the list of cards: its speed is a guess", 0.7)
    spread = 0.3 if card.name == "h200" else 0.5
    because = (
        f"{card.label}: {card.rate(work.precision) / 1e12:,.3g} TFLOP/s and {card.bytes_per_second / 1e9:,.0f} GB/s"
    )
    source = f"{because} ({card.source})"
    return Rates(_PRODUCT_SHARE * card.rate(work.precision), _BANDWIDTH_SHARE * card.bytes_per_second, source, spread)


def token_flops(work: Workload) -> tuple[float, float]:
    """Return the FLOP of a token in a training step, and in a forward pass. Nothing is counted twice."""
    shape = work.shape
    head = shape.vocab_size * shape.hidden_size * work.supervised_share
    attention = 2 * work.mean_context * shape.query_size * shape.num_layers
    body = shape.num_active_weights
    forward = 2 * (body + head + work.num_adapter_weights) + attention
    if not work.is_adapter:
        trained = 1.0 if work.config.method.layers == "all" else work.num_trained_base_weights / shape.num_weights
        return forward * 2 + 2 * (body + head) * trained + attention, forward
    total = 4 * body + 4 * head + 6 * work.num_adapter_weights + 3 * attention
    if work.recomputes:
        total += 2 * body + attention
    return total, forward


def _saved_per_token(work: Workload) -> float:
    shape = work.shape
    numbers = shape.hidden_size + 2 * shape.query_size + 2 * shape.kv_size + 4 * shape.inner_size
    return numbers * shape.num_layers * work.compute_bytes


def micro_batch_seconds(work: Workload, rates: Rates, tokens: float, *, is_compiled: bool) -> float:
    """Return the seconds of the forward and backward pass of a micro-batch."""
    flops, _ = token_flops(work)
    layers = work.shape.num_layers
    if not work.is_gpu:
        return tokens * flops / rates.flops + layers * _CPU_LAYER_SECONDS
    passes = _PASSES["compiled" if is_compiled else "eager"] * (1.3 if work.recomputes else 1.0)
    # Logits are written and read about six times.
    logits = 6 * work.shape.vocab_size * work.supervised_share * work.compute_bytes
    moved = tokens * (passes * _saved_per_token(work) + logits)
    seconds = tokens * flops / rates.flops + moved / rates.bytes_per_second
    if work.quantization != "none":  # weights are dequantised in the forward and in the backward pass
        num_passes = 3 if work.recomputes else 2
        seconds += num_passes * 3.5 * work.shape.num_linear_weights / rates.bytes_per_second
    launches = layers * _LAUNCH_SECONDS * (1.3 if work.recomputes else 1.0)
    return seconds + layers * _COMPILED_LAYER_SECONDS if is_compiled else max(seconds, launches)


def step_seconds(work: Workload, rates: Rates, *, is_compiled: bool) -> float:
    """Return the mean seconds of an optimizer step."""
    groups = work.groups or [[int(work.mean_step_tokens)]]
    sizes = Counter(size for group in groups for size in group)
    total = sum(
        number * micro_batch_seconds(work, rates, size, is_compiled=is_compiled) for size, number in sizes.items()
    )
    fixed = 0.0 if work.is_gpu else _CPU_STEP_SECONDS
    # An update reads and writes each weight, gradient and moment.
    moved = work.num_trainable * OPTIMIZERS.entry(work.config.train.optimizer).update_bytes
    return total / len(groups) + fixed + moved / rates.bytes_per_second


def compute_speed(work: Workload, cpu_flops: float, *, measured: "MeasuredSpeed | None" = None) -> Speed:
    """Compute the duration of the whole run. Measured figures replace computed ones."""
    rates, known = device_rates(work, cpu_flops), measured or MeasuredSpeed()
    eager = known.eager_step or step_seconds(work, rates, is_compiled=False)
    compiled = known.compiled_step or eager * min(
        1.0, step_seconds(work, rates, is_compiled=True) / step_seconds(work, rates, is_compiled=False)
    )
    steps = _steps(work, rates, eager, compiled, known)
    phases = {"start": known.start or _START_SECONDS[work.device.kind], "prepare": 0.5}
    phases["load"] = known.load or _load_seconds(work)
    # The packing check computes a few documents: packed, alone and with transformers' attention.
    phases["check"] = known.check or 0.5 + 15 * work.mean_context * token_flops(work)[1] / rates.flops
    if steps.compile_seconds:
        phases["compile"] = steps.compile_seconds
    has_replay = work.plan.replay is not None and work.plan.replay.value
    if has_replay and not has_shipped_replay(work.config):  # unless the answers are cached
        phases["replay"] = _answer_seconds(work, rates, questions=NUM_PROMPTS, tokens=ANSWER_TOKENS, known=known)
    phases["steps"] = known.warm_up + steps.seconds
    answers = _affordable_answers(work, rates, steps.seconds, known)
    phases["evaluation"] = _evaluation_seconds(work, rates, steps.seconds, known, answers.value if answers else 0)
    # Steps wait only for a part of a checkpoint: most is written beside the training.
    phases["checkpoints"] = 0.3 + checkpoint_bytes(work) / _WRITE_BYTES
    if work.config.verdict.after_training and work.num_held_out:
        # The weights are loaded again, from the file cache. What quantised ones cost is not measured again.
        load = min(phases["load"], _load_seconds(work, _CACHED_BYTES))
        phases["verdict"] = load + _verdict_seconds(work, rates, known)
    tokens = work.mean_step_tokens / (compiled if steps.is_compiled else eager)
    basis = [known.because] if known.because else [rates.because]
    spread = known.spread if measured else rates.spread
    return Speed(phases, eager, tokens, steps.is_compiled, spread, basis, answers, is_halved=steps.is_halved)


@dataclass(frozen=True)
class MeasuredSpeed:
    """Seconds that real steps took; 0 for what was not measured."""

    start: float = 0.0
    load: float = 0.0
    check: float = 0.0
    eager_step: float = 0.0
    warm_up: float = 0.0
    """Seconds that the first step takes more than others."""
    compiled_step: float = 0.0
    compile: float = 0.0
    """Seconds until the first compiled step, with torch's cache filled."""
    evaluation: float = 0.0
    forward_token: float = 0.0
    """Seconds per token of an evaluation, without answers."""
    answer_token: float = 0.0
    """Seconds per generated token of the sample answers, for all of them together."""
    num_answers: int = 1
    spread: float = 0.12
    because: str = ""


class _Steps(NamedTuple):
    """The duration of all steps."""

    seconds: float
    compile_seconds: float = 0.0
    is_compiled: bool = False
    is_halved: bool = False


def _steps(work: Workload, rates: Rates, eager: float, compiled: float, known: MeasuredSpeed) -> _Steps:
    mode, number = work.plan.compile.value, work.num_steps
    if mode == "off" or work.device.kind != "cuda":
        return _Steps(number * eager)
    if mode == "on":
        return _Steps(eager + (number - 1) * compiled, known.compile or _COMPILE_SECONDS, is_compiled=True)
    # As in `training/compile.py`: steps of half the micro-batch, a second process compiles, then the switch.
    half = step_seconds(work.halved(), rates, is_compiled=False) / step_seconds(work, rates, is_compiled=False)
    slow = max(1.2, half) * eager
    if known.compile and number * (eager - compiled) > known.compile:
        return _Steps(3 * slow + max(0, number - 3) * compiled, known.compile, is_compiled=True)
    if number * slow * _SAVED_SHARE <= _MIN_SAVED_SECONDS or not _has_room(work):
        return _Steps(min(number, 3) * slow + max(0, number - 3) * eager)
    before = math.ceil(_AHEAD_SECONDS / slow) + 3
    if before >= number:
        return _Steps(number * slow, is_halved=True)
    if (number - before) * slow * _SAVED_SHARE <= _SWITCH_SECONDS + 1:
        return _Steps(before * slow + (number - before) * eager)
    return _Steps(before * slow + (number - before) * compiled, _SWITCH_SECONDS, is_compiled=True)


def _has_room(work: Workload) -> bool:
    device = work.device
    weights = work.shape.num_weights * 2
    return device.free_bytes is None or device.free_bytes - weights > _MIN_FREE_SHARE * (device.memory_bytes or 0)


def _load_seconds(work: Workload, rate: float = _READ_BYTES) -> float:
    size = work.shape.file_bytes or 2 * work.shape.num_weights
    is_quantised = size < 1.5 * work.shape.num_weights
    return 1.0 + size / rate + (work.shape.num_weights / _DEQUANTISED_WEIGHTS if is_quantised else 0.0)


def _forward_seconds(work: Workload, rates: Rates, tokens: float, known: MeasuredSpeed) -> float:
    if known.forward_token:
        return tokens * known.forward_token
    _, forward = token_flops(work)
    seconds = tokens * forward / rates.flops
    if work.is_gpu:
        moved = tokens * 6 * _saved_per_token(work) / rates.bytes_per_second
        num_batches = math.ceil(tokens / max(1, work.largest_micro_batch))
        return max(seconds + moved, num_batches * work.shape.num_layers * _LAUNCH_SECONDS / 3)
    return seconds


def _answer_seconds(work: Workload, rates: Rates, *, questions: int, tokens: float, known: MeasuredSpeed) -> float:
    """Return the seconds to answer questions together, each with `tokens` new tokens."""
    if not questions:
        return 0.0
    lengths = work.evaluated_lengths
    prompt = float(lengths.mean()) * 0.6 if len(lengths) else 64.0
    at_once = max(1, min(questions, int(_ANSWER_BATCH_TOKENS[work.device.kind] / (prompt + tokens))))
    num_batches = math.ceil(questions / at_once)
    weights = 2.0 * (work.shape.num_active_weights + work.shape.num_table_weights)
    if known.answer_token:
        per_token = known.answer_token * (1 + _ANSWER_COST * at_once) / (1 + _ANSWER_COST * known.num_answers)
    elif not work.is_gpu:
        per_token = max(_CPU_DECODE_SECONDS, 2 * weights / _CPU_BANDWIDTH + at_once * weights / rates.flops)
    else:
        per_token = max(_DECODE_SECONDS, weights / rates.bytes_per_second)
    return num_batches * (tokens * per_token) + _forward_seconds(work, rates, questions * prompt, known)


def _affordable_answers(work: Workload, rates: Rates, steps: float, known: MeasuredSpeed) -> Chosen[int] | None:
    """Return how many questions each evaluation can answer in its share of the time; None without a measure."""
    if work.measure is None:
        return None
    budget, total = max(_EVALUATION_SHARE * steps, _MIN_EVALUATION_SECONDS), len(work.measure.questions)
    planned = math.ceil(work.num_steps / work.plan.evaluate_every.value)
    if work.config.evaluate.every_steps == "auto":
        planned = min(planned, _MIN_EVALUATIONS)
    task = f"`{work.measure.task}`"
    for number in (total, *(fewer for fewer in _ANSWERS if fewer < total)):
        if _evaluation_once(work, rates, known, number) * (planned + 1) <= budget:
            return Chosen(number, because=f"checkpoints are compared by right answers ({task})")
    share = percent(_EVALUATION_SHARE, 0)
    because = f"answers would take over {share} of the training time, and the loss is no measure of {task}"
    return Chosen(0, because=f"{because}: the last checkpoint is used")


def _evaluation_once(work: Workload, rates: Rates, known: MeasuredSpeed, answers: int) -> float:
    """Return the seconds of an evaluation: the loss, and answers."""
    settings, lengths = work.config.evaluate, work.evaluated_lengths
    asked = (answers, work.measure.longest) if answers and work.measure else (settings.samples, settings.sample_tokens)
    number = min(len(lengths), settings.max_documents or len(lengths))
    loss = _forward_seconds(work, rates, number * float(lengths.mean()), known)
    return loss + _answer_seconds(work, rates, questions=asked[0], tokens=asked[1], known=known)


def _evaluation_seconds(work: Workload, rates: Rates, steps: float, known: MeasuredSpeed, answers: int) -> float:
    """Return the seconds of all evaluations. `train` evaluates less often if they take over 5% of the time."""
    if not len(work.evaluated_lengths):
        return 0.0
    settings, every = work.config.evaluate, work.plan.evaluate_every.value
    once = (not answers and known.evaluation) or _evaluation_once(work, rates, known, answers)
    planned = math.ceil(work.num_steps / every)
    if settings.every_steps == "auto" and once * planned > _MIN_EVALUATION_SECONDS:
        possible = max(1, int(_EVALUATION_SHARE * steps / once) - 1)
        planned = min(planned, math.ceil(planned / math.ceil(planned / possible)))
    return once * (planned + 1)  # one more before the first step


def checkpoint_bytes(work: Workload) -> int:
    """Return the size of a checkpoint: the trained weights and their optimizer states."""
    model = work.num_trainable if work.is_adapter else work.shape.num_weights
    return model * work.master_bytes + work.state_bytes


def _verdict_seconds(work: Workload, rates: Rates, known: MeasuredSpeed) -> float:
    """Return the seconds of the verdict after loading: both models are evaluated and answer questions."""
    rules, lengths = work.config.verdict, work.held_out_lengths
    number = min(len(lengths), rules.max_documents or len(lengths))
    loss_tokens = 2 * (number * float(lengths.mean()) + work.everyday_tokens)
    questions = min(rules.questions, len(lengths))
    # All are answered together, so the longest answer counts. The base model often does not stop before the limit.
    longest = float(np.quantile(lengths, questions / (questions + 1))) * work.supervised_share
    limit = min(max(1.5 * longest, _MIN_ANSWER_TOKENS), _MAX_ANSWER_TOKENS)
    limit = limit if rules.answer_tokens == "auto" else rules.answer_tokens
    answers = [
        _answer_seconds(work, rates, questions=questions, tokens=tokens, known=known)
        for tokens in (min(longest, limit), limit)
    ]
    return _VERDICT_SECONDS + _forward_seconds(work, rates, loss_tokens, known) + sum(answers)
