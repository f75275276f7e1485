"""The loss curve of a run, and the held-out curves of several runs: as SVG for files and pages, and as text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.plot import (
    HEIGHT,
    WIDTH,
    Points,
    SvgPlot,
    TextPlot,
    by_value,
    can_draw,
    ceiling,
    cut,
    drawable,
    needs_log_scale,
    smooth,
    smoothing_window,
    svg_document,
)
from tunewell.core.units import count
from tunewell.records.events import read_losses
from tunewell.records.report import Curve

_FEW = 2
"""A line through so few evaluations would look like measurements in between."""


def format_loss(value: float) -> str:
    """Format a loss with four decimals, or in words if it is not finite."""
    if math.isnan(value):
        return "not a number"
    if not math.isfinite(value):
        return "infinite" if value > 0 else "minus infinite"
    return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.3e}"


def _at_step(point: tuple[int, float]) -> str:
    return f"{format_loss(point[1])} at step {count(point[0])}"


class LossPlot:
    """The loss curve of one run, sorted by step and clipped at its ceiling, with its legend and texts."""

    def __init__(self, curve: Curve) -> None:
        train, held_out = sorted(curve.train, key=itemgetter(0)), sorted(curve.held_out, key=itemgetter(0))
        self._series = {"training loss": train, "held-out loss": held_out}
        self._known = drawable((*train, *held_out))
        self._num_bad = len(train) + len(held_out) - len(self._known)
        self._limit = ceiling(train, held_out)
        self._train, self._held_out = cut(train, self._limit), cut(held_out, self._limit)
        evaluations = drawable(held_out)
        named = [point for point in evaluations if point[0] == curve.best_step]
        self._best = min(named or evaluations, key=by_value, default=None)
        self._has_line = len(evaluations) > _FEW
        self._window = smoothing_window(len(train))
        self.is_log = needs_log_scale([value for _, value in drawable((*self._train, *self._held_out))])

    @property
    def description(self) -> str:
        """A description of the curve for screen readers."""
        parts = []
        for name, points in self._series.items():
            if known := drawable(points):
                first, last = known[0], known[-1]
                is_one = first[0] == last[0]
                change = _at_step(first) if is_one else f"from {_at_step(first)} to {_at_step(last)}"
                parts.append(f"{name.capitalize()} {change}.")
        if self._best:
            parts.append(f"The best held-out loss is {_at_step(self._best)}.")
        return " ".join(parts)

    @property
    def remarks(self) -> list[str]:
        """Remarks about losses that the curve cannot show: non-finite, clipped or zero."""
        remarks = []
        for name, points in self._series.items():
            if bad := [step for step, value in points if not can_draw(value)]:
                shown = ", ".join(map(count, bad[:5])) + (", ..." if len(bad) > 5 else "")
                steps = f"{count(len(bad), 'step')} ({'step' if len(bad) == 1 else 'steps'} {shown})"
                remarks.append(f"The {name} was not finite at {steps}: a gap in the line.")
        if self._limit is not None:
            step, highest = max(self._known, key=by_value)
            at = f"{highest:.3g} at step {count(step)}"
            remarks.append(f"The curve is cut at {self._limit:.3g}: the highest loss is {at}.")
        if self.is_log and (below := sum(value <= 0 for _, value in self._known)):
            remarks.append(f"{count(below, 'loss', 'losses')} of 0 drawn at the lower edge: a log scale has no 0.")
        return remarks

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The legend entries: an SVG symbol of 26 by 14 units, and its text."""
        raw, strong = '<path class="raw" d="M2 7H24"/>', '<path class="smooth" d="M2 7H24"/>'
        dot, ring = '<circle class="dot" cx="13" cy="7" r="3"/>', '<circle class="ring" cx="13" cy="7" r="5.8"/>'
        entries = []
        if drawable(self._train):
            entries.append((raw if self._window > 1 else strong, "training, each step"))
            if self._window > 1:
                entries.append((strong, f"training, mean of {self._window} steps"))
        if self._best:
            line = '<path class="evaluation" d="M2 7H24"/>' if self._has_line else ""
            entries.append((f"{line}{dot}", "held-out"))
            entries.append((f"{dot}{ring}", f"best held-out, {_at_step(self._best)}"))
        if self._num_bad:
            entries.append(('<path class="gap" d="M13 2V12"/>', "not finite"))
        return entries

    def shapes(self, width: int, height: int) -> str:
        """Return axes, lines and points as SVG elements, or "" if no loss is finite. CSS classes set the colours."""
        if not self._known:
            return ""
        points = [*self._train, *self._held_out]
        plot = SvgPlot(points, width, height)
        gaps = sorted({round(plot.x(step)) for step, value in points if not can_draw(value)})
        plot.shapes += [f'<path class="gap" d="M{at} {plot.bottom}v-10"/>' for at in gaps]
        if self._window > 1:
            plot.draw_line(self._train, 'class="raw"')
        plot.draw_line(smooth(self._train), 'class="smooth"')
        if self._has_line:
            plot.draw_line(self._held_out, 'class="evaluation"')
        # At most one dot per three units of width, so that many evaluations do not overlap.
        dots = {round(across / 3): (across, down) for across, down in map(plot.place, drawable(self._held_out))}
        plot.shapes += [f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="3.6"/>' for x, y in dots.values()]
        if self._best:
            across, down = plot.place(*cut([self._best], self._limit))
            plot.shapes.append(f'<circle class="ring" cx="{across:g}" cy="{down:g}" r="8"/>')
        return "\n".join(plot.shapes)

    def text(self, width: int, height: int, *, is_ascii: bool) -> str:
        """Draw the curve in `width` by `height` characters, with axes. Return "" if no loss is finite."""
        if not self._known:
            return ""
        line, marks = smooth(self._train), drawable(self._held_out)
        plot = TextPlot([*line, *marks], width, height, is_ascii=is_ascii)
        plot.draw_line(line)
        plot.draw_marks(marks)
        rows = plot.rows()
        if drawable(line):
            rows.append(f"line: training loss{f', mean of {self._window} steps' if self._window > 1 else ''}")
        if marks:
            rows.append("o held-out loss, * its lowest")
        if bad := self._num_bad:
            rows.append(f"left out: {count(bad, 'value')} that {'is' if bad == 1 else 'are'} not finite")
        if self._limit is not None:
            rows.append(f"cut at {self._limit:.4g}; the highest value is {max(self._known, key=by_value)[1]:.4g}")
        return "\n".join(rows)


def draw_curve(losses: Points, held_out: Points, *, width: int = 60, height: int = 10, is_ascii: bool = False) -> str:
    """Draw the losses of a run over its steps for the terminal. Return "" if no loss is finite."""
    return LossPlot(Curve.model_construct(train=losses, held_out=held_out)).text(width, height, is_ascii=is_ascii)


def write_loss_svg(path: Path, curve: Curve, *, title: str) -> None:
    """Write the curve to an SVG file, atomically."""
    write_atomic(path, loss_svg(curve, title=title))


def loss_svg(curve: Curve, *, title: str) -> str:
    """Return the curve as a complete SVG document with axes, legend and remarks."""
    plot = LossPlot(curve)
    return svg_document(
        title,
        plot.shapes(WIDTH, HEIGHT),
        subtitle=f"loss per supervised token{', logarithmic scale' if plot.is_log else ''}",
        description=plot.description,
        legend=plot.legend,
        remarks=plot.remarks,
    )


# The held-out curves of several runs in one picture.

MAX_LINES = 26
"""Each line has a letter; more lines would not be told apart."""
_COLOURS = ("#3f7fc4", "#c4602a", "#3d8b54", "#9a64bd", "#cb5350", "#22878f", "#94722a", "#747b82")
"""They can be told from white and from black paper (3 to 1)."""
_DASHES = ("", "7 4", "2 4")


@dataclass(frozen=True)
class Line:
    """The held-out losses of one run over its steps."""

    name: str
    held_out: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> tuple[int, float] | None:
        """The step and the loss of the best evaluation."""
        return min(drawable(self.held_out), key=by_value, default=None)


def line_of_run(run: Path, name: str) -> Line:
    """Read the held-out losses of a run. A missing or damaged log gives an empty line."""
    try:
        return Line(name, read_losses(run / "events.jsonl")[1])
    except (UserError, OSError, KeyError, TypeError, ValueError):
        return Line(name)


def letter(index: int) -> str:
    """Return the letter of a line: a, b, c ..."""
    return chr(ord("a") + index % MAX_LINES)


def _cut_together(lines: Sequence[Line]) -> tuple[list[list[tuple[int, float]]], list[tuple[int, float]]]:
    """Return the points of each line, and those of all lines that can be drawn.

    They are clipped only if each line has points above its own ceiling.
    """
    limits = [limit for line in lines if (limit := ceiling(line.held_out)) is not None]
    curves = [cut(line.held_out, max(limits) if limits and len(limits) == len(lines) else None) for line in lines]
    return curves, [point for points in curves for point in drawable(points)]


def has_curve(lines: Sequence[Line]) -> bool:
    """Return whether some line has enough evaluations for a curve."""
    return any(len(drawable(line.held_out)) > _FEW for line in lines)


def draw_curves(lines: Sequence[Line], *, width: int = 60, is_ascii: bool = False) -> str:
    """Draw the held-out losses of several runs, each with the letter of the run at its evaluations."""
    curves, known = _cut_together(lines)
    if not known:
        return ""
    plot = TextPlot(known, width, 12, is_ascii=is_ascii)
    for index, points in enumerate(curves[:MAX_LINES]):
        if len(points) > _FEW:
            plot.draw_line(points)
        plot.draw_marks(drawable(points), letter(index), letter(index))
    rows = [f"{letter(index)} {line.name}" for index, line in enumerate(lines[:MAX_LINES])]
    left_out = [f"not drawn: {count(len(lines) - MAX_LINES, 'more run')}"] if len(lines) > MAX_LINES else []
    return "\n".join([*plot.rows(), "held-out loss:", *rows, *left_out])


def curves(lines: Sequence[Line], width: int, height: int) -> tuple[str, list[tuple[str, str]]]:
    """Return the curves as SVG elements, or "" if no loss is finite; and their legend."""
    lines = lines[:MAX_LINES]
    every, known = _cut_together(lines)
    plot = SvgPlot(known, width, height) if known else None
    legend = []
    for index, (line, points) in enumerate(zip(lines, every, strict=True)):
        colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)]
        style = f'class="line" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash or "none"}"'
        best = f"best {_at_step(line.best)}" if line.best else "no finite loss"
        legend.append((f'<path {style} d="M0 7h26"/>', f"{letter(index)}  {line.name}: {best}"))
        if plot is not None and drawable(points):
            if len(points) > _FEW:
                plot.draw_line(points, style)
            across, down = plot.place(min(drawable(points), key=by_value))
            mark = f'class="middle" text-anchor="middle" x="{across:g}" y="{down - 5:g}" fill="{colour}"'
            plot.shapes.append(f"<text {mark}>{letter(index)}</text>")
    return "\n".join(plot.shapes) if plot else "", legend


def curves_svg(lines: Sequence[Line], *, title: str) -> str:
    """Return the curves as an SVG document with axes and a legend."""
    shapes, legend = curves(lines, WIDTH, HEIGHT)
    return svg_document(
        title,
        shapes,
        subtitle="held-out loss per supervised token",
        description="; ".join(text for _, text in legend),
        legend=legend,
    )
