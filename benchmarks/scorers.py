"""Compare our right and wrong with a neutral judge, on answers made from the references of six public jobs.

    python benchmarks/scorers.py JOBS     JOBS has `make.py` (the rows) and `score.py` (the neutral judge)

No model is run. Each test row gets one answer of each form below: forms of a tuned model, and forms that are typical of
a base model, which adds prose, quotes or fences. The disagreements are listed by form, with the side that is right.
"""

import importlib.util
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.scoring.base import ReferenceRow, score_answer
from tunewell.scoring.tasks import make_scorer

TASKS = {
    "banking77": "labels",
    "snips_json": "json",
    "nl2bash": "command",
    "wikisql": "sql",
    "gsm8k": "number",
    "pubmedqa": "choice",
}
Form = Callable[[str, str, random.Random], str]
"""Returns an answer for a reference, another reference and a source of chance."""

TUNED: dict[str, Form] = {
    "the reference": lambda own, other, chance: own,
    "another reference": lambda own, other, chance: other,
    "spaces around": lambda own, other, chance: f"  {own} \n",
    "spaces doubled": lambda own, other, chance: re.sub(r"(?<=\w) (?=\w)", "  ", own, count=1),
    "a final full stop": lambda own, other, chance: own if own.endswith(".") else f"{own}.",
    "upper case": lambda own, other, chance: own.upper(),
    "lower case": lambda own, other, chance: own.lower(),
    "cut off": lambda own, other, chance: own[: max(1, len(own) * 2 // 3)],
    "last letters missing": lambda own, other, chance: own[:-3],
    "a word missing": lambda own, other, chance: without_word(own, chance),
    "a word of another": lambda own, other, chance: with_word(own, other, chance),
    "a digit changed": lambda own, other, chance: with_digit(own, chance),
    "goes on": lambda own, other, chance: f"{own}\n{other}",
    "twice": lambda own, other, chance: f"{own} {own}",
    "empty": lambda own, other, chance: "",
}
BASE: dict[str, Form] = {
    "chatter before": lambda own, other, chance: f"Sure! Here is the answer you asked for: {own}",
    "chatter after": lambda own, other, chance: f"{own}\n\nI hope this helps!",
    "a sentence": lambda own, other, chance: f"The answer is {own}",
    "in quotes": lambda own, other, chance: f'"{own}"',
    "in bold": lambda own, other, chance: f"**{own}**",
    "in a fence": lambda own, other, chance: f"```\n{own}\n```",
    "after thinking": lambda own, other, chance: f"<think>{other}</think>\n{own}",
    "underscores": lambda own, other, chance: own.replace(" ", "_"),
    "denied": lambda own, other, chance: f"It is not {own}",
    "a prompt sign": lambda own, other, chance: f"$ {own}",
    "chatter only": lambda own, other, chance: "I would be glad to help you with that. What is your status?",
}
READER_DECIDES_FOR_US = {
    "in quotes",
    "in bold",
    "in a fence",
    "after thinking",
    "underscores",
    "a sentence",
    "a prompt sign",
}
"""Forms that state the right answer, although the neutral judge calls some of them wrong."""
OF_TASK: dict[str, dict[str, Form]] = {
    "json": {
        "keys reordered": lambda own, other, chance: json.dumps(dict(reversed(json.loads(own).items()))),
        "indented": lambda own, other, chance: json.dumps(json.loads(own), indent=2),
        "ASCII escapes": lambda own, other, chance: json.dumps(json.loads(own), ensure_ascii=True),
        "a field missing": lambda own, other, chance: json.dumps(dict([*json.loads(own).items()][:-1])),
        "a field more": lambda own, other, chance: json.dumps(json.loads(own) | {"note": "x"}),
        "a value of another": lambda own, other, chance: json.dumps(json.loads(own) | json.loads(other)),
        "single quotes": lambda own, other, chance: own.replace('"', "'"),
        "a comma too many": lambda own, other, chance: own[:-1] + ",}",
    },
    "sql": {
        "a semicolon": lambda own, other, chance: f"{own};",
        "a semicolon after a space": lambda own, other, chance: f"{own} ;",
        "double quotes": lambda own, other, chance: own.replace("'", '"'),
        "on several lines": lambda own, other, chance: re.sub(r" (FROM|WHERE|AND) ", r"\n\1 ", own),
        "a clause more": lambda own, other, chance: f"{own} AND id = 1",
        "without the condition": lambda own, other, chance: own.partition(" WHERE ")[0],
        "spaces at signs": lambda own, other, chance: own.replace(" = ", "="),
    },
    "command": {
        "double quotes": lambda own, other, chance: own.replace("'", '"'),
        "with sudo": lambda own, other, chance: f"sudo {own}",
        "a pipe more": lambda own, other, chance: f"{own} | sort",
        "options reordered": lambda own, other, chance: " ".join([*own.split()[:1], *reversed(own.split()[1:])]),
    },
    "number": {
        "the result only": lambda own, other, chance: own.rpartition("####")[2].strip(),
        "the steps only": lambda own, other, chance: own.partition("####")[0].strip(),
        "the steps and another result": lambda own, other, chance: own.partition("####")[0] + last_line(other),
        "dollars": lambda own, other, chance: f"#### ${own.rpartition('####')[2].strip()}",
        "decimals": lambda own, other, chance: f"#### {own.rpartition('####')[2].strip()}.00",
        "thousands": lambda own, other, chance: f"#### {float(own.rpartition('####')[2].replace(',', '')):,.0f}",
        "one more": lambda own, other, chance: f"#### {float(own.rpartition('####')[2].replace(',', '')) + 1:.0f}",
        "negative": lambda own, other, chance: f"#### -{own.rpartition('####')[2].strip()}",
        "a unit": lambda own, other, chance: f"#### {own.rpartition('####')[2].strip()} apples",
        "result in a sentence": lambda own, other, chance: f"So she pays {own.rpartition('####')[2].strip()} dollars.",
    },
    "choice": {
        "the option only": lambda own, other, chance: own.partition(".")[0],
        "another option": lambda own, other, chance: chance.choice(["yes", "no", "maybe"]),
        "a comma": lambda own, other, chance: own.replace(".", ",", 1),
        "capitalised": lambda own, other, chance: own.capitalize(),
        "no reason needed": lambda own, other, chance: f"{own.partition('.')[0]} because the groups differ.",
        "the reason only": lambda own, other, chance: own.partition(". ")[2],
    },
}


@dataclass(frozen=True)
class Disagreement:
    """An answer on which the two judges differ."""

    form: str
    ours: bool
    reference: str
    answer: str


@dataclass(frozen=True)
class Agreement:
    """How often the two judges agree on the answers of one job."""

    answers: int
    right: int
    """Answers that the neutral judge calls right."""
    differ: list[Disagreement]

    @property
    def share(self) -> float:
        return 1 - len(self.differ) / self.answers


def without_word(text: str, chance: random.Random) -> str:
    words = text.split(" ")
    words.pop(chance.randrange(len(words)))
    return " ".join(words)


def with_word(text: str, other: str, chance: random.Random) -> str:
    words = text.split(" ")
    words[chance.randrange(len(words))] = chance.choice(other.split(" "))
    return " ".join(words)


def with_digit(text: str, chance: random.Random) -> str:
    places = [found.start() for found in re.finditer(r"\d", text)]
    if not places:
        return text
    place = chance.choice(places)
    return f"{text[:place]}{(int(text[place]) + 3) % 10}{text[place + 1 :]}"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def module_of(path: Path) -> Any:
    """Load a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(jobs: Path, name: str, part: str) -> list[ReferenceRow]:
    """Return the rows of a job."""
    return [ReferenceRow(row["question"], row["answer"]) for row in module_of(jobs / "make.py").JOBS[name](part)]


def answers_of(task: str, rows: list[ReferenceRow], forms: dict[str, Form]) -> Iterator[tuple[int, str, str]]:
    """Yield the row, the form and the text of each answer."""
    chance = random.Random(0)
    for index, row in enumerate(rows):
        other = chance.choice(rows).reference
        for form, make in forms.items():
            yield index, form, make(row.reference, other, chance)


def agreement(jobs: Path, name: str, forms: dict[str, Form]) -> Agreement:
    """Score answers of some forms to all test rows of a job with both judges."""
    task, neutral = TASKS[name], module_of(jobs / "score.py").score
    rows = rows_of(jobs, name, "test")
    scorer, differ, num_right, number = make_scorer(task, rows, rows_of(jobs, name, "train")), [], 0, 0
    for index, form, answer in answers_of(task, rows, forms):
        row = rows[index]
        ours = bool(score_answer(scorer, index, answer, row).right)
        theirs = bool(neutral(name, [answer], [row.reference])["right"])
        number, num_right = number + 1, num_right + theirs
        if ours != theirs:
            differ.append(Disagreement(form, ours, row.reference, answer))
    return Agreement(number, num_right, differ)


def main() -> None:
    jobs = Path(sys.argv[1])
    for title, shared in (("tuned", TUNED), ("base", BASE)):
        sum_differ = sum_answers = 0
        for name, task in TASKS.items():
            forms = shared | (OF_TASK.get(task, {}) if shared is TUNED else {})
            found = agreement(jobs, name, forms)
            sum_differ, sum_answers = sum_differ + len(found.differ), sum_answers + found.answers
            print(f"{title:6}{name:12}{found.answers:8,} answers, {found.right:7,} right, alike {found.share:.2%}")
            counts = Counter((one.form, one.ours) for one in found.differ)
            for (form, ours), times in counts.most_common():
                first = next(one for one in found.differ if (one.form, one.ours) == (form, ours))
                verb = "we say right" if ours else "we say wrong"
                print(f"      {times:5} {form}: {verb}; {first.answer[-90:]!r} for {first.reference[-60:]!r}")
        print(f"{title:6}all         {sum_answers:8,} answers, alike {1 - sum_differ / sum_answers:.2%}")


if __name__ == "__main__":
    main()
