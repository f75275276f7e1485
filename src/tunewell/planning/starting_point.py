"""Choose epochs, learning rate and LoRA rank for a first run from the number of rows and the size of the model."""

from dataclasses import dataclass

from tunewell.core.units import count
from tunewell.records.plan import Chosen


@dataclass(frozen=True)
class StartingPoint:
    """The values that `init` writes into a new config."""

    epochs: Chosen[float]
    learning_rate: Chosen[float]
    rank: Chosen[int]
    alpha: Chosen[int]


_EPOCHS = ((2_000, 5), (10_000, 3), (100_000, 2))
_RANKS = ((1_000, 16), (20_000, 32))
_RATES = ((500_000_000, 1e-3), (2_000_000_000, 5e-4))


def starting_point(num_rows: int, num_parameters: int | None) -> StartingPoint:
    """Return the values for a first run; the safest ones if the size of the model is unknown."""
    epochs = next((epochs for limit, epochs in _EPOCHS if num_rows < limit), 1)
    rank = next((rank for limit, rank in _RANKS if num_rows < limit), 64)
    rate = next((rate for limit, rate in _RATES if (num_parameters or limit) < limit), 2e-4)
    return StartingPoint(
        epochs=Chosen[float](value=epochs, because=_why_epochs(num_rows, epochs)),
        learning_rate=Chosen[float](value=rate, because=_why_rate(num_parameters)),
        rank=Chosen[int](value=rank, because=_why_rank(num_rows, rank)),
        alpha=Chosen[int](value=2 * rank, because="twice the rank; change both together"),
    )


def _why_epochs(num_rows: int, epochs: int) -> str:
    if epochs == 1:
        return f"{count(num_rows, 'row')} are enough, so each is shown once"
    return f"{count(num_rows, 'row')} are few, so each is shown {epochs} times"


def _why_rate(num_parameters: int | None) -> str:
    if num_parameters is None:
        return "model size unknown; 2e-4 suits LoRA on models of several billion parameters"
    size = f"{num_parameters / 1e6:,.3g} M" if num_parameters < 1e9 else f"{num_parameters / 1e9:,.1f} B"
    return f"for LoRA on {size} parameters; small models need higher rates than large ones"


def _why_rank(num_rows: int, rank: int) -> str:
    if rank == 16:
        return f"enough capacity for {count(num_rows, 'row')}"
    return f"{count(num_rows, 'row')} need more than rank 16"
