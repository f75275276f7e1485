"""What the training benchmarks train on: model shapes, documents, and the arithmetic that a token costs."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

RANK, ALPHA = 16, 32
LEARNING_RATE = 5e-4
LONGEST = 1024
PROMPT_SHARE = 0.4
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SEED = 0


@dataclass(frozen=True)
class Shape:
    """A Llama-like model, in the numbers its speed depends on."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Return the input and output sizes of one layer's linear maps."""
        keys = self.hidden // self.heads * self.kv_heads
        attention = [(self.hidden, self.hidden), (self.hidden, keys), (self.hidden, keys), (self.hidden, self.hidden)]
        return [*attention, (self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden)]

    def config(self) -> Any:
        """Return the model's configuration for transformers."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.is_tied,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )


@dataclass(frozen=True)
class Case:
    """A shape, and how long it is trained: a warm-up, then windows that are timed."""

    shape: Shape
    step_tokens: int
    """Real tokens of the documents that one optimizer step learns from."""
    warmup_steps: int
    window_steps: int
    windows: int = 3

    @property
    def num_steps(self) -> int:
        return self.warmup_steps + self.windows * self.window_steps

    @property
    def marks(self) -> list[int]:
        """Return the steps after which the clock is read."""
        return [self.warmup_steps + number * self.window_steps for number in range(self.windows + 1)]


CASES = {
    "23m": Case(Shape(384, 1024, 8, 6, 6, 32_768, True), 32_768, warmup_steps=30, window_steps=60),
    "135m": Case(Shape(576, 1536, 30, 9, 3, 49_152, True), 16_384, warmup_steps=20, window_steps=30),
    "1.1b": Case(Shape(2048, 5632, 22, 32, 4, 32_000, False), 16_384, warmup_steps=9, window_steps=12),
    "8b": Case(Shape(4096, 14_336, 32, 32, 8, 128_256, False), 16_384, warmup_steps=4, window_steps=5),
    # Small enough for a laptop's CPU: to see that the scripts run, not how fast.
    "smoke": Case(Shape(64, 128, 2, 4, 2, 512, True), 2_048, warmup_steps=2, window_steps=3),
}


@dataclass(frozen=True)
class Variant:
    """A training method, and how it saves memory."""

    kind: str = "lora"
    quantize: str = "none"
    recompute: str = "off"
    optimizer: str = "adamw"
    learning_rate: float = LEARNING_RATE
    step_tokens: int | None = None
    """Instead of the tokens of the case."""
    warmup_steps: int | None = None
    """Instead of the warm-up steps of the case."""
    saves: bool = True
    """Whether our contender writes a checkpoint in every window."""
    bars: dict[str, float] = field(default_factory=dict)
    """At least so many times the best peer's tokens/s, by case."""

    def case(self, name: str) -> Case:
        """Return a case with the tokens and the warm-up of this variant."""
        case = CASES[name]
        steps = {"step_tokens": self.step_tokens, "warmup_steps": self.warmup_steps}
        return replace(case, **{key: value for key, value in steps.items() if value is not None})


VARIANTS = {
    "lora": Variant(bars={"23m": 2.0, "1.1b": 1.4, "8b": 1.1}),
    "qlora": Variant(quantize="nf4", bars={"1.1b": 1.3, "8b": 1.1}),
    "qlora-lean": Variant(quantize="nf4", recompute="offload", step_tokens=2_048, bars={"1.1b": 1.0, "8b": 1.0}),
    "int8": Variant(quantize="int8"),
    "dora": Variant(kind="dora", bars={"1.1b": 2.0}),
    # Without checkpoints: one of 8 B parameters with its states takes more than some disks have. GaLore finds its first
    # bases in 16 steps, which are not timed.
    "full": Variant("full", learning_rate=1e-4, warmup_steps=18, saves=False),
    "full-8bit": Variant("full", optimizer="adamw8bit", learning_rate=1e-4, warmup_steps=18, saves=False),
    "full-galore": Variant("full", optimizer="galore", learning_rate=1e-3, warmup_steps=18, saves=False),
    "full-recompute": Variant("full", recompute="on", learning_rate=1e-4, saves=False),
    "full-8bit-recompute": Variant("full", recompute="on", optimizer="adamw8bit", learning_rate=1e-4, saves=False),
    "full-galore-recompute": Variant("full", recompute="on", optimizer="galore", learning_rate=1e-3, saves=False),
}


class Documents:
    """Documents in memory, as the engine wants them: `len()`, `arrays(i)`, and the columns of `index`."""

    def __init__(self, ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> None:
        self.ids, self.bounds = ids, np.concatenate([[0], np.cumsum(lengths)])
        prompts = (lengths * PROMPT_SHARE).astype(np.int64)
        within = np.arange(len(ids)) - np.repeat(self.bounds[:-1], lengths)
        self.labels = np.where(within < np.repeat(prompts, lengths), np.int32(-100), ids)
        self.index = {"length": lengths.astype(np.int32), "supervised": (lengths - prompts).astype(np.int32)}

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def arrays(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return a document's ids and its labels: unshifted, -100 for tokens that are not supervised."""
        here = slice(self.bounds[index], self.bounds[index + 1])
        return self.ids[here], self.labels[here]

    def as_dataset(self) -> Any:
        """Return the documents as a `datasets.Dataset`, one row each, for TRL."""
        import datasets
        import pyarrow as pa

        bounds = pa.array(self.bounds.astype(np.int32))
        columns = {"input_ids": self.ids, "labels": self.labels}
        lists = {name: pa.ListArray.from_arrays(bounds, pa.array(values)) for name, values in columns.items()}
        return datasets.Dataset(pa.table(lists))


def draw_documents(case: Case, *, steps: int | None = None) -> Documents:
    """Draw documents for a run and a tenth more: log-normal lengths, mean about 185, at most 1,024.

    Low ids are more frequent than high ones, so that there is something to learn and a loss can be seen to fall.
    """
    random = np.random.default_rng(_SEED)
    number = int(case.step_tokens * (steps or case.num_steps) / 185 * 1.1) + 64
    lengths = np.clip(random.lognormal(np.log(150), 0.66, number).astype(np.int64), 16, LONGEST)
    drawn = random.random(int(lengths.sum())) ** 2
    return Documents((10 + drawn * (case.shape.vocabulary - 20)).astype(np.int32), lengths)


def flops_per_token(shape: Shape, *, rank: int, supervised: float, mean_length: float) -> dict[str, float]:
    """Count the multiplications and additions that one token of a LoRA step needs, nothing computed twice.

        4 N_b      frozen linear maps: the output, and the gradient of the input
        4 N_h p    the head, on the share p of tokens that are learned
        6 N_l      the adapters: the output, the gradient of the input, and their own
        3 A        attention, causal: A = 2 s q L forward, twice that backward

    `mean_length` s is the length of the document that the mean token sits in: the sum of squared lengths over the sum.
    """
    body = shape.layers * sum(inputs * outputs for inputs, outputs in shape.linears)
    adapters = shape.layers * rank * sum(inputs + outputs for inputs, outputs in shape.linears)
    return {
        "4 N_b": 4.0 * body,
        "4 N_h p": 4.0 * shape.hidden * shape.vocabulary * supervised,
        "6 N_l": 6.0 * adapters,
        "3 A": 3.0 * 2 * mean_length * shape.hidden * shape.layers,
    }


def flops_of(shape: Shape, index: dict[str, npt.NDArray[Any]], *, rank: int = RANK) -> dict[str, float]:
    """Count what a token of these documents needs, in parts."""
    lengths = index["length"].astype(np.float64)
    supervised = float(index["supervised"].sum() / lengths.sum())
    return flops_per_token(
        shape, rank=rank, supervised=supervised, mean_length=float((lengths**2).sum() / lengths.sum())
    )


MATMUL_FLOPS, COPY_BYTES = 790e12, 4.3e12
"""What one H200 reaches: FLOP/s of a large bf16 product, and bytes/s read and written by a copy."""


def serial_ceiling(shape: Shape, index: dict[str, npt.NDArray[Any]], *, rank: int = RANK) -> float:
    """Return the tokens/s of a compiled LoRA step in which products and passes over memory do not overlap.

    Bytes per token: 40 d + 12 f in each layer for norms, rotation, residuals and the activation, 4 N + 1.2 K beside
    each adapted map of K inputs and N outputs, 8 for each logit. With the backward pass, the first counts 3.2 times and
    the second 2.7 times.
    """
    maps = shape.linears
    beside = sum(4 * outputs + 1.2 * inputs for inputs, outputs in maps)
    supervised = float(index["supervised"].sum() / index["length"].sum())
    per_token = shape.layers * (3.2 * (40 * shape.hidden + 12 * shape.inner) + 2.7 * beside)
    per_token += 8 * shape.vocabulary * supervised
    return 1 / (sum(flops_of(shape, index, rank=rank).values()) / MATMUL_FLOPS + per_token / COPY_BYTES)
