"""How a run ended can be read back, whatever its numbers were."""

import json
import math

import pytest

from tunewell.core.errors import UserError
from tunewell.records.base import read_record
from tunewell.records.rundir import HeldOutLosses, Outcome, write_outcome

OUTCOME = Outcome(
    made_by="tunewell 0.1.0",
    status="interrupted",
    reason="SIGTERM came at step 7",
    steps=7,
    planned_steps=40,
    first_loss=2.5,
    last_loss=1.25,
    held_out=HeldOutLosses(first=2.75, last=1.5, best=1.5),
    best_step=5,
    seconds=12.5,
    tokens=7_000,
    signal="SIGTERM",
    artefacts={"best": "checkpoints/step-000005"},
)


def test_an_outcome_comes_back_as_it_was(tmp_path):
    """Programs decide by it."""
    write_outcome(tmp_path, OUTCOME)
    assert read_record(tmp_path / "outcome.json", Outcome) == OUTCOME


def test_losses_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    """A run that diverged must say so in a file that every program can read."""
    write_outcome(tmp_path, OUTCOME.model_copy(update={"last_loss": math.nan, "first_loss": -math.inf}))
    raw = json.loads((tmp_path / "outcome.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (raw["last_loss"], raw["first_loss"]) == ("nan", "-inf")
    outcome = read_record(tmp_path / "outcome.json", Outcome)
    assert outcome.last_loss is not None
    assert math.isnan(outcome.last_loss) and outcome.first_loss == -math.inf


@pytest.mark.parametrize("text", ["", "[]", "{", '{"status": "fine"}'])
def test_a_damaged_outcome_is_said_to_be_damaged(tmp_path, text):
    """Not a traceback."""
    (tmp_path / "outcome.json").write_text(text)
    with pytest.raises(UserError, match="is damaged"):
        read_record(tmp_path / "outcome.json", Outcome)


def test_an_outcome_of_the_future_is_not_guessed_at(tmp_path):
    """Its words may mean something else."""
    (tmp_path / "outcome.json").write_text('{"format_version": 99}')
    with pytest.raises(UserError, match="newer version of tunewell"):
        read_record(tmp_path / "outcome.json", Outcome)
