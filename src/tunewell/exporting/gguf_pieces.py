"""Tell llama.cpp how a SentencePiece vocabulary is joined: a score for each piece, and what becomes of spaces."""

import re
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.tokenizer_files.sentencepiece_model import NORMAL

_SPACE = "▁"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
# Cuts that change no id: nothing crosses them, or spaces are gone when they look for one.
_HARMLESS_CUT = f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+"
_FIRST_TEXT_ONLY = (
    "llama.cpp puts a space in front of the text behind every marker, the tokenizer in front of the first"
)


def space_prefix(pipeline: dict[str, Any]) -> tuple[bool, list[str]]:
    """Tell whether text gets a space in front, and what llama.cpp does otherwise about it."""
    steps = _steps(pipeline["normalizer"], "normalizers")
    cuts = [step for step in _steps(pipeline["pre_tokenizer"], "pretokenizers") if not _is_harmless(step)]
    if not cuts and steps == [_PREPEND, _REPLACE]:
        return True, []
    if not cuts and steps == [_REPLACE]:
        return False, []
    if not cuts and len(steps) == 2 and steps[1] == _REPLACE and (mark := _dummy_space(steps[0])):
        return True, [] if "behind markers" in mark else [_FIRST_TEXT_ONLY]
    if not steps and len(cuts) == 1 and cuts[0]["type"] == "Metaspace" and cuts[0]["replacement"] == _SPACE:
        scheme = cuts[0].get("prepend_scheme", "always")
        return scheme != "never", [_FIRST_TEXT_ONLY] if scheme == "first" else []
    shown = ", ".join(step["type"] for step in [*steps, *cuts]) or "nothing"
    raise UserError(
        f"llama.cpp does not treat the spaces of a text as this tokenizer does ({shown})",
        where="tokenizer.json",
        fix="export the model as `adapter` or `merged`",
    )


def scores_of(vocabulary: dict[str, int], merges: list[tuple[str, str]], types: list[int]) -> dict[str, float]:
    """Give each piece the score that makes llama.cpp join pieces in the order of the merges.

    It joins any two pieces that make a third, the best score first. So every way to make a piece has to be among the
    merges: UserError where one is not. Symbols that the model's author defined are found in text before any joining,
    and merges that build on them are passed over.
    """
    listed = set(merges)
    joined = {piece for piece, number in vocabulary.items() if types[number] == NORMAL}
    for piece in joined:
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        missing = next((p for p in pairs if p[0] in joined and p[1] in joined and p not in listed), None)
        if missing is not None:
            raise UserError(
                f"its merges are not those of a SentencePiece model: none joins {missing[0]!r} and {missing[1]!r}, "
                "and llama.cpp would",
                where="tokenizer.json",
                fix="export the model as `adapter` or `merged`",
            )
    spans: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(merges):
        if left in joined and right in joined:
            spans.setdefault(left + right, []).append(rank)
    scores: dict[str, float] = {}
    end, group = -1, 0
    for piece, ranks in sorted(spans.items(), key=lambda item: item[1][0]):
        # Merges that lie between each other belong to pieces of one score.
        group += ranks[0] > end
        end = max(end, ranks[-1])
        scores[piece] = float(1 - group)
    return {piece: scores.get(piece, float(-group)) for piece in vocabulary}


def _is_harmless(step: dict[str, Any]) -> bool:
    if step["type"] != "Split":
        return False
    return step["pattern"] == {"String": " "} or step["pattern"] == {"Regex": _HARMLESS_CUT}


def _dummy_space(step: dict[str, Any]) -> str | None:
    pattern = step.get("pattern", {}).get("Regex", "") if step["type"] == "Replace" else ""
    found = re.match(r"\(\?#(dummy space[^)]*)\)", pattern)
    return found[1] if found and step["content"] == _SPACE else None


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [inner for own in step[name] for inner in _steps(own, name)] if step["type"] == "Sequence" else [step]
