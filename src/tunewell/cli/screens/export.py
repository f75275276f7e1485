"""The chain of an export on a screen: each artefact with its figures, and where it broke."""

from typing import TYPE_CHECKING

from tunewell.cli.render import hanging, table

if TYPE_CHECKING:
    from tunewell.records.parity import Link, Parity


def parity_screen(parity: "Parity") -> str:
    """Show what was compared, and say in one line whether all of it is the model that was trained."""
    header = ["", "ids", "likeliest token", "KL", "answers", "stops", ""]
    rows = [_row(link) for link in parity.links]
    parts = [table([header, *rows]), ""]
    for link in parity.links:
        for check in link.checks:
            if not check.is_ok:
                allowed = f" (allowed: {check.bound})" if check.bound else ""
                parts.append(hanging(f"{link.artefact}: ", f"{check.name}: {check.words}{allowed}"))
    if parity.is_ok:
        chain = " = ".join(["trained", *(_sign(link) for link in parity.links)]).replace("= ~", "~ ")
        parts.append(hanging("PROVEN  ", chain))
    else:
        broken = [link.artefact for link in parity.links if not link.is_ok]
        parts.append(hanging("NOT PROVEN  ", f"{', '.join(broken)}: not the model that was trained"))
    return "\n".join(parts)


def _row(link: "Link") -> list[str]:
    found = {check.name: check for check in link.checks}
    logits = found.get("logits")
    answers = found.get("answers")
    if logits is None:
        state = "same" if link.is_ok else "BROKEN"
        return [link.artefact, "", "", "", "", "", state]
    figures = logits.figures
    return [
        link.artefact,
        _word(found, "token ids"),
        f"{figures['same_top']:.1%}",
        f"{figures['kl']:.1e}",
        f"{answers.figures['same']} of {answers.figures['of']}" if answers else "",
        _word(found, "stop"),
        "" if link.is_ok else "BROKEN",
    ]


def _word(found: dict, name: str) -> str:
    check = found.get(name)
    return "" if check is None else "same" if check.is_ok and name == "token ids" else "yes" if check.is_ok else "no"


def _sign(link: "Link") -> str:
    is_rounded = any(part in link.artefact for part in ("q4", "q5", "q6", "q8", "bf16"))
    return f"~{link.artefact}" if is_rounded else link.artefact
