"""`tunewell cache`: what is kept outside of projects, with sizes, and deleted by kind."""

import json
from pathlib import Path

import pytest

from tunewell.cli.main import main
from tunewell.core.cache import DiskCache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    DiskCache("probes").write("one", {"a": 1})
    DiskCache("base", ".npz").write("two", b"12345")
    (tmp_path / "hub" / "models--a--b" / "blobs").mkdir(parents=True)
    (tmp_path / "hub" / "models--a--b" / "blobs" / "w").write_bytes(b"123")
    (tmp_path / "hub" / "models--a--b" / "link").symlink_to("blobs/w")
    return tmp_path


def kinds(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    assert main(["cache", "--json", *arguments]) == 0
    return {one["kind"]: one["bytes"] for one in json.loads(capsys.readouterr().out)["kinds"]}


def test_every_kind_has_its_size_and_the_hub_is_counted_once(home: Path, capsys: pytest.CaptureFixture[str]):
    found = kinds(capsys)
    assert found["base"] == 5 and found["hub"] == 3 and found["probes"] > 0
    assert main(["cache"]) == 0
    assert "measured again in the next verdict" in " ".join(capsys.readouterr().out.split())


def test_one_kind_is_deleted_or_all_and_never_the_hub(home: Path, capsys: pytest.CaptureFixture[str]):
    """Guards models of other programs, and the kinds that were not named."""
    left = kinds(capsys, "--clear", "base")
    assert left["base"] == 0 and left.keys() >= {"probes", "hub"}
    assert DiskCache("probes").read("one") == {"a": 1}
    assert kinds(capsys, "--clear", "all")["hub"] == 3 and DiskCache("probes").read("one") is None
    assert main(["cache", "--clear", "hub"]) == 2
    assert "nothing of the kind `hub` is kept" in capsys.readouterr().err
