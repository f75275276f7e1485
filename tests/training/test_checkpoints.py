"""A checkpoint gives back what was saved to the last bit; the newest, the best and enough of the rest are kept."""

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from checkpoint_states import FILES, filled, names, same, state_at
from tunewell.core.errors import UserError
from tunewell.records import checkpoint as records
from tunewell.records.checkpoint import verify
from tunewell.training import checkpoints as staging
from tunewell.training.checkpoints import Checkpoints, State, compare_identity, disk_space_warning
from tunewell.training.find_checkpoints import Saved, find_best, find_newest


def fail_on_trouble(message: str) -> None:
    raise AssertionError(message)


def opened(folder, *, keep=2):
    return Checkpoints(folder, keep=keep, on_trouble=fail_on_trouble)


def test_what_was_saved_comes_back_to_the_last_bit(tmp_path):
    """Resuming from almost the same state gives another run."""
    checkpoints = opened(tmp_path / "checkpoints")
    checkpoints.save(state_at(7), wait=True)
    saved = checkpoints.newest()
    assert saved is not None and saved.step == 7
    assert same(checkpoints.load(saved), state_at(7))
    assert names(tmp_path / "checkpoints") == ["step-000007"]


def test_the_tensors_can_be_read_by_safetensors_itself(tmp_path):
    """A checkpoint is no private format: other tools open its files."""
    filled(tmp_path, [7])
    read = safetensors.torch.load_file(tmp_path / "step-000007" / FILES[0])
    expected = state_at(7).tensors[FILES[0]]
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_the_files_are_those_that_safetensors_would_write(tmp_path):
    """Hashes of checkpoints must not depend on who wrote the header: dtypes, scalars, empty tensors, odd names."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
    tensors = {f'{number} é "{dtype}\\': torch.arange(6).view(2, 3).to(dtype) for number, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "claim": torch.tensor([True, False])}
    files = {"some.safetensors": tensors, "none.safetensors": {}, "transposed.safetensors": {"t": torch.randn(3, 5).T}}
    opened(tmp_path).save(State(1, tensors=files), wait=True)
    for name, own in files.items():
        expected = safetensors.torch.save({key: tensor.contiguous() for key, tensor in own.items()})
        assert (tmp_path / "step-000001" / name).read_bytes() == expected


def test_a_checkpoint_that_this_process_wrote_is_not_hashed_again(tmp_path, monkeypatch):
    """The end of a run asks for the newest and the best: with 13 GB each, that took longer than saving."""
    filled(tmp_path, [1])
    hashed: list[str] = []
    original = records.sha256_file
    monkeypatch.setattr(records, "sha256_file", lambda path: (hashed.append(path.parent.name), original(path))[1])
    checkpoints = opened(tmp_path)
    checkpoints.save(state_at(2), is_best=True)
    newest, best = checkpoints.newest(), checkpoints.best()
    assert newest is not None and best is not None and (newest.step, best.step) == (2, 2)
    assert "step-000002" not in hashed
    other = opened(tmp_path).newest()
    assert other is not None and "step-000002" in hashed


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    """Loading a pickle runs its author's code."""
    filled(tmp_path, [7])
    files = {path.relative_to(tmp_path / "step-000007").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {*FILES, "manifest.json"}


def test_training_may_change_its_tensors_as_soon_as_save_returns(tmp_path, monkeypatch):
    """Otherwise a checkpoint holds a bit of step 7 and a bit of step 8."""
    may_write, write = threading.Event(), staging.write_synced
    monkeypatch.setattr(staging, "write_synced", lambda *a: (may_write.wait(10), write(*a)))
    checkpoints, state = opened(tmp_path), state_at(7)
    checkpoints.save(state)
    for tensors in state.tensors.values():
        for tensor in tensors.values():
            tensor.zero_()
    state.progress["quarantine"].append(99)
    state.texts["state.json"] = "other"
    may_write.set()
    saved = checkpoints.newest()
    assert saved is not None
    assert same(checkpoints.load(saved), state_at(7))


def test_saving_does_not_wait_for_the_disk_but_the_next_save_does(tmp_path, monkeypatch):
    """Two saves at once would write into each other; one slow save must not stop the training."""
    may_write, write, order = threading.Event(), staging.write_synced, []

    def slow(path, *parts):
        may_write.wait(10)
        order.append(path.parts[len(tmp_path.parts)])
        write(path, *parts)

    monkeypatch.setattr(staging, "write_synced", slow)
    checkpoints = opened(tmp_path)
    checkpoints.save(state_at(1))
    assert order == []
    threading.Timer(0.05, may_write.set).start()
    checkpoints.save(state_at(2))
    assert set(order[:3]) == {"step-000001.tmp"}
    checkpoints.wait()
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_a_mistake_in_the_writing_thread_is_not_lost(tmp_path, monkeypatch):
    """An exception in a thread that nobody asks is a run without checkpoints."""
    monkeypatch.setattr(staging, "write_manifest", lambda folder, manifest: 1 / 0)
    checkpoints = opened(tmp_path)
    checkpoints.save(state_at(1))
    with pytest.raises(ZeroDivisionError):
        checkpoints.wait()


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4, 9, 10]), (2, [4, 9, 10]), (3, [4, 8, 9, 10]), (20, list(range(1, 11)))]
)
def test_the_newest_stay_two_at_least_and_the_best(tmp_path, keep, left):
    """One alone may be damaged, and the best is what the user wants in the end."""
    filled(tmp_path, list(range(1, 11)), best=4, keep=keep)
    assert names(tmp_path) == [f"step-{step:06d}" for step in left]


def test_the_best_is_known_after_a_restart_and_stays_until_a_better_one_is_whole(tmp_path):
    """Which one is best must not live in memory alone."""
    filled(tmp_path, [1, 2, 3, 4], best=1)
    checkpoints = opened(tmp_path)
    newest, best = checkpoints.newest(), checkpoints.best()
    assert newest is not None and best is not None and best.step == 1
    assert same(checkpoints.load(best), state_at(1))
    checkpoints.load(newest)
    checkpoints.save(state_at(5), wait=True)
    assert names(tmp_path) == ["step-000001", "step-000004", "step-000005"]
    checkpoints.save(state_at(6), is_best=True, wait=True)
    assert names(tmp_path) == ["step-000005", "step-000006"]
    best = checkpoints.best()
    assert best is not None and best.step == 6


def test_a_step_saved_again_replaces_the_first(tmp_path):
    """The last periodic checkpoint and the final one often fall on the same step."""
    checkpoints = opened(tmp_path)
    checkpoints.save(state_at(1))
    checkpoints.save(state_at(2), is_best=True)
    again = state_at(2)
    again.progress["at_end"] = True
    checkpoints.save(again, wait=True)
    saved = checkpoints.best()
    assert saved is not None and saved.step == 2 and saved.manifest.progress["at_end"] is True
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_a_run_that_went_back_is_not_resumed_from_what_it_left(tmp_path):
    """After a rewind from 30 to 20, the checkpoint of 30 holds the weights that were fled from."""
    filled(tmp_path, [10, 20, 30], best=30, keep=3)
    checkpoints = opened(tmp_path, keep=3)
    checkpoints.load(Saved(tmp_path / "step-000020", verify(tmp_path / "step-000020")))
    checkpoints.save(state_at(25), wait=True)
    assert names(tmp_path) == ["step-000010", "step-000020", "step-000025"]
    assert checkpoints.best() is None


def test_order_is_by_step_number_whatever_the_clock_said(tmp_path, monkeypatch):
    """Clocks jump back a day, and copied files have the time of the copy: by time, the newest would be deleted."""
    clock = iter(range(10**9, 0, -86_400))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    checkpoints = opened(tmp_path)
    for step in [999_999, 1_000_000, 1_000_001]:
        checkpoints.save(state_at(step), wait=True)
        os.utime(tmp_path / f"step-{step:06d}", (2**31 - step, 2**31 - step))
    assert names(tmp_path) == ["step-1000000", "step-1000001"]
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 1_000_001


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("file", "name"), [(FILES[0], "lora_B"), (FILES[1], "lora_A/exp_avg")])
def test_a_state_that_is_not_finite_is_never_written(tmp_path, bad, file, name):
    """Other trainers save all-NaN weights and exit with 0."""
    told = filled(tmp_path, [1])
    checkpoints, spoiled = Checkpoints(tmp_path, keep=2, on_trouble=told.append), state_at(2)
    spoiled.tensors[file][name].view(-1)[7] = bad
    checkpoints.save(spoiled, wait=True)
    assert told == [
        f"checkpoint `step-000002` was not saved: `{name}` in `{file}` is not finite;"
        " training continues with the previous one"
    ]
    assert checkpoints.trouble is not None
    assert names(tmp_path) == ["step-000001"]


def test_leftovers_of_a_killed_run_are_removed_at_the_start_and_nothing_else(tmp_path):
    """Half a checkpoint takes room for ever; the user's own files are none of ours."""
    filled(tmp_path, [1, 2])
    for name in ["step-000003.tmp", ".step-000002.old", ".step-000001.trash", "mine.tmp", "step-x"]:
        (tmp_path / name / "inside").mkdir(parents=True)
    newest = opened(tmp_path).newest()
    assert newest is not None and newest.step == 2
    assert names(tmp_path) == ["mine.tmp", "step-000001", "step-000002", "step-x"]


def test_readers_leave_a_running_save_alone(tmp_path):
    """`validate` may look at a run that is still going on."""
    filled(tmp_path, [1, 2], best=1)
    (tmp_path / "step-000003.tmp").mkdir()
    newest, best = (find(tmp_path, on_trouble=fail_on_trouble) for find in (find_newest, find_best))
    assert newest is not None and best is not None and (newest.step, best.step) == (2, 1)
    assert (tmp_path / "step-000003.tmp").exists()


def test_a_run_that_has_saved_nothing_has_no_newest_and_no_best(tmp_path):
    """Killed before its first checkpoint, it starts again from step 0."""
    checkpoints = opened(tmp_path)
    assert checkpoints.newest() is None
    assert checkpoints.best() is None


def test_a_checkpoint_that_never_had_a_needed_file_is_refused_by_name(tmp_path):
    """Other trainers resume without the optimizer's state, silently, with another result."""
    state = state_at(3)
    del state.tensors["optimizer.safetensors"]
    checkpoints = opened(tmp_path)
    checkpoints.save(state, wait=True)
    saved = checkpoints.newest()
    assert saved is not None
    with pytest.raises(UserError, match=r"`step-000003` has no `optimizer\.safetensors` and no `rng\.safetensors`"):
        checkpoints.load(saved, needs=["optimizer.safetensors", "rng.safetensors", "state.json"])
    assert same(checkpoints.load(saved, needs=["state.json"]), state)


@pytest.mark.parametrize(
    "name", ["../out.json", "/etc/x.json", "a/../../b.json", "manifest.json", "a\\b.json", "", "c:d"]
)
def test_a_file_that_would_lie_outside_the_checkpoint_is_refused(tmp_path, name):
    """Names come from models and adapters, and models come from strangers."""
    with pytest.raises(ValueError, match="is not a valid name"):
        opened(tmp_path).save(State(1, texts={name: "x"}))
    assert names(tmp_path) == []


def test_numbers_that_are_not_finite_come_back_in_the_progress_as_numbers(tmp_path):
    """The best loss before the first look is infinite, and is compared with the next one."""
    checkpoints = opened(tmp_path)
    checkpoints.save(State(1, progress={"best": float("inf"), "all": [{"worst": -float("inf")}, "info"]}), wait=True)
    saved = checkpoints.newest()
    assert saved is not None
    assert checkpoints.load(saved).progress == {"best": float("inf"), "all": [{"worst": -float("inf")}, "info"]}


def test_what_json_cannot_hold_is_refused_where_it_is_given(tmp_path):
    """A mistake of ours must not come to light in another thread, steps later."""
    with pytest.raises(TypeError, match="not JSON serializable"):
        opened(tmp_path).save(State(1, progress={"loss": torch.ones(())}))
    assert names(tmp_path) == []


def test_too_little_room_for_the_checkpoints_is_said_before_the_first(tmp_path, monkeypatch):
    """Kept ones, the best, that of the lowest loss, and the one being written: keep 3 needs six at once."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=6 << 30))
    assert disk_space_warning(tmp_path, checkpoint_bytes=1 << 30, keep=3) is None
    warning = disk_space_warning(tmp_path, checkpoint_bytes=(1 << 30) + 1, keep=3)
    assert warning == "disk space: checkpoints need about 6.0 GiB (6 at once), 6.0 GiB are free"
    assert disk_space_warning(tmp_path, checkpoint_bytes=(6 << 30) // 5, keep=1) is None


BEFORE = {"seed": 0, "learning_rate": 0.001, "betas": (0.9, 0.99), "corpus_sha256": "ab" * 32, "rows": 5}


def test_the_same_run_differs_in_nothing_after_a_trip_through_the_file(tmp_path):
    """A tuple comes back as a list, and 1.0 must still be 1."""
    assert compare_identity(json.loads(json.dumps(BEFORE)), BEFORE | {"seed": 0.0}, set()) == []


def test_a_changed_run_is_refused_with_a_line_per_difference_and_the_way_to_allow_it():
    """Going on with other data or another rate gives numbers that belong to no run."""
    now = {"seed": 0, "learning_rate": 0.0005, "betas": [0.9, 0.99], "corpus_sha256": "cd" * 32, "new": None}
    with pytest.raises(UserError) as caught:
        compare_identity(BEFORE, now, {"new"})
    assert caught.value.what.splitlines() == [
        "the settings differ from those of the checkpoint:",
        "  learning_rate: 0.001 in the checkpoint, 0.0005 now",
        "  corpus_sha256: abababababab... in the checkpoint, cdcdcdcdcdcd... now",
        "  rows: 5 in the checkpoint, not set now",
    ]
    assert "`--allow-change learning_rate` `--allow-change corpus_sha256`" in (caught.value.fix or "")


def test_what_was_allowed_is_given_back_to_be_written_down():
    """An allowed change is on the record, and a name allows no other that starts like it."""
    now = BEFORE | {"learning_rate": 0.0005, "betas": [0.9, 0.99], "rows": 6}
    assert compare_identity(BEFORE, now, {"learning_rate", "rows"}) == [
        "learning_rate: 0.001 in the checkpoint, 0.0005 now",
        "rows: 5 in the checkpoint, 6 now",
    ]
    with pytest.raises(UserError, match="rows: 5"):
        compare_identity(BEFORE, now, {"learning_rate", "row"})


def test_many_differences_are_counted_and_not_all_shown():
    """A screen full of hashes hides the one that matters."""
    with pytest.raises(UserError) as caught:
        compare_identity({}, {f"key{number}": number for number in range(9)}, set())
    assert caught.value.what.splitlines()[-1] == "  and 4 more"


@pytest.mark.gpu
def test_a_state_on_the_gpu_is_copied_before_the_next_step_changes_it(tmp_path):
    """The copy only waits in the stream: what runs after `save` must not overtake it."""
    weights = torch.randn(4096, 4096, device="cuda")
    expected = weights.cpu()
    checkpoints = opened(tmp_path)
    checkpoints.save(State(1, tensors={"a.safetensors": {"w": weights, "t": weights.T}}))
    weights.mul_(0)
    saved = checkpoints.newest()
    assert saved is not None
    loaded = checkpoints.load(saved).tensors["a.safetensors"]
    assert torch.equal(loaded["w"], expected) and torch.equal(loaded["t"], expected.T)
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=2, on_trouble=told.append)
    weights[4095, 4095] = float("nan")
    checkpoints.save(State(2, tensors={"a.safetensors": {"w": weights, "half": weights.bfloat16()}}), wait=True)
    assert len(told) == 1 and "`w` in `a.safetensors` is not finite" in told[0]
