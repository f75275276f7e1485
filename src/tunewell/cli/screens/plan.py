"""The screen of `tunewell plan`: does it fit, how long does it take, what would fit, and the reasons."""

from typing import TYPE_CHECKING

from tunewell.cli.render import folded_table, hanging, table, width
from tunewell.cli.screens.numbers import format_speed
from tunewell.config.extensions import METHODS
from tunewell.core.units import count, duration, size_bytes

if TYPE_CHECKING:
    from tunewell.planning.result import PlanResult
    from tunewell.records.prediction import Measurement, Prediction

_NOT_AT_ONCE = ("evaluation", "generation")
_SMALL_SHARE = 0.01
_SHOWN_CARDS = 5
_BAR = 20
_CHOICES = {
    "train": "train",
    "retrieve": "retrieve instead of training",
    "compare": "compare it with retrieval",
    "more rows": "too few rows",
}


def plan_screen(result: "PlanResult", *, train: str = "tunewell train") -> str:
    """Return the screen of a plan."""
    if result.cards:
        lines = [cards_table(result)]
    else:
        lines = [*_verdict(result), "", folded_table(_rows(result))]
        lines += [] if result.fits else ["", *_ladder(result)]
    if result.advice is not None:
        advice = result.advice
        lines += ["", hanging("train at all?  ", f"{_CHOICES[advice.choice]}: {advice.because}")]
        lines += [hanging("  - ", option) for option in (advice.options if advice.choice != "train" else [])]
    lines += [hanging("note: ", note) for note in (result.notes if not result.cards else [])]
    lines.append(hanging("next: ", _next(result, train)))
    return "\n".join(lines)


def _verdict(result: "PlanResult") -> list[str]:
    memory = result.prediction.memory
    spread = f"{size_bytes(memory.low_bytes)} to {size_bytes(memory.high_bytes)}"
    free = "an unknown amount" if memory.free_bytes is None else size_bytes(memory.free_bytes)
    needs = f"needs {size_bytes(memory.uncached_bytes)} of memory"
    if memory.cached_bytes:
        needs += f", and holds {size_bytes(memory.peak_bytes)} ({spread}) with weights cached to generate answers"
    else:
        needs += f" ({spread})"
    return [hanging("FITS  " if result.fits else "DOES NOT FIT  ", f"{needs}; {free} free on {result.device.label}")]


def _rows(result: "PlanResult") -> list[list[str]]:
    prediction, plan = result.prediction, result.plan
    memory, seconds = prediction.memory, prediction.seconds
    number = result.num_parameters
    size = f"{number / 1e6:,.0f} M" if number < 1e9 else f"{number / 1e9:,.1f} B"
    size = size if number >= 1e6 else count(number)
    method = METHODS.entry(plan.method.value).title
    quantized = f", base model in {plan.quantized.kind}" if plan.quantized else ""
    cached = "; without cached weights" if memory.cached_bytes else ""
    rows = [
        ["model", f"{result.model}: {size} weights, {method} in {plan.precision.value}{quantized}"],
        ["memory", _parts(prediction)],
        ["  by phase", ", ".join(f"{name} {size_bytes(size)}" for name, size in memory.phases.items()) + cached],
    ]
    if memory.host_bytes is not None and memory.host_bytes > 4 << 30:
        rows.append(["  main memory", size_bytes(memory.host_bytes)])
    if result.sizes:
        best = max(rate for _, rate in result.sizes)
        for tokens, rate in result.sizes:
            mark = ", chosen" if tokens == plan.micro_batch_tokens.value else ""
            rows.append([f"  {count(tokens)}", f"{'#' * round(_BAR * rate / best)} {rate:,.0f} tokens/s{mark}"])
    steps = count(plan.num_steps.value, "step")
    rows += [
        ["micro-batch", f"{count(plan.micro_batch_tokens.value)} tokens: {plan.micro_batch_tokens.because}"],
        [
            "time",
            f"{duration(seconds.low)} to {duration(seconds.high)}: {steps}, {format_speed(result.tokens_per_second)}",
        ],
        ["  by phase", ", ".join(f"{name} {duration(value)}" for name, value in seconds.phases.items())],
    ]
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


def _parts(prediction: "Prediction") -> str:
    memory = prediction.memory
    least = _SMALL_SHARE * memory.peak_bytes
    shown = {name: size for name, size in memory.parts.items() if size >= least and name not in _NOT_AT_ONCE}
    return ", ".join(f"{name} {size_bytes(size)}" for name, size in shown.items())


def _ladder(result: "PlanResult") -> list[str]:
    rows = [["", "fits", "memory", "time", "what would help"]]
    for number, rung in enumerate(result.ladder, 1):
        seconds = rung.prediction.seconds
        rows.append(
            [
                str(number),
                "yes" if rung.prediction.fits else "no",
                size_bytes(rung.prediction.memory.uncached_bytes),
                f"{duration(seconds.low)} to {duration(seconds.high)}",
                rung.name,
            ]
        )
    lines = [folded_table(rows)]
    chosen = result.chosen
    if chosen is not None:
        sets = ", ".join(f"`{key}: {value}`" for key, value in chosen.changes.items())
        lines.append(hanging("mildest: ", f"{chosen.name}: {sets} ({chosen.cost})"))
    if result.fitting_cards:
        names, more = ", ".join(result.fitting_cards[:_SHOWN_CARDS]), len(result.fitting_cards) - _SHOWN_CARDS
        others = f" and {count(more)} larger cards" if more > 0 else ""
        lines.append(hanging("as it is: ", f"fits on {names}{others}; `tunewell notebook` trains on Colab"))
    elif chosen is None:
        lines.append(hanging("as it is: ", "fits on no card in the list: use a smaller model"))
    return lines


def cards_table(result: "PlanResult") -> str:
    """Return the table of other cards: fits, memory, time and cost."""
    has_prices = any(row.price is not None for row in result.cards)
    rows = [["card", "memory", "fits", "needs", "time", *(["cost"] if has_prices else [])]]
    for row in result.cards:
        head = [row.card.name, size_bytes(row.card.memory_bytes)]
        if row.prediction is None:
            rows.append([*head, "no", "cannot run this config", ""])
            continue
        seconds = row.prediction.seconds
        cells = [
            size_bytes(row.prediction.memory.uncached_bytes),
            f"{duration(seconds.low)} to {duration(seconds.high)}",
        ]
        if not row.prediction.fits:
            cells[1] = "-"
        cost = [] if not has_prices else [f"{row.cost:,.2f}" if row.cost is not None and row.prediction.fits else "-"]
        rows.append([*head, "yes" if row.prediction.fits else "no", *cells, *cost])
    return table(rows)


def _next(result: "PlanResult", train: str) -> str:
    if result.cards or result.fits:
        return f"`{train}`"
    if result.chosen is not None:
        return "`tunewell plan --apply` writes the mildest change into the config"
    return "choose a smaller model, or `tunewell notebook` to train on a larger GPU"


def check_screen(run: str, predicted: "Prediction", measured: "Measurement") -> str:
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
    spread = f"{duration(seconds.low)} to {duration(seconds.high)}"
    rows.append(
        [
            "time",
            duration(seconds.expected),
            spread,
            duration(measured.seconds),
            f"{seconds.expected / measured.seconds - 1:+.0%}" if measured.seconds else "",
        ]
    )
    for name in dict.fromkeys([*seconds.phases, *measured.phases]):
        guess, real = seconds.phases.get(name), measured.phases.get(name)
        rows.append(
            [
                f"  {name}",
                duration(guess) if guess is not None else "-",
                "",
                duration(real) if real is not None else "-",
            ]
        )
    how = "after a few real steps" if predicted.is_measured else "from the architecture"
    shown, notes = table(rows, right=(1, 3, 4)), []
    if max(map(len, shown.splitlines())) > width():
        notes = [hanging("range: ", ", ".join(f"{row[0]} {row[2]}" for row in rows[1:] if row[2]))]
        shown = table([[*row[:2], *row[3:]] for row in rows], right=(1, 2, 3))
    return "\n".join([f"{run}, predicted {how}", shown, *notes])
