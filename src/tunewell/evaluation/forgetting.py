"""Forgetting: the loss on everyday text, answers to everyday instructions, and refusals.

A loss on text does not show that a model answers every question with one word, or refuses it. So both models also
answer 60 short instructions, whose answers are checked by rules, and eight greetings. All are unrelated to the rows.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from tunewell.config.rules import VerdictRules
from tunewell.core.text import detect_language, fold, split_words
from tunewell.core.units import percent
from tunewell.evaluation.intervals import compare_pair
from tunewell.records.report import Forgotten, LossPair, OrdinaryAnswer
from tunewell.scoring.base import without_thinking
from tunewell.scoring.matching import is_refusal

MAX_TOKENS = 48
"""Length limit of an answer to an everyday instruction."""
_KNEW_SHARE = 0.7
"""The everyday text counts if the base model's loss on it is below this share of ln(vocabulary size), the loss of an
untrained model."""
_USUAL_VOCABULARY = 32_000
"""Assumed vocabulary size if it is unknown."""


def everyday_texts() -> list[str]:
    """Return text passages of many kinds, mostly in English, some in German, French and Spanish."""
    return [row["text"] for row in _rows("everyday.jsonl")]


@dataclass(frozen=True)
class Instruction:
    """One everyday question or instruction, and the rules for its answer."""

    ask: str
    kind: str = "instruction"
    any: tuple[str, ...] = ()
    """Words or phrases, at least one of which must occur."""
    all: tuple[str, ...] = ()
    words: tuple[int, int] = (1, 10_000)
    """Minimum and maximum number of words."""
    items: int = 0
    """Minimum number of items: lines, or parts between commas."""
    pattern: str = ""
    """Regular expression that the folded answer must contain."""
    language: str = ""
    is_json: bool = False

    def is_followed(self, answer: str) -> bool:
        """Return True if an answer follows the instruction."""
        text = without_thinking(answer)
        words, folded = split_words(text), fold(text)
        spaced = f" {' '.join(words)} "
        checks = (
            self.words[0] <= len(words) <= self.words[1],
            not self.any or any(f" {' '.join(split_words(one))} " in spaced for one in self.any),
            all(f" {' '.join(split_words(one))} " in spaced for one in self.all),
            not self.items
            or max(len([line for line in text.splitlines() if line.strip()]), text.count(",") + 1) >= self.items,
            not self.pattern or re.search(self.pattern, folded) is not None,
            not self.language or detect_language(text) == self.language,
            not self.is_json or _is_json(text),
        )
        return all(checks) and replies(text)


def _is_json(text: str) -> bool:
    found = re.search(r"[{\[].*[}\]]", text, re.DOTALL)
    try:
        return found is not None and bool(json.loads(found[0]))
    except ValueError:
        return False


def replies(text: str) -> bool:
    """Return True if an answer is a reply: neither empty nor a refusal."""
    return bool(split_words(text)) and not is_refusal(text, is_answer=True) and not _REFUSES.search(fold(text))


_REFUSES = re.compile(
    r"\b(?:sorry|apologi[sz]e|unfortunately)\W+(?:but )?(?:i|we) (?:am |are )?(?:not |cannot|can't|can not|unable)"
    r"|\b(?:i|we) (?:cannot|can't|can not|won't|will not|am unable to|am not able to|do not|don't)"
    r" (?:help|assist|answer|provide|do that|discuss|comply|know)"
    r"|\bi(?:'m| am) (?:not able|unable) to\b|\bcan(?:'t|not) (?:help|assist)\b"
)


@cache
def instructions() -> tuple[Instruction, ...]:
    """Return the everyday instructions and greetings."""
    found = list[Instruction]()
    for row in _rows("instructions.jsonl"):
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        found.append(Instruction(**fields))
    return tuple(found)


def _rows(name: str) -> list[dict[str, Any]]:
    lines = files("tunewell.evaluation").joinpath(name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def ordinary_answers(base: Sequence[str], tuned: Sequence[str]) -> list[OrdinaryAnswer]:
    """Return the checked answers of both models; `base` may be empty. The most changed ones come first."""
    found = []
    for index, (asked, answer) in enumerate(zip(instructions(), tuned, strict=True)):
        before = base[index] if base else None
        found.append(
            OrdinaryAnswer(
                question=asked.ask,
                kind="greeting" if asked.kind == "greeting" else "instruction",
                base=before or "",
                tuned=answer,
                base_right=None if before is None else asked.is_followed(before),
                tuned_right=asked.is_followed(answer),
                base_replies=None if before is None else replies(without_thinking(before)),
                tuned_replies=replies(without_thinking(answer)),
            )
        )
    return sorted(found, key=_is_unchanged)


def _is_unchanged(answer: OrdinaryAnswer) -> tuple[bool, bool, float]:
    """Return a sort key: answers that were right and became wrong first, then those with the fewest common words."""
    words = [set(split_words(text)) for text in (answer.base, answer.tuned)]
    shared = len(words[0] & words[1]) / max(1, len(words[0] | words[1]))
    was_lost = bool(answer.base_right) and not answer.tuned_right
    return (not was_lost, bool(answer.base_replies) == answer.tuned_replies, shared)


@dataclass(frozen=True)
class EverydayOutcome:
    """The measurements of an evaluation that show forgetting."""

    text: LossPair | None = None
    answers: Sequence[OrdinaryAnswer] = field(default_factory=list[OrdinaryAnswer])
    vocab_size: int | None = None


def measure_forgetting(found: EverydayOutcome, rules: VerdictRules) -> list[Forgotten]:
    """Return the three measures of forgetting, as far as the base model was measured."""
    results = []
    pair = found.text
    if pair is not None and pair.base is not None and math.isfinite(pair.tuned):
        knew = 0 < pair.base < _KNEW_SHARE * math.log(found.vocab_size or _USUAL_VOCABULARY)
        growth = pair.tuned / pair.base - 1 if pair.base > 0 else 0.0
        verb = "higher" if growth > 0 else "lower"
        results.append(
            Forgotten(
                name="everyday text",
                base=pair.base,
                tuned=pair.tuned,
                limit=rules.max_forgetting,
                is_damaged=knew and growth > rules.max_forgetting,
                result=f"loss on everyday text {pair.base:.2f} -> {pair.tuned:.2f}, {percent(abs(growth), 0)} {verb} "
                f"(limit: {percent(rules.max_forgetting, 0)})",
            )
        )
    if any(one.base_right is not None for one in found.answers):
        own = [one for one in found.answers if one.kind == "instruction"]
        followed = [bool(one.base_right) for one in own], [one.tuned_right for one in own]
        replied = [bool(one.base_replies) for one in found.answers], [one.tuned_replies for one in found.answers]
        results.append(_lost("everyday instructions", *followed, rules, "instructions followed"))
        results.append(_lost("replies", *replied, rules, "questions answered, not refused"))
    return results


def _lost(name: str, base: list[bool], tuned: list[bool], rules: VerdictRules, verb: str) -> Forgotten:
    difference = compare_pair(tuned, base, range(len(base)))
    before, now = sum(base) / len(base), sum(tuned) / len(tuned)
    is_damaged = difference.is_shown and before - now > rules.max_lost
    return Forgotten(
        name=name,
        base=before,
        tuned=now,
        limit=rules.max_lost,
        is_damaged=is_damaged,
        result=f"{sum(tuned)} of {len(tuned)} everyday {verb}, {sum(base)} before "
        f"(limit: {100 * rules.max_lost:.3g} points fewer)",
    )
