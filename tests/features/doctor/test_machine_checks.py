"""Checks of disks, memory, the hub and model files."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import GIB, sound

from tunewell.features.doctor.checks.models import suggest
from tunewell.features.doctor.facts import Disk, ModelState
from tunewell.features.doctor.registry import run_checks
from tunewell.features.doctor.workflow import describe
from tunewell.model_files.checks import read_models, weight_problem

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n"


def found(**machine):
    facts = sound()
    return [(one.id, one.level) for one in run_checks(replace(facts, machine=replace(facts.machine, **machine)))]


def disk(free_bytes, **more):
    return [Disk("the run folder", "/data", free_bytes, **more)]


def test_full_and_nearly_full_disks_are_told_apart():
    """A run stops when the disk is full; a nearly full one may be enough for LoRA."""
    assert found(disks=disk(100 << 20)) == [("disk-full", "broken")]
    assert found(disks=disk(3 * GIB)) == [("disk-low", "warning")]
    assert found(disks=disk(50 * GIB, free_inodes=3)) == [("disk-full", "broken")]
    assert found(disks=disk(50 * GIB, is_writable=False)) == [("disk-read-only", "broken")]


def test_one_file_system_is_reported_once():
    """The run folder and the hub cache are often on the same disk."""
    both = [Disk("the run folder", "/data", 1 << 20), Disk("the hub cache", "/home", 1 << 20)]
    assert found(disks=both) == [("disk-full", "broken")]


def test_little_memory_and_small_shared_memory_are_warnings():
    """Docker's /dev/shm has 64 MiB; the system ends a process that needs more memory than there is."""
    assert found(free_memory_bytes=GIB) == [("memory-low", "warning")]
    assert found(shared_memory_bytes=64 << 20) == [("shm-small", "warning")]
    assert found(free_memory_bytes=None, shared_memory_bytes=None) == []


def test_recorded_facts_of_wsl_name_its_memory_limit():
    """WSL gives Linux half of the memory; the fix is a file on the Windows side."""
    facts = sound()
    facts = replace(facts, machine=replace(facts.machine, is_wsl=True, free_memory_bytes=GIB))
    assert ".wslconfig" in run_checks(facts)[0].fix


def weights(num_bytes: int = 16, cut: int = 0) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}).encode()
    return (struct.pack("<Q", len(header)) + header + bytes(num_bytes))[: -cut or None]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (weights(), None),
        (weights(cut=3), "is truncated"),
        (weights()[:20], "is truncated"),
        (POINTER, "is a Git LFS pointer"),
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>Not found", "is a web page"),
        (b"\xff" * 100, "header is damaged"),
        (struct.pack("<Q", 4) + b"[1] ", "header is damaged"),
    ],
)
def test_damaged_weights_are_found_by_their_header(tmp_path, content, problem):
    """Loading such a file fails with HeaderTooLarge, minutes into a run."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    message = weight_problem(path)
    assert message is None if problem is None else problem in (message or "")


def test_a_truncated_gguf_is_found(tmp_path):
    """Its header is whole, but the tensors are not there."""
    name = b"blk.0.ffn_down.weight"
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 64, 0, 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry)
    assert "is truncated" in (weight_problem(path) or "")
    path.write_bytes(POINTER)
    assert "Git LFS" in (weight_problem(path) or "")


def test_a_model_folder_with_a_pointer_is_named_first(tmp_path, monkeypatch):
    """A clone without git-lfs has pointers instead of weights."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(POINTER)
    first = run_checks(sound(models=read_models("model", base=tmp_path)))[0]
    assert (first.id, first.level) == ("model-lfs-pointer", "broken")
    assert first.commands == [f"git -C {tmp_path / 'model'} lfs pull"]


@pytest.mark.parametrize(("kind", "is_refused"), [("bert", True), ("bloom", False), ("qwen3_next", False)])
def test_a_model_that_cannot_be_trained_is_refused_before_training(tmp_path, kind, is_refused):
    """Training asks the same function; a family that cannot be packed is no problem."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "model.safetensors").write_bytes(weights())
    facts = sound(models=read_models(str(tmp_path)))
    found = run_checks(facts)
    assert [(one.id, one.level) for one in found] == ([("model-not-supported", "broken")] if is_refused else [])
    levels = {"bloom": "document by document", "qwen3_next": "packed with states"}
    assert describe(facts).get("documents", "None").startswith(levels.get(kind, "None"))
    assert not is_refused or "`bert` models are not supported" in found[0].why


def test_a_missing_shard_is_found(tmp_path):
    """The index lists files that were not downloaded."""
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(weights())
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = read_models(str(tmp_path), is_fast=True)[0]
    assert state.damage == [("model-00002-of-00002.safetensors", "is missing, although the index lists it")]


def cached(home: Path, name: str, content: bytes | None) -> Path:
    """Write a model into a hub cache as huggingface_hub does."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True)
    if content is not None:
        (folder / "blobs" / "abc").write_bytes(content)
        (folder / "snapshots" / "1").mkdir(parents=True)
        (folder / "snapshots" / "1" / "model.safetensors").symlink_to("../../blobs/abc")
    return folder


def test_half_downloaded_models_in_the_cache_are_found(tmp_path, monkeypatch):
    """A download that broke off is a warning, and broken if the config names the model."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = cached(tmp_path, "ada/tiny", weights())
    assert run_checks(sound(models=read_models(None))) == []
    (folder / "blobs" / "def.incomplete").write_bytes(b"1")
    assert [one.level for one in run_checks(sound(models=read_models(None)))] == ["warning"]
    broken = run_checks(sound(models=read_models("ada/tiny")))
    assert [(one.id, one.level) for one in broken] == [("model-damaged", "broken")]
    assert broken[0].commands == ["hf download ada/tiny --force-download"]


def test_an_offline_hub_without_the_model_is_broken(tmp_path, monkeypatch):
    """The run would fail when it loads the model; a cached model is enough."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cached(tmp_path, "ada/tiny", weights())
    facts = sound(models=read_models("ada/other"))
    facts = replace(facts, machine=replace(facts.machine, variables={"HF_HUB_OFFLINE": "1"}))
    first = run_checks(facts)[0]
    assert first.id == "hub-offline" and "ada/tiny" in first.why
    assert run_checks(replace(facts, models=read_models("ada/tiny"))) == []
    unreachable = replace(sound(models=read_models("ada/other")), hub_problem="huggingface.co cannot be reached")
    assert [one.id for one in run_checks(unreachable)] == ["hub-unreachable"]


def test_a_model_that_is_nothing_is_named():
    """A typo in a path is neither a folder nor a hub id."""
    for models in ([ModelState("modle", None, True, "other")], read_models("./modle"), read_models("../models/modle")):
        assert run_checks(sound(models=models))[0].id == "model-not-found"


def test_a_model_that_is_larger_than_the_memory_gets_a_suggestion(tmp_path):
    """The weights are counted from the header; the suggestion is of the same family and fits in half the memory."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1 << 20, 1 << 13], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    state = read_models(str(tmp_path))[0]
    assert (state.num_parameters, state.model_type) == (1 << 33, "qwen3")
    facts = sound(models=[state])
    assert run_checks(facts) == []  # 32 GiB in fp32, on a machine with 32 GiB
    facts = replace(facts, machine=replace(facts.machine, memory_bytes=16 * GIB))
    found = run_checks(facts)
    assert [(one.id, one.level) for one in found] == [("model-too-large", "warning")]
    assert "`Qwen/Qwen3-1.7B` or `Qwen/Qwen3-0.6B`" in found[0].fix
    assert run_checks(replace(facts, bytes_per_parameter=0.5)) == []


def test_the_suggested_models_are_ordered_by_size():
    assert suggest("phi", 16 * GIB, 4.0) == ["Qwen/Qwen3-1.7B", "HuggingFaceTB/SmolLM2-1.7B-Instruct"]
    assert suggest("llama", 1 << 20, 4.0) == []
