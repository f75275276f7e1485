"""Read a run folder of tunewell or of `HealthCallback`: its steps, its problems and its last traceback.

Plan, config and report of a run are left out: they explain choices in words that look like messages.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_text
from tunewell.core.units import count
from tunewell.features.diagnose.findings import Evidence
from tunewell.features.diagnose.readers import read_run
from tunewell.features.diagnose.reading import EVENTS, Reading, signatures
from tunewell.records.healing import HEALING, HealingEntry, read_healing
from tunewell.runs.state import StoredRun
from tunewell.training.log_rules import NOTHING_READ, replay


def read_own_run(folder: Path, notes: list[str]) -> list[Reading]:
    """Return the readings of a run. Problems that the run solved itself become notes, as does its advice.

    Raises UserError if its files are damaged.
    """
    try:
        log = read_run(folder)
        entries = read_healing(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the run in `{folder}` is damaged: {error}", fix="give the printed log instead") from None
    outcome = StoredRun(folder).outcome
    lines = _lines_by_step(folder)
    num_steps = sum(step.held_out_loss is None for step in log.steps)
    steps = Reading(EVENTS, len(lines), num_steps, num_steps, tool="tunewell")
    for finding in replay(log.steps, log.about) if log.steps else []:
        if finding.severity != "note" and finding.name != NOTHING_READ:
            line, text = lines.get(finding.step, (0, ""))
            steps.facts.setdefault(f"series:{finding.name}", [Evidence(line, text, EVENTS, finding.words)])
    problems = Reading(HEALING, len(entries), tool="tunewell")
    for number, entry in enumerate(entries, start=1):
        _add_entry(entry, number, problems, device=log.about.device or "", notes=notes)
    if (status := outcome.get("status")) not in (None, "finished"):
        notes.append(f"the run is {status}: {outcome.get('reason', '')}")
    notes += [f"advice of the run: {line}" for line in outcome.get("advice", ())]
    return [steps, problems]


def _add_entry(entry: HealingEntry, number: int, reading: Reading, *, device: str, notes: list[str]) -> None:
    """Add a problem that the run did not solve as a fact, or as an error if no failure has its name."""
    is_open = entry.action == "stop" or (entry.action == "none" and entry.severity != "note")
    shown = Evidence(number, f"step {count(entry.step)}: {entry.words}", HEALING)
    names = [f"series:{entry.name}", f"healing:{entry.name}", f"healing:{entry.name}-{device}"]
    known = [name for name in names if name in _known_facts()]
    if is_open and known:
        reading.facts.setdefault(known[0], [shown])
    elif is_open and entry.severity == "fault":
        reading.errors.append(shown)
    elif is_open or entry.severity == "fault":
        notes.append(shown.text)


@lru_cache(maxsize=1)
def _known_facts() -> frozenset[str]:
    return frozenset(fact for signature in signatures() for fact in signature.facts)


def _lines_by_step(folder: Path) -> dict[int, tuple[int, str]]:
    """Return the number and the first metrics of the line of each step."""
    found: dict[int, tuple[int, str]] = {}
    for number, line in enumerate(read_text(folder / EVENTS).splitlines(), start=1):
        try:
            event: dict[str, Any] = parse_json(line)
        except ValueError:  # the last line of a run that was killed
            continue
        shown = ", ".join(
            f"{key} {event[key]}" for key in ("step", "loss", "grad_norm", "learning_rate") if key in event
        )
        found[event.get("step", 0)] = (number, shown)
    return found
