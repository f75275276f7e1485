"""The screen of `tunewell plan`: does it fit, how long does it take, what would fit, and the reasons."""

import shlex
from collections.abc import Sequence

from tunewell.cli.render import bar_table, folded_table, hanging, table, width
from tunewell.cli.screens.numbers import format_speed
from tunewell.config.extensions import METHODS
from tunewell.core.units import count, duration, percent, size_bytes
from tunewell.model_files.families import ATTENTION
from tunewell.planning.fit import Rung
from tunewell.planning.result import PlanResult
from tunewell.records.prediction import Measurement, Prediction

_NOT_AT_ONCE = ("evaluation", "generation")
_SMALL_SHARE = 0.01
_SHOWN_CARDS = 5
_BAR = 20
_MUCH_HOST = 4 << 30
_NONE_FITS = "no change of settings makes it fit, not even all of them together"
_CHOICES = {
    "train": "train",
    "retrieve": "retrieve instead of training",
    "compare": "compare it with retrieval",
    "more rows": "too few rows",
}


def plan_screen(result: PlanResult, *, train: str = "tunewell train", can_apply: bool = True) -> str:
    """Return the screen of a plan."""
    if result.cards:
        lines = [cards_table(result), *_cards_ladders(result)]
    else:
        lines = [*_verdict(result), "", bar_table(result.memory_chart), "", folded_table(_rows(result))]
        lines += [] if result.fits else ["", *_ladder(result.ladder), *_other_cards(result)]
    if result.advice is not None:
        advice = result.advice
        lines += ["", hanging("train at all?  ", f"{_CHOICES[advice.choice]}: {advice.because}")]
        lines += [hanging("  - ", option) for option in (advice.options if advice.choice != "train" else [])]
    lines += [hanging("note: ", note) for note in result.notes]
    lines.append(hanging("next: ", _next(result, train, can_apply=can_apply)))
    return "\n".join(lines)


def _verdict(result: PlanResult) -> list[str]:
    memory = result.prediction.memory
    spread = f"{size_bytes(memory.low_bytes)} to {size_bytes(memory.high_bytes)}"
    free = "an unknown amount" if memory.free_bytes is None else size_bytes(memory.free_bytes)
    needs = f"needs {size_bytes(memory.uncached_bytes)} of memory"
    if memory.cached_bytes:
        needs += f", and holds {size_bytes(memory.peak_bytes)} ({spread}) with weights cached to generate answers"
    else:
        needs += f" ({spread})"
    return [hanging("FITS  " if result.fits else "DOES NOT FIT  ", f"{needs}; {free} free on {result.device.label}")]


def _rows(result: PlanResult) -> list[list[str]]:
    prediction, plan = result.prediction, result.plan
    memory, seconds = prediction.memory, prediction.seconds
    number = result.num_parameters
    size = f"{number / 1e6:,.0f} M" if number < 1e9 else f"{number / 1e9:,.1f} B"
    size = size if number >= 1e6 else count(number)
    method = METHODS.entry(plan.method.value).title
    quantized = f", base model in {plan.quantized.kind}" if plan.quantized else ""
    rows = [
        ["model", f"{result.model}: {size} weights, {method} in {plan.precision.value}{quantized}"],
        ["memory", _parts(prediction)],
    ]
    if memory.host_bytes is not None and memory.host_bytes > _MUCH_HOST:
        rows.append(["  main memory", size_bytes(memory.host_bytes)])
    if result.sizes:
        best = max(rate for _, rate in result.sizes)
        for tokens, rate in result.sizes:
            mark = ", chosen" if tokens == plan.micro_batch_tokens.value else ""
            rows.append([f"  {count(tokens)}", f"{'#' * round(_BAR * rate / best)} {rate:,.0f} tokens/s{mark}"])
    if plan.packing is not None and plan.packing.value != ATTENTION:
        rows.append(["documents", f"{plan.packing.value}: {plan.packing.because}"])
    batch = plan.batch_documents if plan.batch_documents.value else plan.batch_tokens
    epochs = f"{plan.epochs.value:.3g} {'epoch' if plan.epochs.value == 1 else 'epochs'}"
    rows += [
        ["training", f"{plan.updates} in {epochs}: {batch.because}"],
        ["micro-batch", f"{count(plan.micro_batch_tokens.value)} tokens: {plan.micro_batch_tokens.because}"],
        [
            "time",
            f"{_time(prediction)}: {format_speed(result.tokens_per_second)}",
        ],
        ["  by phase", ", ".join(f"{name} {duration(value)}" for name, value in seconds.phases.items())],
    ]
    if plan.replay is not None:
        rows.append(["replay", f"{percent(plan.replay.value, 0)} of the tokens: {plan.replay.because}"])
    if plan.answers is not None:
        rows.append(["answers", f"{count(plan.answers.value)} at each evaluation: {plan.answers.because}"])
    if result.cost is not None:
        rows.append(["cost", f"about {result.cost:,.2f} at {result.price:g} per hour"])
    if prediction.disk is not None:
        disk = prediction.disk
        free = f", {size_bytes(disk.free_bytes)} free" if disk.free_bytes is not None else ""
        exports = f", exports {size_bytes(disk.export_bytes)}" if disk.export_bytes else ""
        rows.append(["disk", f"checkpoints {size_bytes(disk.checkpoints_bytes)}{exports}{free}"])
    how = "a few real steps were taken" if prediction.is_measured else "computed, no step was taken"
    rows.append(["how", f"{how}; {'; '.join(prediction.basis)}"])
    return rows


def _parts(prediction: Prediction) -> str:
    memory = prediction.memory
    least = _SMALL_SHARE * memory.peak_bytes
    shown = {name: size for name, size in memory.parts.items() if size >= least and name not in _NOT_AT_ONCE}
    return ", ".join(f"{name} {size_bytes(size)}" for name, size in shown.items())


def _ladder(ladder: Sequence[Rung]) -> list[str]:
    rows = [["", "fits", "memory", "time", "what would help"]]
    for number, rung in enumerate(ladder, 1):
        needed, fits = size_bytes(rung.prediction.memory.needed_bytes), "yes" if rung.fits else "no"
        rows.append([str(number), fits, needed, _time(rung.prediction), rung.name + _beside(rung.prediction)])
    chosen = next((rung for rung in ladder if rung.fits), None)
    return [folded_table(rows), hanging("mildest: ", _describe(chosen)) if chosen else _NONE_FITS]


def _time(prediction: Prediction) -> str:
    return f"{duration(prediction.seconds.low)} to {duration(prediction.seconds.high)}"


def _describe(rung: Rung) -> str:
    sets = ", ".join(f"`{one}`" for one in rung.sets)
    return f"{rung.name}{_beside(rung.prediction)}: {sets} ({rung.cost})"


def _beside(prediction: Prediction) -> str:
    host = prediction.memory.host_bytes or 0
    return f" (and {size_bytes(host)} of main memory)" if host > _MUCH_HOST else ""


def _cards_ladders(result: PlanResult) -> list[str]:
    """Return what would make the run fit on each card on which it does not: the ladder, or only its first rung."""
    refused = [row for row in result.cards if not row.fits]
    host = max((row.prediction.memory.host_bytes or 0 for row in result.cards if row.prediction), default=0)
    lines = [hanging("also: ", f"{size_bytes(host)} of main memory to load the model")] if host > _MUCH_HOST else []
    lines += [hanging(f"{row.card.name}: ", row.problem) for row in refused if row.problem]
    shown = [row for row in refused if row.ladder or not row.problem]
    if len(shown) == 1:
        return ["", *lines, *_ladder(shown[0].ladder), *_other_cards(result)]
    for row in shown:
        way = f"fits with {_describe(row.chosen)}" if row.chosen else _NONE_FITS
        lines.append(hanging(f"{row.card.name}: ", way))
    return [*([""] if lines else []), *lines, *(_other_cards(result) if refused else [])]


def _other_cards(result: PlanResult) -> list[str]:
    if result.fitting_cards:
        names, more = ", ".join(result.fitting_cards[:_SHOWN_CARDS]), len(result.fitting_cards) - _SHOWN_CARDS
        others = f" and {count(more)} larger cards" if more > 0 else ""
        return [hanging("unchanged: ", f"fits on {names}{others}")]
    return [hanging("unchanged: ", "fits on no card in the list")]


def cards_table(result: PlanResult) -> str:
    """Return the table of other cards: fits, memory, time and cost."""
    has_prices = any(row.price is not None for row in result.cards)
    rows = [["card", "memory", "fits", "needs", "time", *(["cost"] if has_prices else [])]]
    for row in result.cards:
        head = [row.card.name, size_bytes(row.card.memory_bytes)]
        if row.prediction is None:
            rows.append([*head, "no", "cannot run this config", ""])
            continue
        cells = [size_bytes(row.prediction.memory.needed_bytes), _time(row.prediction) if row.fits else "-"]
        cost = [] if not has_prices else [f"{row.cost:,.2f}" if row.cost is not None and row.fits else "-"]
        rows.append([*head, "yes" if row.fits else "no", *cells, *cost])
    return table(rows)


def _next(result: PlanResult, train: str, *, can_apply: bool) -> str:
    where = f"on {result.card.label}: " if result.card else ""
    if not result.exit_code:
        return f"{where}`{train}`"
    if chosen := result.chosen:
        sets = "".join(f" --set {shlex.quote(own)}" for own in chosen.sets)
        apply = "; `--apply` writes the change into the config" if can_apply else ""
        return f"{where}`{train}{sets}`{apply}"
    larger = "; or train on a larger GPU: `tunewell notebook`" if result.fitting_cards else ""
    return f"choose a smaller model: `tunewell models`{larger}"


def check_screen(run: str, predicted: Prediction, measured: Measurement) -> str:
    """Return the screen of `plan --check`: predicted beside measured."""
    memory, seconds = predicted.memory, predicted.seconds
    rows = [["", "predicted", "range", "measured", "difference"]]
    if measured.peak_bytes:
        spread = f"{size_bytes(memory.low_bytes)} to {size_bytes(memory.high_bytes)}"
        rows.append(
            [
                "peak memory",
                size_bytes(memory.peak_bytes),
                spread,
                size_bytes(measured.peak_bytes),
                f"{memory.peak_bytes / measured.peak_bytes - 1:+.0%}",
            ]
        )
    off = f"{seconds.expected / measured.seconds - 1:+.0%}" if measured.seconds else ""
    rows.append(["time", duration(seconds.expected), _time(predicted), duration(measured.seconds), off])
    for name in dict.fromkeys([*seconds.phases, *measured.phases]):
        guess, real = (
            duration(phases[name]) if name in phases else "-" for phases in (seconds.phases, measured.phases)
        )
        rows.append([f"  {name}", guess, "", real])
    how = "after a few real steps" if predicted.is_measured else "from the architecture"
    shown, notes = table(rows, right=(1, 3, 4)), []
    if max(map(len, shown.splitlines())) > width():
        notes = [hanging("range: ", ", ".join(f"{row[0]} {row[2]}" for row in rows[1:] if row[2]))]
        shown = table([[*row[:2], *row[3:]] for row in rows], right=(1, 2, 3))
    return "\n".join([f"{run}, predicted {how}", shown, *notes])
