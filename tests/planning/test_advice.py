"""Whether rows should be trained on at all: facts, manners, fixed answers, and too few rows."""

import csv
import json
from pathlib import Path

import pytest

from corpora import prepare_in, write_rows
from tunewell.data.corpus.reader import open_corpus
from tunewell.planning.advice import advise, look_up_hint

EXAMPLE = Path(__file__).parents[2] / "examples" / "college"


def _advice(folder: Path, model: Path, pairs: list[tuple[str, str]]):
    rows = write_rows(folder / "rows.jsonl", ({"question": question, "answer": answer} for question, answer in pairs))
    result = prepare_in(folder, model, rows, "data.held_out=0", "packing.long_documents=drop")
    return advise(open_corpus(result.corpus))


def test_a_fixed_set_of_answers_is_trained(tmp_path, tiny_model):
    """Labels are learned from examples; there is nothing to look up."""
    pairs = [(f"text {n} about topic {n % 4}", f"topic_{n % 4}") for n in range(80)]
    assert _advice(tmp_path, tiny_model, pairs).choice == "train"


def test_facts_that_nothing_repeats_are_retrieved(tmp_path, tiny_model):
    """One row per fact is rarely remembered; `train` would look fine and answer wrongly."""
    pairs = [(f"Who lives in house {n}?", f"Person{n} Name{n * 7} of street{n}") for n in range(400)]
    advice = _advice(tmp_path, tiny_model, pairs)
    assert advice.choice == "retrieve"
    assert advice.fact_rows == 1.0
    assert advice.options[0].startswith("retrieve")


def test_train_says_where_looking_up_is_better(tmp_path, tiny_model):
    """Only `plan` said it, and nobody is sent there: rows of facts, and texts without questions."""
    pairs = [(f"Who lives in house {n}?", f"Person{n} Name{n * 7} of street{n}") for n in range(400)]
    _advice(tmp_path, tiny_model, pairs)
    hint = look_up_hint(open_corpus(tmp_path / "corpus"))
    assert hint is not None and "train or look up? the rows are facts" in hint and "`tunewell compare`" in hint
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "page.md").write_text("# Page\n\nThe shop opens at nine.\n\nIt closes at six.\n")
    result = prepare_in(tmp_path / "texts", tiny_model, tmp_path / "texts" / "page.md", "data.held_out=0")
    texts = look_up_hint(open_corpus(result.corpus))
    assert texts is not None and "`tunewell index FOLDER`" in texts
    labels = [(f"text {n} about topic {n % 4}", f"topic_{n % 4}") for n in range(80)]
    (tmp_path / "labels").mkdir()
    _advice(tmp_path / "labels", tiny_model, labels)
    assert look_up_hint(open_corpus(tmp_path / "labels" / "corpus")) is None


def test_answers_made_of_the_question_are_a_manner(tmp_path, tiny_model):
    """Rewriting what the question contains is a manner, however many rows there are."""
    pairs = [(f"shout word{n} word{n + 1}", f"word{n} word{n + 1} indeed") for n in range(400)]
    assert _advice(tmp_path, tiny_model, pairs).choice == "train"


def test_few_rows_are_named(tmp_path, tiny_model):
    """Thirty rows train without an error, and change nothing."""
    pairs = [(f"question {n}", f"the answer is the question {n} again") for n in range(30)]
    advice = _advice(tmp_path, tiny_model, pairs)
    assert advice.choice == "more rows"
    assert "30 rows" in advice.because


def test_the_example_has_facts_in_several_wordings(tmp_path, tiny_model):
    """Reworded facts can be learned or retrieved: a comparison decides."""
    rows = [json.loads(line) for line in (EXAMPLE / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    advice = _advice(tmp_path, tiny_model, [(row["instruction"], row["output"]) for row in rows])
    assert advice.choice == "compare"
    assert advice.rows_per_answer == 5.0


def _rows_of(name: str, data: Path) -> list[tuple[str, str]]:
    if name == "gsm8k":
        found = [json.loads(line) for line in (data / "gsm8k" / "train.jsonl").open(encoding="utf-8")]
        return [(row["question"], row["answer"]) for row in found]
    if name == "banking77":
        with (data / "banking77" / "train.csv").open(encoding="utf-8", newline="") as file:
            return [(row["text"], row["category"]) for row in csv.DictReader(file)]
    if name == "self_instruct":
        found = [json.loads(line) for line in (data / "self_instruct" / "seed_tasks.jsonl").open(encoding="utf-8")]
        return [
            (f"{row['instruction']} {row['instances'][0]['input']}", row["instances"][0]["output"]) for row in found
        ]
    found = json.loads((data / "pubmedqa" / "ori_pqal.json").read_text(encoding="utf-8")).values()
    return [(row["QUESTION"], row["LONG_ANSWER"]) for row in found]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "choice"),
    [("gsm8k", "train"), ("banking77", "train"), ("self_instruct", "more rows"), ("pubmedqa", "retrieve")],
)
def test_real_sets_get_the_advice_that_their_authors_would_give(name, choice, tmp_path, tiny_model, shared_data):
    """The thresholds were chosen on these sets; they must hold for the corpora that `prepare` makes of them."""
    assert _advice(tmp_path, tiny_model, _rows_of(name, shared_data)[:4000]).choice == choice


@pytest.mark.shared
def test_texts_without_a_question_are_split_at_their_last_line(tmp_path, tiny_model, shared_data):
    """WikiSQL's rows are plain texts: the SQL in the last line is made of the lines before."""
    result = prepare_in(tmp_path, tiny_model, shared_data / "wikisql_mlx" / "train.jsonl", "data.held_out=0")
    assert advise(open_corpus(result.corpus)).choice == "train"
