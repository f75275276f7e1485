"""Facts about a log that need arithmetic: rules on the series of losses, and on numbers told in a text.

`read_facts` returns facts by name with their evidence. Signatures refer to them in `facts`. Findings of the rules of
`training/health.py` and `training/log_rules.py` have the prefix `series:`.
"""

import math
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from tunewell.diagnosis.findings import Evidence
from tunewell.diagnosis.readers import TrainingLog, read_log
from tunewell.training.health import Finding as SeriesFinding
from tunewell.training.log_rules import NOTHING_READ, replay

Facts = dict[str, list[Evidence]]
_LONGEST, _LONGEST_PROSE = 300, 4000
_BROKEN_NUMBERS = {"nan-gradients", "loss-zero-collapse", "mps-nan-fp16", "lr-too-high", "loss-scale-exhausted"}
_METRIC = re.compile(r"loss|norm|perplexity", re.I)
_NOT_FINITE = re.compile(r"\b(?:nan|inf)\b", re.I)


def read_facts(text: str, *, first_line: int = 1, every: int = 1) -> tuple[Facts, TrainingLog]:
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
            facts.setdefault(f"series:{finding.name}", [_evidence_of(finding, lines, first_line, log)])
    for name, rule in _RULES.items():
        evidence = rule(lines)
        if evidence:
            facts[name] = [Evidence(first_line + at, _shorten(lines[at])) for at in evidence]
    return facts, log


def is_prose(text: str) -> bool:
    """Return whether a text is a few sentences typed by a person, and not a log."""
    if (
        len(text) > 4000
        or text.count(" | ") > 2
        or "Traceback" in text
        or "log_history" in text
        or _LOG_LINE.search(text)
    ):
        return False
    return is_sentence(text)


def is_sentence(line: str) -> bool:
    """Return whether most words of a line are plain words."""
    words = line.split()
    plain = sum(1 for word in words if word.strip(".,;:()'\"`!?*").replace("-", "").replace("'", "").isalpha())
    return (
        len(words) >= 6
        and plain >= 0.55 * len(words)
        and line.count(" | ") < 2
        and line.lstrip()[:1] not in ("{", "<", "[")
        and _SETTING.match(line) is None
        and _PRINTED.match(line) is None
    )


_SETTING = re.compile(r"\s*(?:- )?[a-z_][a-z0-9_.]*:\s+\S+\s+#")
"""Matches a setting of a YAML file with a comment, which is a sentence about the setting and not about a run."""
_PRINTED = re.compile(r"\W{0,6}(?:\[?rank\s?\d+\]?:\s)?[\w.]*(?:Error|Exception|Warning): ")
"""Matches a line that Python prints for an exception. A person did not write it."""
_LOG_LINE = re.compile(r"(?m)^\s*[{<\[]|^\S+Error:|it/s\]|s/it\]|^\s*\w+_\w+: ")


def _evidence_of(finding: SeriesFinding, lines: list[str], first_line: int, log: TrainingLog) -> Evidence:
    """Return the line of a finding: that of its step, one with NaN, one with one of its numbers, or the first."""
    values = [value for value in finding.numbers.values() if isinstance(value, int | float)]
    wants_nan = any(not math.isfinite(value) for value in values)
    keys = {f"{value:g}" for value in values if math.isfinite(value)} | {repr(value) for value in values}
    metric = [at for at, line in enumerate(lines) if _METRIC.search(line)]
    best = None
    if len(metric) == len(log.steps):  # one line per step
        best = next((at for at, step in zip(metric, log.steps, strict=True) if step.step == finding.step), None)
    if best is None:
        best = next((at for at in metric if wants_nan and _NOT_FINITE.search(lines[at])), None)
    if best is None:
        best = next((at for at in metric if any(key in lines[at] for key in keys)), metric[0] if metric else 0)
    return Evidence(first_line + best, _shorten(lines[best]), note=finding.words)


def _shorten(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."


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


_BATCH = re.compile(r"\bbatch(?:[_ ]size)?\s{0,3}[:=]\s{0,3}(\d{1,5})", re.I)
_SPEED = re.compile(rf"{_NUMBER}\s?it/s", re.I)
_SLOWNESS = re.compile(rf"{_NUMBER}\s?s/it", re.I)


def throughput_falls_with_batch(lines: list[str]) -> list[int]:
    """Find two speeds at two micro-batch sizes of which the larger one processes fewer rows per second."""
    rates: list[tuple[int, float, int]] = []
    for at, line in enumerate(lines[:5000]):
        if (batch := _BATCH.search(line)) and (speed := _SPEED.search(line)):
            rates.append((int(batch[1]), int(batch[1]) * float(speed[1].replace(",", "")), at))
    for size, rate, at in rates:
        for other, other_rate, other_at in rates:
            if other > size and other_rate < 0.8 * rate:
                return sorted({at, other_at})
    return []


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


_RULES: dict[str, Callable[[list[str]], list[int]]] = {
    "loss-scales-with-accumulation": loss_scales_with_accumulation,
    "throughput-falls-with-batch": throughput_falls_with_batch,
    "lengths-far-below-limit": lengths_far_below_limit,
    "slow-fast-cycles": slow_fast_cycles,
    "pad-equals-eos": pad_equals_eos,
}
