"""`tunewell eject`: write a run as a script for transformers, PEFT and TRL."""

import shlex
from pathlib import Path
from typing import Annotated

from tunewell.cli.options import AllowPickle, Argument, AsJson, Option
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, folded_table, hanging, json_text
from tunewell.core.units import count


def command(
    run: Annotated[Path | None, Argument("A run. Default: this folder's run.", "RUN")] = None,
    out: Annotated[Path, Option("Folder to write.", "FOLDER")] = Path("ejected"),
    allow_pickle: AllowPickle = False,
    json: AsJson = False,
) -> None:
    """Write a run as a script for transformers, PEFT and TRL, which runs without tunewell.

    The folder has the script, the tokenised rows in the order of the run, the first weights and pinned versions. The
    script computes the same losses: `python train.py --check` compares the first 20.
    """
    from tunewell.features.eject.workflow import eject

    with shown_stages() as progress:
        done = eject(run, out=out, allow_pickle=allow_pickle, progress=progress)
    folder = done.folder
    if json:
        emit(json_text({**vars(done), "folder": str(folder)}))
        return
    rows = [
        ["script", f"`{folder / 'train.py'}`, {count(done.num_steps, 'step')}"],
        ["model", f"`{folder / 'model' if done.model == 'model' else done.model}`"],
        ["rows", f"`{folder / 'data'}`, tokenised, in the order of the run"],
    ]
    emit("\n".join([folded_table(rows), *(hanging("note: ", note) for note in done.notes)]))
    name = shlex.quote(str(folder))
    emit(hanging("next: ", f"`pip install -r {name}/requirements.txt`, then `python {name}/train.py --check`"))
