"""Read one document: scan it for patterns, collect the lines with metrics, and remember errors and the tool."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tunewell.features.diagnose.findings import Evidence
from tunewell.features.diagnose.knowledge import Signature, load_classes, load_tools
from tunewell.features.diagnose.matcher import Hits, Scanner
from tunewell.features.diagnose.patterns import Pattern
from tunewell.features.diagnose.rules import Facts, advice_lines, is_prose, read_facts
from tunewell.features.diagnose.text import Chunk, line_around

EVENTS = "events.jsonl"
SMALL_BYTES = 200_000
"""A larger text is a log: signatures for sentences are not tried, and only some of its lines with metrics are read."""
_METRIC_LINES = 300
_NOT_FINITE_LINES = 100
_LONGEST_METRIC_LINE = 2000
_METRIC = re.compile(rb"(?i)loss|norm")
_NOT_FINITE = re.compile(rb"(?i)\b(?:nan|inf)\b")
_EXCEPTION = re.compile(
    rb"(?m)(?:Error|Exception|Interrupt)(?:: |:?$)|^[^\n]{0,40}?\b(?:ERROR|FATAL|[Ee]rror)\b ?[:\]!]"
)
_ERROR_HINT = re.compile(rb"rror|xception|FATAL|Interrupt")
_ERRORS = 4
_HEADING = re.compile(r"(?m)^#{1,4} \S[^\n]{2,80}$")


@dataclass
class Reading:
    """What one document says."""

    name: str | None
    num_lines: int
    num_steps: int = 0
    """Number of logged steps; an estimate if only a sample was judged."""
    num_judged: int = 0
    hits: Hits = field(default_factory=Hits)
    facts: Facts = field(default_factory=Facts)
    errors: list[Evidence] = field(default_factory=list[Evidence])
    """The first and the last lines that name an exception."""
    prose: str = ""
    """The text, if it is a few sentences typed by a person; otherwise empty."""
    is_small: bool = True
    is_report: bool = False
    """Whether it is a written report with headings, and not a log."""
    advice: frozenset[int] = frozenset()
    """Lines of a small text that are advice or comments of code. They describe no failure."""
    tool: str | None = None
    text: str = ""
    """The text of a small document, in which configs are looked for."""
    config: list[str] = field(default_factory=list[str])
    """Keys of a config that was understood, or empty."""

    def add_fact(self, name: str, line: int, text: str, note: str = "") -> None:
        """Add a line as evidence of a fact."""
        self.facts.setdefault(name, []).append(Evidence(line, text, self.name, note))


@lru_cache(maxsize=2)
def _patterns(is_small: bool) -> tuple[Pattern, ...]:
    wanted = [signature for signature in signatures() if is_small or not signature.is_sentence]
    found = [pattern for signature in wanted for pattern in signature.patterns]
    return tuple(dict.fromkeys([*found, *(pattern for tool in load_tools() for pattern in tool.patterns)]))


def signatures() -> Iterable[Signature]:
    """Yield every signature of every class."""
    for failure in load_classes().values():
        yield from failure.signatures


class _MetricLines:
    """Lines with metrics, thinned out evenly so that their number is bounded; those with NaN are kept first."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, bytes]] = []
        self._not_finite: list[tuple[int, bytes]] = []
        self._stride = 1
        self._seen = 0

    def add(self, chunk: Chunk) -> None:
        number = chunk.line_of(chunk.fresh)
        may_be_nan = _NOT_FINITE.search(chunk.data, chunk.fresh) is not None
        for line in chunk.data[chunk.fresh :].split(b"\n"):
            # Nearly all lines with metrics have the word in lower case, and `in` is faster than a search.
            if len(line) < _LONGEST_METRIC_LINE and (b"loss" in line or b"norm" in line or _METRIC.search(line)):
                self._add(number, line, may_be_nan=may_be_nan)
            number += 1

    def _add(self, number: int, line: bytes, *, may_be_nan: bool) -> None:
        self._seen += 1
        if may_be_nan and len(self._not_finite) < _NOT_FINITE_LINES and _NOT_FINITE.search(line):
            self._not_finite.append((number, line))
        elif self._seen % self._stride == 0:
            self._kept.append((number, line))
            if len(self._kept) > 2 * _METRIC_LINES:
                self._kept = self._kept[::2]
                self._stride *= 2

    @property
    def stride(self) -> int:
        """n if each n-th line is kept, besides those with NaN."""
        return self._stride

    def scale(self, num_steps: int) -> int:
        """Return the number of steps of the whole log, for the number of steps in the lines that are kept."""
        if self._stride == 1:
            return num_steps
        return round(self._seen * num_steps / (len(self._kept) + len(self._not_finite)))

    def text(self) -> tuple[str, list[int]]:
        lines = sorted([*self._kept, *self._not_finite])
        return b"\n".join(line for _, line in lines).decode("utf-8", "replace"), [number for number, _ in lines]


def read_document(chunks: Iterable[Chunk], *, name: str | None = None) -> Reading:
    """Read a document of any size."""
    whole: list[bytes] = []
    size = num_lines = 0
    scanner: Scanner | None = None
    metrics = _MetricLines()
    errors: list[Evidence] = []
    for chunk in chunks:
        # The first chunk decides the size: a document that fits in it is small.
        if scanner is None:
            scanner = Scanner(_patterns(len(chunk.data) <= SMALL_BYTES), file=name)
        size += len(chunk.data) - chunk.fresh
        num_lines = chunk.line_of(len(chunk.data)) - (1 if chunk.data.endswith(b"\n") else 0)
        scanner.scan(chunk)
        _collect_errors(chunk, errors, name)
        if size <= SMALL_BYTES:
            whole.append(chunk.data[chunk.fresh :])
        metrics.add(chunk)
    hits = scanner.hits if scanner is not None else Hits()
    is_small = size <= SMALL_BYTES
    if is_small:
        text, numbers = b"".join(whole).decode("utf-8", "replace").replace("\x0b", "\n"), None
    else:
        text, numbers = metrics.text()
    is_report = is_small and len(_HEADING.findall(text)) > 1
    facts, log = read_facts(text, every=1 if is_small else metrics.stride)
    facts = {key: [_renumber(evidence, numbers, name) for evidence in found] for key, found in facts.items()}
    return Reading(
        name=name,
        hits=hits,
        facts=facts,
        num_lines=num_lines,
        num_steps=len(log.steps) if is_small else metrics.scale(len(log.steps)),
        num_judged=len(log.steps),
        errors=errors,
        prose=text if is_small and not is_report and is_prose(text) else "",
        is_small=is_small,
        is_report=is_report,
        advice=advice_lines(text) if is_small else frozenset(),
        tool=next((tool.name for tool in load_tools() if any(map(hits.of, tool.patterns))), None),
    )


def _renumber(evidence: Evidence, numbers: list[int] | None, name: str | None) -> Evidence:
    if numbers is None:
        return replace(evidence, file=name)
    return replace(evidence, line=numbers[evidence.line - 1] if evidence.line <= len(numbers) else 0, file=name)


def _collect_errors(chunk: Chunk, errors: list[Evidence], name: str | None) -> None:
    if not _ERROR_HINT.search(chunk.data):
        return
    for match in _EXCEPTION.finditer(chunk.data, chunk.fresh):
        if len(errors) >= _ERRORS:
            del errors[_ERRORS // 2]
        errors.append(Evidence(chunk.line_of(match.start()), line_around(chunk, match.start(), match.end()), name))
