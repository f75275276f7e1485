"""The Python library: rows from memory, results, callbacks, and the README's example in a real notebook kernel."""

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import tunewell
from corpora import row, rows_file
from tunewell.cli.screens.run_state import RunState
from tunewell.core.errors import UserError
from tunewell.library.progress import NotebookTable

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "device": "cpu",
    "method": {"rank": 2},
    "train": {"max_steps": 4, "batch_documents": 4},
    "evaluate": {"every_steps": 2, "samples": 1, "sample_tokens": 2},
    "data": {"held_out": 0.2},
    "verdict": {"questions": 3, "answer_tokens": 4},
}


@pytest.fixture
def base(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A current folder with a small llama model in `base`."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=256, **sizes)).save_pretrained("base")
    PreTrainedTokenizerFast.from_pretrained(tiny_model).save_pretrained("base")
    return "base"


def test_train_takes_rows_from_memory_and_returns_a_result_that_shows_itself(base: str) -> None:
    """A notebook user has rows in a variable, and looks at a result by naming it."""
    steps, evaluations = [], []
    rows = [row(number) for number in range(30)]
    num_threads = torch.get_num_threads()
    result = tunewell.train(
        SETTINGS,
        model=base,
        data=rows,
        out="first",
        progress=False,
        on_step=lambda event: steps.append(event.step),
        on_evaluate=lambda event: evaluations.append(event.step),
    )
    assert (result.run, result.status) == (Path("first"), "finished")
    assert steps == [1, 2, 3, 4] and evaluations == [0, 2, 4]
    assert repr(result).startswith("TrainResult(run='first', status='finished', steps=4, loss=")
    assert result.validation is not None
    page = result._repr_html_()
    assert "`" not in page and "tunewell train" not in page, "advice is in Python, and given once"
    assert result.validation.report.verdict in page and "<svg" in page and "trained model" in page
    assert torch.get_num_threads() == num_threads, "a library call must not change the threads of its process"
    model = tunewell.load(result, device="cpu")
    assert isinstance(model.chat("What is 1?"), str) and "messages=2" in repr(model)
    assert len(model.generate(["What is 2?", "What is 3?"], max_new_tokens=3)) == 2
    again = tunewell.train(SETTINGS, model=base, data=rows, out="first", resume=True, progress=False)
    assert again.steps == 4


def test_prepare_takes_lists_datasets_and_data_frames_as_the_same_rows(base: str) -> None:
    """Whatever holds the rows, the corpus must be the same."""
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    rows = [row(number) for number in range(20)]
    kinds = [rows, datasets.Dataset.from_list(rows), pandas.DataFrame(rows), str(rows_file(Path("rows.jsonl"), 20))]
    made = [tunewell.prepare(model=base, data=data, out=f"corpus{at}", progress=False) for at, data in enumerate(kinds)]
    assert len({result.manifest.corpus_sha256 for result in made}) <= 2, "a file has another name than saved rows"
    assert len({(result.manifest.documents, result.manifest.held_out) for result in made}) == 1
    assert "documents=" in repr(made[0]) and "held out" in made[0]._repr_html_()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ([], "contains no rows"),
        ([1, 2], "row 1 of `data` is a int"),
        (42, "cannot be a int"),
        ([{"question": {1, 2}}], "row 1 of `data` cannot be written as JSON"),
        ([{"question": "q", "answer": "a"}, {"question": "q", "number": 1 << 70}], "column `number`"),
    ],
)
def test_data_that_is_not_rows_is_a_clear_error(base: str, data: object, what: str) -> None:
    """At 0.1.0 a list of 200 rows gave 200 problems with the config."""
    with pytest.raises(UserError) as caught:
        tunewell.prepare(model=base, data=data, progress=False)
    assert what in str(caught.value)


def test_data_frames_from_parquet_and_with_times_are_rows(base: str) -> None:
    """pandas reads a list of dicts as an array of objects, and has its own values for empty cells."""
    pandas = pytest.importorskip("pandas")
    pairs = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}] for n in range(12)]
    frame = pandas.DataFrame({"messages": pairs})
    frame.to_parquet("rows.parquet")
    read = pandas.read_parquet("rows.parquet")
    read["when"] = [pandas.Timestamp("2026-01-01"), *[pandas.NaT] * 11]
    read["count"] = pandas.array([1, *[None] * 11], dtype="Int64")
    made = [tunewell.prepare(model=base, data=d, out=o, progress=False) for d, o in ((frame, "one"), (read, "two"))]
    assert made[0].manifest.documents == made[1].manifest.documents > 0


def test_validate_takes_several_files_a_folder_as_text_and_numbers_of_numpy(base: str) -> None:
    numpy = pytest.importorskip("numpy")
    for name in ("a.jsonl", "b.jsonl"):
        rows_file(Path(name), 4)
    metrics = {"f": lambda *_: numpy.float32(0.5), "b": lambda *_: numpy.bool_(True), "bad": lambda: 1}
    options = {"device": "cpu", "out": "report", "metrics": metrics, "sets": ["verdict.answer_tokens=4"]}
    found = tunewell.validate(base, data=["a.jsonl", f"file://{Path('b.jsonl').absolute()}"], progress=False, **options)
    assert found.folder == Path("report")
    means = {name: (result.tuned, result.failed) for name, result in found.report.metrics.items()}
    assert means["f"] == (0.5, 0) and means["b"] == (1.0, 0) and means["bad"][0] is None
    assert "bad" in found._repr_html_() and "failed" in found._repr_html_()
    with pytest.raises(UserError, match="the metric `m` is not a function"):
        tunewell.validate(base, data="a.jsonl", progress=False, device="cpu", metrics={"m": 3})


def test_answers_to_a_list_are_those_to_each_and_follow_the_seed(base: str) -> None:
    model = tunewell.load(base, device="cpu")
    prompts = ["What is 1?", "Hello", "What is 1?"]
    assert model.generate(prompts, max_new_tokens=8) == [model.generate(prompt, max_new_tokens=8) for prompt in prompts]
    drawn = [model.generate(prompts, max_new_tokens=8, temperature=2.0, seed=seed) for seed in (0, 0, 9)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0] != drawn[0][2]
    assert model.generate([]) == []
    with pytest.raises(UserError, match="a string or a list of strings"):
        model.generate(5)  # type: ignore[call-overload]


def test_settings_are_values_by_key_and_override_sets(base: str) -> None:
    """`sets=["train.epochs=1"]` is a command line in Python; numbers, lists and names with commas are values."""
    rows = [row(number) for number in range(12)]
    settings = {"packing.context_length": 128, "corpus": Path("own, corpus"), "data.held_out": 0.25}
    found = tunewell.prepare(model=base, data=rows, sets=["corpus=other"], settings=settings, progress=False)
    assert (found.corpus, found.manifest.packing.context_length) == (Path("own, corpus"), 128)
    assert found.manifest.held_out == 4, "a quarter of the documents, and their near duplicates"
    with pytest.raises(UserError, match=r"train\.epoch"):
        tunewell.prepare(model=base, data=rows, settings={"train.epoch": 1}, progress=False)


def test_chat_takes_messages_and_streams(base: str) -> None:
    """A conversation from elsewhere is a list of messages; the next text continues it."""
    model = tunewell.load(base, device="cpu")
    reply = model.chat("Hello")
    assert "".join(model.stream("And you?")) == model.chat(
        [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "And you?"},
        ]
    )
    assert "messages=4" in repr(model)
    model.chat("More")
    assert "messages=6" in repr(model)
    for wrong in ([], [{"role": "assistant", "content": "Hello"}], [{"role": "user"}], [{"role": "tool"}]):
        with pytest.raises(UserError, match="must alternate"):
            model.chat(wrong)


def test_a_dataset_with_several_splits_asks_which_one(base: str) -> None:
    """Testing on the training split by accident is worse than an error."""
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([row(1)])})
    with pytest.raises(UserError, match="several splits: `train`"):
        tunewell.validate(base, data=splits, progress=False)


def test_progress_can_be_a_function_and_runs_on_any_thread(base: str) -> None:
    """Web services call from worker threads, where no signal handler can be installed."""
    events, results = [], []
    rows = [row(number) for number in range(20)]
    settings = SETTINGS | {"verdict": {"after_training": False}}

    def call() -> None:
        results.append(tunewell.train(settings, model=base, data=rows, progress=events.append))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert results and results[0].status == "finished"
    assert {type(event).__name__ for event in events} >= {"Progress", "RunStarted", "StepTaken", "Evaluated"}


@pytest.mark.slow  # the slowest default test: a Jupyter kernel that trains, validates and exports
def test_the_example_of_the_readme_runs_in_a_notebook(base: str, tmp_path: Path) -> None:
    """The ten lines that sell the library must work where they will be pasted."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(import tunewell\n.*?)```", text, re.DOTALL)
    assert code, "the README shows the library"
    rows_file(tmp_path / "chats.jsonl", 40)
    rows_file(tmp_path / "more.jsonl", 4, first=100)
    source = code.group(1).replace("path/to/model", base)
    source = source.replace("train(", f"train({json.dumps(SETTINGS).replace('true', 'True')}, ", 1)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    shown = json.dumps(notebook.cells[0].outputs)
    assert "held-out loss" in shown, "progress is a table in a notebook"


def test_the_table_in_a_notebook_has_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook showed neither how far a run is nor how long it takes."""
    pages: list[str] = []
    shown = SimpleNamespace(HTML=lambda page: page, display=lambda page, display_id: pages.append(page))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=shown))
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    table = NotebookTable()
    table._run.start = SimpleNamespace(plan=SimpleNamespace(num_steps=SimpleNamespace(value=10)))  # type: ignore[assignment]
    monkeypatch.setattr(RunState, "seconds_left", lambda _: 90.0)
    table._run.last = SimpleNamespace(step=4, loss=1.0, tokens=10, seconds=1.0)  # type: ignore[assignment]
    table.update()
    assert '<progress value="4" max="10"' in pages[0] and "about 1 m 30 s left" in pages[0]


@pytest.mark.parametrize(
    ("call", "way_out"),
    [
        (lambda: tunewell.train(learning_rate=1e-3), 'settings={"train.learning_rate": 0.001}'),  # pyright: ignore
        (lambda: tunewell.prepare(max_seq_length=512), 'settings={"packing.context_length": 512}'),  # pyright: ignore
        (lambda: tunewell.sweep({}, epochs=2), 'settings={"train.epochs": 2}'),  # pyright: ignore
        (lambda: tunewell.validate("run", metriks={}), "did you mean `metrics`?"),  # pyright: ignore
        (lambda: tunewell.compare("run", qestions=3), "num_questions"),  # pyright: ignore
    ],
)
def test_an_unknown_keyword_names_what_to_write(call: Callable[[], Any], way_out: str) -> None:
    """Guards a bare TypeError for `learning_rate=`, which other trainers take as a keyword."""
    with pytest.raises(TypeError, match="has no parameter") as error:
        call()
    assert way_out in str(error.value)
