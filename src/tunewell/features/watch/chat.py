"""Chat with the tuned model and its base, each in a `tunewell serve` of its own, which ends when it is idle."""

from dataclasses import dataclass
from typing import Any

from tunewell.core.progress import ProgressListener
from tunewell.features.watch.watched import Watched


@dataclass(frozen=True)
class Delta:
    """Some text of an answer."""

    text: str


def state(watched: Watched, query: Any) -> dict[str, Any]:
    return {"sides": [], "idle_minutes": 10, "blocked": None}


def open_sides(watched: Watched, body: dict[str, Any]) -> dict[str, Any]:
    return state(watched, body)


def close(watched: Watched, body: dict[str, Any]) -> dict[str, Any]:
    return state(watched, body)


def say(watched: Watched, body: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    return {}


def end_all(watched: Watched) -> None:
    pass
