"""`tunewell init`: write a config for rows and a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AsJson
from tunewell.cli.progress import shown_progress
from tunewell.cli.render import emit, folded_table, hanging, json_text
from tunewell.cli.screens.corpus import dropped_reasons
from tunewell.config.extensions import METHODS
from tunewell.core.units import count

if TYPE_CHECKING:
    from tunewell.planning.first_config import InitResult


def command(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="File, folder or glob of rows. `rows.jsonl#500` uses the first 500.")
    ],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Model: a folder, a `.gguf` file, a Hub id or `package:NAME`.")
    ],
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="Training method: `lora`, `qlora` (base model in 4 bits), `int8` (in 8 bits), `dora`, `full`, "
            "`adamw8bit` or `galore` (full, with small optimizer states).",
        ),
    ] = "lora",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Config file to write. Default: `tunewell.yaml`.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing config.")] = False,
    json: AsJson = False,
) -> None:
    """Write a config for your rows and a model, with the reasons."""
    from tunewell.workflows.init import init

    with shown_progress() as progress:
        result = init(data, model=model, method=method, out=out, is_overwriting=force, progress=progress)
    emit(json_text(result.as_json()) if json else _screen(result, data))


def _screen(result: "InitResult", data: str) -> str:
    from tunewell.planning.first_config import find_recipe

    sample, start, facts = result.sample, result.start, result.facts
    formats = ", ".join(sorted({name for source in sample.sources for name in source.formats}))
    size = f"{count(facts.num_parameters)} parameters" if facts.num_parameters else "size unknown"
    limit = f"context of {count(facts.context_limit)} tokens" if facts.context_limit else "context length unknown"
    lengths = f"{sample.lengths.mean:.0f} tokens on average, longest {count(sample.lengths.max)}"
    is_own_template = result.template == "auto"
    template = "the model's own" if is_own_template else f"`{result.template}`; the model has none"
    if formats == "text":
        template = "not used for plain text"
    number = max(round(result.num_rows * 0.05), min(2, result.num_rows // 4))
    held_out = f"about {count(number)} of {count(result.num_rows, 'row')}"
    rows = [
        ["model", f"{facts.name}: {size}, {limit}"],
        ["rows", f"{count(result.num_rows)} in `{data}`, format {formats}; {lengths}"],
        ["chat template", template],
        [
            "for testing",
            f"`{result.held_out}`, found beside the data"
            if result.held_out
            else f"{held_out} (5%, always the same ones)",
        ],
        ["epochs", f"{start.epochs.value:g}: {start.epochs.because}"],
        ["learning rate", f"{start.learning_rate.value:g}: {start.learning_rate.because}"],
    ]
    if METHODS.entry(find_recipe(result.method).kind).is_adapter:
        rows.append(["LoRA rank", f"{start.rank.value}: {start.rank.because}"])
    if result.labels:
        remark = f"{count(len(result.labels), 'label')}; the model learns to name the label of a text (see the config)"
        rows.insert(2, ["classification", remark])
    rows += [["note", remark] for remark in sample.remarks]
    if sample.dropped:
        dropped = f"{count(sum(sample.dropped.values()))} of the first {count(sample.rows_in, 'row')}"
        rows.append(["dropped", f"{dropped}: {dropped_reasons(sample.dropped)}"])
    return "\n".join(
        [
            folded_table(rows),
            f"wrote `{result.path}`",
            hanging("next: ", "`tunewell inspect` to see the rows as the model does, then `tunewell train`"),
        ]
    )
