"""Draw the held-out curves of several runs in one picture: as SVG for files and pages. The terminal has its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.units import count
from tunewell.records.events import as_number, read_events
from tunewell.runs.loss_curve import (
    LOG_RATIO,
    MARGIN_BOTTOM,
    MARGIN_LEFT,
    MARGIN_RIGHT,
    MARGIN_TOP,
    Points,
    ceiling,
    cut,
    drawable,
    format_loss,
    linear_axis,
    log_axis,
    path_through,
    step_axis,
    tenth,
)

MAX_LINES = 26
"""Each line has a letter; more lines would not be told apart."""
_WIDTH, _HEIGHT, _HEADER, _ROW = 900, 400, 44, 20
_COLOURS = ("#1b5a9e", "#b8480f", "#22763f", "#7a3e9d", "#9c1f1c", "#00707a", "#8a6100", "#4d5259")
_DASHES = ("", "7 4", "2 4")
_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",Arial,sans-serif}
text{fill:#575e66;font-size:12px}.heading{fill:#1d2125;font-size:17px;font-weight:600}
.end{text-anchor:end}.middle{text-anchor:middle}.paper{fill:#fff}.grid{stroke:#e6e6e0;fill:none}
.frame{stroke:#575e66;fill:none}.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
"""


@dataclass(frozen=True)
class Line:
    """The held-out losses of one run over its steps."""

    name: str
    held_out: list[tuple[int, float]] = field(default_factory=list)
    train: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> tuple[int, float] | None:
        """The step and the loss of the best evaluation."""
        return min(drawable(self.held_out), key=lambda point: point[1], default=None)


def line_of_run(run: Path, name: str) -> Line:
    """Read the losses of a run. A missing or damaged log gives an empty line."""
    try:
        events = read_events(run / "events.jsonl")
    except (UserError, OSError):
        return Line(name)
    line = Line(name)
    for event in events:
        points = {"held_out": line.held_out, "step": line.train}.get(str(event.get("kind")))
        try:
            if points is not None and (event["kind"] == "held_out" or event.get("supervised_tokens")):
                points.append((int(event["step"]), float(as_number(event["loss"]))))
        except (KeyError, TypeError, ValueError):
            continue
    return line


def letter(index: int) -> str:
    """Return the letter of a line: a, b, c ..."""
    return chr(ord("a") + index % MAX_LINES)


def write_curves_svg(path: Path, lines: Sequence[Line], *, title: str) -> None:
    """Write the curves to an SVG file, atomically."""
    write_atomic(path, curves_svg(lines, title=title))


def curves_svg(lines: Sequence[Line], *, title: str, is_page: bool = False) -> str:
    """Return the curves as an SVG document with axes and a legend. In a page, presentation attributes colour it."""
    lines = lines[:MAX_LINES]
    legend = [_legend_row(index, line, _HEADER + _HEIGHT + 6 + _ROW * index) for index, line in enumerate(lines)]
    height = _HEADER + _HEIGHT + 16 + _ROW * len(lines)
    none = f'<text class="middle" x="{_WIDTH / 2:g}" y="{_HEIGHT / 2:g}">no finite loss</text>'
    described = "; ".join(f"{line.name}: best {format_loss(line.best[1])}" for line in lines if line.best)
    size = "" if is_page else f' width="{_WIDTH}" height="{height}"'
    style = "" if is_page else f"<style>{_STYLE}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{_text(title)}"{size}>\n'
        f"<desc>{_text(described)}</desc>\n{style}"
        f'<rect class="paper" width="{_WIDTH}" height="{height}" fill="#fff"/>'
        f'<text class="heading" x="16" y="28">{_text(title)}</text>\n'
        f'<g transform="translate(0 {_HEADER})">\n{_shapes(lines) or none}\n</g>\n' + "\n".join(legend) + "\n</svg>\n"
    )


def _shapes(lines: Sequence[Line]) -> str:
    known = [point for line in lines for point in drawable(line.held_out)]
    if not known:
        return ""
    limits = [limit for line in lines if (limit := ceiling((), line.held_out)) is not None]
    limit = max(limits) if len(limits) == len(lines) else None
    values = [value for _, value in cut(known, limit)]
    positive = [value for value in values if value > 0]
    axis = log_axis if positive and max(positive) / LOG_RATIO >= min(positive) else linear_axis
    left, right, bottom = MARGIN_LEFT, _WIDTH - MARGIN_RIGHT, _HEIGHT - MARGIN_BOTTOM
    x, x_ticks = step_axis([step for step, _ in known], left, right)
    y, y_ticks = axis(values, bottom, MARGIN_TOP)
    parts = [
        f'<path class="grid" stroke="#e6e6e0" fill="none" d="M{left:g} {tenth(y(tick)):g}H{right:g}"/>'
        f'<text class="tick end" x="{left - 7:g}" y="{tenth(y(tick)) + 4:g}">{tick:,.6g}</text>'
        for tick in y_ticks
    ]
    parts.append(f'<path class="frame" stroke="#575e66" fill="none" d="M{left:g} {bottom:g}H{right:g}"/>')
    parts += [
        f'<text class="tick middle" x="{tenth(x(tick)):g}" y="{bottom + 17:g}">{count(round(tick))}</text>'
        for tick in x_ticks
    ]
    parts.append(f'<text class="tick end" x="{right:g}" y="{bottom + 34:g}">optimizer step</text>')
    for index, line in enumerate(lines):
        points: Points = cut(line.held_out, limit)
        if path := path_through(points, x, y):
            parts.append(f'<path class="line" fill="none" {_stroke(index)} d="{path}"/>')
        for step, value in cut([line.best] if line.best else [], limit):
            at = f'x="{tenth(x(step)):g}" y="{tenth(y(value)) - 5:g}"'
            parts.append(f'<text class="middle" {at} fill="{_colour(index)}">{letter(index)}</text>')
    return "\n".join(parts)


def _legend_row(index: int, line: Line, y: float) -> str:
    best = f"best {format_loss(line.best[1])} at step {count(line.best[0])}" if line.best else "no finite loss"
    text = _text(f"{letter(index)}  {line.name}: {best}")
    key = f'<path class="line" fill="none" {_stroke(index)} d="M{MARGIN_LEFT:g} {y + 7:g}h26"/>'
    return f'{key}<text x="{MARGIN_LEFT + 34:g}" y="{y + 11:g}">{text}</text>'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _stroke(index: int) -> str:
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    return f'stroke="{_colour(index)}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _text(text: str) -> str:
    """Escape a text for XML, which does not allow control characters and lone surrogates."""
    return escape("".join(character if character.isprintable() else "?" for character in text))
