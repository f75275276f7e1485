"""The rules a run is held to: what is done when it goes wrong, and what its model must show to pass."""

from typing import Annotated, Literal

from pydantic import Field

from tunewell.config.fields import Auto, Bool, Float, Int, Section


class Healing(Section):
    """What is done about a run that goes wrong, and how often."""

    on: Bool = True
    """Act on what is seen. `false`: what is seen is written down and shown, and the run goes on or fails as it may; an
    update that is not finite is left out even so."""
    quiet_steps: Annotated[Int, Field(ge=1)] = 16
    """Good steps after which trouble counts as over: the next is met with the mildest remedy again."""
    max_rewinds: Annotated[Int, Field(ge=0)] = 4
    """How often a run goes back to a checkpoint before it stops: without the documents that did it, with half the
    rate, in fp32, on the CPU."""
    max_left_out: Annotated[Float, Field(ge=0, le=1)] = 0.05
    """Share of the documents, or eight of them, that may be left out because numbers go bad with them and with no other
    of their step. More than that is not the documents' fault."""
    spike_factor: Annotated[Float, Field(gt=1)] = 10.0
    """An update is left out where its gradient is so many times longer than the median of the last 128 steps, and also
    far beyond their spread and twice their longest. In logbooks spikes began at twenty times, hard batches ended at
    three."""
    change_precision: Bool = True
    """Go on in fp32 where numbers keep overflowing in 16 bits."""
    restarts: Annotated[Int, Field(ge=0)] = 3
    """How often a run that was killed, crashed or hung at the same step is started again."""
    hang_seconds: Annotated[Float, Field(gt=0)] = 60.0
    """A run hangs where nothing happens for this long and three times what a step takes."""


class Export(Section):
    """What is made of a trained model."""

    to: tuple[Literal["adapter", "merged", "gguf", "ollama"], ...] = ()
    """What `export` makes where the command names nothing. `train` refuses what cannot be made of the model before its
    first step."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Numbers of the merged weights; the sum itself is made in fp32."""
    gguf: tuple[Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"], ...] = ("q8_0",)
    """How weights are stored in GGUF files, one file each. Small models lose most by few bits."""


class VerdictRules(Section):
    """How a trained model is judged, and what it takes to pass."""

    after_training: Bool = True
    """Judge the model at the end of `train`."""
    questions: Annotated[Int, Field(ge=0)] = 100
    """Held-out questions that are asked, spread evenly over the rows. 0: none, the losses alone decide."""
    answer_tokens: Annotated[Int, Field(ge=1)] | Auto = "auto"
    """Longest answer in tokens. `auto`: one and a half times the longest reference, from 32 to 512."""
    max_documents: Annotated[Int, Field(ge=1)] | None = 500
    """Held-out documents whose loss is computed, spread evenly over them. `null`: all."""
    batch_size: Annotated[Int, Field(ge=1)] | Auto = "auto"
    """Questions answered at once. `auto`: as many as fit into 8,192 tokens."""
    min_gain: Annotated[Float, Field(ge=0, lt=1)] = 0.05
    """Share by which the held-out loss must be lower than the base model's. Less is WEAK, none at all is FAIL: rows
    that were not trained on are where learning shows."""
    min_right: Annotated[Float, Field(ge=0, le=1)] = 0.5
    """Share of the questions with a short reference that must be answered right. Less is WEAK: a model that is wrong
    more often than not is of no use as a source of facts."""
    max_faults: Annotated[Float, Field(ge=0, le=1)] = 0.1
    """Share of the answers that may be empty, loop, echo or never end. More is WEAK, half of them is FAIL: one in ten
    is what a reader forgives."""
    max_rise: Annotated[Float, Field(ge=0)] = 0.15
    """Share by which the held-out loss may rise above its lowest while the training loss falls. More is WEAK: what was
    learned since is the rows by heart."""
    max_forgetting: Annotated[Float, Field(ge=0)] = 0.5
    """Share by which the loss on everyday text may rise above the base model's. More is WEAK, doubled is FAIL: a
    model that has lost its language answers nothing new."""
