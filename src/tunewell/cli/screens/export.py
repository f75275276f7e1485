"""The screen of `export` and `verify`: the comparison of each artefact with the trained model, and the result."""

from typing import TYPE_CHECKING

from tunewell.cli.render import hanging, table, width
from tunewell.config.extensions import EXPORT_TARGETS

if TYPE_CHECKING:
    from tunewell.records.parity import Check, Link, Parity

_NOT_COMPARED = "-"
_NARROW = 72
"""Columns that the table needs with wide gaps."""
_LEGEND = "= identical, ~ equal within rounding"


def parity_screen(parity: "Parity") -> str:
    """Return the screen: the figures of each artefact, the failed checks, and whether all match the trained model."""
    is_narrow = width() < _NARROW
    header = ["", "ids", "top token", "KL", "answers" if is_narrow else "same answers", "stops", ""]
    parts = [table([header, *(_row(link) for link in parity.links)], gap=2 if is_narrow else 3), ""]
    if any(_has_other_answers(link) for link in parity.links if link.is_ok):
        parts.append(
            hanging("answers: ", "token by token; with rounded weights (~) they may differ, and only the KL is limited")
        )
    for link in parity.links:
        for check in link.checks:
            if not check.is_ok:
                allowed = f" (allowed: {check.bound})" if check.bound else ""
                parts.append(hanging(f"{link.artefact}: ", f"{check.name}: {check.words}{allowed}"))
            elif check.is_warning:
                parts.append(hanging(f"WARNING  {link.artefact}: ", check.words))
    if parity.is_ok:
        chain = "".join(f" {'=' if _is_exact(link) else '~'} {link.artefact}" for link in parity.links)
        parts.append(hanging("PROVEN  ", f"trained{chain}   ({_LEGEND})"))
    else:
        broken = [link.artefact for link in parity.links if not link.is_ok]
        parts.append(hanging("NOT PROVEN  ", f"{', '.join(broken)}: not the trained model"))
    return "\n".join(parts)


def _row(link: "Link") -> list[str]:
    checks = {check.name: check for check in link.checks}
    state = "" if link.is_ok else "BROKEN"
    logits = checks.get("logits")
    if logits is None:
        return [link.artefact, *[_NOT_COMPARED] * 5, "same" if link.is_ok else state]
    return [
        link.artefact,
        _yes_or_no(checks.get("token ids"), "same"),
        f"{logits.figures['same_top']:.1%}",
        f"{logits.figures['kl']:.1e}",
        _ratio(checks.get("answers")),
        _yes_or_no(checks.get("stop"), "yes"),
        state,
    ]


def _yes_or_no(check: "Check | None", yes: str) -> str:
    # If no answer of the trained model ended, the stop tokens cannot be compared.
    if check is None or (check.is_ok and check.figures.get("of") == 0):
        return _NOT_COMPARED
    return yes if check.is_ok else "no"


def _ratio(check: "Check | None") -> str:
    if check is None or not check.figures["of"]:
        return _NOT_COMPARED
    return f"{check.figures['same']} of {check.figures['of']}"


def _has_other_answers(link: "Link") -> bool:
    checks = (check for check in link.checks if check.name == "answers")
    return any(check.figures["same"] < check.figures["of"] for check in checks)


def _is_exact(link: "Link") -> bool:
    kind, _, precision = link.artefact.partition(" ")
    return EXPORT_TARGETS.load(kind)().is_exact(precision)
