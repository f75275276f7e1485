"""Expected times of commands that load a finished model."""

from pathlib import Path

import pytest

from tunewell.core.progress import Progress, Timetable
from tunewell.planning import pace


@pytest.fixture
def known_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 135M weights on two free cores of 100 GFLOP/s each."""
    own = pace.Pace(135_000_000, 2e11, 2)
    monkeypatch.setattr(pace.Pace, "of", lambda model: own)


def test_every_stage_of_an_export_is_expected_in_its_order(known_size: None) -> None:
    """Guards against stages that the time left does not know, which would stop the clock."""
    stages = pace.export_seconds("model", ["gguf", "ollama"], ["q8_0", "q4_k_m"])
    left: list[float] = []
    table = Timetable(lambda progress: left.append(progress.seconds_left or 0.0), stages, clock=lambda: 0.0)
    for text in (
        "importing torch",
        "loading the trained model",
        "computing logits of the trained model",
        "answering questions with the trained model",
        "sketching the trained tensors",
        "checking the merged weights",
        "writing run-q8_0.gguf",
        "rounding the trained tensors for the verification",
        "deriving the template for Ollama",
        "verifying gguf q8_0",
        "verifying gguf q4_k_m",
        "verifying ollama",
    ):
        table(Progress(text))
    assert len(set(left)) == len(left), "each stage is known"
    assert left == sorted(left, reverse=True)


def test_more_rows_and_a_base_model_take_longer(known_size: None) -> None:
    few = pace.validate_seconds("model", held_out=[60] * 10, questions=10, has_base=False)
    many = pace.validate_seconds("model", held_out=[60] * 100, questions=100, has_base=True)
    assert sum(many.values()) > 2 * sum(few.values())


def test_a_busy_machine_is_expected_to_be_slower() -> None:
    free, busy = (pace.Pace(1_000_000, 2e11 / slow, 2, slow) for slow in (1.0, 4.0))
    assert busy.start() == 4 * free.start() and busy.forward(100) == 4 * free.forward(100)
    assert busy.load() == 4 * free.load()


def test_a_model_of_unknown_size_has_no_expectation(tmp_path: Path) -> None:
    assert pace.export_seconds(str(tmp_path / "none"), ["gguf"], ["q8_0"]) == {}
