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
from typing import Any

from tunewell.config.rules import VerdictRules
from tunewell.core.files import read_data
from tunewell.core.text import fold, split_words
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
    return [row["text"] for row in read_data(__file__, "everyday.jsonl")]


@dataclass(frozen=True)
class Instruction:
    """One everyday question or instruction, and the rules for its answer."""

    ask: str
    kind: str = "instruction"
    any: Sequence[str] = ()
    """Words of which one must occur."""
    all: Sequence[str] = ()
    words: Sequence[int] = (1, 10_000)
    """Fewest and most words."""
    items: int = 0
    """Minimum number of items: lines, or parts between commas."""
    pattern: str = ""
    """Regular expression that the answer must contain."""
    is_json: bool = False

    def is_followed(self, answer: str) -> bool:
        """Return True if an answer follows the instruction."""
        text = without_thinking(answer)
        spaced = _spaced(text)
        num_items = max(sum(map(bool, map(str.strip, text.splitlines()))), text.count(",") + text.count(" and ") + 1)
        checks = (
            self.words[0] <= len(spaced.split()) <= self.words[1],
            not self.any or any(_spaced(one) in spaced for one in self.any),
            all(_spaced(one) in spaced for one in self.all),
            num_items >= self.items,
            re.search(self.pattern, text) is not None,
            not self.is_json or _is_json(text),
        )
        return all(checks) and replies(text)


def _spaced(text: str) -> str:
    return f" {' '.join(split_words(text))} "


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
    return tuple(Instruction(**row) for row in read_data(__file__, "instructions.jsonl"))


def ordinary_answers(base: Sequence[str], tuned: Sequence[str]) -> list[OrdinaryAnswer]:
    """Return the checked answers of both models; `base` may be empty. The most changed ones come first."""
    found = []
    for index, (asked, answer) in enumerate(zip(instructions(), tuned, strict=True)):
        fields: dict[str, Any] = {"question": asked.ask, "kind": asked.kind}
        for name, text in (("base", base[index]), ("tuned", answer)) if base else (("tuned", answer),):
            is_reply = replies(without_thinking(text))
            fields |= {name: text, f"{name}_right": asked.is_followed(text), f"{name}_replies": is_reply}
        found.append(OrdinaryAnswer(**fields))
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
        own = [(bool(one.base_right), one.tuned_right) for one in found.answers if one.kind == "instruction"]
        replied = [(bool(one.base_replies), one.tuned_replies) for one in found.answers]
        results.append(_lost("everyday instructions", own, rules, "instructions followed"))
        results.append(_lost("replies", replied, rules, "questions answered, not refused"))
    return results


def _lost(name: str, pairs: Sequence[tuple[bool, bool]], rules: VerdictRules, verb: str) -> Forgotten:
    base, tuned = zip(*pairs, strict=True)
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
