"""Decide what a reading means: complete signatures become findings, ranked so that causes come before consequences."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from tunewell.core.units import count
from tunewell.features.diagnose.findings import HEALTHY, LIKELY, UNKNOWN, DiagnosedFailure, Evidence
from tunewell.features.diagnose.knowledge import FailureClass, Signature, load_classes
from tunewell.features.diagnose.matcher import complete
from tunewell.features.diagnose.reading import Reading
from tunewell.features.diagnose.rules import is_sentence
from tunewell.features.diagnose.similarity import guess_class

LEAST_CONFIDENCE = 0.45
"""Weaker evidence is mentioned as a hint of an unknown failure, not reported."""
_MORE_EVIDENCE = 0.02
_CLEAR = 0.78
_CLOSE, _DOUBT = 0.08, 0.12
"""If another class fits a sentence nearly as well, the first one is less certain."""
_WARNING_PENALTY = 0.2
"""A warning must be this much more certain than a failure to be named before it."""
_EQUAL = 0.05
_PER_LINE, _MOST_LINES, _MEASURED = 0.03, 10, 0.3
"""In a written report of several problems, a problem that its numbers show is named first, then the one that most lines
describe."""
_NEAR, _LOOSE = 3, 0.65
"""Maximum number of lines between an error and its evidence, and the maximum confidence of evidence farther away."""
_FRAME = re.compile(r'\W{0,6}File "[^"]+", line\b|\s*at \S+:\d+\b')
_ERROR = re.compile(r"(?i)error|exception|fail|fatal|assert|abort|cannot|could not|unable")
_MAX_EVIDENCE = 4
_WHOLE_CONFIG = 8
"""Known keys from which a text is a whole config, and not a few lines that a person comments on."""
_MAX_FINDINGS = 12
_LEAST_WORDS = 6
"""Words of a sentence from which its failure is guessed."""


@dataclass(frozen=True)
class FailureCandidate:
    """A class whose signature is complete in one document."""

    failure: FailureClass
    signature: Signature
    """The complete signature with the highest confidence."""
    confidence: float
    evidence: tuple[Evidence, ...]
    num_lines: int = 0
    """Number of lines about it in a written report; 0 in a log."""

    @property
    def is_sentence(self) -> bool:
        return self.signature.is_sentence

    @property
    def is_series(self) -> bool:
        return any(fact.startswith("series:") for fact in self.signature.facts)

    @property
    def score(self) -> float:
        """The order among findings that do not explain each other."""
        if not self.num_lines:
            return self.confidence - (_WARNING_PENALTY if self.failure.severity == "warning" else 0.0)
        # A problem that a rule computed from numbers, not only from text.
        measured = _MEASURED if self.signature.facts else 0.0
        return self.confidence + measured + _PER_LINE * min(self.num_lines, _MOST_LINES)

    @property
    def line(self) -> int:
        return min((evidence.line for evidence in self.evidence), default=0)


def find_candidates(reading: Reading) -> list[FailureCandidate]:
    """Return the classes that have a complete signature in a document."""
    found: list[FailureCandidate] = []
    for failure in load_classes().values():
        if complete_ones := list(_complete_signatures(failure, reading)):
            best = _doubted(reduce(_both, complete_ones), reading)
            if not _is_comment(best, reading):
                num_lines = 1 + _lines_about(failure, reading) if reading.is_report else 0
                found.append(replace(best, num_lines=num_lines))
    return _with_guess(found, reading) if reading.prose else found


def _complete_signatures(failure: FailureClass, reading: Reading) -> Iterator[FailureCandidate]:
    facts = {name for name in reading.facts if not (reading.prose and name.startswith("series:"))}
    for signature in failure.signatures:
        if signature.is_sentence and not reading.is_small:
            continue
        # In a document of many paragraphs, a sentence is one line, at most two.
        within = 1 if signature.is_sentence and not reading.prose else signature.within
        evidence = complete(signature, reading.hits, facts, within=within, without=reading.advice)
        if evidence is None:
            continue
        if signature.is_sentence and not reading.prose and not any(is_sentence(shown.text) for shown in evidence):
            continue
        evidence += [shown for fact in signature.facts for shown in reading.facts[fact]]
        yield FailureCandidate(failure, signature, signature.confidence, tuple(evidence))


def _both(one: FailureCandidate, other: FailureCandidate) -> FailureCandidate:
    """Return the more certain of two candidates of a class, with the evidence of both."""
    best, other = (other, one) if other.confidence > one.confidence else (one, other)
    sure = min(0.99, best.confidence + _MORE_EVIDENCE)
    return replace(best, confidence=sure, evidence=(*best.evidence, *other.evidence))


def _doubted(candidate: FailureCandidate, reading: Reading) -> FailureCandidate:
    """Return the candidate, with lower confidence if its evidence is not part of an error.

    Such evidence is only frames of a traceback, or sentences and settings far from every error.
    """
    if candidate.confidence < LIKELY or candidate.failure.severity == "harmless" or not candidate.evidence:
        return candidate
    is_frame = all(_FRAME.match(shown.text) for shown in candidate.evidence)
    errors = [error.line for error in reading.errors]
    is_beside = (
        bool(errors)
        and not reading.is_report
        and not any(_ERROR.search(shown.text) for shown in candidate.evidence)
        and not any(abs(shown.line - line) <= _NEAR for shown in candidate.evidence for line in errors)
    )
    if is_frame or (is_beside and not candidate.is_series):
        return replace(candidate, confidence=_LOOSE)
    return candidate


def _is_comment(candidate: FailureCandidate, reading: Reading) -> bool:
    """Return whether a candidate rests on a comment of a whole config, which explains settings and not a failure."""
    is_noted = any(shown.text.startswith("#") or " # " in shown.text for shown in candidate.evidence)
    is_config = not reading.is_report and len(reading.config) >= max(_WHOLE_CONFIG, reading.num_lines / 12)
    return is_config and is_noted


def _lines_about(failure: FailureClass, reading: Reading) -> int:
    """Return the number of lines that match a message of a class."""
    messages = [signature for signature in failure.signatures if not signature.is_sentence]
    patterns = {pattern for signature in messages for pattern in (*signature.all, *signature.any)}
    return len({shown.line for pattern in patterns for shown in reading.hits.of(pattern)})


def rank(readings: Sequence[Reading]) -> tuple[list[DiagnosedFailure], list[str]]:
    """Return the findings about all documents of a run, best first, and notes about harmless messages."""
    everything = [candidate for reading in readings for candidate in find_candidates(reading)]
    harmless = [candidate for candidate in everything if candidate.failure.severity == "harmless"]
    merged = _merge([candidate for candidate in everything if candidate.failure.severity != "harmless"])
    fine = max((c.confidence for c in harmless if c.failure.id == HEALTHY and c.is_sentence), default=0.0)
    merged = [c for c in merged if not (c.is_sentence or c.is_series) or c.confidence > fine]
    tool = next((reading.tool for reading in readings if reading.tool), None)
    strong = [c for c in merged if c.failure.id != UNKNOWN and c.confidence >= LEAST_CONFIDENCE]
    hints = [c for c in merged if c.failure.id != UNKNOWN and c.confidence < LEAST_CONFIDENCE]
    findings = [
        _finding(
            one.failure,
            _unique([one]),
            confidence=round(one.confidence, 2),
            cause=one.signature.cause or one.failure.page["cause"],
            fix=one.failure.fix_for(tool),
            because_of=because,
        )
        for one, because in _order(strong)
    ]
    notes = [f"harmless: line {shown.line}: {shown.note or shown.text}" for shown in _unique(harmless)[:3]]
    is_healthy = _is_healthy(readings, merged, harmless)
    unexplained = _unexplained(readings, strong, harmless)
    is_failing = any(finding.severity == "failure" and finding.confidence >= 0.5 for finding in findings)
    if (unexplained and not is_failing) or (not findings and not is_healthy):
        decides = [c for c in merged if c.failure.id == UNKNOWN]
        findings.insert(0, _unknown(unexplained, decides, hints, readings))
    return findings[:_MAX_FINDINGS], notes


def _with_guess(candidates: list[FailureCandidate], reading: Reading) -> list[FailureCandidate]:
    """Add the class that sentences are most similar to. Where it contradicts a signature, both are less certain."""
    lines = enumerate(reading.prose.split("\n"), 1)
    described = [line for number, line in lines if line.strip() and number not in reading.advice]
    text = "\n".join(described)
    can_guess = len(described) > len(reading.advice) and len(text.split()) >= _LEAST_WORDS
    guessed = guess_class(text) if can_guess else None
    if guessed is None:
        return candidates
    failure, confidence = guessed
    if any(candidate.confidence >= (_CLEAR if candidate.is_sentence else LIKELY) for candidate in candidates):
        return candidates
    known = [candidate for candidate in candidates if candidate.failure.id == failure.id]
    if known:
        surer = replace(known[0], confidence=min(0.9, known[0].confidence + _MORE_EVIDENCE))
        return [surer if candidate is known[0] else candidate for candidate in candidates]
    doubted = [
        replace(candidate, confidence=candidate.confidence - _DOUBT) if candidate.is_sentence else candidate
        for candidate in candidates
    ]
    confidence -= _CLOSE if doubted else 0.0
    shown = Evidence(1, " ".join(reading.prose.split())[:300], reading.name)
    signature = Signature(confidence=confidence, is_sentence=True)
    return [*doubted, FailureCandidate(failure, signature, confidence, (shown,))]


def _merge(candidates: list[FailureCandidate]) -> list[FailureCandidate]:
    """Keep the surest candidate of each class over all documents, with the evidence of all."""
    by_id: dict[str, FailureCandidate] = {}
    for candidate in candidates:
        known = by_id.setdefault(candidate.failure.id, candidate)
        if known is not candidate:
            surest = max(known, candidate, key=lambda one: one.confidence)
            by_id[known.failure.id] = replace(surest, evidence=(*known.evidence, *candidate.evidence))
    return list(by_id.values())


def _order(candidates: list[FailureCandidate]) -> list[tuple[FailureCandidate, str | None]]:
    """Sort by certainty, then move each consequence behind its cause."""
    ordered = sorted(candidates, key=lambda candidate: (-round(candidate.score, 2), candidate.line))
    if len(ordered) > 1 and ordered[0].is_sentence and ordered[1].is_sentence:
        first, second = ordered[:2]
        related = second.failure.id in first.failure.explains or first.failure.id in second.failure.explains
        if not related and first.score - second.score < _CLOSE:
            ordered[:2] = (
                replace(candidate, confidence=candidate.confidence - _DOUBT) for candidate in (first, second)
            )
    return sorted(((one, _cause_of(one, ordered)) for one in ordered), key=lambda pair: pair[1] is not None)


def _cause_of(candidate: FailureCandidate, others: list[FailureCandidate]) -> str | None:
    """Return the id of a finding that explains this one."""
    for other in others:
        if other is candidate or other.confidence < 0.5:
            continue
        if other.is_sentence and candidate.is_sentence and other.confidence < candidate.confidence - _EQUAL:
            continue
        # Of two classes that explain each other, the less certain one is the consequence.
        is_less_certain = other.confidence < candidate.confidence and other.failure.id in candidate.failure.explains
        if candidate.failure.id in other.failure.explains and not is_less_certain:
            return other.failure.id
        is_failure = other.failure.severity == "failure" and not other.failure.is_symptom
        if candidate.failure.is_symptom and is_failure and not other.is_sentence:
            return other.failure.id
    return None


def _finding(failure: FailureClass, evidence: Sequence[Evidence], **known: Any) -> DiagnosedFailure:
    """Return a finding with the texts of its page; `known` are its other fields."""
    page = failure.page
    return DiagnosedFailure(
        id=failure.id,
        title=failure.title,
        family=failure.family,
        evidence=tuple(evidence[:_MAX_EVIDENCE]),
        severity=failure.severity,
        next=page.get("next", ""),
        caught_by=tuple(page.get("caught_by", ())),
        **{"cause": page["cause"], "fix": page["fix"], **known},
    )


def _unique(candidates: list[FailureCandidate]) -> list[Evidence]:
    seen: dict[tuple[str | None, int, str], Evidence] = {}
    for candidate in candidates:
        for evidence in candidate.evidence:
            seen.setdefault((evidence.file, evidence.line, evidence.note), evidence)
    return list(seen.values())


def _unexplained(
    readings: Sequence[Reading], strong: list[FailureCandidate], harmless: list[FailureCandidate]
) -> list[Evidence]:
    """Return the lines with exceptions that are not near a failure's evidence, and not harmless themselves."""
    used = {(shown.file, shown.line) for candidate in strong for shown in candidate.evidence}
    near = {(file, line + offset) for file, line in used for offset in range(-3, 4)}
    near |= {(shown.file, shown.line) for candidate in harmless for shown in candidate.evidence}
    return [error for reading in readings for error in reading.errors if (error.file, error.line) not in near]


def _is_healthy(readings: Sequence[Reading], merged: list[FailureCandidate], harmless: list[FailureCandidate]) -> bool:
    """Return whether enough was read to say that nothing is wrong."""
    if any(candidate.failure.id == UNKNOWN for candidate in merged):
        return False
    if any(candidate.confidence >= LEAST_CONFIDENCE for candidate in harmless):
        return True
    return any((reading.num_steps > 0 and not reading.prose) or reading.config for reading in readings)


def _unknown(
    errors: list[Evidence], decides: list[FailureCandidate], hints: list[FailureCandidate], readings: Sequence[Reading]
) -> DiagnosedFailure:
    failure = load_classes()[UNKNOWN]
    num_lines = sum(reading.num_lines for reading in readings)
    evidence = [*_unique(decides), *reversed(errors)]
    cause = failure.page["cause"]
    if not evidence:
        verb = "was" if num_lines == 1 else "were"
        read = f"{count(num_lines, 'line')} {verb} read" if num_lines else "The text is empty"
        cause = f"{read}: nothing names a known failure."
    possible = f" It could be {' or '.join(hint.failure.id for hint in hints[:3])}." if hints else ""
    return _finding(failure, evidence, confidence=0.2, cause=cause + possible)
