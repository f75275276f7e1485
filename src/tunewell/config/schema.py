"""Every key of `tunewell.yaml`: its type, its range, its default and what it means, declared once.

The YAML file, `--set KEY=VALUE`, `tunewell explain KEY` and the JSON Schema for editors all come from here.
A number stays a number: the text `"5"`, the word `yes` and `true` are refused where a number is asked for.
"""

import re
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tunewell.config.fields import Auto, Bool, Float, Int, OneOf, Section, Text
from tunewell.config.methods import METHODS, MethodName
from tunewell.config.optimizers import OPTIMIZERS, OptimizerName
from tunewell.config.rules import Export, Healing, VerdictRules

LearnFrom = Literal["responses", "last_response", "everything"]
Role = Literal["system", "user", "assistant", "tool"]
Format = Literal["auto", "alpaca", "dolly", "question_answer", "prompt_completion", "messages", "sharegpt", "text"]

ALIASES: dict[str, str] = {
    "max_length": "packing.context_length",
    "max_seq_length": "packing.context_length",
    "sequence_len": "packing.context_length",
    "cutoff_len": "packing.context_length",
    "lr": "train.learning_rate",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "lora_r": "method.rank",
    "lora_rank": "method.rank",
    "lora_alpha": "method.alpha",
    "base_model": "model",
    "model_name_or_path": "model",
    "model_name": "model",
    "lora_dropout": "method.dropout",
    "target_modules": "method.targets",
    "lora_target_modules": "method.targets",
    "use_rslora": "method.rslora",
    "lr_scheduler_type": "train.schedule",
    "lr_scheduler": "train.schedule",
    "warmup_ratio": "train.warmup",
    "warmup_steps": "train.warmup",
    "gradient_checkpointing": "train.recompute",
    "eval_steps": "evaluate.every_steps",
    "save_steps": "checkpoints.every_steps",
    "save_total_limit": "checkpoints.keep",
    "output_dir": "run",
}
"""What other tools call our keys; read at the top of the file and in the key's own branch."""


def as_sources(value: Any) -> Any:
    """Spell out the short forms of `data.sources`: one path, or a list of paths, each with an optional `#500`."""
    entries = [value] if isinstance(value, str | dict) else value
    return [_as_source(entry) for entry in entries] if isinstance(entries, list | tuple) else entries


def _as_source(entry: Any) -> Any:
    if not isinstance(entry, str):
        return entry
    if limited := re.fullmatch(r"(.+)#(\d{1,18})", entry, flags=re.DOTALL):
        return {"path": limited[1], "limit": int(limited[2])}
    return {"path": entry}


class SourceConfig(Section):
    """One place rows come from."""

    path: Text
    """A file, a folder or a glob, from the config file's folder. As a bare string it may end in `#500`, a limit."""
    format: Format = "auto"
    """How a row is laid out. `auto`: detected from the rows and printed."""
    columns: dict[str, str] = {}  # noqa: RUF012  pydantic copies it
    """Our field to the name it has in your rows, e.g. `{question: Frage, answer: Antwort}`."""
    map: str | None = None
    """A function of yours that turns a row into another, `file.py:function`. It runs with your rights."""
    map_batch: Annotated[Int, Field(ge=1)] | None = None
    """Rows handed to the `map` function at a time, as a list. `null`: one row at a time."""
    limit: Annotated[Int, Field(ge=1)] | None = None
    """Rows read from this source, from its beginning. `null`: all of them."""
    share: Annotated[Float, Field(gt=0, le=1)] | None = None
    """Share of the training documents that come from this source, 0 to 1. Sources without one
    divide what is left by their size."""
    template: Text | None = None
    """The template for this source, in place of `template.name`."""
    learn_from: LearnFrom | None = None
    """What is learned from this source, in place of `template.learn_from`."""
    learn_roles: tuple[Role, ...] | None = None
    """Whose turns are learned from this source, in place of `template.learn_roles`."""
    system: str | None = None
    """System message put before the conversations of this source that have none."""
    text_rows: Literal["line", "paragraph", "file"] = "line"
    """How a `.txt` file is cut into rows: at every line, at empty lines, or not at all."""
    encoding: Text = "auto"
    """Character encoding of text files, e.g. `cp1252`. `auto`: UTF-8, or what the byte order mark says."""

    @model_validator(mode="before")
    @classmethod
    def _read_short_form(cls, value: Any) -> Any:
        return _as_source(value)

    @field_validator("map")
    @classmethod
    def _name_file_and_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r".+\.py:[^\W\d]\w*", value):
            raise ValueError(f"must name a file and a function in it, like `rows.py:convert`, not {value!r}")
        return value

    @field_validator("encoding")
    @classmethod
    def _know_the_encoding(cls, value: str) -> str:
        try:
            "".encode("utf-8" if value == "auto" else value)
        except (LookupError, ValueError):
            raise ValueError(
                f"must be `auto` or an encoding Python knows, like `utf-8` or `cp1252`, not {value!r}"
            ) from None
        return value

    @model_validator(mode="after")
    def _batch_needs_a_function(self) -> "SourceConfig":
        if self.map_batch is not None and self.map is None:
            raise ValueError("has `map_batch` without `map`: name the function the batches are for")
        return self


class Clean(Section):
    """Which rows are left out. Every one is counted and listed in `dropped.jsonl`."""

    exact_duplicate: Literal["drop", "keep"] = "drop"
    """A row whose conversation is the same as an earlier one's."""
    answer_in_held_out: Literal["drop", "keep"] = "drop"
    """A training row that asks a question of the held-out rows; keeping it makes held-out figures worthless."""
    bad_rows: Literal["drop", "error"] = "drop"
    """A row that cannot be read or is no conversation: drop and count it, or stop."""
    bad_text: Literal["drop", "replace", "error"] = "drop"
    """A row with a NUL, half a surrogate pair or bytes that are no text: drop it, put U+FFFD there, or stop."""
    max_row_bytes: Annotated[Int, Field(ge=1)] = 4 * 1024 * 1024
    """Size of a row in bytes above which it is dropped as `too_large`. 4,194,304 is 4 MiB."""
    max_nesting: Annotated[Int, Field(ge=1, le=500)] = 64
    """Lists and objects inside one another above which a row is dropped as `too_large`."""
    min_reply_chars: Annotated[Int, Field(ge=0)] = 0
    """Characters in all replies of a row below which it is dropped as `too_short`. 0: none is."""
    drop_urls: Bool = False
    """Drop rows that contain a web address (`has_url`)."""


class Data(Section):
    """The rows: where they come from, which are held out, which are left out."""

    sources: tuple[SourceConfig, ...] = ()
    """Where rows come from: one path, a list of paths, or a list of groups of keys."""
    held_out: Annotated[Float, Field(ge=0, lt=0.5)] | Text = 0.05
    """Share of the rows kept from training to judge it by, chosen by a hash of the content; or a file of
    such rows, read like the first source."""
    max_repeats: Annotated[Int, Field(ge=1)] = 4
    """How often one document may be used to reach its source's `share`."""
    clean: Clean = Clean()
    """Which rows are left out."""

    @field_validator("sources", mode="before")
    @classmethod
    def _read_short_forms(cls, value: Any) -> Any:
        return as_sources(value)

    @field_validator("held_out")
    @classmethod
    def _catch_numbers_in_quotes(cls, value: float | str) -> float | str:
        if isinstance(value, str) and re.fullmatch(r"[\d.]+\s*%?", value):
            raise ValueError(f"must be a number like 0.05 without quotes or percent sign, or a file, not {value!r}")
        return value

    @model_validator(mode="after")
    def _shares_fit(self) -> "Data":
        shares = [source.share for source in self.sources if source.share is not None]
        total = round(sum(shares), 9)
        everywhere = len(shares) == len(self.sources)
        if total > 1:
            raise ValueError(f"has shares that add up to {total:g}; together they can be 1 at most")
        if shares and everywhere and total != 1:
            raise ValueError(f"has a share on every source, and they add up to {total:g} instead of 1")
        if shares and not everywhere and total == 1:
            raise ValueError("has shares that add up to 1, which leaves nothing for the sources without one")
        return self


class Template(Section):
    """How a conversation becomes text, and which of it is learned."""

    name: Text = "auto"
    """`auto`: the model's own; or a built-in name (`chatml`, `llama3`, ...), or a `.jinja` file."""
    learn_from: LearnFrom = "responses"
    """`responses`: everything the assistant says; `last_response`: its last turn; `everything`: the whole text."""
    learn_roles: tuple[Role, ...] = ("assistant",)
    """Whose turns are learned."""
    add_missing_tokens: Bool = False
    """Add the template's markers to the tokenizer where it lacks them; their embeddings start untrained."""
    date: str = "2025-01-01"
    """The day a template sees when it asks for today's date, so that equal rows give equal tokens."""
    arguments: dict[str, Any] = {}  # noqa: RUF012  pydantic copies it
    """Values handed to the template, e.g. `{enable_thinking: false}`."""

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, value: str) -> str:
        try:
            date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"must be a day like 2025-01-31, not {value!r}") from None
        return value


class Packing(Section):
    """How documents are laid into sequences."""

    context_length: Annotated[Int, Field(ge=2)] | Auto = "auto"
    """Tokens in one packed sequence. `auto`: the longest document rounded up to 128, at least 1,024 and within the
    model's limit."""
    long_documents: Literal["error", "split", "drop"] = "error"
    """What to do with a document that does not fit. A drop is counted as `too_long`, what a split adds as `pieces`."""


class MethodSettings(Section):
    """What of the model is trained."""

    kind: MethodName = Field(default="lora", description=OneOf(METHODS).doc())
    rank: Annotated[Int, Field(ge=1, le=4096)] = 16
    """Rank of the added matrices: higher learns more and needs more memory."""
    alpha: Annotated[Int, Field(ge=1)] = 32
    """Strength of the added matrices; their output is scaled by alpha / rank."""
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs that the added matrices do not see, drawn anew at each step."""
    rslora: Bool = False
    """Scale by alpha / sqrt(rank) instead, which keeps high ranks from learning too little."""
    targets: Literal["all-linear"] | tuple[Text, ...] = "all-linear"
    """Which linear layers get matrices: `all-linear` (the head excepted), or names like `[q_proj, v_proj]`."""
    layers: Literal["all"] | tuple[Annotated[Int, Field(ge=0)], ...] = "all"
    """Which decoder layers get matrices, counted from 0; `all` of them."""
    modules_to_save: tuple[Text, ...] = ()
    """Modules trained as a whole beside the matrices, and saved with them, e.g. `[embed_tokens, lm_head]`."""


class Train(Section):
    """How long and how fast is learned, and how a step is cut up."""

    epochs: Annotated[Float, Field(gt=0, le=10_000)] = 3.0
    """How often the training documents are seen; `max_steps` can say more."""
    max_steps: Annotated[Int, Field(ge=1)] | None = None
    """Optimizer steps after which training ends, in place of `epochs`. `null`: as many as the epochs take."""
    learning_rate: Annotated[Float, Field(gt=0, le=1)] = 2e-4
    """Peak step size of the optimizer."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the step size falls after the warm-up: along a cosine or a line to `min_rate_share`, or not at all."""
    min_rate_share: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that it falls towards."""
    warmup: Annotated[Float, Field(ge=0)] = 0.03
    """Steps over which the step size rises to its peak: below 1 a share of all steps, from 1 on a number of them."""
    optimizer: OptimizerName = Field(default="adamw", description=OneOf(OPTIMIZERS).doc())
    weight_decay: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Pull of the weights towards zero; norms and biases are spared."""
    adam_beta1: Annotated[Float, Field(ge=0, lt=1)] = 0.9
    """How slowly the optimizer forgets the direction of earlier gradients."""
    adam_beta2: Annotated[Float, Field(ge=0, lt=1)] = 0.999
    """How slowly the optimizer forgets the size of earlier gradients."""
    adam_epsilon: Annotated[Float, Field(gt=0)] = 1e-8
    """Keeps the optimizer from dividing by nothing."""
    max_grad_norm: Annotated[Float, Field(gt=0)] | None = 1.0
    """Gradients longer than this are shortened to it. `null`: never."""
    batch_tokens: Annotated[Int, Field(ge=1)] | Auto = "auto"
    """Tokens of the documents that one optimizer step learns from. `auto`: a fortieth of an epoch, at least 256
    and at most 16,384."""
    batch_documents: Annotated[Int, Field(ge=1)] | None = None
    """Documents that one optimizer step learns from, in place of `batch_tokens`."""
    micro_batch_tokens: Annotated[Int, Field(ge=1)] | Auto = "auto"
    """Tokens computed at once. A step is cut into as many micro-batches as it takes; the result is the same."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Numbers the model computes in. `auto`: bf16 where the machine really has it, fp32 elsewhere. fp16 is used with a
    scaler only. What is trained is kept in fp32 always."""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """How documents are kept apart: `sdpa` runs anywhere, `flash` on CUDA devices from the Ampere generation on."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the layers for CUDA. `auto`: once the steps left are worth the wait; the first step never waits."""
    recompute: Bool = False
    """Keep only each layer's input and compute the rest again on the way back: less memory, about a third slower."""
    threads: Annotated[Int, Field(ge=1)] | Auto = "auto"
    """Threads on the CPU. `auto`: measured at the start, since on a busy machine more can be slower."""


class Evaluate(Section):
    """How a run is watched on held-out rows."""

    every_steps: Annotated[Int, Field(ge=1)] | Auto = "auto"
    """Steps between two looks at the held-out rows. `auto`: ten looks in a run. The end is always looked at."""
    max_documents: Annotated[Int, Field(ge=1)] | None = 200
    """Held-out documents looked at each time, spread evenly over them. `null`: all."""
    patience: Annotated[Int, Field(ge=1)] | None = None
    """Looks without a better held-out loss after which training ends early. `null`: never."""
    samples: Annotated[Int, Field(ge=0)] = 4
    """Held-out questions answered at each look, written to `samples.jsonl`."""
    sample_tokens: Annotated[Int, Field(ge=1)] = 64
    """Longest answer of a sample in tokens."""


class Checkpoints(Section):
    """What is kept of a run while it goes on."""

    every_steps: Annotated[Int, Field(ge=1)] | Auto = "auto"
    """Steps between two checkpoints. `auto`: where the held-out rows are looked at, and at most every 10 steps."""
    keep: Annotated[Int, Field(ge=1)] = 2
    """Newest checkpoints kept, two at least. The best by held-out loss is kept beside them."""


class Config(Section):
    """A whole `tunewell.yaml`."""

    model: Text | None = None
    """The model: a folder, a hub id, a `.gguf` file, a SentencePiece `.model` file, `package:NAME`, which looks
    inside an installed Python package, or `preset:NAME`, which starts from nothing with what `tokenizer` names."""
    tokenizer: Text | None = None
    """Where the tokenizer comes from, if not from the model: a folder, a `tokenizer.json`, a SentencePiece `.model`."""
    corpus: Text = "corpus"
    """The folder `tunewell prepare` writes."""
    run: Text = "run"
    """The folder `tunewell train` writes."""
    device: Text = "auto"
    """Where to train: `cpu`, `cuda`, `cuda:1`, `mps`. `auto`: the best there is."""
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    """Start of every random choice; equal seeds and equal rows give equal bytes."""
    data: Data = Data()
    """The rows: where they come from, which are held out, which are left out."""
    template: Template = Template()
    """How a conversation becomes text, and which of it is learned."""
    packing: Packing = Packing()
    """How documents are laid into sequences."""
    method: MethodSettings = MethodSettings()
    """What of the model is trained."""
    train: Train = Train()
    """How long and how fast is learned, and how a step is cut up."""
    evaluate: Evaluate = Evaluate()
    """How a run is watched on held-out rows."""
    checkpoints: Checkpoints = Checkpoints()
    """What is kept of a run while it goes on."""
    healing: Healing = Healing()
    """What is done about a run that goes wrong, and how often."""
    verdict: VerdictRules = VerdictRules()
    """How a trained model is judged, and what it takes to pass."""
    export: Export = Export()
    """What is made of a trained model."""
