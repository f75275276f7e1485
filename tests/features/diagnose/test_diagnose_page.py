"""`tunewell explain FAILURE` shows the page of a failure."""

import json

import pytest

from tunewell.cli.main import main
from tunewell.core import features


def test_the_page_of_a_failure_is_shown_offline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The pages are not part of the repository: this is where a user finds the fix for his tool."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["explain", "oom-cuda"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("CUDA out of memory") and "Axolotl" in shown and "\nWhy\n" in shown
    assert main(["explain", "oom-cuda", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fixes"]["vLLM"].startswith("--gpu-memory-utilization")


def test_every_page_can_be_shown(capsys: pytest.CaptureFixture[str]):
    """A page with a missing text would be found only by the person whose run failed."""
    from tunewell.features.diagnose.knowledge import load_classes

    for name, found in load_classes().items():
        if found.severity != "harmless" and ("-" in name or name == "overfitting"):
            assert main(["explain", name]) == 0, name
            assert found.title in capsys.readouterr().out


def test_a_wrong_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    """A slip must not end in advice about config keys."""
    assert main(["explain", "oom-cud"]) == 2
    assert "did you mean `oom-cuda`" in capsys.readouterr().err


def test_without_the_feature_it_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """`explain oom-cuda` must not claim that the name is wrong."""
    monkeypatch.setattr(features, "features", lambda: {})
    assert main(["explain", "oom-cuda"]) == 2
    assert "the feature `diagnose`" in capsys.readouterr().err.replace("\n", " ")
