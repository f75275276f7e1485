"""Draw the held-out curves of several runs in one picture: as SVG for files and pages. The terminal has its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.records.events import read_losses
from tunewell.runs.loss_curve import (
    MARGIN_LEFT,
    Points,
    ceiling,
    cut,
    draw_axes,
    drawable,
    escape_text,
    format_loss,
    path_through,
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

    @property
    def best(self) -> tuple[int, float] | None:
        """The step and the loss of the best evaluation."""
        return min(drawable(self.held_out), key=lambda point: point[1], default=None)


def line_of_run(run: Path, name: str) -> Line:
    """Read the held-out losses of a run. A missing or damaged log gives an empty line."""
    try:
        return Line(name, read_losses(run / "events.jsonl")[1])
    except (UserError, OSError, KeyError, TypeError, ValueError):
        return Line(name)


def shown_together(lines: Sequence[Line]) -> tuple[list[tuple[int, float]], float | None]:
    """Return the points that all lines show, clipped, and the loss at which they are clipped. None: nowhere."""
    limits = [limit for line in lines if (limit := ceiling((), line.held_out)) is not None]
    limit = max(limits, default=None) if len(limits) == len(lines) else None
    return cut([point for line in lines for point in drawable(line.held_out)], limit), limit


def letter(index: int) -> str:
    """Return the letter of a line: a, b, c ..."""
    return chr(ord("a") + index % MAX_LINES)


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
        f'aria-label="{escape_text(title)}"{size}>\n'
        f"<desc>{escape_text(described)}</desc>\n{style}"
        f'<rect class="paper" width="{_WIDTH}" height="{height}" fill="#fff"/>'
        f'<text class="heading" x="16" y="28">{escape_text(title)}</text>\n'
        f'<g transform="translate(0 {_HEADER})">\n{_shapes(lines) or none}\n</g>\n' + "\n".join(legend) + "\n</svg>\n"
    )


def _shapes(lines: Sequence[Line]) -> str:
    known, limit = shown_together(lines)
    if not known:
        return ""
    x, y, parts = draw_axes(known, _WIDTH, _HEIGHT)
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
    text = escape_text(f"{letter(index)}  {line.name}: {best}")
    key = f'<path class="line" fill="none" {_stroke(index)} d="M{MARGIN_LEFT:g} {y + 7:g}h26"/>'
    return f'{key}<text x="{MARGIN_LEFT + 34:g}" y="{y + 11:g}">{text}</text>'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _stroke(index: int) -> str:
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    return f'stroke="{_colour(index)}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")
