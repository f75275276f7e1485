"""`tunewell plan`: predict memory, time and cost of a run, without torch."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tunewell.config.extensions import NATIVE
from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import count
from tunewell.data.corpus.reader import open_corpus
from tunewell.machine.cards import Card, find_card
from tunewell.machine.facts import DeviceFacts
from tunewell.machine.machine import Machine, read_machine
from tunewell.machine.system import System
from tunewell.planning.advice import advise
from tunewell.planning.fit import Planner
from tunewell.planning.forecast import Outlook, shape_of
from tunewell.planning.machine_notes import machine_notes
from tunewell.planning.recommendation import with_recommended
from tunewell.planning.result import CardRow, PlanResult
from tunewell.records.plan import Chosen
from tunewell.runs.config import require_training_data, with_start
from tunewell.runs.probe import probe_run, with_probe
from tunewell.workflows.prepare import prepare

_HERE = "here"
"""The name of this machine in `plan.prices`."""
_FREE_RAM = 0.9
"""Share of `--ram` that the system leaves to a run."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of one `plan` call."""

    is_measuring: bool = True
    gpus: Sequence[str] = ()
    ram_bytes: int | None = None
    """Plan for a machine with this much main memory; with `gpus`, for the machine with each of them."""


def plan(
    loaded: LoadedConfig,
    options: PlanOptions | None = None,
    *,
    progress: ProgressListener = silent,
    system: System | None = None,
) -> PlanResult:
    """Predict a run. The corpus is prepared if needed. Raises UserError for a config that cannot be trained."""
    options = options or PlanOptions()
    cards = [find_card(name) for name in options.gpus]
    prices = _prices(loaded)
    loaded, _ = with_start(loaded)
    require_training_data(loaded, is_resuming=False)
    if loaded.config.data.sources:
        progress(Progress("preparing the corpus"))
        prepare(loaded, progress=progress)
    corpus = open_corpus(loaded.path(loaded.config.corpus))
    loaded = with_recommended(loaded, corpus.manifest)
    machine = read_machine(system)
    device = machine.device(loaded.config.device)
    if not cards:
        _require_device(loaded, device, machine)
    host_bytes = None if options.ram_bytes is None else int(options.ram_bytes * _FREE_RAM)
    if host_bytes is not None and not cards:
        if device.kind != "cpu":
            raise UserError("`--ram` plans a run on a CPU", fix="add `--set device=cpu`, or use `--gpu`")
        device = replace(device, memory_bytes=options.ram_bytes, free_bytes=host_bytes)
    run = loaded.path(loaded.config.run)
    nearest = next(folder for folder in (run, *run.absolute().parents) if folder.is_dir())
    planner = Planner(
        loaded,
        corpus,
        device,
        shape_of(loaded, corpus),
        lambda shapes: Chosen[int](value=machine.cores, because=f"{count(machine.cores, 'core')}; measured by `train`"),
        free_disk=(system or System()).free_disk(str(nearest)),
    )
    reason = ""
    if options.is_measuring and not cards and options.ram_bytes is None:
        planner, reason = _measured(planner, progress)
    made, _, outlook = planner.first
    rows = [_card_row(planner, card, prices.get(card.name), host_bytes) for card in cards]
    best = min(rows, key=lambda row: (not row.fits, row.chosen is None), default=None)
    fits = all(row.fits for row in rows) if rows else outlook.prediction.fits
    return PlanResult(
        plan=made,
        prediction=outlook.prediction,
        model=loaded.config.model or "",
        num_parameters=planner.shape.num_weights,
        device=device,
        tokens_per_second=outlook.speed.tokens_per_second,
        ladder=list(best.ladder) if best else [] if fits else planner.ladder,
        cards=rows,
        card=best.card if best else None,
        fitting_cards=[] if fits else [card.name for card in planner.cards_that_fit(host_bytes)],
        notes=[
            *loaded.notes,
            *([reason] if reason else []),
            *_layer_notes(outlook),
            *([few] if (few := corpus.manifest.too_few_to_judge) else []),
            *([] if cards else machine_notes(machine, made, outlook, corpus=corpus.path, run=run)),
        ],
        advice=advise(corpus),
        sizes=planner.sizes,
        price=prices.get(_HERE),
    )


def _layer_notes(outlook: Outlook) -> list[str]:
    unknown, known = outlook.work.unknown_layers, dict.fromkeys(own.name for own in outlook.work.shape.linears)
    if not unknown:
        return []
    names = ", ".join(f"`{name}`" for name in unknown)
    return [f"`train` may refuse this config: no linear layer is named {names}; there are {', '.join(known)}"]


def _prices(loaded: LoadedConfig) -> dict[str, float]:
    """Return the prices by the names of `cards.json`; raise UserError for a name that no card has."""
    prices, where = loaded.config.plan.prices, loaded.origin("plan.prices")
    return {name if name == _HERE else find_card(name, where=where).name: price for name, price in prices.items()}


def _measured(planner: Planner, progress: ProgressListener) -> tuple[Planner, str]:
    """Return the planner with what real steps measured, or with the reason why none were taken."""
    made, _, outlook = planner.first
    if planner.is_impossible:
        return planner, ""
    if (engine := planner.loaded.config.engine) != NATIVE:
        return planner, f"this is the prediction for tunewell's own engine; `engine: {engine}` is not predicted"
    found, reason = probe_run(planner.loaded, made, outlook, progress)
    if found is None:
        return planner, f"no real steps were taken: {reason}"
    return with_probe(planner, found), ""


def _require_device(loaded: LoadedConfig, device: DeviceFacts, machine: Machine) -> None:
    asked = loaded.config.device
    if asked not in ("auto", device.kind, device.name) and machine.gpu_problem is None:
        raise UserError(
            f"this machine has no device `{asked}`",
            where=loaded.origin("device"),
            fix="set `device: auto`, or plan for another machine: `tunewell plan --gpu t4`",
        )


def _card_row(planner: Planner, card: Card, price: float | None, host_bytes: int | None) -> CardRow:
    there = planner.on_card(card, host_bytes)
    try:
        outlook = there.outlook
    except UserError as error:
        problem = f"{error.what}; {error.fix}" if error.fix else error.what
        there = there.with_supported_settings()
        with suppress(UserError):
            return CardRow(card, None, problem, there.ladder, price=price)
        return CardRow(card, None, problem, price=price)
    ladder = () if outlook.prediction.fits else there.ladder
    return CardRow(card, outlook.prediction, "", ladder, outlook.work.micro_tokens, price)
