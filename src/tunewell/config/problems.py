"""Several things wrong with one config, told together."""

from collections.abc import Sequence
from dataclasses import dataclass

from tunewell.core.errors import UserError
from tunewell.core.units import count

_SHOWN = 5


@dataclass(frozen=True)
class Problem:
    """One thing wrong: what, where (`tunewell.yaml line 3`), and how to mend it."""

    what: str
    where: str
    fix: str | None = None


def refuse(problems: Sequence[Problem]) -> None:
    """Raise one UserError for all problems: the first 5 and a count; return when there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise UserError(problems[0].what, where=problems[0].where, fix=problems[0].fix)
    lines = [f"{count(len(problems))} problems in the config"]
    for problem in problems[:_SHOWN]:
        lines.append(f"  {problem.where}: {problem.what}" + (f" ({problem.fix})" if problem.fix else ""))
    if len(problems) > _SHOWN:
        lines.append(f"  and {count(len(problems) - _SHOWN)} more")
    raise UserError("\n".join(lines), fix="`tunewell explain KEY` says what a key takes")
