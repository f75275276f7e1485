"""`tunewell track`: send the metrics of a run to a tracker."""

from typing import Annotated

import typer

from tunewell.cli.options import AsJson
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, hanging, json_text
from tunewell.config.extensions import TRACKERS
from tunewell.core.units import count


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, finished or not.")] = "run",
    to: Annotated[
        str, typer.Option(metavar="TRACKER", help=f"Tracker: {', '.join(TRACKERS.names())}.")
    ] = "tensorboard",
    json: AsJson = False,
) -> None:
    """Send the metrics of a run to TensorBoard, W&B or MLflow."""
    from tunewell.features.track.workflow import track

    with shown_stages() as progress:
        done = track(run, to=to, progress=progress)
    if json:
        emit(json_text({**vars(done), "run": str(done.run)}))
        return
    sent = f"sent {count(done.num_sent, 'new point')} of" if done.num_sent else "nothing new to send from"
    emit(hanging("", f"{sent} `{done.run}` to {done.tracker}"))
    if to == "tensorboard":
        emit(hanging("next: ", f"`tensorboard --logdir {done.run / 'track' / 'tensorboard'}`"))
