"""Make a run fit: choose a micro-batch that fits, and list what else would, from the mildest change on (the ladder)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.units import count, duration, size_bytes
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus
from tunewell.hardware.cards import Card, known_cards
from tunewell.hardware.facts import DeviceFacts
from tunewell.models.shape import ModelShape
from tunewell.planning.forecast import Measured, Outlook, predict, workload_of
from tunewell.planning.plan import ThreadMeasurement, plan_run
from tunewell.planning.workload import Workload
from tunewell.records.plan import Chosen, Plan
from tunewell.records.prediction import Prediction

_MIN_MICRO_TOKENS = 64
_MIN_CONTEXT = 256
_LOWER_RANK = 8
_CERTAIN = 0.85
"""A computed run is refused only if even this share of its memory is not free."""

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Rung:
    """One way to make a run fit: the config keys to change, and what the run then needs."""

    name: str
    changes: dict[str, Any]
    """Dotted config keys and their new values."""
    prediction: Prediction
    cost: str = ""
    """What is given up."""

    def as_json(self) -> dict[str, Any]:
        """Return the object in `plan --json`."""
        memory, seconds = self.prediction.memory, self.prediction.seconds
        return {
            "name": self.name,
            "set": self.changes,
            "fits": self.prediction.fits,
            "peak_bytes": memory.uncached_bytes,
            "seconds": {"low": seconds.low, "high": seconds.high},
            "cost": self.cost,
        }


@dataclass(frozen=True)
class Planner:
    """Plans a config on a device, with changes, and predicts what the run needs."""

    loaded: LoadedConfig
    corpus: Corpus
    device: DeviceFacts
    shape: ModelShape
    measure_threads: ThreadMeasurement
    free_disk: int | None = None
    measured: Measured | None = None
    micro_batch: Chosen[int] | None = None
    """The measured micro-batch size; None if sizes were not compared."""
    sizes: tuple[tuple[int, float], ...] = ()
    """Measured tokens/s by micro-batch size."""

    @cached_property
    def first(self) -> tuple[Plan, DataOrder, Outlook]:
        """The plan without changes, its order and its prediction. An automatic micro-batch is one that fits."""
        plan, order = self._plan(self.loaded)
        if self.micro_batch is not None:
            plan = plan.model_copy(update={"micro_batch_tokens": self.micro_batch})
        outlook = self._outlook(self.loaded, plan, order)
        if not outlook.prediction.fits and self.loaded.config.train.micro_batch_tokens == "auto":
            smaller = self._smaller(outlook)
            if smaller is not None:
                outlook, tokens = smaller, smaller.work.micro_tokens
                because = f"the largest that fits in {size_bytes(self.device.free_bytes or 0)}"
                plan = plan.model_copy(update={"micro_batch_tokens": Chosen[int](value=tokens, because=because)})
        return plan.model_copy(update={"prediction": outlook.prediction}), order, outlook

    @property
    def outlook(self) -> Outlook:
        return self.first[2]

    def _plan(self, loaded: LoadedConfig) -> tuple[Plan, DataOrder]:
        return plan_run(loaded, self.corpus, self.device, measure_threads=self.measure_threads)

    def _outlook(self, loaded: LoadedConfig, plan: Plan, order: DataOrder) -> Outlook:
        work = workload_of(plan, loaded, self.corpus, order, device=self.device, shape=self.shape)
        measured = self.measured if loaded is self.loaded else None
        return predict(work, measured=measured, free_disk=self.free_disk)

    def _smaller(self, outlook: Outlook) -> Outlook | None:
        return smaller_micro_batch(
            outlook, lambda work: predict(work, measured=self.measured, free_disk=self.free_disk)
        )

    def changed(self, changes: Changes, *, context: int | None = None) -> Outlook | None:
        """Return the outlook of a changed config with the largest micro-batch that fits; None if it cannot be planned.

        If no micro-batch fits, the outlook has the smallest one. `context` splits longer documents.
        """
        loaded = replace(self.loaded, config=with_changes(self.loaded.config, changes))
        try:
            plan, order = self._plan(loaded)
        except UserError:
            return None
        outlook = self._outlook(loaded, plan, order)
        if context is not None:
            outlook = _with_context(outlook, context, self.free_disk)
        if outlook.prediction.fits:
            return outlook
        fitting = replace(self, measured=None)._smaller(outlook)
        if fitting is not None:
            return fitting
        longest = max(int(outlook.work.lengths.max(initial=1)), _MIN_MICRO_TOKENS)
        return predict(outlook.work.with_micro_tokens(longest), free_disk=self.free_disk)

    @cached_property
    def floor(self) -> Prediction:
        """The prediction with the least memory that the run's own recovery from out of memory can reach."""
        outlook = self.outlook
        if outlook.prediction.fits:
            return outlook.prediction
        found = self.changed({"train.recompute": "on"} if self.loaded.config.train.recompute == "off" else {})
        return found.prediction if found else outlook.prediction

    @property
    def is_impossible(self) -> bool:
        """Whether the run would be out of memory even after all remedies of a running training."""
        floor = self.floor
        free = floor.memory.free_bytes
        return free is not None and _CERTAIN * floor.memory.needed_bytes > free

    @cached_property
    def ladder(self) -> list[Rung]:
        """What would make the run fit, the mildest change first."""
        rungs: list[Rung] = []
        for name, changes, cost, context in self._candidates():
            outlook = self.changed(changes, context=context)
            if outlook is None:
                continue
            if outlook.prediction.memory.uncached_bytes >= self.outlook.prediction.memory.uncached_bytes:
                continue
            own = dict(changes)
            if outlook.work.micro_tokens < outlook.work.plan.micro_batch_tokens.value or not changes:
                own["train.micro_batch_tokens"] = outlook.work.micro_tokens
            rungs.append(Rung(name, own, outlook.prediction, cost))
        return rungs

    def _candidates(self) -> Iterator[tuple[str, dict[str, Any], str, int | None]]:
        config, work = self.loaded.config, self.outlook.work
        method, is_cuda = config.method, self.device.kind == "cuda"
        yield "smaller micro-batches", {}, "more passes for a step, with the same result", None
        recompute: dict[str, Any] = {"train.recompute": "on"}
        if config.train.recompute == "off":
            yield "recompute activations", dict(recompute), "a third more time", None
        if is_cuda and config.train.recompute != "offload":
            recompute = {"train.recompute": "offload"}
            yield "layer inputs in main memory", dict(recompute), "a third more time, and main memory", None
        if work.is_adapter and method.rank > _LOWER_RANK and method.adapter is None:
            lower: dict[str, Any] = {"method.rank": _LOWER_RANK, "method.alpha": 2 * _LOWER_RANK}
            yield "a lower rank", recompute | lower, "a smaller adapter stores less", None
        longest = int(work.lengths.max(initial=1))
        if longest > 2 * _MIN_CONTEXT:
            context = max(_MIN_CONTEXT, longest // 4)
            split: dict[str, Any] = {"packing.context_length": context, "packing.long_documents": "split"}
            num_long = int((work.lengths > context).sum())
            cost = f"{count(num_long, 'document')} of {count(len(work.lengths))} cut into pieces"
            yield "split long documents", recompute | split, cost, context
        if not work.is_adapter:
            if config.train.optimizer == "adamw" and is_cuda:
                yield "8-bit optimizer", recompute | {"train.optimizer": "adamw8bit"}, "hardly any accuracy", None
            lora: dict[str, Any] = {"method.kind": "lora", "train.masters": "fp32", "train.optimizer": "adamw"}
            yield "LoRA instead of full fine-tuning", lora, "only an adapter is trained", None
            yield "LoRA with recomputing", lora | {"train.recompute": "on"}, "an adapter, a third more time", None
        else:
            lora = {}
        if is_cuda and method.quantize == "none" and self.outlook.work.quantization == "none":
            small = lora | {"train.recompute": "on"}
            yield "LoRA, base model in 8 bits", small | {"method.quantize": "int8"}, "some accuracy, and time", None
            if find_spec("bitsandbytes") is not None:
                tiny = lora | {"method.quantize": "nf4"} | recompute
                yield "LoRA, base model in 4 bits (NF4)", tiny, "some accuracy, and time", None

    def cards_that_fit(self) -> list[Card]:
        """Return the cards on which the run fits as it is, the smallest first."""
        found: list[Card] = []
        for card in sorted(known_cards().values(), key=lambda card: card.memory_bytes):
            outlook = on_card(self, card)
            if outlook is not None and outlook.prediction.fits:
                found.append(card)
        return found

    def require_fit(self) -> None:
        """Raise UserError if the run cannot fit, with the mildest change that would help."""
        if not self.is_impossible:
            return
        floor = self.floor.memory
        free = f"{size_bytes(floor.free_bytes or 0)} are free on {self.device.label}"
        fitting = next((rung for rung in self.ladder if rung.prediction.fits), None)
        if fitting is not None:
            sets = " ".join(f"--set {key}={value}" for key, value in fitting.changes.items())
            fix = f"{fitting.name}: `{sets}`, or `tunewell plan --apply`; `tunewell plan` lists other ways"
        else:
            cards = self.cards_that_fit()
            named = (
                f"a GPU with more memory ({', '.join(card.name for card in cards[:3])})" if cards else "several GPUs"
            )
            fix = f"use a smaller model or {named}: `tunewell notebook`; `tunewell plan` lists what was tried"
        raise UserError(
            f"the run does not fit: it needs at least {size_bytes(floor.needed_bytes)}, and {free}",
            where=f"{self.loaded.config.model}, {describe_method(self.outlook)}",
            fix=fix,
        )


def smaller_micro_batch(outlook: Outlook, forecast: Callable[[Workload], Outlook]) -> Outlook | None:
    """Return the outlook with the largest micro-batch that fits, or None if a single document does not fit."""
    tokens = min(outlook.work.micro_tokens, outlook.work.largest_micro_batch)
    longest = int(outlook.work.lengths.max(initial=1))
    while tokens > max(longest, _MIN_MICRO_TOKENS):
        tokens = max(tokens // 2, longest, _MIN_MICRO_TOKENS)
        found = forecast(outlook.work.with_micro_tokens(tokens))
        if found.prediction.fits:
            return found
    return None


def describe_method(outlook: Outlook) -> str:
    """Return the training method in a few words."""
    work = outlook.work
    base = f", base model in {work.quantization}" if work.quantization != "none" else ""
    return f"{work.config.method.kind} in {work.precision}{base}, {count(work.largest_micro_batch)} tokens at once"


def with_changes(config: Any, changes: Changes) -> Any:
    """Return a config section with dotted keys changed."""
    for key, value in changes.items():
        head, _, rest = key.partition(".")
        inner = with_changes(getattr(config, head), {rest: value}) if rest else value
        config = config.model_copy(update={head: inner})
    return config


def _with_context(outlook: Outlook, context: int, free_disk: int | None) -> Outlook:
    """Return the outlook with documents cut into pieces of at most `context` tokens."""

    def cut(lengths: Any) -> Any:
        parts = [np.full(int(length) // context, context) for length in lengths]
        rests = [int(length) % context for length in lengths]
        return np.concatenate([*parts, np.array([rest for rest in rests if rest], dtype=np.int64)]).astype(np.int64)

    work = outlook.work
    shorter = replace(work, lengths=cut(work.lengths), step_lengths=tuple(cut(step) for step in work.step_lengths))
    return predict(shorter, free_disk=free_disk)


def on_card(planner: Planner, card: Card) -> Outlook | None:
    """Return the outlook of the same config on another card; None if it cannot run there."""
    loaded = replace(planner.loaded, config=with_changes(planner.loaded.config, {"device": "auto"}))
    other = Planner(loaded, planner.corpus, card.facts(), planner.shape, planner.measure_threads)
    try:
        return other.outlook
    except UserError:
        return None


def describe_rung(rung: Rung) -> str:
    """Return a rung's needs as text."""
    memory, seconds = rung.prediction.memory, rung.prediction.seconds
    return f"{size_bytes(memory.uncached_bytes)}, {duration(seconds.low)} to {duration(seconds.high)}"
