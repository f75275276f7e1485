"""Make a run fit: choose a micro-batch that fits, and list what else would, from the mildest change on (the ladder)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import attrgetter, le
from typing import Any

import numpy as np

from tunewell.config.edit import as_scalar
from tunewell.config.load import LoadedConfig, with_changes
from tunewell.core.errors import UserError
from tunewell.core.files import read_data
from tunewell.core.units import count, size_bytes
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus
from tunewell.machine.cards import Card, known_cards
from tunewell.machine.facts import DeviceFacts
from tunewell.model_files.shape import ModelShape
from tunewell.planning.forecast import MeasuredRun, Outlook, predict, workload_of
from tunewell.planning.plan import ThreadMeasurement, plan_run
from tunewell.planning.workload import Workload
from tunewell.records.plan import Chosen, Plan
from tunewell.records.prediction import Prediction

_MIN_MICRO_TOKENS = 64
_MIN_CONTEXT = 256
_MAX_RUNGS = 6
_CERTAIN = 0.85
"""A computed run is refused only if even this share of its memory is not free."""

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """One way to save memory, from `changes.json`."""

    severity: int
    """How much the run loses; the severities of several changes add up."""
    name: str
    settings: Changes
    """Dotted config keys and their new values."""
    cost: str
    """What is given up."""
    only: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes of the `Workload`, and the values with which the change is possible."""


_RAW = read_data(__file__, "changes.json")
_LEVERS = [[Change(**own) for own in lever] for lever in _RAW["levers"]]
_SMALLER, _SUPPORTED = Change(**_RAW["smaller"]), Change(**_RAW["supported"])


@dataclass(frozen=True)
class Rung:
    """A combination of changes, and what the run then needs."""

    name: str
    changes: dict[str, Any]
    """Dotted config keys and their new values."""
    prediction: Prediction
    cost: str = ""
    """What is given up."""

    @property
    def fits(self) -> bool:
        return self.prediction.fits

    @property
    def sets(self) -> list[str]:
        """The changes as values of `--set`."""
        return [f"{key}={as_scalar(value)}" for key, value in self.changes.items()]

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
    measured: MeasuredRun | None = None
    micro_batch: Chosen[int] | None = None
    """The measured micro-batch size; None if sizes were not compared."""
    sizes: tuple[tuple[int, float], ...] = ()
    """Measured tokens/s by micro-batch size."""
    supported: Sequence[Change] = ()
    """Changes that are already made, because the device refuses the config without them. Every rung contains them."""

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
                plan = plan.model_copy(update={"micro_batch_tokens": Chosen(tokens, because=because)})
        found = {"prediction": outlook.prediction, "answers": outlook.speed.answers}
        return plan.model_copy(update=found), order, outlook

    @property
    def outlook(self) -> Outlook:
        return self.first[2]

    def _plan(self, loaded: LoadedConfig, order: DataOrder | None = None) -> tuple[Plan, DataOrder]:
        return plan_run(loaded, self.corpus, self.device, measure_threads=self.measure_threads, order=order)

    def _outlook(self, loaded: LoadedConfig, plan: Plan, order: DataOrder) -> Outlook:
        work = workload_of(plan, loaded, self.corpus, order, device=self.device, shape=self.shape)
        measured = self.measured if loaded is self.loaded else None
        return predict(work, measured=measured, free_disk=self.free_disk)

    def _smaller(self, outlook: Outlook) -> Outlook | None:
        return smaller_micro_batch(
            outlook, lambda work: predict(work, measured=self.measured, free_disk=self.free_disk)
        )

    def changed(self, changes: Changes) -> Outlook | None:
        """Return the outlook of a changed config with the largest micro-batch that fits; None if it cannot be planned.

        If no micro-batch fits, the outlook has the smallest one.
        """
        key = str(sorted(changes.items()))
        if key not in self._outlooks:
            self._outlooks[key] = self._changed(changes)
        return self._outlooks[key]

    @cached_property
    def _outlooks(self) -> dict[str, Outlook | None]:
        return {}

    def _changed(self, changes: Changes) -> Outlook | None:
        loaded = replace(self.loaded, config=with_changes(self.loaded.config, changes))
        try:
            plan, order = self._plan(loaded, self.first[1])
        except UserError:
            return None
        outlook = self._outlook(loaded, plan, order)
        if (context := changes.get("packing.context_length")) is not None:
            outlook = _with_context(outlook, context, self.free_disk)
        if outlook.prediction.fits:
            return outlook
        longest = max(int(outlook.work.lengths.max(initial=1)), _MIN_MICRO_TOKENS)
        smallest = predict(outlook.work.with_micro_tokens(longest), free_disk=self.free_disk)
        if not smallest.prediction.fits:
            return smallest
        return replace(self, measured=None)._smaller(outlook) or smallest

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
        """The changes with which the run fits, the mildest first; several together only where fewer are not enough.

        If there is none: what each change saves, and last what the strongest ones save together.
        """
        levers = self._levers()

        def pick(levels: Sequence[int]) -> list[Change]:
            return [lever[level - 1] for lever, level in zip(levers, levels, strict=True) if level]

        strongest = [len(lever) for lever in levers]
        allowed = [range(most + 1) for most in strongest]
        if self.device.host_bytes is None:  # otherwise a stronger change can need too much main memory
            allowed = [
                [level for level in own if self._fits(pick([*strongest[:at], level, *strongest[at + 1 :]]))]
                for at, own in enumerate(allowed)
            ]
        fitting: list[tuple[int, ...]] = []
        for levels in sorted(product(*allowed), key=lambda levels: sum(own.severity for own in pick(levels))):
            # Each smaller base model (the last lever) has its own mildest combinations.
            same = [own for own in fitting if own[-1] == levels[-1] or not any(own)]
            milder = [own for own in same if all(map(le, own, levels))]
            # A change alone is listed also if a milder one of its kind fits.
            is_listed = len(pick(levels)) == 1 or (not milder and len(fitting) < _MAX_RUNGS)
            if is_listed and all(map(any, milder)) and self._fits(pick(levels)):
                fitting.append(levels)
        alone = [[], *([own] for lever in levers for own in lever), pick(strongest)]
        rungs = [self._rung(own) for own in (map(pick, fitting) if fitting else alone)]
        most = self.outlook.prediction.memory.uncached_bytes
        return [own for own in rungs if own and (own.fits or own.prediction.memory.uncached_bytes < most)]

    def _settings(self, changes: Sequence[Change]) -> dict[str, Any]:
        """Return the keys of several changes that differ from the config. Those of later changes win."""
        merged = {key: value for own in changes for key, value in own.settings.items()}
        merged = {key: () if value == [] else value for key, value in merged.items()}
        return {key: value for key, value in merged.items() if attrgetter(key)(self.loaded.config) != value}

    def _fits(self, changes: Sequence[Change]) -> bool:
        return (found := self.changed(self._settings(changes))) is not None and found.prediction.fits

    def _rung(self, changes: Sequence[Change]) -> Rung | None:
        settings = self._settings(changes)
        if (found := self.changed(settings)) is None:
            return None
        if found.work.micro_tokens < found.work.plan.micro_batch_tokens.value:
            settings["train.micro_batch_tokens"] = found.work.micro_tokens
        shown = [*self.supported, *changes] or [_SMALLER]
        settings = {key: value for own in self.supported for key, value in own.settings.items()} | settings
        cost = "; ".join(dict.fromkeys(own.cost for own in shown))
        return Rung(", ".join(own.name for own in shown), settings, found.prediction, cost)

    def _levers(self) -> list[list[Change]]:
        """Return the changes that are possible. Those in one list exclude each other; the last one saves most."""
        work = self.outlook.work

        def is_possible(own: Change) -> bool:
            is_meant = all(attrgetter(key)(work) in values for key, values in own.only.items())
            return is_meant and bool(settings := self._settings([own])) and self.changed(settings) is not None

        return [list(filter(is_possible, lever)) for lever in (*_LEVERS[:-1], self._shorter_contexts(), _LEVERS[-1])]

    def _shorter_contexts(self) -> list[Change]:
        lengths, longest = self.outlook.work.lengths, int(self.outlook.work.lengths.max(initial=1))
        contexts, changes = [longest // 2, longest // 4] if self.loaded.config.data.sources else [], list[Change]()
        for severity, context in enumerate([own for own in contexts if own >= _MIN_CONTEXT], 4):
            settings = {"packing.context_length": context, "packing.long_documents": "split"}
            cost = f"{count(int((lengths > context).sum()), 'document')} of {count(len(lengths))} cut into pieces"
            changes.append(Change(severity, f"documents of at most {count(context)} tokens", settings, cost))
        return changes

    def on_card(self, card: Card, host_bytes: int | None = None) -> "Planner":
        """Return the planner of the same config on another card. `host_bytes` is its machine's free main memory."""
        loaded = replace(self.loaded, config=with_changes(self.loaded.config, {"device": "auto"}))
        device = replace(card.facts(), host_bytes=host_bytes)
        return Planner(loaded, self.corpus, device, self.shape, self.measure_threads)

    def with_supported_settings(self) -> "Planner":
        """Return the planner with automatic values of the settings that not every device supports."""
        change = replace(_SUPPORTED, settings=self._settings([_SUPPORTED]))
        config = with_changes(self.loaded.config, change.settings)
        return replace(self, loaded=replace(self.loaded, config=config), supported=[change])

    def cards_that_fit(self, host_bytes: int | None = None) -> list[Card]:
        """Return the cards on which the run fits as it is, the smallest first."""
        found: list[Card] = []
        for card in sorted(known_cards().values(), key=lambda card: card.memory_bytes):
            with suppress(UserError):
                found += [card] if self.on_card(card, host_bytes).outlook.prediction.fits else []
        return found

    def require_fit(self) -> None:
        """Raise UserError if the run cannot fit, with the mildest changes that would help."""
        if not self.is_impossible:
            return
        floor = self.floor.memory
        free = f"{size_bytes(floor.free_bytes or 0)} are free on {self.device.label}"
        fitting = [rung for rung in self.ladder if rung.fits]
        if fitting:
            smallest = min(fitting, key=lambda rung: rung.prediction.memory.needed_bytes)
            ways = [f"{own.name}: `{' '.join(f'--set {one}' for one in own.sets)}`" for own in (fitting[0], smallest)]
            fix = f"{'; or '.join(dict.fromkeys(ways))}; `tunewell plan` lists {count(len(fitting), 'way')}"
        else:
            cards = self.cards_that_fit()
            named = (
                f"a GPU with more memory ({', '.join(card.name for card in cards[:3])})" if cards else "several GPUs"
            )
            fix = f"no change of settings is enough: use a smaller model or {named}: `tunewell notebook`"
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


def _with_context(outlook: Outlook, context: int, free_disk: int | None) -> Outlook:
    """Return the outlook with documents cut into pieces of at most `context` tokens."""

    def cut(lengths: Any) -> Any:
        rests = lengths % context
        return np.concatenate([np.full((lengths // context).sum(), context), rests[rests > 0]]).astype(np.int64)

    work = outlook.work
    shorter = replace(work, lengths=cut(work.lengths), step_lengths=tuple(cut(step) for step in work.step_lengths))
    return predict(shorter, free_disk=free_disk)
