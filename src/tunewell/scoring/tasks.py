"""Find the task of some rows from the form of their replies, with the reason. The task decides how answers are scored.

task        replies of the training rows                              found by
labels      card arrival                                              few different replies, each of them often
choice      Yes. The trial showed a difference.                       few different starts
number      ... #### 72                                               a marked result, or nothing but a number
json        {"intent": "PlayMusic", "year": "1959"}                   they parse
tools       {"name": "search", "arguments": {"query": "tea"}}         they parse as calls
sql         SELECT name FROM songs                                    their first words
command     find . -name '*.py' | xargs wc -l                         programs, options and pipes
facts       The deadline of Alderhollow is 15 January.                short answers to questions
chat        several replies in a row, or the first person             conversations
documents   (no questions)                                            text without questions
text        anything else
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import cast

from tunewell.config.extensions import SCORERS
from tunewell.core.text import fold, split_words
from tunewell.core.units import count, percent
from tunewell.data.rows.functions import load_row_function
from tunewell.data.sources.exports.turns import CHAT_FORMATS
from tunewell.records.plan import Chosen
from tunewell.scoring.answer_keys import answer_keys
from tunewell.scoring.answer_values import find_values
from tunewell.scoring.base import ReferenceRow, Scorer, without_fence, without_thinking
from tunewell.scoring.choice import NAMED, find_options
from tunewell.scoring.free_text import UserFunction
from tunewell.scoring.labels import fold_label, is_short_label
from tunewell.scoring.matching import is_refusal, is_short_reference
from tunewell.scoring.number import marked_results, stated_results
from tunewell.scoring.structured import parse_calls, parse_json
from tunewell.scoring.words import read_lines, word_set

_NEARLY_ALL, _MOST, _SOME = 0.9, 0.6, 0.3
"""Share of the replies that must have a form. A tenth may be ordinary instructions that were mixed in."""
_WORDS_OF_LABEL = 4.0
_MIN_PER_LABEL, _SURELY_LABELS = 3.0, 10.0
"""Rows per different reply: below the first, replies are not labels; from the second on, they are."""
_SAMPLE = 400
_SQL = re.compile(
    r"\s*(?:select\b.+\bfrom|insert\s+into|update\b.+\bset|delete\s+from|with\b.+\bselect|(?:create|alter|drop)\s+\w+)\b",
    re.IGNORECASE | re.DOTALL,
)
_REASON = re.compile(
    r"[.,;:)!\n-]\s*\(?\s*(?:because|since|as|reason|explanation|why|weil|da|grund|car|parce|porque)\b"
)
_NAME = re.compile(r"[^\W\d_a-zß-ÿ]")
_SHELL = re.compile(r"(?:^|\s)--?[A-Za-z][\w-]*|\s\|\s|\$\(|\$\{?\w|&&|>\s?\S|(?:^|\s)[.~]?/\S*|\*\.\w|\\;")
_PROGRAM = re.compile(r"(?:sudo\s+|\$\s+|\w+=\S+\s+)*([A-Za-z_.][\w.+-]*)")
_QUESTION = re.compile(
    r"\?\s*$|^\W*(?:what|when|where|who|whom|whose|which|why|how|is|are|was|were|do|does|did|can|could|has|have|by when"
    r"|in which|at what|wann|wo|wer|wie|welche[rs]?|warum|quand|où|qui|quel(?:le)?s?|combien|cuándo|dónde|quién|qué"
    r"|cuál|cómo)\b",
    re.IGNORECASE,
)
_CODE = re.compile(
    r"[\w\])]\s*=\s*\S|[;{]\s*$|^\s*(?:def|for|if|import|class|return)\b.*[:;)]\s*$|\w\(\w*\)", re.MULTILINE
)
_FIRST_PERSON = re.compile(
    r"\b(?:i|i'm|i've|i'll|i'd|im|my|mine|me|we|we're|our|ich|mein\w*|mir|mich|wir|je|j'|mon|ma|mes|nous|yo|mi|mis|nosotros|eu|meu|minha|io|mio|mia|ik|mijn)\b"
)


@dataclass(frozen=True)
class _Rows:
    """The training rows, or a sample of them, and their number before sampling."""

    rows: Sequence[ReferenceRow]
    num_rows: int

    @property
    def replies(self) -> list[str]:
        return [row.reference for row in self.rows]

    def share(self, test: Callable[[str], object]) -> float:
        """Return the share of the replies that pass a test."""
        return fmean(bool(test(reply)) for reply in self.replies)

    def have(self, share: float, form: str) -> str:
        """Return a sentence: this share of the replies has a form."""
        return f"{percent(share, 0)} of {count(self.num_rows, 'reply', 'replies')} {form}"


def find_task(
    rows: Sequence[ReferenceRow], *, num_documents: int = 0, num_rows: int | None = None, is_chat: bool = False
) -> Chosen[str]:
    """Return the task of some training rows, with the reason.

    `rows` have a question each; `num_documents` rows have none. `num_rows` is the number of rows if these are a sample,
    and `is_chat` whether they come from a chat app.
    """
    if is_chat:
        return Chosen(value="chat", because="the rows come from a chat app")
    if num_documents > len(rows):
        return Chosen(value="documents", because=f"{count(num_documents, 'row')} without a question")
    rows = [row for row in _without_thinking(rows) if row.reference.strip()]
    if not rows:
        return Chosen(value="text", because="there are no replies")
    found = _Rows(rows, num_rows or len(rows))
    for name, find in _FINDERS:
        if because := find(found):
            return Chosen(value=name, because=because)
    because = "the replies have no common form that can be checked"
    share, form = max((found.share(parse_json), "parse as JSON"), (found.share(parse_calls), "are tool calls"))
    if share > 0.3:
        because += f"; {percent(share, 0)} of the replies {form}, {percent(_NEARLY_ALL, 0)} are needed to score that"
    return Chosen(value="text", because=because)


def is_chat_export(formats: AbstractSet[str]) -> bool:
    """Return True if rows come from chat apps only, by the names of their formats."""
    return bool(formats) and formats <= CHAT_FORMATS


def make_scorer(
    task: str, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow], *, base: Path | None = None
) -> Scorer:
    """Return the scorer of a task, or of the user's function `file.py:function`; paths are relative to `base`."""
    if ":" in task:
        function = load_row_function(task, batch=None, base=base or Path()).function
        return UserFunction(cast(Callable[[str, str, str], float | bool], function), asked)
    return SCORERS.load(task)(_without_thinking(asked), _without_thinking(training))


def _without_thinking(rows: Sequence[ReferenceRow]) -> list[ReferenceRow]:
    return [replace(row, reference=without_thinking(row.reference)) for row in rows]


def _find_form(found: _Rows, *, test: Callable[[str], object], form: str, least: float = _NEARLY_ALL) -> str | None:
    """Return the reason for a task whose replies pass a test, or None if too few pass it."""
    share = found.share(test)
    return found.have(share, form) if share >= least else None


def _tools(found: _Rows) -> str | None:
    # Prose has brackets too, so `search(q="tea")` is a call only if nearly all replies are calls.
    marked = found.share(lambda text: re.search(r"[{<]", text) and parse_calls(text))
    all_calls = found.share(parse_calls)
    is_found = marked >= _SOME or all_calls >= _NEARLY_ALL
    return found.have(max(marked, all_calls), "call a tool") if is_found else None


def _is_sql(text: str) -> bool:
    return _SQL.match(without_fence(text)) is not None


def _marks_number(text: str) -> bool:
    return any(map(find_values, marked_results(text) or stated_results(fold(text))))


def _labels(found: _Rows) -> str | None:
    folded = [fold_label(reply) for reply in found.replies]
    counts = Counter(folded)
    short = fmean(map(is_short_label, folded))
    repeated, per_label = fmean(counts[text] > 1 for text in folded), len(folded) / len(counts)
    # A few rows of many labels hardly repeat them, but labels are shorter than most facts.
    is_sample = repeated >= 0.4 and fmean(len(text.split()) for text in folded) <= _WORDS_OF_LABEL
    if short < _NEARLY_ALL or not (is_sample or repeated >= _NEARLY_ALL):
        return None
    options = find_options(found.replies)
    if options and _are_plain(options):
        return None  # yes and no, or letters, are a choice
    if (per_label < _MIN_PER_LABEL and not is_sample) or (per_label < _SURELY_LABELS and _name_facts(found, folded)):
        return None
    return f"{count(len(counts), 'label')} in {count(found.num_rows, 'row')}"


def _are_plain(options: Sequence[str]) -> bool:
    """Return True if all options are yes, no and the like, or letters."""
    return all(option in word_set("options") or (len(option) == 1 and option.isalpha()) for option in options)


def _name_facts(found: _Rows, folded: Sequence[str]) -> bool:
    """Return True if few rows share a reply because they ask for one fact in other words, not because it is a label."""
    with_value = fmean(
        any(value.kind in ("date", "time", "contact") or value.unit for value in find_values(text))
        for text in set(folded)
    )
    if with_value > 0.3:
        return True
    words = [{word for word in split_words(row.question) if len(word) > 3} for row in found.rows]
    instruction = set[str].intersection(*words)  # `Which label fits this text? Labels: ...` is in every question
    questions = defaultdict[str, list[set[str]]](list)
    for own, reply in zip(words, folded, strict=True):
        questions[reply].append(own - instruction)
    overlaps = [
        len(one & other) / max(1, min(len(one), len(other)))
        for same in list(questions.values())[:_SAMPLE]
        for one, other in combinations(same[:4], 2)
    ]
    return bool(overlaps) and fmean(overlaps) > 0.4


def _choice(found: _Rows) -> str | None:
    options = find_options(found.replies)
    if not options or median(len(option) for option in options) > 20:
        return None
    # Chats, code and names in a script begin alike too; an option stands alone, or a reason follows.
    alone = found.share(lambda reply: fold(reply).strip(" .!?*`\"'") in options)
    reason = found.share(lambda reply: _REASON.search(fold(reply)[:120]) or NAMED.search(fold(reply)))
    if not _are_plain(options) and max(alone, reason) < 0.5:
        return None
    return f"nearly all replies begin with {', '.join(options[:4])}{' ...' if len(options) > 4 else ''}"


def _is_command(text: str) -> bool:
    line = without_fence(text)
    program = _PROGRAM.match(line)
    if program is None or line.count("\n") > 5 or (line.rstrip().endswith((".", "?", "!")) and " -" not in line):
        return False
    marks = _SHELL.findall(line)
    if program[1] in _programs() and (marks or len(line.split()) < 4):
        return True
    return len(marks) >= 2 and (program[1].islower() or "-" in program[1])  # `Get-Item` of PowerShell


@cache
def _programs() -> frozenset[str]:
    return frozenset(" ".join(read_lines("programs.txt")).split())


def _is_number(text: str) -> bool:
    values = [value for value in find_values(text) if value.kind == "number"]
    return len(values) == 1 and len(split_words(text[: values[0].start] + text[values[0].end :])) <= 1


def _conversation(found: _Rows) -> str | None:
    share = fmean(row.num_replies > 1 for row in found.rows)
    return f"{percent(share, 0)} of the rows are conversations of several replies" if share >= _SOME else None


def _personal(found: _Rows) -> str | None:
    # `i` is a variable in code.
    share = found.share(lambda text: _FIRST_PERSON.search(fold(text)) and not (is_refusal(text) or _CODE.search(text)))
    words = median(len(reply.split()) for reply in found.replies)
    if share < 0.4 or words > 30:
        return None
    return f"{percent(share, 0)} of the replies say I or we, in {int(words)} words (median)"


def _facts(found: _Rows) -> str | None:
    last_lines = [row.question.strip().rpartition("\n")[2] for row in found.rows]
    asked = fmean(_QUESTION.search(line) is not None for line in last_lines)
    short = found.share(is_short_reference)
    if asked < _MOST or short < _MOST or _personal(found):
        return None
    step = max(1, len(found.rows) // _SAMPLE)
    keys = answer_keys(found.rows[::step])
    # A whole reference is a fact if it has a value or a name: "haha no way" is none.
    judged = fmean(
        key.origin == "derived"
        or key.is_refusal
        or (key.is_judged and bool(find_values(key.text) or _is_name(key.text)))
        for key in keys
    )
    if judged < 0.5:
        return None
    return f"{percent(short, 0)} of the replies are short answers to questions; {percent(judged, 0)} have a key"


def _is_name(text: str) -> bool:
    """Return True if a text is one capitalised word, or has one after its first word."""
    first, _, rest = text.partition(" ")
    return _NAME.search(rest or first) is not None


_FINDERS: Sequence[tuple[str, Callable[[_Rows], str | None]]] = (
    ("tools", _tools),
    ("json", partial(_find_form, test=lambda text: parse_json(text) is not None, form="are JSON")),
    ("sql", partial(_find_form, test=_is_sql, form="are SQL")),
    ("number", partial(_find_form, test=_marks_number, form="mark a number as the result")),
    ("labels", _labels),
    ("command", partial(_find_form, test=_is_command, form="are commands", least=0.8)),
    ("number", partial(_find_form, test=_is_number, form="are a number")),
    ("choice", _choice),
    ("chat", _conversation),
    ("facts", _facts),
    ("chat", _personal),
)
