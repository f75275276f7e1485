"""Combinations of method, precision, tokens, saved modules, model and export, from rows to a proven export."""

from pathlib import Path
from typing import Any

import pytest
from combination_matrix import (
    COMBINATIONS,
    EXPORTS,
    METHODS,
    MODELS,
    PRECISIONS,
    REFUSED,
    SAMPLE,
    Combination,
    refuse,
    run,
    write_models,
)

from tunewell.machine.device import probe_device

# A processor without bf16 refuses it.
_HAS_BF16 = probe_device("cpu").has_bf16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("combinations"))


def _check(combination: Combination, models: Path) -> None:
    if combination.precision == "bf16" and not _HAS_BF16:
        assert "bf16 cannot be used" in refuse(combination.settings(), models).what
    else:
        run(combination, models)


@pytest.mark.parametrize("combination", SAMPLE, ids=str)
def test_a_sample_of_the_combinations_goes_from_rows_to_a_proven_export(combination: Combination, models: Path) -> None:
    """Guards the casts between fp32 and 16 bits: LoRA with added tokens crashed at the first evaluation."""
    _check(combination, models)


@pytest.mark.slow
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_combination_goes_from_rows_to_a_proven_export(combination: Combination, models: Path) -> None:
    """The held-out loss is also computed by transformers, in fp32, on the exported files."""
    _check(combination, models)


def test_the_matrix_is_large_and_its_sample_has_every_value() -> None:
    """A changed matrix must not leave a value untested by default."""
    assert len(set(COMBINATIONS)) >= 80 and len(SAMPLE) == 12
    values = {str(value) for one in SAMPLE for value in (one.method, one.precision, one.model, one.export)}
    assert values >= {*METHODS, *PRECISIONS, *MODELS, *EXPORTS}
    assert {(one.tokens, one.saved) for one in SAMPLE} >= {("own", "none"), ("added", "none"), ("added", "tables")}


@pytest.mark.parametrize(("settings", "text"), REFUSED, ids=str)
def test_a_combination_that_cannot_work_is_refused_before_the_first_step(
    settings: dict[str, Any], text: str, models: Path
) -> None:
    """The error says what is wrong and what to do instead."""
    error = refuse(settings, models)
    assert text in error.what and error.fix
