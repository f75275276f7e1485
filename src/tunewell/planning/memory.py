"""Memory of a run by part and by phase, computed from the architecture.

    weights + adapter + gradients + optimizer + activations + head + workspace      a training step
    weights + adapter + optimizer + evaluation                                      an evaluation
    weights + adapter + optimizer + generation                                      sample answers
    weights + adapter + generation                                                  the verdict

Saved activations were counted with autograd's hooks on our own forward pass (torch 2.13, 2026-11-17). The compiled ones
were fitted to peaks on an H200 (`benchmarks/RESULTS.md`): 16.7 GiB (1.1B, LoRA) and 54.3 GiB (8B, NF4) match to 2%.
"""

from dataclasses import dataclass

from tunewell.config.prices import Activations
from tunewell.planning.workload import Workload

MiB = 1 << 20
GiB = 1 << 30

CONTEXT_BYTES = 540 * MiB
"""CUDA context and loaded kernels, outside torch's allocator. An estimate that was not measured."""
PROCESS_BYTES = 450 * MiB
"""Resident set of a process that has imported torch and transformers (torch 2.13, CPU build)."""
_MPS_BYTES = 300 * MiB
_CPU_CHUNK_BYTES, _GPU_CHUNK_BYTES = 64 * MiB, 512 * MiB
"""fp32 logits computed at once, as in `models/loss.py`."""
_COMPILED_ROWS = 2048
_ANSWER_TOKENS = 8192
"""Tokens of the answers that are generated at once, as in `training/evaluate.py`."""
_VERDICT_TOKENS = 4096
"""Tokens of a batch of the verdict on a CPU, as in `inference/runtime.py`."""
_LAUNCH_BOUND_FLOP = 1.0e12
_RESERVE_SHARE = {"eager": 0.08, "compiled": 0.16}
_COMPILED_RESERVE_BYTES = int(2.2 * GiB)
_RESERVE_BYTES = 200 * MiB
"""Memory that torch's allocator holds but does not use: a share of the activations and a constant. With compiled
layers, 2.4 GiB were not used at 1.1B (activations of 13 GiB) and at 8B (49 GiB)."""
_PINNED_BYTES = 256 * MiB
_CPU_RESERVE_SHARE = 0.06
_CPU_BLOCK = 192
_CPU_MAX_KEYS = 512
"""On a CPU, attention weights of documents up to this length are saved, in blocks of queries of the size above."""


_AUTOCAST = Activations(13, 2, 2, 4)
"""Full fine-tuning with fp32 weights in a 16-bit precision: the residual stream is in fp32."""
_COMPILED = Activations(0.75, 2, 2, 2.5)


@dataclass(frozen=True)
class Memory:
    """Bytes by part and by phase."""

    parts: dict[str, int]
    phases: dict[str, int]
    reserve_bytes: int
    """Memory that the allocator holds but does not use, included in the phases."""
    host_bytes: int | None = None
    with_cache_bytes: int = 0
    """What is held while answers are generated with cached dequantised weights; 0 without them. Not in the phases."""

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())

    @property
    def needed_bytes(self) -> int:
        return self.peak_bytes - self.reserve_bytes


def compute_memory(work: Workload, *, is_compiled: bool) -> Memory:
    """Compute the memory of a run. `is_compiled` says whether its layers will be compiled."""
    tokens = work.largest_micro_batch
    fixed = {
        "weights": _weight_bytes(work),
        "adapter": 4 * work.num_adapter_weights,
        "gradients": work.num_trainable * work.master_bytes,
        "optimizer": work.state_bytes,
    }
    activations = _activation_bytes(work, tokens, is_compiled=is_compiled)
    head, workspace = _head_bytes(work, tokens, is_compiled=is_compiled), _workspace_bytes(work, tokens)
    graphs = _graph_bytes(work, tokens) if is_compiled else 0
    reserve = _reserve_bytes(work, activations, is_compiled=is_compiled)
    small_reserve = min(reserve, _RESERVE_BYTES)
    base = {"cuda": CONTEXT_BYTES, "mps": _MPS_BYTES, "cpu": PROCESS_BYTES}[work.device.kind]
    base_name = "CUDA context" if work.device.kind == "cuda" else "process"
    # Logits are computed before the backward pass needs its workspace.
    at_once = max(head, workspace)
    evaluation = _evaluation_bytes(work, tokens)
    generation = _generation_bytes(work, len(work.measure.questions) if work.measure else work.config.evaluate.samples)
    answers = _generation_bytes(work, min(work.config.verdict.questions, work.num_held_out))
    held = fixed["weights"] + fixed["adapter"] + base
    # Gradients of a single micro-batch appear while its activations are freed.
    is_single = work.mean_micro_batches <= 1.0 and not work.is_adapter
    step = activations + at_once + fixed["gradients"]
    if is_single:
        step = max(activations + at_once, fixed["gradients"] + workspace)
    phases = {
        "load": held + _load_bytes(work) - fixed["adapter"],
        "steps": held + fixed["optimizer"] + step + graphs + reserve,
        "evaluation": held + fixed["optimizer"] + evaluation + small_reserve,
        "verdict": held + max(evaluation, answers) + small_reserve,
    }
    if not work.is_gpu and work.config.verdict.after_training and work.num_held_out:
        # Freed memory stays in the process, and the verdict loads the model again: 1,438 MiB became 1,715 (135M, GGUF).
        # Its batches need new memory if they are larger than those of the steps: 823 MiB became 1,249 (31M).
        batch = _evaluation_bytes(work, _VERDICT_TOKENS, is_everyday=True)
        again = _load_bytes(work) + (batch if batch > activations else 0)
        phases["verdict"] = max(phases["verdict"], phases["steps"] + again)
    if work.config.evaluate.samples:
        phases["generation"] = held + fixed["optimizer"] + generation + small_reserve
    parts = {
        **fixed,
        "activations": activations,
        "head": head,
        "workspace": max(0, at_once - head),
        "graphs": graphs,
        base_name: base,
        "reserve": reserve,
        "evaluation": evaluation,
        "generation": generation,
    }
    if cached := _cached_weight_bytes(work, held):
        cached += held + max(fixed["optimizer"] + generation, answers) + small_reserve
    reserve = reserve if max(phases, key=lambda name: phases[name]) == "steps" else 0
    return Memory(parts, phases, reserve, _host(work), cached)


def _num_quantized(work: Workload) -> int:
    """Return the number of weights in quantised layers."""
    keep = work.plan.quantized.keep if work.plan.quantized else []
    return sum(own.num_weights for own in work.shape.linears if own.name not in keep)


def _cached_weight_bytes(work: Workload, held: int) -> int:
    """Return the dequantised weights that are cached while answers are generated, as in `methods/base.py`."""
    config, free = work.config, work.device.free_bytes
    has_answers = config.evaluate.samples or (config.verdict.after_training and config.verdict.questions)
    # Without prompts, all tokens are supervised, and there is nothing to answer.
    if not has_answers or not work.num_held_out or work.supervised_share >= 1:
        return 0
    if work.quantization == "none" or not work.is_gpu or free is None:
        return 0
    size = _num_quantized(work) * work.compute_bytes
    return size if 2 * size <= free - held else 0


def _weight_bytes(work: Workload) -> int:
    shape = work.shape
    if not work.is_adapter:
        return shape.num_weights * work.master_bytes
    trained = work.num_trained_base_weights  # kept in fp32
    plain = shape.num_weights - trained
    if work.quantization == "none":
        return plain * work.compute_bytes + 4 * trained
    # int8: a byte, and a scale per row. NF4: half a byte, and a quantised scale for each block of 64.
    size = 1.0 + 4 / shape.hidden_size if work.quantization == "int8" else 0.5 + 1 / 64 + 4 / (64 * 256)
    quantized = _num_quantized(work)
    return int(quantized * size) + (plain - quantized) * work.compute_bytes + 4 * trained


def _per_token(work: Workload, own: Activations) -> float:
    """Return the bytes that a layer saves for a token, without attention weights."""
    shape = work.shape
    numbers = own.hidden * shape.hidden_size + own.query * shape.query_size
    numbers += own.kv * shape.kv_size + own.inner * shape.inner_size
    return numbers * work.compute_bytes


def _layer_bytes(work: Workload, tokens: int, *, is_compiled: bool) -> float:
    own = work.method.activations
    eager = _AUTOCAST if work.has_casts else own
    total = tokens * _per_token(work, _COMPILED if is_compiled else eager)
    total += (
        tokens * own.rank * work.config.method.rank_and_alpha[0] * work.compute_bytes
    )  # between the matrices of an adapter
    if not work.is_gpu and work.precision == "fp32":
        context = min(work.mean_context, _CPU_MAX_KEYS)
        keys = context if context <= _CPU_BLOCK else (context + _CPU_BLOCK) / 2
        total += tokens * work.shape.num_heads * keys * 4
    if work.plan.attention.value == "sdpa" and work.is_gpu:
        total += tokens * work.shape.query_size * work.compute_bytes
    return total


def _activation_bytes(work: Workload, tokens: int, *, is_compiled: bool) -> int:
    shape, mode = work.shape, work.config.train.recompute
    layer = _layer_bytes(work, tokens, is_compiled=is_compiled)
    casts = 2 * shape.num_linear_weights if work.has_casts else 0
    stream = tokens * shape.hidden_size * (4 if work.has_casts else work.compute_bytes)
    if mode == "offload" and work.device.kind == "cuda":
        return int(3 * stream + layer + casts)
    if mode != "off":  # elsewhere, `offload` has no second memory
        return int(shape.num_layers * stream + layer + casts)
    method, lowest = work.config.method, 0
    if method.layers != "all" and not method.modules_to_save:
        lowest = min(method.layers, default=0)  # layers below save nothing
    return int((shape.num_layers - lowest) * layer + stream + casts)


def _head_bytes(work: Workload, tokens: int, *, is_compiled: bool) -> int:
    shape, size = work.shape, work.compute_bytes
    supervised = max(1, int(tokens * work.supervised_share))
    budget = _GPU_CHUNK_BYTES if work.device.kind == "cuda" else _CPU_CHUNK_BYTES
    rows = 1 << (max(64, budget // (4 * shape.vocab_size)).bit_length() - 1)
    rows = _COMPILED_ROWS if is_compiled else min(rows, supervised)
    # Logits and their gradient in the run's precision; uncompiled also in fp32, in which a CPU computes in place.
    per_logit = 2 * size if is_compiled else (4 + 4 if size == 4 else 2 * size + 4)
    total = rows * shape.vocab_size * per_logit + 3 * supervised * shape.hidden_size * size
    if not work.is_adapter or work.num_trained_base_weights:  # the gradient of the head, in fp32
        total += 4 * shape.vocab_size * shape.hidden_size
    return total


def _workspace_bytes(work: Workload, tokens: int) -> int:
    """Return the temporary tensors of the backward pass of one layer."""
    shape = work.shape
    total = tokens * (3 * shape.inner_size + 2 * shape.hidden_size) * work.compute_bytes
    if work.quantization != "none":  # a dequantised weight
        total += 2 * shape.hidden_size * shape.inner_size * work.compute_bytes
    return total


def _graph_bytes(work: Workload, tokens: int) -> int:
    """Return the memory that CUDA graphs add: inputs and gradients of the layers that cannot be shared."""
    flop = 6 * work.shape.num_linear_weights / work.shape.num_layers * tokens
    uses_graphs = flop < _LAUNCH_BOUND_FLOP and not work.recomputes and not work.config.method.dropout
    return int(0.1 * work.shape.num_layers * tokens * _per_token(work, _COMPILED)) if uses_graphs else 0


def _reserve_bytes(work: Workload, activations: int, *, is_compiled: bool) -> int:
    if not work.is_gpu:
        return int(_CPU_RESERVE_SHARE * activations)
    if is_compiled:
        return min(int(_RESERVE_SHARE["compiled"] * activations), _COMPILED_RESERVE_BYTES) + _RESERVE_BYTES
    return int(_RESERVE_SHARE["eager"] * activations) + _RESERVE_BYTES


def _evaluation_bytes(work: Workload, tokens: int, *, is_everyday: bool = False) -> int:
    """Return the temporary tensors of a forward pass: those of one layer, and the logits.

    Everyday text has more tokens than the held-out rows of a small set.
    """
    shape, size = work.shape, work.compute_bytes
    evaluated = max(int(work.held_out_lengths.sum()), int(work.selection_lengths.sum()))
    tokens = min(tokens, evaluated) if evaluated and not is_everyday else tokens
    layer = tokens * (4 * shape.hidden_size + 3 * shape.inner_size + 2 * shape.query_size) * size
    return layer + _head_bytes(work, tokens, is_compiled=False)


def _generation_bytes(work: Workload, questions: int) -> int:
    """Return the KV cache of answers that are generated together, and logits for one token of each."""
    shape, size = work.shape, work.compute_bytes
    longest = max(int(own.max(initial=0)) for own in (work.held_out_lengths, work.selection_lengths))
    if not longest or not questions:
        return 0
    longest += work.config.evaluate.sample_tokens
    tokens = max(longest, min(_ANSWER_TOKENS, questions * longest))
    cache = 2 * shape.num_layers * shape.kv_size * tokens * size
    return cache + questions * shape.vocab_size * 8 + 2 * work.num_adapter_weights * size


def _load_bytes(work: Workload) -> int:
    """Return what loading needs beyond the weights: on a CPU, the mapped file and a copy of one tensor."""
    if work.is_gpu:
        return 0
    table = work.shape.vocab_size * work.shape.hidden_size * 4
    return (work.shape.file_bytes or 0) + table


def _host(work: Workload) -> int | None:
    """Return the main memory of a run on a GPU, if it holds the model or activations there."""
    if not work.is_gpu:
        return None
    total, plan = PROCESS_BYTES + GiB, work.plan
    if plan.quantized is not None and not plan.quantized.is_saved:
        total += work.shape.num_weights * 2
    if work.config.train.recompute == "offload":
        size = work.largest_micro_batch * work.shape.hidden_size * work.compute_bytes
        # Blocks of pinned memory, as in `training/memory.py`; no input is divided between two.
        block = -(-size // _PINNED_BYTES) * _PINNED_BYTES
        total += -(-work.shape.num_layers // (block // size)) * block
    return total
