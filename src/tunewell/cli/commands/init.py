"""`tunewell init`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AsJson

if TYPE_CHECKING:
    from tunewell.workflows.init import InitResult


def command(
    data: Annotated[str, typer.Argument(help="File, folder or glob of rows; `rows.jsonl#500` takes the first 500.")],
    model: Annotated[str, typer.Option(help="Folder, `.gguf` file, hub id or `package:NAME`.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the config; `tunewell.yaml` if not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a config that is there.")] = False,
    json: AsJson = False,
) -> None:
    """Look at rows and a model, and write a config with the reasons in it."""
    from tunewell.cli.progress import shown_progress
    from tunewell.cli.render import emit, emit_json
    from tunewell.workflows.init import init

    with shown_progress() as progress:
        result = init(data, model=model, out=out, is_overwriting=force, progress=progress)
    if json:
        emit_json(result.as_json())
    else:
        emit(_screen(result, data))


def _screen(result: "InitResult", data: str) -> str:
    from tunewell.cli.commands.prepare import dropped_words
    from tunewell.cli.render import table
    from tunewell.core.units import count

    sample, start, facts = result.sample, result.start, result.facts
    formats = ", ".join(sorted({name for source in sample.sources for name in source.formats}))
    size = f"{count(facts.num_parameters)} parameters" if facts.num_parameters else "size unknown"
    limit = f"reads {count(facts.context_limit)} tokens" if facts.context_limit else "context limit unknown"
    rows = [
        ["model", facts.name, f"{size}, {limit}"],
        ["rows", count(result.num_rows), f"in `{data}`, read as {formats}"],
        [
            "template",
            result.template,
            "the model's own" if result.template == "auto" else "built in; the model has none",
        ],
        [
            "held out",
            result.held_out or "5%",
            "found beside the data" if result.held_out else "by a hash of the content",
        ],
        ["lengths", f"{sample.lengths.mean:.0f}", f"tokens on average, longest {count(sample.lengths.max)}"],
        ["epochs", f"{start.epochs.value:g}", f"because {start.epochs.because}"],
        ["rate", f"{start.learning_rate.value:g}", f"because {start.learning_rate.because}"],
        ["rank", str(start.rank.value), f"because {start.rank.because}"],
    ]
    if sample.dropped:
        looked = f"of the first {count(sample.rows_in)} rows"
        rows.append(["dropped", count(sum(sample.dropped.values())), f"{looked}: {dropped_words(sample.dropped, '')}"])
    return "\n".join([table(rows), f"wrote `{result.path}`", "next: `tunewell inspect`, then `tunewell prepare`"])
