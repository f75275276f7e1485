"""The screen of `migrate`: the headline, the ledger in groups, and the next command."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from tunewell.cli.render import folded_table, hanging
from tunewell.config.load import FILE_NAME
from tunewell.core.units import count
from tunewell.features.migrate.ledger import STATUSES, Entry, Migration

_HEADS = {
    "lost": "lost: what differs in the run",
    "translated": "translated",
    "kept": "kept",
    "not needed": "not needed here",
}
_UNSET = ("not set", "this is how tunewell trains")


def migration_screen(found: Migration, *, shows_all: bool) -> str:
    """Return the screen. Keys that are not set in the source are only counted, unless all are shown."""
    counts = ", ".join(f"{len(found.of(status))} {status}" for status in STATUSES if found.of(status))
    lines = [hanging("", f"{found.tool}: {count(len(found.entries), 'key')}: {counts}. Wrote `{found.path}`.")]
    if found.batch:
        lines.append(hanging("batch: ", found.batch))
    files = {one.file for one in found.entries}
    for status, head in _HEADS.items():
        entries = found.of(status)  # type: ignore[arg-type]
        shown = [one for one in entries if shows_all or one.why not in _UNSET]
        if shown:
            lines += ["", head, folded_table([_row(one, has_files=len(files) > 1) for one in shown])]
        if len(entries) > len(shown):
            lines.append(hanging("  ", f"and {len(entries) - len(shown)} that set nothing: `--all` shows them"))
    if found.defaults:
        rows = [[f"  {one.key}: {one.value}", "", one.ours or one.why] for one in found.defaults]
        lines += ["", "defaults there, which the source left out", folded_table(rows)]
    lines += _list("traps of this source, and what happens here", found.traps)
    lines += _list("notes", found.notes)
    return "\n".join([*lines, "", hanging("next: ", _next(found))])


def _row(one: Entry, *, has_files: bool) -> list[str]:
    place = f"{Path(one.file).name} line {one.line}" if has_files else f"line {one.line}"
    result = "; ".join(text for text in (one.ours, one.why) if text)
    return [f"  {one.key}: {one.value}", place, result]


def _list(head: str, texts: Sequence[str]) -> list[str]:
    return ["", head, *(hanging("  - ", text) for text in texts)] if texts else []


def _next(found: Migration) -> str:
    config = "" if str(found.path) == FILE_NAME else f" --config {shlex.quote(str(found.path))}"
    plan = f"`tunewell plan{config or f' --config {FILE_NAME}'}` checks memory and time"
    if "  held_out: 0 " in found.config:
        plan += f"; nothing is held out, as there: `tunewell train{config} --set data.held_out=auto` gives a verdict"
    return plan
