"""What a session tells the verdict about the training."""

from types import SimpleNamespace
from typing import Any

import pytest

from tunewell.evaluation.session import _training_settings
from tunewell.records.report import RowCounts


@pytest.mark.parametrize(("held_out", "number"), [("auto", 3_060), (0.02, 3_060), ("held.csv", 3_000)])
def test_rows_of_a_test_file_are_not_rows_that_could_be_held_out(held_out: Any, number: int) -> None:
    """`153 of 3,060 rows are held out` with `data.held_out: auto`: without the file there are 3,000 rows."""
    chosen = SimpleNamespace(value=1.0)
    plan = SimpleNamespace(
        replay=None, learning_rate=chosen, epochs=chosen, corpus="corpus", config={"data": {"held_out": held_out}}
    )
    ref: Any = SimpleNamespace(adapter=None, path=None, name="model", plan=plan, kind="run", corpus=None)
    sums: dict[str, Any] = {"dropped": {}, "tokens": 1, "supervised": 1, "sources": []}
    counts = RowCounts(rows=3_060, documents=2_850, selected=150, held_out=60, **sums)
    assert _training_settings(ref, counts)["num_rows"] == number
