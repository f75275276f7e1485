"""The result of `tunewell plan`: the prediction, the ladder, other cards, and the object that `--json` prints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunewell.core.html import render
from tunewell.core.plot import BarChart, BarRow
from tunewell.core.units import duration, size_bytes
from tunewell.machine.cards import Card
from tunewell.machine.facts import DeviceFacts
from tunewell.planning.advice import Advice
from tunewell.planning.fit import Rung
from tunewell.records.plan import Chosen, Plan, QuantizedBase
from tunewell.records.prediction import Prediction

EXIT_DOES_NOT_FIT = 2
_STATES = {"steps": ("optimizer", "gradients"), "evaluation": ("optimizer",), "generation": ("optimizer",)}
_HELD = ("weights", "adapter", "process", "CUDA context")
_MEMORY_PARTS = {0: "weights and process", 1: "optimizer and gradients", 2: "activations and buffers"}
_NEAR = 1.5
"""A free memory up to this multiple of the highest value is on the axis; beyond it, the bars would be short."""


def first_fitting(ladder: Sequence[Rung]) -> Rung | None:
    """Return the mildest change with which a run fits, or None."""
    return next((rung for rung in ladder if rung.fits), None)


def _cost(price: float | None, prediction: Prediction | None) -> float | None:
    return price * prediction.seconds.expected / 3600 if price is not None and prediction else None


def memory_chart(prediction: Prediction) -> BarChart:
    """Return the memory of each phase beside the free memory: weights, what the optimizer adds, and the rest."""
    memory, rows = prediction.memory, list[BarRow]()
    for name, size in memory.phases.items():
        held, state = (sum(memory.parts.get(part, 0) for part in parts) for parts in (_HELD, _STATES.get(name, ())))
        held = min(held, size)
        state = min(state, size - held)
        rows.append(BarRow(name, [size_bytes(size)], (held, state, size - held - state)))
    label = "highest, measured" if prediction.is_measured else "highest, expected"
    ends = memory.low_bytes, memory.peak_bytes, memory.high_bytes
    rows.append(BarRow(label, [size_bytes(memory.peak_bytes)], interval=ends))
    high = max(memory.high_bytes, *memory.phases.values())
    ticks = [(0, "0")]
    if memory.free_bytes is not None:
        high = max(high, min(memory.free_bytes, _NEAR * high))
        is_off = memory.free_bytes > high
        ticks.append((memory.free_bytes, f"{size_bytes(memory.free_bytes)} free{' →' if is_off else ''}"))
    return BarChart("memory by phase", [""], rows, high, _MEMORY_PARTS, ticks)


@dataclass(frozen=True)
class CardRow:
    """The same run on another card."""

    card: Card
    prediction: Prediction | None
    """None if the config cannot run there."""
    problem: str = ""
    """Why the config cannot run there, and what to change."""
    ladder: Sequence[Rung] = ()
    """What would make the run fit there; empty if it fits."""
    micro_batch_tokens: int = 0
    price: float | None = None
    """Per hour."""

    @property
    def fits(self) -> bool:
        return self.prediction is not None and self.prediction.fits

    @property
    def chosen(self) -> Rung | None:
        """The mildest change with which the run fits."""
        return first_fitting(self.ladder)

    @property
    def cost(self) -> float | None:
        return _cost(self.price, self.prediction)


@dataclass(frozen=True)
class PlanResult:
    """The plan of a run with its prediction, the ladder if it does not fit, and notes about the machine."""

    plan: Plan
    prediction: Prediction
    model: str
    num_parameters: int
    device: DeviceFacts
    tokens_per_second: float
    ladder: Sequence[Rung] = ()
    cards: Sequence[CardRow] = ()
    card: Card | None = None
    """The first of the cards on which the run fits, or fits with changes; `ladder` is for this card."""
    fitting_cards: Sequence[str] = ()
    notes: Sequence[str] = ()
    advice: Advice | None = None
    price: float | None = None
    """Of this machine per hour."""
    sizes: Sequence[tuple[int, float]] = ()
    """Measured tokens/s by micro-batch size."""

    @property
    def fits(self) -> bool:
        return self.prediction.fits

    @property
    def chosen(self) -> Rung | None:
        """The mildest change with which the run fits."""
        return first_fitting(self.ladder)

    @property
    def exit_code(self) -> int:
        """2 if the run does not fit. With `--gpu`, if it fits on none of the cards."""
        if self.cards:
            return 0 if any(row.fits for row in self.cards) else EXIT_DOES_NOT_FIT
        return 0 if self.fits else EXIT_DOES_NOT_FIT

    @property
    def cost(self) -> float | None:
        return _cost(self.price, self.prediction)

    @property
    def memory_chart(self) -> BarChart:
        """The memory of each phase beside the free memory."""
        return memory_chart(self.prediction)

    @property
    def time_range(self) -> str:
        seconds = self.prediction.seconds
        return f"{duration(seconds.low)} to {duration(seconds.high)}"

    def __repr__(self) -> str:
        memory = size_bytes(self.prediction.memory.uncached_bytes)
        return f"PlanResult(fits={self.fits}, memory={memory!r}, time={self.time_range!r})"

    def _repr_html_(self) -> str:
        return render("tunewell.planning", "plan.html", result=self)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `plan --json` prints."""
        prediction = self.prediction.model_dump(mode="json")
        return {
            **prediction,
            "micro_batch_tokens": self.plan.micro_batch_tokens.value,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "micro_batches": [{"tokens": tokens, "tokens_per_second": rate} for tokens, rate in self.sizes],
            "cost": self.cost,
            "device": self.device.label,
            "plan": self.plan.model_dump(
                include={name for name, value in self.plan if isinstance(value, Chosen | QuantizedBase)}
            ),
            "ladder": [rung.as_json() for rung in self.ladder],
            "fits_on": self.fitting_cards,
            "cards": [
                {
                    "card": row.card.name,
                    "fits": row.fits,
                    "problem": row.problem or None,
                    "ladder": [rung.as_json() for rung in row.ladder],
                    "peak_bytes": row.prediction.memory.uncached_bytes if row.prediction else None,
                    "seconds": row.prediction.seconds.model_dump(include={"low", "high"}) if row.prediction else None,
                    "micro_batch_tokens": row.micro_batch_tokens,
                    "cost": row.cost,
                }
                for row in self.cards
            ],
            "advice": self.advice.as_json() if self.advice else None,
            "notes": self.notes,
            "exit_code": self.exit_code,
        }
