"""Read back what trackers stored, with their own packages or formats: `python read_trackers.py NAME PLACE`.

Prints a list of [metric, step, value]. It runs in the environment of the trackers.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any


def tensorboard(place: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows: list[Any] = []
    for folder in sorted({file.parent for file in place.rglob("events.out.tfevents.*")}):
        accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        accumulator.Reload()
        front = "" if folder == place else f"{folder.name}/"
        rows += [
            [f"{front}{tag}", event.step, event.value]
            for tag in accumulator.Tags()["scalars"]
            for event in accumulator.Scalars(tag)
        ]
    return rows


def wandb(place: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    rows: list[Any] = []
    for file in sorted(place.rglob("*.wandb")):
        for data in _records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows += [[name, items["step"], value] for name, value in items.items() if not name.startswith("_")]
    return rows


def _records(data: bytes) -> Any:
    """Yield the records of a file in LevelDB's log format, after a header of seven bytes."""
    block, position, parts = 32768, 7, b""
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if kind == 0:
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def mlflow(place: str) -> list[Any]:
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    client, rows = MlflowClient(place), []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            for name in run.data.metrics:
                history = client.get_metric_history(run.info.run_id, name)
                rows += [[name, metric.step, metric.value] for metric in history]
    return rows


if __name__ == "__main__":
    name, place = sys.argv[1:]
    found = {"tensorboard": tensorboard, "wandb": wandb}.get(name)
    sys.stdout.write(json.dumps(mlflow(place) if found is None else found(Path(place))))
