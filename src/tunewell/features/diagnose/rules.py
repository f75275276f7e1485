"""Facts about a log that need arithmetic: rules on the series of losses, and on numbers stated in a text.

`read_facts` returns facts by name with their evidence. Signatures refer to them in `facts`. Findings of the rules of
`training/health.py` and `training/log_rules.py` have the prefix `series:`.
"""

import math
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise

from tunewell.core.text import shorten_line
from tunewell.features.diagnose.findings import Evidence
from tunewell.features.diagnose.readers import TrainingLog, read_log
from tunewell.training.health import HealthFinding
from tunewell.training.log_rules import NOTHING_READ, replay

Facts = dict[str, list[Evidence]]
_LONGEST, _LONGEST_PROSE = 300, 4000
_BROKEN_NUMBERS = {"nan-gradients", "loss-zero-collapse", "mps-nan-fp16", "lr-too-high", "loss-scale-exhausted"}
_METRIC = re.compile(r"loss|norm|perplexity", re.I)
_NOT_FINITE = re.compile(r"\b(?:nan|inf)\b", re.I)


def read_facts(text: str, *, every: int = 1) -> tuple[Facts, TrainingLog]:
    """Return the facts of a text, and the metrics read from it. `every`: see `read_log`."""
    facts: Facts = {}
    log = read_log(text, every=every)
    lines = text.split("\n")
    found = replay(log.steps, log.about) if log.steps else []
    has_fault = any(finding.severity != "note" for finding in found)
    has_broken_numbers = False
    for finding in found:
        # Where numbers break, the first finding is the cause: a NaN gradient makes the next losses 0.
        if finding.name in _BROKEN_NUMBERS and finding.severity != "note":
            if has_broken_numbers:
                continue
            has_broken_numbers = True
        is_benign = finding.name == "fp16-scaler-skip-benign" and not has_fault
        if (finding.severity != "note" or is_benign) and finding.name != NOTHING_READ:
            facts.setdefault(f"series:{finding.name}", [_evidence_of(finding, lines, log)])
    for rule in _RULES:
        evidence = rule(lines)
        notes = evidence if isinstance(evidence, dict) else dict.fromkeys(evidence, "")
        if notes:
            facts[rule.__name__.replace("_", "-")] = [
                Evidence(1 + at, shorten_line(lines[at], _LONGEST), note=notes[at]) for at in sorted(notes)
            ]
    return facts, log


def is_prose(text: str) -> bool:
    """Return whether a text is a few sentences typed by a person, and not a log."""
    if (
        len(text) > 4000
        or text.count(" | ") > 2
        or "Traceback" in text
        or "log_history" in text
        or _LOG_LINE.search(text)
        or _CODE.search(text)
    ):
        return False
    return is_sentence(text)


def is_sentence(line: str) -> bool:
    """Return whether most words of a line are plain words."""
    words = line.split()
    plain = sum(1 for word in words if word.strip(".,;:()'\"`!?*").replace("-", "").replace("'", "").isalpha())
    return (
        len(words) >= 4
        and plain >= 0.55 * len(words)
        and line.count(" | ") < 2
        and line.lstrip()[:1] not in ("{", "<", "[")
        and _SETTING.match(line) is None
        and _PRINTED.match(line) is None
    )


_ADVICE = re.compile(
    r"(?!.*(?:Error\b|\bstill\b|\bfail|\bcrash|\bgot\b|\bgives?\b))"
    r"(?:\s*(?:[-*\u2022]|(?:tip|hint|note|advice)s?:|\d{1,2}[.)]|\[[ xX]?\]|\u2705|\u274c|\u00e2\S{1,3}"
    r"|\u201a\S{1,3}))+\s*(?:\*\*)?"
    r"(?:use|apply|force|set|keep|filter|let|disable|enable|reduce|avoid|don't|do not|never|always|choose|try|run|pass"
    r"|add|lower|increase|check|verify|monitor|validate|test|start|debug|profile|calibrate|pre-format|remove|prefer"
    r"|make sure|ensure|consider|prevent|fix|solve|increase|if you|in case of|to (?:avoid|prevent|fix|solve))\b",
    re.I,
)
"""Matches an item of a list that begins with an imperative. The last marks are emoji that were decoded wrongly."""
_CODE = re.compile(
    r"(?m)^\s*(?:def \w+\(|class \w+|import \w+|from [\w.]+ import |(?:if|for|while) .{1,80}:$|[\w.]+ = \w+[\w.]*\()"
)
_COMMENT = re.compile(r"\s*(?:#|//)")


def advice_lines(text: str) -> frozenset[int]:
    """Return the lines that give advice and do not describe a failure: list items with an imperative, code comments."""
    has_fence = "```" in text
    is_code = "Traceback" not in text and _CODE.search(text) is not None
    inside = is_code and not has_fence
    found: set[int] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif _ADVICE.match(line) or (inside and _COMMENT.match(line) and "Error: " not in line):
            found.add(number)
    return frozenset(found)


_SETTING = re.compile(r"\s*(?:- )?[a-z_][a-z0-9_.]*:\s+\S+\s+#")
"""Matches a setting of a YAML file with a comment, which is a sentence about the setting and not about a run."""
_PRINTED = re.compile(r"\W{0,6}(?:\[?rank\s?\d+\]?:\s)?[\w.]*(?:Error|Exception|Warning): ")
"""Matches a line that Python prints for an exception. A person did not write it."""
_LOG_LINE = re.compile(r"(?m)^\s*[{<\[]|^\S+Error:|it/s\]|s/it\]|^\s*\w+_\w+: ")


def _evidence_of(finding: HealthFinding, lines: list[str], log: TrainingLog) -> Evidence:
    """Return the line of a finding: that of its step, one with NaN, one with one of its numbers, or the first."""
    values = [value for value in finding.numbers.values() if isinstance(value, int | float)]
    wants_nan = any(not math.isfinite(value) for value in values)
    keys = {f"{value:g}" for value in values if math.isfinite(value)} | {repr(value) for value in values}
    metric = [at for at, line in enumerate(lines) if _METRIC.search(line)]
    same_step = [at for at, step in zip(metric, log.steps, strict=False) if step.step == finding.step]
    likely = [
        *(same_step if len(metric) == len(log.steps) else ()),  # one line per step
        *(at for at in metric if wants_nan and _NOT_FINITE.search(lines[at])),
        *(at for at in metric if any(key in lines[at] for key in keys)),
        *metric,
        0,
    ]
    return Evidence(1 + likely[0], shorten_line(lines[likely[0]], _LONGEST), note=finding.words)


_NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
_ACCUMULATION = re.compile(r"(?:gradient[_ ])?accumulation(?:[_ ]steps)?['\"]?\s{0,3}[:=]?\s{0,3}(\d{1,4})", re.I)
_LOSS = re.compile(r"\bloss['\"]?\s{0,3}[:=]?\s{0,3}(?:over |of |about )?(\d+(?:\.\d+)?)", re.I)


def loss_scales_with_accumulation(lines: list[str]) -> list[int]:
    """Find losses that grow with the accumulation, or a first loss that is plausible only after division by it."""
    pairs: list[tuple[int, float, int]] = []
    for at, line in enumerate(lines[:5000]):
        if (steps := _ACCUMULATION.search(line)) and (loss := _LOSS.search(line)):
            pairs.append((int(steps[1]), float(loss[1]), at))
    for count, loss, at in pairs:
        for other, other_loss, other_at in pairs:
            if other > count and 0 < 2 * loss <= other_loss:
                return sorted({at, other_at})
        if count > 1 and 12.5 < loss < 12 * count and 0.3 < loss / count < 6:
            return [at]
    return []


_RUN_SETTING = re.compile(
    r"(?:(?<!effective )\b|(?<!eval)_)(?:batch(?:[_ -]?size)?|bs(?==))['\"]?"
    r"(?:\s{0,3}[:=]|\s(?:of|was|is|to))?\s{0,3}"
    r"(?:(\d{1,5})\b(?!%|\s?/)|from (\d{1,5}) to (\d{1,5}))"
    r"|accum(?:ulation)?(?:[_ ]steps)?['\"]?\s{0,3}[:=]\s{0,3}(\d{1,4})"
    rf"|{_NUMBER}\s?(it/s|s/it|(?:samples?|seq(?:uence)?s?|rows|tokens|tok)(?:/s\b|\s?/\s?sec| per second))",
    re.I,
)
"""Matches a micro-batch size (or two, if it was changed), the accumulation, or a speed with its unit."""
_SPEED = re.compile(rf"{_NUMBER}\s?it/s", re.I)
_SLOWNESS = re.compile(rf"{_NUMBER}\s?s/it", re.I)
_NEAR_LINES = 12
"""A speed belongs to a micro-batch size that is stated at most this many lines before it."""
_Speed = tuple[int, float, str, int]
"""Micro-batch size, rate, unit, and line."""


def _speeds(lines: list[str]) -> list[_Speed]:
    """Return the rate at each micro-batch size, in rows per second unless another unit is stated."""
    found: list[_Speed] = []
    size, following, accumulated, since = 0, 0, 1, -_NEAR_LINES - 1
    for at, line in enumerate(lines[:5000]):
        if at - since > _NEAR_LINES and "batch" not in line.lower() and "bs=" not in line:
            continue
        for match in _RUN_SETTING.finditer(line):
            one, before, after, steps, number, unit = match.groups()
            if one or before:
                size, following, accumulated, since = int(one or before), int(after or 0), 1, at
            elif steps:
                accumulated = int(steps)
            elif size and at - since <= _NEAR_LINES:
                rate, unit = float(number.replace(",", "")), unit.lower()
                if unit in ("it/s", "s/it"):
                    a_second = rate if unit == "it/s" else 1 / max(rate, 1e-9)
                    rate, unit = size * accumulated * a_second, "rows/s"
                found.append((size, rate, unit, at))
                size, following = following or size, 0
    return found


def _throughput(lines: list[str], *, falls: bool) -> dict[int, str]:
    """Return the lines of two micro-batch sizes of which the larger one has the lower (or the higher) rate."""
    speeds = _speeds(lines)
    for size, rate, unit, at in speeds:
        for other, other_rate, other_unit, other_at in speeds:
            if other > size and unit == other_unit and ((other_rate < 0.8 * rate) == falls):
                compared = f"{other_rate:,.1f} {unit} at a micro-batch of {other}, {rate:,.1f} {unit} at {size}"
                return {max(at, other_at): "", min(at, other_at): compared}
    return {}


def throughput_falls_with_batch(lines: list[str]) -> dict[int, str]:
    """Find two micro-batch sizes of which the larger one processes fewer rows per second."""
    return _throughput(lines, falls=True)


def throughput_rises_with_batch(lines: list[str]) -> dict[int, str]:
    """Find two micro-batch sizes of which the larger one processes more rows per second, in fewer iterations."""
    return {} if _throughput(lines, falls=True) else _throughput(lines, falls=False)


_STARTED = re.compile(
    r"(?i)training (?:has )?(?:just )?(?:started|begun|begins)|start(?:ed|ing|s)? (?:the )?(?:fine-?tun\w+|training)"
    r"|running training|launched (?:the )?training"
)
_BEGUN = re.compile(
    r"(?i)\bloss\b[^\n]{0,20}?\d|\bstep\s?[:=]?\s?[1-9]|\|\s*[1-9]\d*/\d+ \[|\b(?:finished|completed?|took)\b|Error\b"
)
_WAITED = re.compile(rf"{_NUMBER}\+?\s?-?(minutes?|mins?|hours?|hrs?|h|days?)\b", re.I)
_ELAPSED = re.compile(
    r"\|\s*0/\d+ \[(?:(\d+):)?(\d+):(\d\d)<\?|\b(?:elapsed|etime|time)\W{1,3}(?:(\d+):)?(\d+):(\d\d)\b", re.I
)
_SILENT = re.compile(
    r"(?i)\b(?:stuck|hang|hung|froz|no (?:output|progress|logs?|steps?|loss)|nothing|empty|still|later|silent|maxed)"
)
_CLOCK = re.compile(r"(?:(\d{4}-\d\d-\d\d)[T ])?\b(\d\d:\d\d:\d\d)\b")
_NO_DATE = "2000-01-01"
_HOURS = {"m": 1 / 60, "h": 1.0, "d": 24.0}
_LONG_HOURS = 1 / 6


def no_step_for_long(lines: list[str]) -> dict[int, str]:
    """Find a training that started and, ten minutes or more later, has not logged a step."""
    lines = lines[:5000]
    text = "\n".join(lines)
    started = next((at for at, line in enumerate(lines) if _STARTED.search(line) or "| 0/" in line), None)
    if started is None or _BEGUN.search(text):
        return {}
    is_silent = _SILENT.search(text) is not None
    waits: list[tuple[float, int]] = []
    for at, line in enumerate(lines):
        for number, unit in _WAITED.findall(line) if is_silent else ():
            waits.append((float(number.replace(",", "")) * _HOURS[unit[0].lower()], at))
        for match in _ELAPSED.finditer(line):
            hours, minutes, seconds = (
                int(part or 0) for part in (match.groups()[:3] if match[3] else match.groups()[3:])
            )
            waits.append((hours + minutes / 60 + seconds / 3600, at))
    clocks = [
        (datetime.fromisoformat(f"{found[1] or _NO_DATE} {found[2]}"), at)
        for at, line in enumerate(lines[started:], started)
        if (found := _CLOCK.search(line))
    ]
    if clocks:
        waits.append(((clocks[-1][0] - clocks[0][0]).total_seconds() / 3600, clocks[-1][1]))
    hours, at = max(waits, default=(0.0, 0))
    return {started: "", at: f"no step was logged in {hours * 60:,.0f} minutes"} if hours >= _LONG_HOURS else {}


_LIMIT = re.compile(
    r"(?:max_seq_length|max_length|max_seq_len|sequence_len|cutoff_len)['\"]?\s{0,3}[:= ]\s{0,3}(\d{2,6})"
)
_MEAN = re.compile(
    r"(?:average|mean|avg|median)\w{0,3}(?:\s(?:row|token|length)s?){0,2}\s{0,3}[:=]?\s{0,3}(\d{1,6})(?:\.\d+)?"
)


def lengths_far_below_limit(lines: list[str]) -> list[int]:
    """Find a length limit that is at least eight times the mean length, where rows are padded to the limit."""
    text = "\n".join(lines[:5000])
    if "max_length" not in text or not re.search(r"padding\s{0,2}[=:]\s{0,2}['\"]max_length", text):
        return []
    limits = [(int(found[1]), at) for at, line in enumerate(lines[:5000]) if (found := _LIMIT.search(line))]
    means = [(int(found[1]), at) for at, line in enumerate(lines[:5000]) if (found := _MEAN.search(line.lower()))]
    for limit, at in limits:
        for mean, mean_at in means:
            if 0 < 8 * mean <= limit:
                return sorted({at, mean_at})
    return []


def slow_fast_cycles(lines: list[str]) -> list[int]:
    """Find a log that alternates between many iterations per second and many seconds per iteration."""
    paces: list[tuple[bool, int]] = []
    for at, line in enumerate(lines[:5000]):
        if fast := _SPEED.search(line):
            paces.append((float(fast[1].replace(",", "")) < 1, at))
        elif slow := _SLOWNESS.search(line):
            paces.append((float(slow[1].replace(",", "")) > 2, at))
    changes = [at for (was, _), (now, at) in pairwise(paces) if was != now]
    return changes[:4] if len(changes) >= 3 else []


_TOKEN = re.compile(r"\b(eos|pad)_token(_id)?['\"]?\s{0,3}[:=]\s{0,3}['\"]?([^'\",\s}\])]{1,60})")
_ADDED = re.compile(r"content['\"]\s{0,3}:\s{0,3}['\"]([^'\"]{1,60})")


def pad_equals_eos(lines: list[str]) -> list[int]:
    """Find a tokenizer config in which the pad token is the end token."""
    found: dict[tuple[str, bool], tuple[str, int]] = {}
    for at, line in enumerate(lines[:20_000]):
        if "_token" not in line:
            continue
        for name, is_id, value in _tokens(line, lines[at + 1 : at + 6]):
            if value not in ("null", "None", "{"):
                found.setdefault((name, is_id), (value, at))
    for is_id in (False, True):
        eos, pad = found.get(("eos", is_id)), found.get(("pad", is_id))
        if eos and pad and eos[0] == pad[0]:
            return sorted({eos[1], pad[1]})
    return []


def _tokens(line: str, following: list[str]) -> Iterator[tuple[str, bool, str]]:
    for name, is_id, value in _TOKEN.findall(line):
        if value == "{":
            content = _ADDED.search("\n".join([line, *following]))
            value = content[1] if content else value
        yield name, bool(is_id), value


_RULES: tuple[Callable[[list[str]], list[int] | dict[int, str]], ...] = (
    loss_scales_with_accumulation,
    throughput_falls_with_batch,
    throughput_rises_with_batch,
    no_step_for_long,
    lengths_far_below_limit,
    slow_fast_cycles,
    pad_equals_eos,
)
"""The name of a fact is that of its rule, with hyphens."""
