"""Rows that a new user brings: what is not used, not read or cut is named, and near misses get a suggestion."""

import csv
import errno
import json
import os
from pathlib import Path

import pytest

from corpora import prepare_in, rows_file, write_rows
from tunewell import open_corpus
from tunewell.cli.main import main
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.data.sources.base import find_files
from tunewell.data.sources.blocks import ReadOptions, read_blocks
from tunewell.data.tokenizers.load import load_tokenizer


def texts(result, *, supervised: bool = False) -> list[str]:
    """The training documents as text, or only what is supervised in them."""
    tokenizer = load_tokenizer(result.corpus / "tokenizer").backend
    documents = [(document.input_ids, document.labels) for document in open_corpus(result.corpus)]
    chosen = [
        [token for token, label in zip(ids, labels, strict=True) if label != -100 or not supervised]
        for ids, labels in documents
    ]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in chosen]


def assert_closes(manifest) -> None:
    assert manifest.rows_in == manifest.documents + manifest.held_out + sum(manifest.dropped.values())


def write_csv(path, rows: list[dict]):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


INTENTS = [
    {"text": f"where is my card number {number}?", "category": "card arrival" if number % 2 else "lost card"}
    for number in range(30)
]


def test_columns_that_are_not_used_are_named(tiny_model, tmp_path):
    """A column that vanishes without a word was often the one that the user cared about."""
    rows = [{"question": f"q {n}?", "answer": f"a {n}", "difficulty": "hard", "empty": None} for n in range(30)]
    rows += [{"question": f"r {n}?", "solution": f"s {n}", "answer": f"a {n}"} for n in range(30)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for seed in (0, 1):  # the second time from the cached blocks
        manifest = prepare_in(tmp_path, tiny_model, path, f"seed={seed}").manifest
        assert manifest.sources[0].unused == {"difficulty": 30, "solution": 30}
        assert manifest.remarks == ["`rows.jsonl`: unused columns: `difficulty`, `solution`"]
    assert not prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "plain.jsonl", 30)).manifest.remarks


def test_a_classification_set_is_recognised_and_offered_as_questions(tiny_model, tmp_path):
    """`text, category` was read as plain text, and the label that should be learned was dropped."""
    path = write_csv(tmp_path / "intents.csv", INTENTS)
    result = prepare_in(tmp_path, tiny_model, path)
    assert_closes(result.manifest)
    assert not result.manifest.remarks
    named = prepare_in(tmp_path, tiny_model, path, "data.sources[0].format=classification")
    assert texts(named) == texts(result)
    assert "Labels: card arrival, lost card.\n\nwhere is my card" in texts(result)[0]
    assert {text.removesuffix("<|im_end|>") for text in texts(result, supervised=True)} == {"card arrival", "lost card"}


def test_numbered_labels_stay_numbers_unless_they_get_names(tiny_model, tmp_path):
    """The rows were dropped by `prepare` and `train --data`, while `init` took the numbers as labels."""
    rows = [{"sentence": f"text {number}", "label": number % 2} for number in range(30)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert set(texts(prepare_in(tmp_path, tiny_model, path), supervised=True)) == {"0<|im_end|>", "1<|im_end|>"}
    with pytest.raises(UserError, match="numbers; their names"):
        prepare_in(tmp_path, tiny_model, path, "data.sources[0].format=classification")
    named = ("data.sources[0].format=classification", "data.sources[0].labels=[bad, good]")
    assert set(texts(prepare_in(tmp_path, tiny_model, path, *named), supervised=True)) == {
        "bad<|im_end|>",
        "good<|im_end|>",
    }


def test_free_text_is_not_a_label(tiny_model, tmp_path):
    """A list of thousands of labels in each question would be no classification."""
    rows = [{"text": f"t {number}", "label": f"label {number}"} for number in range(300)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match="more than 200 different values"):
        prepare_in(tmp_path, tiny_model, path, "data.sources[0].format=classification")


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ({"Questions": "q?", "Answers": "a"}, "columns: {question: Questions, answer: Answers}"),
        ({"instrution": "q?", "ouput": "a"}, "columns: {instruction: instrution, output: ouput}"),
        ({"Convesations": [{"from": "human", "value": "q"}]}, "columns: {conversations: Convesations}"),
        ({"utterance": "hi", "intent": "greeting"}, "format: classification"),
    ],
)
def test_near_misses_of_a_format_get_the_setting_that_fits(tiny_model, tmp_path, row, setting):
    """`no known column names` left the reader to guess what the known ones are."""
    with pytest.raises(UserError, match="no training data") as caught:
        prepare_in(tmp_path, tiny_model, write_rows(tmp_path / "rows.jsonl", [row] * 5))
    assert f"`data: {{sources: [{{path: rows.jsonl, {setting}}}]}}`" in str(caught.value.fix)


def test_rows_that_cannot_be_read_name_a_setting_that_helps(tiny_model, tmp_path):
    """The fix of `inspect` was to run `inspect`."""
    with pytest.raises(UserError, match="no training data") as caught:
        prepare_in(tmp_path, tiny_model, write_rows(tmp_path / "rows.jsonl", [{"text": 5}] * 5))
    assert "`map: rows.py:to_messages`" in str(caught.value.fix) and "inspect" not in str(caught.value.fix)


def test_column_names_in_other_case_are_used_and_noted(tiny_model, tmp_path):
    """`Question` and `Answer` are the usual names in Excel, and every such row was dropped."""
    rows = [{"Question": f"what is {number}?", " ANSWER": "a number", "Notes": "n"} for number in range(20)]
    path = write_csv(tmp_path / "rows.csv", rows)
    for seed in (0, 1):  # the second time from the cached blocks
        manifest = prepare_in(tmp_path, tiny_model, path, f"seed={seed}").manifest
        assert (manifest.dropped, manifest.notes["names_in_other_case"]) == ({}, 20)
        assert manifest.remarks == ["`rows.csv`: unused columns: `Notes`"]
    both = [{"Question": "q?", "QUESTION": "r?", "Answer": "a"}] * 5
    with pytest.raises(UserError, match="no training data"):
        prepare_in(tmp_path, tiny_model, write_rows(tmp_path / "both.jsonl", both))


def test_a_source_that_loses_most_rows_says_why_on_the_screen(tiny_model, tmp_path):
    """The setting that helps was only in `dropped.jsonl`."""
    known = [{"question": "what?", "answer": "that"}]
    near = write_rows(tmp_path / "near.jsonl", [*known, *[{"Questions": f"q {n}?", "Answers": "a"} for n in range(9)]])
    (remark,) = prepare_in(tmp_path, tiny_model, near).manifest.cautions()[:1]
    assert remark.startswith(
        "`near.jsonl`: 9 of 10 rows dropped as `not_a_conversation`; first: row 2: no known column"
    )
    assert remark.endswith("set `columns: {question: Questions, answer: Answers}`")
    other = write_rows(tmp_path / "other.jsonl", [*known, *[{"Eins": f"q {n}?", "Zwei": "a"} for n in range(9)]])
    (remark,) = prepare_in(tmp_path, tiny_model, other).manifest.remarks
    assert "its columns: Eins, Zwei; if these are questions" in remark and "answer: YOURS" in remark


def test_a_misspelled_column_beside_a_known_format_is_named(tiny_model, tmp_path):
    """The row is valid as plain text, so nothing else shows the mistake."""
    rows = [{"text": f"what is {number}?", "respones": "a number"} for number in range(30)]
    manifest = prepare_in(tmp_path, tiny_model, write_rows(tmp_path / "rows.jsonl", rows)).manifest
    assert manifest.remarks == ["`rows.jsonl`: unused columns: `respones` (did you mean `response`?)"]
    assert json.loads((tmp_path / "corpus" / "manifest.json").read_text())["remarks"] == manifest.remarks


def test_a_guessed_encoding_and_a_wrong_one_are_named(tiny_model, tmp_path):
    """Nine of ten rows of a German Excel file were dropped as `bad_text`, with exit code 0."""
    rows = [{"question": f"Größe {number}?", "answer": f"{number} Füße"} for number in range(20)]
    text = "question;answer\n" + "".join(f"{row['question']};{row['answer']}\n" for row in rows)
    (tmp_path / "rows.csv").write_bytes(text.encode("cp1252"))
    result = prepare_in(tmp_path, tiny_model, tmp_path / "rows.csv")
    assert not result.manifest.dropped and any("Füße" in text for text in texts(result))
    note = "`rows.csv`: read as cp1252 (Windows, Excel); save it as UTF-8 if letters look wrong"
    assert result.manifest.remarks == [note]
    lines = [json.dumps(row, ensure_ascii=False) for row in [*rows, {"question": "q?", "answer": "a"}]]
    (tmp_path / "rows.jsonl").write_bytes("\n".join(lines).encode("cp1252"))
    (remark,) = prepare_in(tmp_path, tiny_model, tmp_path / "rows.jsonl").manifest.remarks
    assert remark.startswith("`rows.jsonl`: 20 of 21 rows dropped as `bad_text`; first: row 1: ")
    assert remark.endswith("save the file as UTF-8, or set its `encoding` on the source, like `encoding: cp1252`")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("question,answer\n", "there are no rows below the header of `rows.csv`"),
        ("Our FAQ\n\nquestion;answer\nq?;a\nr?;b\n", "delete the rows above the header"),
        ("Our;FAQ\nquestion;answer;n\nq?;a;1\nr?;b;2\n", "delete the rows above the header"),
    ],
)
def test_a_table_without_usable_rows_gets_a_fix(tiny_model, tmp_path, text, fix):
    """A header alone was "empty", and a title above the header got no fix."""
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="no training data") as caught:
        prepare_in(tmp_path, tiny_model, tmp_path / "rows.csv")
    assert fix in str(caught.value.fix)


def test_a_config_under_another_name_is_not_overlooked(tmp_path, monkeypatch):
    """A `config.yaml` was ignored, and every setting in it with it."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text("model: m\ndata:\n  sources: rows.jsonl\nbf16: true\noptim: adamw\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"there is a `config.yaml` here, but no `tunewell.yaml`") as caught:
        load_config(model="other")
    assert "--config config.yaml" in str(caught.value.fix)
    assert load_config(config).config.model == "m"
    config.write_text("model: m\nmodel_type: llama\n", encoding="utf-8")  # another program's file
    assert load_config(model="other").config.model == "other"
    config.write_text("model: m\n", encoding="utf-8")
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")  # the folder of a run
    assert load_config(model="other").config.model == "other"


def test_files_that_describe_a_folder_are_not_rows(tiny_model, tmp_path):
    """The `manifest.json` of a folder of shards became a row, and a `README.md` would become a text to learn."""
    shards = tmp_path / "shards"
    rows_file(shards / "shard-0.jsonl", 20)
    rows_file(shards / "shard-1.jsonl", 20, first=20)
    (shards / "manifest.json").write_text('{"shards": ["shard-0.jsonl"], "rows": 40}', encoding="utf-8")
    (shards / "README.md").write_text("# Rows\n\nOurs.\n", encoding="utf-8")
    (shards / "photo.png").write_bytes(b"\x89PNG")
    (shards / ".hidden").write_text("x", encoding="utf-8")
    manifest = prepare_in(tmp_path, tiny_model, shards).manifest
    assert [source.name for source in manifest.sources] == ["shard-0.jsonl", "shard-1.jsonl"]
    assert (manifest.rows_in, manifest.dropped) == (40, {})
    [remark] = manifest.remarks
    assert remark.startswith("3 files in ")
    assert "not read: `README.md`, `manifest.json`, `photo.png`; to read a file, list it in `data.sources`" in remark
    assert remark.endswith("; `photo.png`: images cannot be trained on; use text")
    by_glob = prepare_in(tmp_path, tiny_model, shards / "*.json*").manifest
    assert by_glob.rows_in == 40
    assert "`manifest.json`" in by_glob.remarks[0]


def test_a_folder_of_nothing_else_is_read(tiny_model, tmp_path):
    """What is left out is left out beside rows only."""
    folder = tmp_path / "only"
    folder.mkdir()
    rows = [{"question": f"q {number}?", "answer": f"a {number}"} for number in range(30)]
    (folder / "metadata.json").write_text(json.dumps(rows), encoding="utf-8")
    assert prepare_in(tmp_path, tiny_model, folder).manifest.rows_in == 30


def test_alpaca_rows_with_an_input_have_alpacas_own_form(tiny_model, tmp_path):
    """The published weights were trained on `### Input:`; two line feeds are another prompt."""
    rows = [{"instruction": f"Add {n}.", "input": f"{n} and 1", "output": f"{n + 1}"} for n in range(20)]
    rows += [{"instruction": f"Say {n}.", "input": "", "output": f"{n}"} for n in range(20)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    result = prepare_in(tmp_path, tiny_model, path, "template.name=alpaca", "data.held_out=0.0")
    assert_closes(result.manifest)
    found = set(texts(result))
    assert (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd 3.\n\n### Input:\n3 and 1\n\n### Response:\n4<|im_end|>"
    ) in found
    assert (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay 3.\n\n### Response:\n3<|im_end|>"
    ) in found
    assert "4<|im_end|>" in texts(result, supervised=True)
    chatml = texts(prepare_in(tmp_path, tiny_model, path, "data.held_out=0.0"))
    assert any("Add 3.\n\n3 and 1<|im_end|>" in text for text in chatml)


PAGE = """---
title: Opening hours
---

# Opening hours

The library opens at nine on weekdays.
On Sundays it is closed.

## Loans

A book may be kept for four weeks.

```
first line of code

second line of code
```
"""


def test_a_folder_of_texts_is_read_with_its_markdown(tiny_model, tmp_path):
    """The `.md` files were skipped without a word, and every heading of a `.txt` file was a document."""
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "hours.md").write_text(PAGE, encoding="utf-8")
    (folder / "README.md").write_text("All about the library, in one sentence.\n", encoding="utf-8")
    notes = "MINUTES OF THE MEETING\n\nItem one\n\nWe met at noon.\nWe left at one.\n\nNobody objected.\n"
    (folder / "notes.txt").write_text(notes, encoding="utf-8")
    result = prepare_in(tmp_path, tiny_model, folder, "data.held_out=0.0")
    assert_closes(result.manifest)
    assert {source.name: source.rows for source in result.manifest.sources} == {
        "README.md": 1,
        "hours.md": 3,
        "notes.txt": 2,
    }
    assert sorted(text.removesuffix("<|im_end|>") for text in texts(result)) == sorted(
        [
            "All about the library, in one sentence.",
            "---\ntitle: Opening hours\n---\n\n# Opening hours\n\n"
            "The library opens at nine on weekdays.\nOn Sundays it is closed.",
            "## Loans\n\nA book may be kept for four weeks.",
            "```\nfirst line of code\n\nsecond line of code\n```",
            "MINUTES OF THE MEETING\n\nItem one\n\nWe met at noon.\nWe left at one.",
            "Nobody objected.",
        ]
    )
    [remark] = result.manifest.remarks
    assert "paragraphs at blank lines: `README.md` (1 row), `hours.md` (3 rows), `notes.txt` (2 rows)" in remark
    assert "`text_rows: file`" in remark
    whole = prepare_in(tmp_path, tiny_model, folder, "data.held_out=0.0", "data.sources[0].text_rows=file")
    assert whole.manifest.documents == 3


def test_short_lines_between_blank_lines_do_not_become_one_document(tmp_path):
    """A list of names is no chain of headings."""
    path = tmp_path / "names.txt"
    path.write_text("".join(f"name {number}\n\n" for number in range(12)), encoding="utf-8")
    [file] = find_files(str(path), base=tmp_path)
    assert [len(block) for block in read_blocks(file, ReadOptions(1 << 20, 64))] == [3]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("report.pdf", "pdftotext"),
        ("letter.docx", "Save As > Plain Text"),
        ("page.html", "pandoc"),
        ("photo.jpg", "images cannot be trained on"),
        ("talk.mp3", "transcripts"),
    ],
)
def test_a_file_that_cannot_be_read_gets_advice_that_helps(tmp_path, name, advice):
    """Renaming a PDF to `.txt` trains on its bytes."""
    (tmp_path / name).write_bytes(b"%PDF-1.7 \xff")
    with pytest.raises(UserError) as caught:
        find_files(name, base=tmp_path)
    assert advice in str(caught.value.fix)
    assert "rename" not in str(caught.value)


@pytest.mark.parametrize(
    ("out", "message"),
    [("/", "is the root of a disk"), ("x" * 5000, "the path is too long"), ("rows.jsonl/corpus", "Not a directory")],
    ids=["root", "too long", "below a file"],
)
def test_an_output_path_that_cannot_work_is_named(tiny_model, tmp_path, monkeypatch, capsys, out, message):
    """Each of these ended in `this is a bug in tunewell`."""
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "rows.jsonl", 5)
    assert main(["prepare", "--model", str(tiny_model), "--data", "rows.jsonl", "--out", out]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "bug" not in printed and "fix:" in printed


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_named(tiny_model, tmp_path, monkeypatch, capsys, code):
    """A read-only disk is no bug, wherever the first write fails."""
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "rows.jsonl", 5)
    arguments = ["prepare", "--model", str(tiny_model), "--data", "rows.jsonl"]

    def refuse(path, *_, **__):
        raise OSError(code, os.strerror(code), str(path))

    for function in ("mkdir", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, function, refuse)
            assert main(arguments) == 2
        printed = capsys.readouterr().err
        assert os.strerror(code) in printed or "read-only" in printed or "permission denied" in printed
        assert "bug" not in printed
    assert main(arguments) == 0


def test_a_label_that_is_a_number_stays_itself_beside_others(tiny_model, tmp_path):
    """`1` was read as an index into `1, 2, 3, unrated`, so that every rating was trained one too high."""
    ratings = ("1", 2, 3.0, "unrated")
    rows = [{"text": f"meal number {n}", "label": ratings[n % 4]} for n in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    result = prepare_in(tmp_path, tiny_model, path, "data.sources[0].format=classification", "data.held_out=0")
    for document, text in zip(open_corpus(result.corpus), texts(result, supervised=True), strict=True):
        assert text.startswith(("1", "2", "3", "unrated")[(document.row - 1) % 4])


def test_training_shows_what_preparing_found(tiny_model, tmp_path, monkeypatch, capfd):
    """`train` prepares the data itself and said nothing of dropped rows, secrets, leaks and unused columns."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"what is {n} plus {n}?", "answer": f"it is {2 * n}", "level": "easy"} for n in range(40)]
    rows += [{"question": "empty?", "answer": ""}, {"question": "who?", "answer": "write to ann@some-company.org"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    settings = {"model": "preset:tiny-1m", "tokenizer": tiny_model, "data.sources": "rows.jsonl", "train.max_steps": 1}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    assert main(["train", "--no-supervisor", "--no-validate", "--json", *sets]) == 0
    notes = "\n".join(json.loads(capfd.readouterr().out)["notes"])
    for part in ("1 of 42 rows dropped: 1 empty_reply", "1 e-mail address", "unused columns: `level`"):
        assert part in notes
