"""`tunewell init`: write a config for rows and a model."""

import shlex
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tunewell.cli.options import Argument, AsJson, Option, Sets
from tunewell.cli.prompt import progress_and_questions
from tunewell.cli.render import emit, folded_table, hanging, json_text
from tunewell.cli.screens.corpus import dropped_reasons
from tunewell.config.glossary import explain_losses
from tunewell.core.errors import UserError
from tunewell.core.units import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunewell.core.progress import ProgressListener
    from tunewell.core.questions import Asker
    from tunewell.planning.first_config import InitResult
    from tunewell.records.plan import Chosen

_EITHER = "if the answers are in documents, `tunewell index DOCUMENTS`; `tunewell compare` shows which works better"
_LOOK_UP = {
    "facts": _EITHER,
    "text": _EITHER,
    "documents": "texts teach a style and hardly any facts; to look facts up instead, `tunewell index {data}`",
}
"""What else is possible, by the task of the rows; nothing for labels, chats and the like."""
EXIT_OPEN = 2
_LABELS = {"columns": "columns", "encoding": "encoding", "separator": "separator", "assistant": "replies of"}
"""Settings of the source that the screen shows."""
_SETTINGS = {
    "method.rank": "LoRA rank",
    "train.epochs": "epochs",
    "train.learning_rate": "learning rate",
    "train.batch_documents": "batch",
    "train.batch_tokens": "batch",
}
"""Recommended settings that the screen shows."""


def command(
    data: Annotated[str, Argument("File, folder or glob of rows. `rows.jsonl#500` uses the first 500.", "DATA")],
    model: Annotated[
        str | None,
        Option(
            "Model: a hub id, a folder, a `.gguf` file, `ollama:NAME` or `package:NAME`. Default: the one that "
            "`tunewell models` recommends.",
            "MODEL",
        ),
    ] = None,
    method: Annotated[
        str,
        Option(
            "Training method: `lora`, `qlora` (base model in 4 bits), `int8` (in 8 bits), `dora`, `full`, "
            "`adamw8bit` or `galore` (full, with small optimizer states).",
            "METHOD",
        ),
    ] = "lora",
    out: Annotated[Path | None, Option("Config file to write. Default: `tunewell.yaml`.", "FILE")] = None,
    columns: Annotated[
        str | None, Option("Your columns: `question=Frage,answer=Antwort`. Not needed for known names.", "NAMES")
    ] = None,
    encoding: Annotated[
        str | None, Option("Character encoding of the rows, like `cp1252`. Default: detected.", "NAME")
    ] = None,
    set_: Sets = None,
    force: Annotated[bool, Option("Overwrite an existing config.")] = False,
    json: AsJson = False,
) -> int:
    """Write a config for your rows and a model, with the reasons.

    In a terminal, it asks for what it cannot tell: columns, encoding, separator, whose messages are the replies.
    Elsewhere, such points are marked `?` in the config, and the exit code is 2.
    """
    from tunewell.workflows.init import as_options, init

    sets = [*source_sets(columns, encoding), *(set_ or ())]
    with progress_and_questions(can_ask=not json) as (progress, ask):
        model = model or choose_model(data, sets=sets, ask=ask, progress=progress)
        result = init(
            data, model=model, method=method, out=out, sets=sets, is_overwriting=force, ask=ask, progress=progress
        )
    given = ["--model", model, *(["--method", method] if method != "lora" else []), *as_options(sets)]
    emit(json_text(result.as_json()) if json else _screen(result, data, given, set_ or ()))
    return EXIT_OPEN if result.source.open_points else 0


def choose_model(
    data: str | None,
    *,
    ask: "Asker | None",
    progress: "ProgressListener",
    sets: "Sequence[str]" = (),
    language: str = "",
) -> str:
    """Return the model that is recommended for these rows, and print why. In a terminal, a download is asked for."""
    from tunewell.workflows.models import recommend_model

    model, because = recommend_model(data, sets=sets, language=language or None, ask=ask, progress=progress)
    sys.stderr.write(hanging("model: ", f"{model}: {because} (`tunewell models` compares others)") + "\n")
    sys.stderr.flush()
    return model


def source_sets(columns: str | None, encoding: str | None) -> list[str]:
    """Return `--columns` and `--encoding` as settings of the first source."""
    from tunewell.config.load import as_sets

    sets = as_sets(**{"data.sources[0].encoding": encoding})
    if columns is not None:
        pairs = dict(part.split("=", 1) for part in columns.split(",") if "=" in part)
        if len(pairs) != len(columns.split(",")):
            raise UserError(
                f"`--columns {columns}` is not a list of names", fix="write `--columns question=Frage,answer=Antwort`"
            )
        named = {ours.strip(): theirs.strip() for ours, theirs in pairs.items()}
        sets.append(f"data.sources[0].columns={dumps(named, ensure_ascii=False)}")
    return sets


def config_table(result: "InitResult", data: str, sets: "Sequence[str]" = ()) -> str:
    """Return what the config is based on, with the reasons."""
    from tunewell.model_files.families import ATTENTION

    sample, facts = result.sample, result.facts
    formats = ", ".join(sorted({name for source in sample.sources for name in source.formats}))
    size = f"{count(facts.num_parameters)} parameters" if facts.num_parameters else "size unknown"
    limit = f"context of {count(facts.context_limit)} tokens" if facts.context_limit else "context length unknown"
    lengths = f"{sample.lengths.mean:.0f} tokens on average, longest {count(sample.lengths.max)}"
    is_own_template = result.template == "auto"
    template = "the model's own" if is_own_template else f"`{result.template}`; the model has none"
    if formats == "text":
        template = "not used for plain text"
    rows = [
        ["model", f"{facts.name}: {size}, {limit}"],
        *([["documents", result.packing.words]] if result.packing.level != ATTENTION else []),
        ["rows", f"{count(result.num_rows)} in `{data}`, format {formats}; {lengths}"],
        *(
            [_LABELS[key], _setting(value)]
            for key, value in result.source.settings.items()
            if key in _LABELS and key not in result.source.open_points
        ),
        *([["task", f"{result.task.value}: {result.task.because}"]] if result.task else []),
        ["chat template", template],
        ["kept for testing", result.kept_for_testing],
        *([_SETTINGS[key], _with_reason(key, own)] for key, own in result.settings.items() if key in _SETTINGS),
        ["updates", f"about {count(result.num_updates)} in all"],
    ]
    if labels := result.source.labels:
        remark = f"{count(len(labels), 'label')}; the model learns to name the label of a text (see the config)"
        rows.insert(2, ["classification", remark])
    rows += [["set", f"`{text}`"] for text in sets]
    rows += [["note", remark] for remark in sample.remarks]
    if result.too_few_to_judge:
        rows.append(["warning", result.too_few_to_judge])
    if sample.pieces and "long_documents: error" in result.text:
        remark = "some rows are longer than the model can read, and `train` will stop at them"
        rows.append(["warning", f"{remark}: add `--set packing.long_documents=split`, or `=drop`"])
    if sample.dropped:
        dropped = f"{count(sum(sample.dropped.values()))} of the first {count(sample.rows_in, 'row')}"
        rows.append(["dropped", f"{dropped}: {dropped_reasons(sample.dropped)}"])
        if not result.source.pauses:
            rows += [["why", text] for text in explain_losses(sample.dropped, sample.rows_in)]
    if result.source.pauses:
        rows.append(["pauses", result.source.pauses])
    rows += [["open", f"`{key}`: {question}"] for key, question in result.source.open_points.items()]
    return folded_table(rows)


def _with_reason(key: str, own: "Chosen[Any]") -> str:
    return f"{own.value:,g}{' ' if 'batch' in key else ': '}{own.because}"


def _screen(result: "InitResult", data: str, options: "Sequence[str]", sets: "Sequence[str]") -> str:
    from tunewell.config.load import FILE_NAME

    open_points = result.source.open_points
    config = "" if str(result.path) == FILE_NAME else f" --config {shlex.quote(str(result.path))}"
    next_step = f"`tunewell train{config}`; `tunewell inspect{config}` shows the rows as the model sees them"
    marked = ""
    if open_points:
        flags = " ".join(result.source.flags.values())
        given = shlex.join(["tunewell", "init", data, *options])
        out = f" --out {shlex.quote(str(result.path))}" if config else ""
        next_step = f"decide, for example: `{given}{out} --force {flags}`"
        marked = f" with {count(len(open_points), 'open point')}, marked `?`"
    lines = [config_table(result, data, sets), f"wrote `{result.path}`{marked}"]
    if not open_points and result.task and result.task.value in _LOOK_UP:
        lines.append(hanging("or: ", _LOOK_UP[result.task.value].format(data=shlex.quote(data))))
    return "\n".join([*lines, hanging("next: ", next_step)])


def _setting(value: Any) -> str:
    if not isinstance(value, dict):
        return f"`{value}`"
    return ", ".join(f"{ours}: `{theirs}`" for ours, theirs in value.items())
