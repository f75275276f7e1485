"""Load the bundled passages of everyday text; their loss shows what a model has forgotten."""

import json
from functools import cache
from importlib.resources import files


@cache
def _passages() -> tuple[dict[str, str], ...]:
    lines = files("tunewell.evaluation").joinpath("everyday.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def everyday_texts() -> list[str]:
    """Return the passages: letters, recipes, news, stories and a little code, mostly English, some German, French and
    Spanish; written for tunewell, under its licence.
    """
    return [passage["text"] for passage in _passages()]
