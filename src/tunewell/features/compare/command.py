"""`tunewell compare`: runs, models and indexes side by side."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tunewell.cli.options import Argument, AsJson, Option
from tunewell.cli.progress import shown_stages
from tunewell.cli.prompt import ask_in_terminal
from tunewell.cli.render import emit, folded_table, hanging, json_text
from tunewell.core.errors import UserError
from tunewell.core.questions import MenuQuestion
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
    """Say what the questions cost, ask whether to send them, and record the answers."""
    from tunewell.features.compare.record import plan_recording, record

    unused = (options.indexes, options.judge, options.num_passages, options.is_fresh)
    if any(unused) or options.num_questions != CompareOptions.num_questions:
        raise UserError(
            "`--record` takes only `--data`, `--yes` and `--json`",
            fix="leave the other options out; `--data rows.jsonl#50` asks the first 50 questions",
        )
    data = [options.data] if isinstance(options.data, str | Path) else options.data or ()
    plan = plan_recording(path, models, [str(one) for one in data])
    number, (read, written) = count(len(plan.open), "question"), plan.tokens
    if plan.open:
        known = len(plan.questions) - len(plan.open)
        rows = [
            ["rows", f"{count(len(plan.questions), 'question')} of `{plan.rows}`; `{path}` answers {count(known)}"],
            ["asks", f"{number}: about {count(read)} tokens to read and {count(written)} to write"],
            ["at most", f"{count(len(plan.open) * plan.length)} tokens to write, {count(plan.length)} per answer"],
            ["terms", "those of the provider may forbid training a model on these answers: read them first"],
        ]
        sys.stderr.write(folded_table(rows) + "\n")
        if not yes and not _agrees(number):
            return 2
    with shown_stages() as progress:
        code = record(plan, progress, owns_process=True)
    found = plan_recording(path, models, [str(one) for one in data])
    left, total, others = len(found.open), len(found.questions), found.num_others
    if json:
        emit(json_text({"file": str(path), "questions": total, "left": left, "others": others}))
        return code
    emit(f"`{path}` answers {count(total - left)} of {count(total, 'question')}")
    if others:
        emit(hanging("note: ", f"it also has {count(others, 'answer')} to questions that are not in the rows"))
    rows = shlex.join(["--data", *map(str, data)])
    again = f"`tunewell compare --record {path} {models[0]} {rows}` asks the others"
    emit(hanging("next: ", again if found.open else f"`tunewell compare {path} RUN {rows}`"))
    return code


def _agrees(number: str) -> bool:
    """Return whether the user agrees to send the questions; raise UserError if nobody can be asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"asking {number} costs tokens", fix="add `--yes` to ask them")
    question = MenuQuestion(f"Ask {number} now?", (("yes", "yes"), ("no", "no")))
    return ask_in_terminal(question) == "yes"
