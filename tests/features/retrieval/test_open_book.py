"""Training rows with passages: held-out documents, refusals, exchanged answers, and the command that uses them."""

import json
import re
from pathlib import Path

import pytest
from toy_index import COLLEGE, HashedWords, college_facts, college_index

from tunewell.cli.main import main
from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.reading_prompt import NOT_FOUND, Passage, prompt_form, question_in, reading_prompt
from tunewell.features.retrieval.open_book import locate_questions, open_book_rows
from tunewell.features.retrieval.records import read_index, write_index
from tunewell.records.plan import Chosen
from tunewell.scoring.answer_keys import ReferenceRow, answer_keys
from tunewell.scoring.judge import contains_key


@pytest.fixture(scope="module")
def retriever(tmp_path_factory):
    return college_index(tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def located(retriever):
    facts = college_facts("train")
    return locate_questions(retriever, answer_keys([ReferenceRow(*fact[:2]) for fact in facts]))


def turns(row):
    return [turn["content"] for turn in row["messages"]]


def test_a_reply_is_in_the_passage_that_it_cites(located):
    """In copies the answer is exchanged; a reply whose passage says something else would teach to invent."""
    rows = open_book_rows(located, num_passages=4, seed=3)
    assert len(rows.train) > 300 and rows.held_out and 1 <= len(rows.held_out_documents) <= 3
    for row in rows.train + rows.held_out:
        prompt, reply = turns(row)
        if reply == NOT_FOUND:
            assert "answers" not in row
            continue
        reference, _, number = reply.rpartition(" [")
        passage = prompt.split(f"\n[{number[:-1]}] ")[1].split("\n\n[")[0].rpartition("\n\nQuestion: ")
        text = passage[0] or passage[2]
        key = answer_keys([ReferenceRow("", reference, tuple(row["answers"]))])[0]
        assert contains_key(text, key), (text, reply)
    again = open_book_rows(located, num_passages=4, seed=3)
    assert again == rows and open_book_rows(located, num_passages=4, seed=4) != rows


def test_copies_differ_in_answer_order_and_near_misses(located):
    """Equal copies would teach the fact and the place of the passage, not reading."""
    rows = open_book_rows(located, num_passages=4, seed=0, num_copies=8)
    by_question = {}
    for row in rows.train:
        by_question.setdefault(question_in(turns(row)[0]), []).append(turns(row))
    replies = [len({re.sub(r" \[\d\]", "", reply) for _, reply in copies}) for copies in by_question.values()]
    assert sum(replies) / len(replies) > 3, "answers are exchanged"
    places = {reply[-3:] for copies in by_question.values() for _, reply in copies if reply != NOT_FOUND}
    assert places == {"[1]", "[2]", "[3]", "[4]"}
    shares = [reply == NOT_FOUND for copies in by_question.values() for _, reply in copies]
    assert 0.2 < sum(shares) / len(shares) < 0.3


def test_held_out_documents_are_in_no_training_row(located):
    """Neither as an answer, nor as a near miss, nor as an exchanged value: the test measures reading, not memory."""
    rows = open_book_rows(located, num_passages=4, seed=0, num_copies=8)
    titles = [Path(name).stem.replace("-", " ") for name in rows.held_out_documents]
    values = {one.key.text for one in located if one and one.answer.file in rows.held_out_documents}
    for row in rows.train:
        prompt, reply = turns(row)
        assert not any(title in prompt.lower() for title in titles)
        assert not any(value in reply for value in values)
    asked = {question_in(turns(row)[0]) for row in rows.held_out}
    assert asked and not asked & {question_in(turns(row)[0]) for row in rows.train}


def test_test_questions_on_trained_documents_are_left_out_and_counted(located):
    rows = open_book_rows(located, located[:60], num_passages=4)
    assert len(rows.held_out) + rows.num_seen_documents == sum(one is not None for one in located[:60])
    with pytest.raises(UserError, match="only 1 document"):
        open_book_rows(located[:15], num_passages=4)


def test_the_form_of_the_message_is_the_message():
    """An export tells other programs how to write the message; a difference would make the model worse there."""
    passages = [Passage("a.md", "A", ("B",), "One."), Passage("c.md", "C", (), "Two.")]
    form = prompt_form()
    shown = form["between_passages"].join(
        form["passage"].format(number=number, headings=one.path, text=one.text)
        for number, one in enumerate(passages, 1)
    )
    message = reading_prompt("Why?", passages)
    assert form["message"].format(passages=shown, question="Why?") == message
    assert question_in(message) == "Why?" and question_in("Question: Why?") == "Question: Why?"


def college_folder(tmp_path, monkeypatch):
    for module in ("tunewell.features.retrieval.index_workflow", "tunewell.features.retrieval.search"):
        monkeypatch.setattr(f"{module}.open_embedder", lambda name: HashedWords())
    monkeypatch.chdir(tmp_path)
    assert main(["index", str(COLLEGE / "pages")]) == 0
    manifest = read_index(Path("index"))
    settings = manifest.settings.model_copy(update={"num_passages": Chosen[int](value=2, because="")})
    write_index(Path("index"), manifest.model_copy(update={"settings": settings}))


def test_train_with_an_index_prepares_rows_with_passages(tmp_path, monkeypatch, tiny_model, capsys):
    """The corpus has the passages; the same command again does nothing; another index makes new rows."""
    college_folder(tmp_path, monkeypatch)
    rows = ["--data", str(COLLEGE / "train.jsonl"), "--model", str(tiny_model), "--set", "data.index=index"]
    rows += ["--set", f"data.held_out={COLLEGE / 'held_out.jsonl'}"]
    assert main(["prepare", *rows, "--json"]) == 0
    corpus = open_corpus(tmp_path / "corpus")
    written = [json.loads(line) for line in Path("corpus-rows/train.jsonl").read_text().splitlines()]
    assert len(corpus) + len(corpus.selection) == len(written) and len(corpus.held_out)
    assert any(remark.startswith("open book: ") for remark in corpus.manifest.remarks)
    capsys.readouterr()
    assert main(["prepare", *rows, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["up_to_date"] is True
    manifest = read_index(Path("index"))
    settings = manifest.settings.model_copy(update={"num_passages": Chosen[int](value=3, because="")})
    write_index(Path("index"), manifest.model_copy(update={"settings": settings}))
    assert main(["prepare", *rows, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["up_to_date"] is False


def test_rows_that_the_index_does_not_answer_are_an_error(tmp_path, monkeypatch, tiny_model, capsys):
    college_folder(tmp_path, monkeypatch)
    Path("other.jsonl").write_text('{"question": "How tall is the tower?", "answer": "It is 4,711 feet tall."}\n')
    command = ["prepare", "--data", "other.jsonl", "--model", str(tiny_model), "--set"]
    assert main([*command, "data.index=index"]) == 2
    assert "no passage of the index contains the answer" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "data.index=nowhere"]) == 2
    assert "there is no index" in capsys.readouterr().err
