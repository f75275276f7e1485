"""Recommend epochs, batch, learning rate, rank, warm-up and schedule: one function for `init`, `train` and `plan`.

The tables and their sources are in `recommendation.toml`. The values depend on rows, task, model and method, but not on
the device: the same rows give the same model on a laptop and on a GPU. The size of an update is chosen for learning:

rows  150 | 1,000 | 10,003 | 15,000 labels        epochs x rows / rows of an update  >=  some hundred updates
epochs  5 |     3 |      3 |      2
update  4 |     8 |     64 |     64 rows
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from tunewell.config.extensions import METHODS, OPTIMIZERS, SCORERS
from tunewell.config.load import LoadedConfig, with_changes
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.files import read_data
from tunewell.core.units import count
from tunewell.data.question_rows import read_questions
from tunewell.model_files.facts import read_facts
from tunewell.model_files.presets import is_preset
from tunewell.records.manifest import Manifest, RowsRecord
from tunewell.records.plan import Chosen, Plan
from tunewell.scoring.base import ReferenceRow
from tunewell.scoring.tasks import find_task, is_chat_export

_TABLES = read_data(__file__, "recommendation.toml")
RECOMMENDED = (
    *("method.rank", "method.alpha", "train.epochs", "train.learning_rate", "train.schedule", "train.warmup"),
    *("train.batch_documents", "train.batch_tokens"),
)
"""The keys that are recommended."""
_TASK_ROWS = 20_000
"""Maximum number of rows, from the first on, that are read to find the task."""


def recommend_replay(config: Config, rows: RowsRecord | None) -> Chosen[float]:
    """Return the share of everyday prompts: some where that was measured to keep instructions and cost no answers."""
    table, task = _TABLES["replay"], rows.task if rows else ""
    is_measured = has_shipped_replay(config) and config.method.kind == "lora" and task in table["tasks"]
    if rows is None or not is_measured or rows.num_rows >= table["fewer_rows_than"]:
        return Chosen(0.0, because="`auto`: off where its cost is not measured; 0.05 switches it on")
    return Chosen(table["share"], because=f"it forgets less; with few rows of {task}, no right answers were lost by it")


def has_shipped_replay(config: Config) -> bool:
    """Return True if the answers of the base model to the everyday prompts are shipped."""
    return config.model in _TABLES["replay"]["models"] and config.method.quantize == "none"


def recommend_settings(rows: RowsRecord, num_parameters: int | None, config: Config) -> dict[str, Chosen[Any]]:
    """Return values for the keys that are `auto` in a config. `num_parameters` is None if unknown.

    Of `train.batch_documents` and `train.batch_tokens`, one at most is among them.
    """
    rank = _lookup("ranks", rows.num_rows)
    epochs, batch, size = _schedule(rows)
    found = {
        "method.rank": Chosen(rank, because=f"enough for {count(rows.num_rows, 'row')}"),
        "method.alpha": Chosen(2 * (rank if config.method.rank == "auto" else config.method.rank), "twice the rank"),
        "train.epochs": epochs,
        "train.learning_rate": recommend_rate(num_parameters, config),
        "train.schedule": Chosen(_TABLES["schedule"]["name"], because="the learning rate falls to zero"),
        "train.warmup": Chosen(_TABLES["schedule"]["warmup"], because="3% of the updates, the usual share"),
    }
    if is_open(config, "train.batch_tokens") and is_open(config, "train.batch_documents"):
        found[batch] = size
    return {key: own for key, own in found.items() if is_open(config, key)}


def is_open(config: Config, key: str) -> bool:
    """Return True if a key is to be recommended."""
    return attrgetter(key)(config) in ("auto", None)


def _schedule(rows: RowsRecord) -> tuple[Chosen[float], str, Chosen[int]]:
    """Return the epochs, and the key and the value of the size of an update."""
    short, usual = _TABLES["short"], _lookup("epochs", rows.num_rows)
    is_short = rows.task in short["tasks"] or rows.mean_supervised <= short["tokens"]
    amount, key, most = float(rows.num_rows), "batch_documents", _TABLES["documents"]["short" if is_short else "long"]
    size = _update_size(usual * amount, _TABLES["documents"], most=most)
    because = f"short replies ({rows.task})" if is_short else f"replies of the task `{rows.task}`"
    because = f"rows per update, for {because}"
    most_tokens = _TABLES["tokens"]["most"]
    if rows.task == "documents" or size * rows.mean_tokens > most_tokens:
        amount, key = rows.num_rows * max(1.0, rows.mean_tokens), "batch_tokens"
        size = _update_size(usual * amount, _TABLES["tokens"], most=most_tokens)
        kind = "plain texts" if rows.task == "documents" else f"rows of {rows.mean_tokens:,.0f} tokens"
        because = f"tokens per update, for {kind}"
    per_epoch = max(1, math.ceil(amount / size))
    enough, needed = (math.ceil(_TABLES["updates"][name] / per_epoch) for name in ("goal", "least"))
    epochs = min(max(min(usual, max(2, enough)), needed), _TABLES["epochs"]["most"])
    why = _why_epochs(count(rows.num_rows, "row"), epochs, usual)
    return Chosen(float(epochs), because=why), f"train.{key}", Chosen(size, because=because)


def num_updates(rows: RowsRecord, settings: Mapping[str, Chosen[Any]]) -> int:
    """Return about how many updates a run has; its plan has the exact number."""
    size, amount = settings.get("train.batch_documents"), rows.num_rows
    if size is None:
        size, amount = settings["train.batch_tokens"], rows.num_rows * rows.mean_tokens
    return round(math.ceil(amount / size.value) * settings["train.epochs"].value)


def _lookup(name: str, number: float) -> Any:
    table = _TABLES[name]
    return next((value for limit, value in table["below"] if number < limit), table["otherwise"])


def _update_size(total: float, table: Mapping[str, int], *, most: int) -> int:
    """Return the power of two with which a total amount gives about as many updates as wanted."""
    updates = _TABLES["updates"]
    least = table["usual"] if total / table["usual"] >= updates["least"] else table["least"]
    return min(max(2 ** round(math.log2(max(1.0, total / updates["goal"]))), least), most)


def _why_epochs(number: str, epochs: int, usual: int) -> str:
    if epochs > usual:
        return f"{number} give too few updates with {usual} epochs"
    if epochs < usual:
        return f"{number} give enough updates with {epochs} {'epoch' if epochs == 1 else 'epochs'}"
    return f"{number} are {'enough, so each is shown once' if epochs == 1 else f'few, so each is shown {epochs} times'}"


def recommend_rate(num_parameters: int | None, config: Config) -> Chosen[float]:
    """Return the learning rate for a model of this size with the training method and the optimizer of a config."""
    name = config.method.kind
    entry, own, rates = METHODS.entry(name), OPTIMIZERS.entry(config.train.optimizer), _TABLES["rates"]
    factor = f", times {own.rate_factor:g}: {own.rate_reason}" if own.rate_reason else ""
    if is_preset(config.model or ""):
        return Chosen(
            round(rates["new"] * own.rate_factor, 12), because=f"the model starts from random weights{factor}"
        )
    rate = rates["unknown"] if num_parameters is None else _lookup("rates", num_parameters)
    rate *= entry.learning_rate / METHODS.entry("lora").learning_rate
    remark = ", the rate of LoRA" if entry.is_adapter else ", about a tenth of LoRA's, because it changes every weight"
    because = f"{entry.title}{'' if name == 'lora' else remark}{factor}"
    if num_parameters is None:
        because = f"model size unknown; suits several billion parameters with {because}"
    else:
        size = f"{num_parameters / 1e6:,.3g} M" if num_parameters < 1e9 else f"{num_parameters / 1e9:,.1f} B"
        because = f"for {size} parameters with {because}; small models need higher rates than large ones"
    return Chosen(round(rate * own.rate_factor, 12), because=because)


# Fill in the settings of a config that are `auto`.


def with_recommended(loaded: LoadedConfig, manifest: Manifest, before: Plan | None = None) -> LoadedConfig:
    """Return a config in which recommended values replace `auto`; `LoadedConfig.reasons` has the reasons.

    `before` is the plan of a run that is resumed: its values are kept.
    """
    config = loaded.config
    size = read_facts(loaded.seen(config.model or "")).num_parameters
    found = recommend_settings(_rows_of(config, manifest), size, config)
    if before is not None:
        has_batch = any("batch" in key for key in found)
        known = _of_plan(before).items()
        found = {key: own for key, own in known if is_open(config, key) and (has_batch or "batch" not in key)}
    changed = with_changes(config, {key: own.value for key, own in found.items()})
    reasons = {**loaded.reasons, **{key: own.because for key, own in found.items()}}
    return replace(loaded, config=changed, reasons=reasons)


def _of_plan(plan: Plan) -> dict[str, Chosen[Any]]:
    """Return the settings of an earlier plan, also of one that was made before they could be `auto`."""
    values = {key: plan.config[key.partition(".")[0]].get(key.partition(".")[2]) for key in RECOMMENDED}
    planned = ("learning_rate", "batch_tokens", "batch_documents")
    values |= {f"train.{name}": getattr(plan, name).value for name in planned}
    values["train.replay"] = plan.replay.value if plan.replay else None
    because = "as in the plan of this run"
    return {key: Chosen(value, because=because) for key, value in values.items() if value not in ("auto", None)}


def _rows_of(config: Config, manifest: Manifest) -> RowsRecord:
    rows = manifest.rows
    if rows is None:  # the corpus of an earlier version
        split = manifest.splits["train"]
        number = max(1, split.documents)
        means = {"mean_tokens": split.tokens / number, "mean_supervised": split.supervised / number}
        rows = RowsRecord(num_rows=number, task="text", because="unknown", **means)
    return rows.model_copy(update={"task": config.verdict.task}) if config.verdict.task in SCORERS.names() else rows


def task_of_rows(config: Config, formats: Sequence[str], num_documents: int, *, base: Path) -> Chosen[str]:
    """Return the task of the first source's rows, with the reason; without questions, they are documents."""
    if config.verdict.task in SCORERS.names():
        return Chosen(config.verdict.task, because="set by `verdict.task`")
    source = config.data.sources[0]
    limit = min(source.limit or _TASK_ROWS, _TASK_ROWS)
    try:
        found = read_questions(source.model_copy(update={"limit": limit}), base=base, storage=config.storage)
    except UserError:
        found = []
    rows = [ReferenceRow(one.text, one.reference, one.answers, num_replies=one.num_replies) for one in found]
    return find_task(rows, num_documents=0 if rows else num_documents, is_chat=is_chat_export({*formats}))
