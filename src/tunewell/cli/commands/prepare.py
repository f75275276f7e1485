"""`tunewell prepare`: build a corpus from rows."""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunewell.cli.options import AsJson, ConfigOptions, DataPaths, Option, TokenizerModel
from tunewell.cli.progress import shown_progress
from tunewell.cli.render import emit, folded_table, hanging, json_text
from tunewell.cli.screens.corpus import corpus_rows
from tunewell.core.units import duration

if TYPE_CHECKING:
    from tunewell.workflows.prepare import PrepareResult

_COLLECT_EVERY = 50_000


def command(
    *,
    given: ConfigOptions,
    model: TokenizerModel = None,
    data: DataPaths = None,
    out: Annotated[Path | None, Option("Folder to write the corpus to.", "FOLDER")] = None,
    details: Annotated[bool, Option("Also show padding and near duplicates, even if there are none.")] = False,
    json: AsJson = False,
) -> None:
    """Turn rows into a corpus for training: clean, tokenise, mask, pack."""
    # A block of rows is many small objects. Searching them for cycles after every 700 took a tenth of the time.
    gc.set_threshold(_COLLECT_EVERY)
    from tunewell.workflows.prepare import prepare

    loaded = given.load(model=model, data=data, out=out)
    with shown_progress() as progress:
        result = prepare(loaded, progress=progress)
    train = given.train_command(model=model, data=data, sets=[f"corpus={out}"] if out else ())
    emit(json_text(result.as_json()) if json else screen(result, has_details=details, train=train))


def screen(result: "PrepareResult", *, has_details: bool = False, train: str = "tunewell train") -> str:
    """Return the screen: counts of rows and tokens, the written corpus and the next command."""
    seconds = duration(result.seconds)
    outcome = (
        f"`{result.corpus}` is up to date ({seconds})"
        if result.was_up_to_date
        else f"wrote `{result.corpus}` in {seconds}"
    )
    return "\n".join(
        [
            folded_table(corpus_rows(result.manifest, folder=str(result.corpus), has_details=has_details), right=(1,)),
            hanging("", outcome),
            hanging("next: ", f"`{train}`; `tunewell inspect {result.corpus}` shows the tokens"),
        ]
    )
