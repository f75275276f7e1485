"""Config sections for `storage`, evaluation, checkpoints, recovery (`healing`), `plan`, `export` and `verdict`."""

import re
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator

from tunewell.config.extensions import EXPORT_TARGETS, SCORERS, GgufFormat, MergedPrecision
from tunewell.config.fields import (
    Auto,
    Bool,
    Count,
    Float,
    NonNegative,
    OneOf,
    PartialShare,
    Positive,
    PositiveFloat,
    Section,
    Share,
    Text,
)

_MAX_PRICE = 1000


class Storage(Section):
    """Access to remote files, and their cache. Access keys are never part of the config: they are read from environment
    variables, or from a profile in `~/.aws`."""

    profile: Text | None = None
    """Profile in `~/.aws/credentials` and `~/.aws/config`, instead of the access keys in environment variables."""
    endpoint: Text | None = None
    """Endpoint of the object storage, if it is not Amazon's, e.g. `https://ACCOUNT.r2.cloudflarestorage.com`. `null`:
    AWS_ENDPOINT_URL, or the endpoint of the profile; for `r2://`, the endpoint of R2_ACCOUNT_ID."""
    region: Text | None = None
    """Region of the bucket. `null`: AWS_REGION, the region of the profile, or `us-east-1`; `auto` for `r2://`."""
    role: Literal["instance"] | None = None
    """`instance`: without access keys, ask the metadata service of this cloud machine for the keys of its role (Amazon,
    Google, Azure). `null`: the metadata service is never asked. The variables of a container platform, such as
    AWS_CONTAINER_CREDENTIALS_RELATIVE_URI, are used in either case."""
    cache_gb: PositiveFloat = 100.0
    """Maximum size of the cache of downloaded files in GB (10^9 bytes), in `~/.cache/tunewell` or TUNEWELL_CACHE.
    The least recently used files are removed first."""
    offline: Bool = False
    """Use only files that were downloaded earlier, and send no requests. Also set by `--offline`."""

    @field_validator("endpoint")
    @classmethod
    def _require_plain_address(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s/@?#]+/?", value):
            raise ValueError("must be an address like `https://HOST` or `http://HOST:PORT`, without keys or a path")
        return value


class Evaluate(Section):
    """Evaluation during training: on the rows of `data.selection`, or without them on held-out rows."""

    single = {"every_steps": (int, str), "max_documents": (int,)}  # noqa: RUF012
    switch = "leave it out: rows are always evaluated; with `data.selection: 0` and `data.held_out: 0`, there are none"
    every_steps: Positive | Auto = "auto"
    """Steps between two evaluations. `auto`: ten evaluations per run. The last step is always evaluated."""
    max_documents: Positive | None = 200
    """Documents per evaluation, spread evenly over all of them. `null`: all."""
    patience: Positive | None = None
    """Early stopping: number of evaluations without a better checkpoint after which training ends. Rows must be set
    aside for it (`data.selection`). `null`: never."""
    samples: Count = 4
    """Questions that the model answers at each evaluation, written to `samples.jsonl`."""
    sample_tokens: Positive = 64
    """Maximum length of a sample answer in tokens."""


class CheckpointRules(Section):
    """Checkpoints: how often they are saved, and how many are kept."""

    single = {"every_steps": (int, str), "keep": (int,)}  # noqa: RUF012
    switch = "leave it out: checkpoints are always written"
    every_steps: Positive | Auto = "auto"
    """Steps between two checkpoints. `auto`: at every evaluation, and at least every 10 steps."""
    keep: Positive = 2
    """Number of latest checkpoints to keep, at least two. The best checkpoint on the selection slice is also kept."""


class Healing(Section):
    """Automatic recovery: what happens when a run fails or diverges, and how often."""

    single = {"on": (bool,)}  # noqa: RUF012
    on: Bool = True
    """Recover automatically. `false`: problems are only logged and shown, but updates with NaN or infinity are still
    skipped."""
    quiet_steps: Positive = 16
    """Number of steps without a problem after which the last problem counts as solved. The next problem then starts
    with the mildest remedy again."""
    max_rewinds: Count = 4
    """How often a run goes back to a checkpoint before it stops. Each time it changes something: it leaves out the
    documents at fault, halves the learning rate, trains in fp32, or moves to the CPU."""
    max_left_out: Share = 0.05
    """Maximum share of the documents (but at least eight documents) that may be left out because they alone cause NaN
    or infinity. If there are more, the cause is something else."""
    spike_factor: Annotated[Float, Field(gt=1)] = 10.0
    """Skip an update if its gradient norm is this many times the median of the last 128 steps, far outside their spread
    and over twice their maximum. In recorded runs, spikes were at least 20 times the median and hard batches at most
    3 times."""
    behaviour: Literal["warn", "stop"] = "warn"
    """What happens if most sample answers are empty, loop or repeat the question at two evaluations in a row: all of
    them, or at least half of them and two more than at step 0. `warn`: the run continues with a warning. `stop`: it
    ends with exit code 4. The evaluation at step 0 does not count."""
    change_precision: Bool = True
    """Switch to fp32 if values repeatedly overflow in a 16-bit precision."""
    restarts: Count = 3
    """Number of automatic restarts after a kill, crash or hang at the same step."""
    hang_seconds: PositiveFloat = 60.0
    """Number of seconds without progress after which a run counts as hung; at least three times the duration of a
    step."""


class PlanRules(Section):
    """The plan of a run: prices, and what happens if a run does not fit."""

    prices: dict[str, float] = {}  # noqa: RUF012  pydantic copies it
    """Your prices per hour by card, e.g. `{t4: 0.35, h200: 3.79}`; `here` is this machine. `tunewell plan` multiplies
    them with the predicted hours, in your currency."""
    memory: Literal["refuse", "warn"] = "refuse"
    """What `train` does if a run cannot fit into memory, before it loads the model: `refuse` or `warn`."""

    @field_validator("prices", mode="before")
    @classmethod
    def _require_plausible_prices(cls, value: Any) -> Any:
        prices = cast(dict[Any, Any], value) if isinstance(value, dict) else {}
        for name, price in prices.items():
            if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price <= _MAX_PRICE:
                raise ValueError(f"has {price!r} for `{name}`: a price per hour is a number from 0 to {_MAX_PRICE}")
        return cast(Any, value)


class Export(Section):
    """Export: which files are written from a trained model."""

    single = {"to": (list,)}  # noqa: RUF012
    switch = "leave it out: `export.to` names what `train` exports at its end"
    to: tuple[Annotated[str, OneOf(EXPORT_TARGETS)], ...] = Field(
        default=(),
        description=f"Export targets. {OneOf(EXPORT_TARGETS).doc()} `train` checks before its first step that the "
        "model can be exported to them, and exports it at the end, unless the verdict is FAIL.",
    )
    merge_onto: Literal["trained", "original"] = "trained"
    """The base weights of a run with `method.quantize`: the quantised ones on which the adapter was `trained`,
    dequantised, or the `original` ones in 16 bits. An export shows the held-out loss of both."""
    precision: MergedPrecision = "bf16"
    """Precision of the merged weights. The adapter is merged in fp32."""
    gguf: tuple[GgufFormat, ...] = ("q8_0",)
    """Types of the GGUF files, one file for each type. Small models lose the most quality at low bit widths."""


class VerdictRules(Section):
    """Rules of the verdict: how the trained model is tested, and what it must reach to pass."""

    single = {"after_training": (bool,)}  # noqa: RUF012
    after_training: Bool = True
    """Test the model and write the report at the end of `train`."""
    questions: Count = 100
    """Number of held-out questions to answer, spread evenly over the rows. 0: none, only the losses decide."""
    answer_tokens: Positive | Auto = "auto"
    """Maximum length of an answer in tokens. `auto`: 1.5 times the longest expected answer, from 32 to 512."""
    max_documents: Positive | None = 500
    """Number of held-out documents for the loss, spread evenly over all of them. `null`: all."""
    batch_size: Positive | Auto = "auto"
    """Number of questions answered at once. `auto`: as many as fit into 8,192 tokens."""
    reuse_base: Bool = True
    """Reuse the losses and answers of the base model from an earlier evaluation on this machine, if weights, rows,
    tokenizer, template, decoding settings and versions are the same. `false`: measure the base model again."""
    task: str = Field(
        default="auto",
        description="Task of the rows, which decides how answers are scored. `auto`: found from the training rows. "
        f"{OneOf(SCORERS).doc()} `file.py:function`: your own function decides; `fn(question, answer, reference)` "
        "returns True, False or a number from 0 to 1; an answer is right from 0.5. It runs with your permissions.",
    )
    metrics: tuple[str, ...] = ()
    """Your own metric functions, each as `file.py:function`: `fn(question, answer, reference)` returns a number. The
    report shows the mean for the base and the tuned model. The functions run with your permissions and do not change
    the verdict; `verdict.task` does."""
    min_gain: PartialShare = 0.05
    """For texts, chats and documents: the held-out loss must be lower than that of the base model by this share. A
    smaller gain is WEAK."""
    min_right: Share | Auto = "auto"
    """Share of the questions that must be answered right. Less is WEAK. `auto`: the threshold of the task, from 0.2 for
    commands to 0.6 for labels."""
    max_faults: Share = 0.1
    """Maximum share of answers that are empty, loop, echo the question or never end. A larger share is WEAK; half of
    the answers or more is FAIL."""
    max_rise: NonNegative = 0.15
    """Overfitting: share by which the held-out loss may rise above its minimum. A larger rise is a note, not a verdict:
    the best checkpoint is used, and right answers may still increase."""
    max_forgetting: NonNegative = 0.3
    """Forgetting: share by which the loss on everyday text may rise above that of the base model. A larger rise is
    WEAK."""
    max_lost: Share = 0.1
    """Forgetting: by how much the share of the 60 everyday instructions that are followed may be lower than that of the
    base model. A larger loss is WEAK if the difference is significant. The same limit holds for refusals."""

    @field_validator("task")
    @classmethod
    def _require_task(cls, value: str) -> str:
        if value != "auto" and value not in SCORERS.names() and not re.fullmatch(r".+\.py:[^\W\d]\w*", value):
            known = ", ".join(f"`{name}`" for name in ("auto", *SCORERS.names()))
            raise ValueError(f"must be one of {known}, or `file.py:function`, not {value!r}")
        return value

    @field_validator("metrics", mode="before")
    @classmethod
    def _name_files_and_functions(cls, value: Any) -> Any:
        for reference in (value := [value] if isinstance(value, str) else value) or ():
            if not isinstance(reference, str) or not re.fullmatch(r".+\.py:[^\W\d]\w*", reference):
                raise ValueError(f"must be a file and a function in it, like `metrics.py:exact`, not {reference!r}")
        return value
