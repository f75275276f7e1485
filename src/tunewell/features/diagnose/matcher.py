"""Search a text for all patterns at once, and decide which signatures are complete.

    chunk -> its set of words -> patterns whose words all occur -> matches with line numbers

Scanning takes one pass and keeps a bounded number of matches per pattern.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tunewell.features.diagnose.findings import Evidence
from tunewell.features.diagnose.knowledge import Signature
from tunewell.features.diagnose.patterns import Pattern, fold, words_of
from tunewell.features.diagnose.text import Chunk, line_around

_HITS_PER_CHUNK, _FIRST_HITS, _LAST_HITS = 20, 60, 20
"""Matches kept per pattern: the first ones, because they are nearest to the cause, and the last ones."""


@dataclass
class Hits:
    """The matches of one text, by pattern."""

    by_pattern: dict[Pattern, list[Evidence]] = field(default_factory=dict[Pattern, list[Evidence]])

    def add(self, pattern: Pattern, evidence: Evidence) -> None:
        """Add a match. Beyond the limit, the oldest of the last matches is dropped."""
        kept = self.by_pattern.setdefault(pattern, [])
        if kept and kept[-1].line == evidence.line and kept[-1].text == evidence.text:
            return
        if len(kept) >= _FIRST_HITS + _LAST_HITS:
            del kept[_FIRST_HITS]
        kept.append(evidence)

    def of(self, pattern: Pattern) -> list[Evidence]:
        """Return the matches of a pattern, in the order of the text."""
        return self.by_pattern.get(pattern, [])


class Scanner:
    """Finds patterns in the chunks of one text."""

    def __init__(self, patterns: Iterable[Pattern], *, file: str | None = None) -> None:
        self._patterns = list(dict.fromkeys(patterns))
        self._file = file
        self.hits = Hits()

    def scan(self, chunk: Chunk) -> None:
        """Search a chunk for all patterns."""
        folded = fold(chunk.data)
        words = words_of(folded)
        joined = b" ".join(words)
        for pattern in self._patterns:
            if not pattern.can_match(words, joined, folded):
                continue
            for start, end in pattern.spans(folded, _HITS_PER_CHUNK, at=chunk.fresh):
                evidence = Evidence(chunk.line_of(start), line_around(chunk, start, end), self._file)
                self.hits.add(pattern, evidence)


def complete(
    signature: Signature,
    hits: Hits,
    facts: Collection[str] = (),
    *,
    within: int | None = None,
    without: Collection[int] = (),
) -> list[Evidence] | None:
    """Return the evidence of a signature outside the lines `without`, or None if some is missing.

    `facts` come from rules.
    """
    if not set(signature.facts) <= set(facts):
        return None
    within = signature.within if within is None else within
    groups = [hits.of(pattern) for pattern in signature.all]
    if signature.any:
        union = [evidence for pattern in signature.any for evidence in hits.of(pattern)]
        groups.append(sorted(union, key=lambda evidence: evidence.line))
    groups = [[evidence for evidence in group if evidence.line not in without] for group in groups]
    if not all(groups):
        return None
    if not groups:
        return []
    excluded = [evidence.line for pattern in signature.none for evidence in hits.of(pattern)]
    for first in groups[0]:
        chosen = [first]
        for group in groups[1:]:
            near = min(group, key=lambda evidence: abs(evidence.line - first.line))
            if abs(near.line - first.line) > within:
                break
            chosen.append(near)
        else:
            if not any(abs(line - first.line) <= within for line in excluded):
                unique = {(evidence.line, evidence.text): evidence for evidence in chosen}
                return sorted(unique.values(), key=lambda evidence: evidence.line)
    return None
