"""Everyday text that has nothing to do with anybody's rows: what a model should still know after training."""

import json
from functools import cache
from importlib.resources import files


@cache
def _passages() -> tuple[dict[str, str], ...]:
    lines = files("tunewell.evaluation").joinpath("everyday.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def everyday_texts() -> list[str]:
    """List the passages: letters, recipes, news, stories, a little code, most in English and some in German, French
    and Spanish; written for tunewell, under its licence.
    """
    return [passage["text"] for passage in _passages()]
