"""Replay in a run: what the user is told."""

from types import SimpleNamespace
from typing import Any

import pytest

from tunewell.records.plan import Chosen
from tunewell.training.events import Note
from tunewell.training.replay import add_replay


@pytest.mark.parametrize(("setting", "is_told"), [(0.1, True), (0.0, False), ("auto", False)])
def test_a_run_says_why_it_has_no_replay_if_that_was_asked_for(setting: Any, is_told: bool) -> None:
    """A model without a template of its own has none: `train.replay: 0.1` was ignored in silence."""
    notes: list[Note] = []
    config = SimpleNamespace(train=SimpleNamespace(replay=setting))
    parts: Any = SimpleNamespace(plan=SimpleNamespace(replay=Chosen(0.0, because="no template")), config=config)
    run: Any = SimpleNamespace(order=SimpleNamespace(num_replayed=0), listener=notes.append)
    add_replay(parts, run)
    assert [note.message for note in notes] == (["no replay: no template"] if is_told else [])
