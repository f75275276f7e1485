"""The ledger: every reason planted in known amounts comes back in those amounts, on exactly those lines."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny import dropped_rows, prepare, write_jsonl

from tunewell import open_corpus

NUM_ROWS = 2000
CONTEXT = 192


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def pair(question: str, answer: str) -> dict[str, Any]:
    return {"question": question, "answer": answer}


@dataclass
class Planted:
    """Lines of a file and, for each, the reason it is to be dropped for (None: it becomes a document)."""

    lines: list[tuple[bytes, str | None]] = field(default_factory=list)
    _count: int = 0

    def unique(self) -> str:
        self._count += 1
        return f"number {self._count}"

    def add(self, row: Any, reason: str | None = None) -> None:
        line = row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=self._count % 2 == 0).encode()
        self.lines.append((line, reason))

    def good(self, kind: int) -> dict[str, Any]:
        """A row that becomes a document, in each of the formats in turn."""
        asked, told = f"What is {self.unique()}?", f"That is {self.unique()}, I think."
        return [
            {"instruction": asked, "input": "", "output": told},
            {"instruction": asked, "context": "Think first.", "response": told},
            pair(asked, told),
            {"prompt": asked, "completion": told},
            {"prompt": [turn("user", asked)], "completion": [turn("assistant", told)]},
            {"messages": [turn("system", "Be brief."), turn("user", asked), turn("assistant", told, weight=1)]},
            {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": told}]},
            {"messages": [turn("user", [{"type": "text", "text": asked}]), turn("assistant", told)]},
            {"text": asked + " " + told},
        ][kind % 9]


def plant(seed: int, *, is_strict: bool) -> tuple[Planted, Planted]:
    """Plan the lines of a training file and of a held-out file."""
    plan, held_out = Planted(), Planted(_count=1_000_000)

    for _ in range(13):
        text = plan.unique()
        plan.add(f'{{"question": "{text}", "answer": '.encode(), "unparsable")
        plan.add(f'{{"question": "{text}", "answer": "a", "question": "b"}}'.encode(), "unparsable")
        plan.add(f'{{"question": "{text}", "answer": "a", "score": NaN}}'.encode(), "unparsable")
    for _ in range(17):
        plan.add([1, plan.unique()], "not_a_conversation")
        plan.add(pair(plan.unique(), {"a": 5}), "not_a_conversation")  # type: ignore[arg-type]
        plan.add({"messages": [turn("alien", plan.unique()), turn("assistant", "a")]}, "not_a_conversation")
        plan.add({"messages": [turn("user", plan.unique())]}, "not_a_conversation")
        plan.add({"category": plan.unique()}, "not_a_conversation")
    for _ in range(19):
        plan.add(pair("  ", plan.unique() + " and more"), "empty_question")
        plan.add({"instruction": "", "input": "", "output": plan.unique() + " and more"}, "empty_question")
    for _ in range(23):
        plan.add(pair(plan.unique(), "\n"), "empty_reply")
        plan.add({"text": " \t"}, "empty_reply")
    for _ in range(11):
        plan.add(pair(plan.unique(), "with a \0 in it"), "bad_text")
        plan.add(f'{{"question": "{plan.unique()}", "answer": "half \\ud800 of it"}}'.encode(), "bad_text")
        plan.add(f'{{"question": "{plan.unique()}", "answer": "caf\xe9"}}'.encode("latin-1"), "bad_text")
    for _ in range(7):
        plan.add(pair(plan.unique(), "large " * 2000), "too_large")
        plan.add(b'{"question": "deep", "answer": ' + b"[" * 100 + b"]" * 100 + b"}", "too_large")
    for _ in range(29):
        plan.add(pair(plan.unique(), "many words indeed " * 40), "too_long")
    for _ in range(31):
        turns = [turn("user", plan.unique()), turn("assistant", "not to be learned", weight=0)]
        plan.add({"messages": turns}, "nothing_to_learn")
    for _ in range(37):
        plan.add(pair(plan.unique() + " how much?", "no"), "too_short" if is_strict else None)
    for index in range(41):
        link = ("https://example.org/", "www.example.org", "HTTP://EXAMPLE.ORG")[index % 3]
        plan.add(pair(plan.unique() + " where?", f"see {link}"), "has_url" if is_strict else None)
    for _ in range(20):
        question = f"Held out {held_out.unique()}?"
        held_out.add(pair(question, "This is the answer to keep away."))
        plan.add(pair(question.upper().replace(" ", "  "), "An answer that gives it away."), "answer_in_held_out")
        plan.add(pair(question, "This is the answer to keep away."), "answer_in_held_out")
    held_out.add(pair("Held out", ""), "empty_reply")
    held_out.add(json.loads(held_out.lines[0][0]), "exact_duplicate")

    for _ in range(43):
        row = plan.good(2)
        for _ in range(3):
            plan.add(row, "exact_duplicate")  # the first of the three in the file stays: see `expected`
        same = {"messages": [turn("user", row["question"]), turn("assistant", row["answer"])]}
        plan.add(same, "exact_duplicate")
    while len(plan.lines) < NUM_ROWS:
        plan.add(plan.good(len(plan.lines)))
    assert len(plan.lines) == NUM_ROWS
    random.Random(seed).shuffle(plan.lines)
    return plan, held_out


def conversation_of(line: bytes) -> tuple[str, str]:
    row = json.loads(line)
    turns = row.get("messages")
    return (turns[0]["content"], turns[1]["content"]) if turns else (row["question"], row["answer"])


def write_file(path: Path, plan: Planted, seed: int) -> dict[int, str]:
    """Write the lines with blank ones between; say what is dropped on which line."""
    rng = random.Random(seed)
    expected: dict[int, str] = {}
    seen: set[tuple[str, str]] = set()
    lines: list[bytes] = []
    for line, reason in plan.lines:
        lines += [b""] * (rng.random() < 0.05) + [line]
        if reason == "exact_duplicate" and path.name == "rows.jsonl" and conversation_of(line) not in seen:
            seen.add(conversation_of(line))
            continue
        if reason:
            expected[len(lines)] = reason
    path.write_bytes(b"\n".join(lines) + b"\n")
    return expected


@pytest.mark.parametrize("is_strict", [False, True], ids=["as it is", "with every check on"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_reason_comes_back_in_the_amount_planted(seed, is_strict, tiny_model, tmp_path):
    """Nothing is lost silently: each count, each line, and both sums."""
    plan, held_out = plant(seed, is_strict=is_strict)
    expected = {"rows.jsonl": write_file(tmp_path / "rows.jsonl", plan, seed)}
    expected["held_out.jsonl"] = write_file(tmp_path / "held_out.jsonl", held_out, seed)
    sets = ["data.held_out=held_out.jsonl", "data.clean.max_row_bytes=5000", "packing.long_documents=drop"]
    sets += [f"packing.context_length={CONTEXT}"]
    sets += ["data.clean.min_reply_chars=5", "data.clean.drop_urls=true"] if is_strict else []
    result = prepare(tmp_path, tiny_model, "rows.jsonl", sets=sets)

    found: dict[str, dict[int, str]] = {name: {} for name in expected}
    for row in dropped_rows(tmp_path):
        assert row["row"] not in found[row["source"]], "a row dropped twice"
        found[row["source"]][row["row"]] = row["reason"]
    assert found == expected
    counts = Counter(reason for reasons in expected.values() for reason in reasons.values())
    assert result["dropped"] == counts
    always = {"unparsable", "not_a_conversation", "empty_question", "empty_reply", "exact_duplicate", "bad_text"}
    always |= {"too_large", "too_long", "nothing_to_learn", "answer_in_held_out"}
    assert set(counts) == always | ({"too_short", "has_url"} if is_strict else set())
    assert counts["exact_duplicate"] == 43 * 3 + 1

    assert result["rows_in"] == result["rows_read"] == NUM_ROWS + len(held_out.lines)
    assert result["held_out"] == 20
    used = result["documents"] + result["selected"]
    assert used == NUM_ROWS - len(expected["rows.jsonl"]) and result["selected"] == round(0.05 * used)
    assert result["rows_in"] == used + result["held_out"] + sum(result["dropped"].values())
    assert_tokens_add_up(tmp_path, result)


def assert_tokens_add_up(folder: Path, result: dict[str, Any]) -> None:
    """Count the tokens again from the documents themselves."""
    tokens, packing = result["tokens"], result["packing"]
    assert tokens["total"] == tokens["supervised"] + tokens["context"] + tokens["padding"]
    assert tokens["total"] == packing["sequences"] * packing["context_length"]
    corpus = open_corpus(folder / "corpus")
    documents = list(corpus)
    assert len(documents) == result["documents"]
    assert len(list(corpus.held_out)) == result["held_out"]
    assert sum(len(document.input_ids) for document in documents) == tokens["supervised"] + tokens["context"]
    assert sum(label != -100 for document in documents for label in document.labels) == tokens["supervised"]
    assert len({(document.source, document.row) for document in documents}) == len(documents)


# --- held out by a hash


def held_out_rows(folder: Path, rows_of: dict[str, list[Any]]) -> list[Any]:
    return [rows_of[document.source][document.row - 1] for document in open_corpus(folder / "corpus").held_out]


def key(row: Any) -> str:
    return json.dumps(row, sort_keys=True)


@pytest.mark.slow
def test_a_row_stays_on_its_side_when_others_come(tiny_model, tmp_path):
    """A held-out row that is trained on after the next 100 rows were added makes every later figure a lie."""
    rng = random.Random(5)
    rows = [pair(f"Question {rng.random()}?", f"Answer {index}.") for index in range(5000)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    result = prepare(tmp_path, tiny_model, "rows.jsonl")
    assert 0.04 < result["held_out"] / 5000 < 0.06
    first = {key(row) for row in held_out_rows(tmp_path, {"rows.jsonl": rows})}

    added = [pair(f"New question {rng.random()}?", "New.") for _ in range(500)]
    moved = rows + added
    rng.shuffle(moved)
    parts = {"a.jsonl": moved[:1234], "b.jsonl": moved[1234:]}
    for name, part in parts.items():
        write_jsonl(tmp_path / name, part)
    prepare(tmp_path, tiny_model, "a.jsonl", "b.jsonl")
    second = {key(row) for row in held_out_rows(tmp_path, parts)}
    assert first <= second
    assert second - first <= {key(row) for row in added}


def test_no_question_is_on_both_sides(tiny_model, tmp_path):
    """Neither a duplicate nor the same question with another answer, case or spacing."""
    rng = random.Random(6)
    questions = [f"What is {rng.random()} here?" for _ in range(600)]
    rows = [pair(question, f"Answer {index}.") for index, question in enumerate(questions)]
    rows += [pair(question.upper(), "Another answer.") for question in questions]
    rows += [pair("  " + question.replace(" ", "\n"), "A third.") for question in questions]
    rows += [pair(question, f"Answer {index}.") for index, question in enumerate(questions)]
    rng.shuffle(rows)
    write_jsonl(tmp_path / "rows.jsonl", rows)
    result = prepare(tmp_path, tiny_model, "rows.jsonl", sets=["data.held_out=0.2"])
    assert result["dropped"] == {"exact_duplicate": 600}
    corpus = open_corpus(tmp_path / "corpus")

    def asked(documents) -> set[str]:
        return {" ".join(rows[document.row - 1]["question"].split()).casefold() for document in documents}

    train, held_out, selected = asked(corpus), asked(corpus.held_out), asked(corpus.selection)
    assert not train & held_out and not selected & (train | held_out)
    assert len(train | held_out | selected) == 600
    assert len(held_out) > 60
