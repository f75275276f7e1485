"""`tunewell track`: send the metrics of a run to a tracker."""

from typing import Annotated

from tunewell.cli.options import Argument, AsJson, Option
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, hanging, json_text
from tunewell.config.extensions import TRACKERS
from tunewell.core.units import count


def command(
    run: Annotated[str, Argument("A run folder, finished or not.", "RUN")] = "run",
    to: Annotated[str, Option(f"Tracker: {', '.join(TRACKERS.names())}.", "TRACKER")] = "tensorboard",
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
