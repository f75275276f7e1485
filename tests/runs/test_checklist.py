"""The check list before the first step."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config, Evaluate, MethodSettings
from tunewell.machine.facts import DeviceFacts
from tunewell.records.plan import Chosen
from tunewell.records.prediction import MemoryPrediction, Prediction, TimePrediction
from tunewell.runs import checklist as module
from tunewell.runs.checklist import checklist, settings_without_effect, warnings

GIB = 1 << 30


def items(tmp_path, monkeypatch, *, held_out=4, free=20 * GIB, disk=100 * GIB, templates=("chatml",), prediction=None):
    """Return the items by name."""
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=disk))
    plan = SimpleNamespace(
        device=Chosen[str](value="cuda:0", because="the first GPU found"),
        precision=Chosen[str](value="bf16", because="supported"),
        updates="100 updates of up to 64 rows",
        packing=Chosen[str](value="packed with states", because="layers start anew"),
        num_steps=Chosen[int](value=100, because="x"),
        epochs=Chosen[float](value=3.0, because="x"),
        prediction=prediction,
    )
    split = SimpleNamespace(documents=56, supervised=436, tokens=1851)
    records = [SimpleNamespace(name=name) for name in templates]
    counts = {"dropped": {"empty": 2}, "held_out": held_out, "selected": 3}
    manifest = SimpleNamespace(splits={"train": split}, templates=records, **counts)
    device = DeviceFacts("cuda", "cuda:0", "NVIDIA T4", 24 * GIB, free, has_bf16=True, has_flash=True)
    found = checklist(plan, manifest, device, folder=tmp_path, checkpoint_bytes=GIB, keep=2)  # type: ignore[arg-type]
    return {item.name: item for item in found}


def test_the_list_has_every_item_in_order(tmp_path, monkeypatch):
    """Device, precision, documents, memory, disk, data, template and time: what a user asks before a long run."""
    found = items(tmp_path, monkeypatch)
    assert list(found) == ["device", "precision", "documents", "memory", "disk", "data", "template", "time"]
    assert [name for name, item in found.items() if item.state != "ok"] == ["time"]
    assert found["data"].value == (
        "56 documents (436 of 1,851 tokens trained on), 3 for choosing, 4 held out, 2 rows dropped, 3 epochs"
    )
    assert found["documents"].value == "packed with states: layers start anew"
    assert "known after the first steps" in found["time"].value


def test_what_is_missing_is_marked(tmp_path, monkeypatch):
    """No held-out rows, a full disk and a full GPU are seen before step 1, and stay in the log as notes."""
    found = items(tmp_path, monkeypatch, held_out=0, free=GIB, disk=2 * GIB)
    assert [name for name, item in found.items() if item.state == "warn"] == ["memory", "disk", "data"]
    notes = list(warnings(list(found.values())))
    assert len(notes) == 2 and notes[1].startswith("disk space: checkpoints need about")


@pytest.mark.parametrize(("fits", "state"), [(True, "ok"), (False, "warn")])
def test_predictions_are_shown_if_there_are_any(tmp_path, monkeypatch, fits, state):
    """The planner predicts memory and time; the list compares them with what is free."""
    size = 10 * GIB
    memory = MemoryPrediction(peak_bytes=size, needed_bytes=size, low_bytes=size, high_bytes=size)
    prediction = Prediction(fits=fits, memory=memory, seconds=TimePrediction(low=60.0, high=90.0, expected=75.0))
    found = items(tmp_path, monkeypatch, prediction=prediction)
    assert found["memory"].state == state and found["memory"].value.startswith("about 10.0 GiB expected; 20.0 GiB of")
    assert (
        found["time"].value == "1 m 00 s to 1 m 30 s in all; 100 updates of up to 64 rows"
        and found["time"].state == "ok"
    )


def test_plain_text_needs_no_template(tmp_path, monkeypatch):
    """Rows of text are trained on as they are."""
    assert items(tmp_path, monkeypatch, templates=())["template"].value == "none: the rows are plain text"


def loaded(config):
    return LoadedConfig(config, Path(), None, {})


@pytest.mark.parametrize(
    ("selected", "because", "words"),
    [(0, "5% of 40 rows are fewer than 20", "5% of 40 rows"), (0, "", "no slice"), (30, "5%", "answers take too long")],
)
def test_patience_without_compared_checkpoints_has_no_effect(selected, because, words):
    """A setting that is ignored is reported, with the reason."""
    config = loaded(Config(evaluate=Evaluate(patience=3)))
    manifest = SimpleNamespace(selected=selected, selected_because=because)
    (note,) = settings_without_effect(config, manifest, is_selecting=False)
    assert "evaluate.patience" in note and words in note
    assert list(settings_without_effect(config, manifest, is_selecting=True)) == []


def test_settings_of_an_adapter_have_no_effect_on_full_fine_tuning():
    """`modules_to_save` and `rank` were ignored without a warning."""
    given = MethodSettings(kind="full", rank=8, layers=(0,), modules_to_save=("lm_head",))
    found = list(settings_without_effect(loaded(Config(method=given)), None, is_selecting=True))
    assert [note.partition("`")[2].partition("`")[0] for note in found] == ["method.rank", "method.modules_to_save"]
    own = loaded(Config(method=MethodSettings(rank=8)))
    assert list(settings_without_effect(own, None, is_selecting=True)) == []
