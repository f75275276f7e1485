"""`tunewell compare`: runs, models and indexes side by side."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tunewell.cli.options import Argument, AsJson, Option
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, folded_table, hanging, json_text
from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.features.compare.options import CompareOptions


def command(
    columns: Annotated[
        list[str] | None,
        Argument(
            "Runs, adapters, model folders, `.gguf` files, hub ids, `URL#MODEL` or its recorded answers. Default: this "
            "folder's run.",
            "MODEL",
        ),
    ] = None,
    *,
    options: CompareOptions,
    record: Annotated[
        Path | None,
        Option("Ask `URL#MODEL` each question of `--data` once, and keep its answers here.", "FILE"),
    ] = None,
    yes: Annotated[bool, Option("Ask the questions of `--record` without confirmation.")] = False,
    json: AsJson = False,
) -> int:
    """Compare runs and models, with and without documents.

    With an index, the base model and the tuned model answer the same held-out questions, with and without passages, and
    one of them is recommended. Runs alone are compared by settings, curves, answers and speed; an existing report is
    used if it has the same held-out rows. A FILE of `--record` stands for its model, also when the model is gone.
    """
    if record is not None:
        return _record(record, columns or (), options, yes=yes, json=json)
    from tunewell.features.compare.screen import compare_screen
    from tunewell.features.compare.workflow import compare

    with shown_stages() as progress:
        found = compare(columns or (), options=options, progress=progress)
    emit(json_text({**found.comparison.as_json(), "page": str(found.page)}) if json else compare_screen(found))
    return 0


def _record(path: Path, models: Sequence[str], options: CompareOptions, *, yes: bool, json: bool) -> int:
    """Print what the questions cost and, if the user agrees, record the answers."""
    from tunewell.features.compare.record import plan_recording, record

    if options != CompareOptions(indexes=[], data=options.data, out=Path(CompareOptions.out)):
        raise UserError(
            "`--record` takes only `--data`, `--yes` and `--json`",
            fix="leave the other options out; `--data rows.jsonl#50` asks the first 50 questions",
        )
    data = [options.data] if isinstance(options.data, str | Path) else options.data or ()
    data = [str(one) for one in data]
    plan = plan_recording(path, models, data)
    total, number, (read, written) = len(plan.questions), count(len(plan.open), "question"), plan.tokens
    if plan.open:
        known = f"`{path}` answers {count(total - len(plan.open))}"
        rows = [
            ["rows", f"{count(total, 'question')} of `{', '.join(data)}`; {known}"],
            ["asks", f"{number}: about {count(read)} tokens to read and {count(written)} to write"],
            ["at most", f"{count(len(plan.open) * plan.length)} tokens to write, {count(plan.length)} per answer"],
            ["terms", "those of the provider may forbid training a model on these answers: read them first"],
        ]
        sys.stderr.write(folded_table(rows) + "\n")
        if not yes:
            raise UserError(f"asking {number} costs tokens", fix="add `--yes` to ask them")
    with shown_stages() as progress:
        code = record(plan, progress, owns_process=True)
    left = len(plan_recording(path, models, data).open)
    if json:
        emit(json_text({"file": str(path), "questions": total, "left": left}))
        return code
    emit(f"`{path}` answers {count(total - left)} of {count(total, 'question')}")
    rows, name = shlex.join(["--data", *data]), shlex.quote(str(path))
    again = f"`tunewell compare --record {name} {shlex.quote(models[0])} {rows}` asks the others"
    emit(hanging("next: ", again if left else f"`tunewell compare {name} RUN {rows}`"))
    return code
