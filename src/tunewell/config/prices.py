"""What training methods and optimizers cost, for `plan`: the weights that they train, and the bytes that they store.

Each function is a field of an entry in `config/extensions.py`. A method or optimizer of another package has its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunewell.config.schema import MethodSettings, Train
    from tunewell.model_files.shape import ModelShape

Shape = tuple[int, ...]
_MIN_8BIT_SIZE = 4096
_TABLES = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


@dataclass(frozen=True)
class Activations:
    """Saved numbers per token and layer: multiples of the hidden, query, key and feed-forward widths, and of the rank.

    They are those of uncompiled layers without gradient checkpointing.
    """

    hidden: float
    query: float
    kv: float
    inner: float
    rank: float = 0.0


def no_weights(inputs: int, outputs: int, settings: "MethodSettings") -> Sequence[Shape]:
    """Return nothing: the method adds no weights."""
    return ()


def lora_matrices(inputs: int, outputs: int, settings: "MethodSettings") -> Sequence[Shape]:
    """Return the shapes of A and B."""
    rank, _ = settings.rank_and_alpha
    return [(rank, inputs), (outputs, rank)]


def dora_weights(inputs: int, outputs: int, settings: "MethodSettings") -> Sequence[Shape]:
    """Return the shapes of A, B and the magnitudes."""
    return [*lora_matrices(inputs, outputs, settings), (outputs,)]


def saved_tables(shape: "ModelShape", settings: "MethodSettings") -> Sequence[Shape]:
    """Return the embedding and the head, if `method.modules_to_save` names them. A tied one is counted once."""
    tables = [name for name in settings.modules_to_save if name.rpartition(".")[2] in _TABLES]
    return [(shape.vocab_size, shape.hidden_size)] * min(len(tables), 1 if shape.is_tied else 2)


def weights_of_layers(shape: "ModelShape", settings: "MethodSettings") -> Sequence[Shape]:
    """Return all weights of the model, or the matrices of the decoder layers in `method.layers`."""
    if settings.layers != "all":
        return [(own.outputs, own.inputs) for own in shape.linears if own.layer in settings.layers]
    matrices = [(own.outputs, own.inputs) for own in shape.linears]
    return [*matrices, (shape.num_weights - num_numbers(matrices),)]


def num_numbers(shapes: Sequence[Shape]) -> int:
    """Return how many numbers tensors of these shapes have."""
    return sum(map(math.prod, shapes))


def adamw_bytes(shapes: Sequence[Shape], weight_bytes: int, settings: "Train") -> float:
    """Return the size of two moments in the dtype of the weights."""
    return 2 * weight_bytes * num_numbers(shapes)


def adamw8bit_bytes(shapes: Sequence[Shape], weight_bytes: int, settings: "Train") -> float:
    """Return the size of two moments, as `_moment_bytes` counts them."""
    return sum(_moment_bytes(math.prod(sizes), weight_bytes) for sizes in shapes)


def _moment_bytes(size: int, weight_bytes: int) -> float:
    """Return two moments of a byte with two fp32 scales for each block of 256. Those of a small tensor are in full."""
    return size * (2 + 8 / 256) if size >= _MIN_8BIT_SIZE else 2 * weight_bytes * size


def galore_bytes(shapes: Sequence[Shape], weight_bytes: int, settings: "Train") -> float:
    """Return the size of the moments of projected matrices with their bases, and of the other weights' moments."""
    rank, total = settings.galore_rank, 0.0
    for sizes in shapes:
        size, short = math.prod(sizes), min(sizes) if len(sizes) == 2 else 0
        if short > rank:
            size, total = rank * max(sizes), total + weight_bytes * rank * short
        total += _moment_bytes(size, weight_bytes) if settings.galore_8bit else 2 * weight_bytes * size
    return total
