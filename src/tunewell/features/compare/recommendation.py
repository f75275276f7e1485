"""Recommend one of several columns: the one with the most right answers, unless a simpler one is not shown to be worse.

column             right     needs             shown to be worse than the best?
base                5 of 40                    yes
base + retrieval   12 of 40  index             yes
tuned              39 of 40  training          no      <- recommended: it needs less than the best
tuned + retrieval  40 of 40  training, index
"""

from tunewell.core.units import count
from tunewell.evaluation.comparison import ColumnComparison, ColumnCounts, ColumnDifference, Recommendation

MIN_QUESTIONS = 20
"""With fewer questions, one answer more or less changes the order of the columns."""
_FEW_RIGHT = 0.5
_MANY_INVENTED = 0.5


def recommend(comparison: ColumnComparison) -> Recommendation:
    """Return which column to use, with the reason in one or two sentences."""
    names, counts = comparison.names, comparison.counts
    num_judged = min((own.judged for own in counts), default=0)
    if not num_judged:
        return Recommendation(None, "no answer can be judged: the references are too long to compare")
    if num_judged < MIN_QUESTIONS:
        because = f"only {count(num_judged, 'question')}; a recommendation needs at least {MIN_QUESTIONS}"
        return Recommendation(None, because)
    best = max(range(len(names)), key=lambda index: (counts[index].right, -len(comparison.needs[index])))
    if counts[best].share < _FEW_RIGHT:
        return Recommendation(None, _none_is_good(names[best], counts[best]))
    equal = [
        index
        for index in range(len(names))
        if index == best or not ((found := _between(comparison, index, best)) and found.is_shown)
    ]
    chosen = min(equal, key=lambda index: (len(comparison.needs[index]), -counts[index].right))
    parts = [f"{counts[chosen].right} of {count(counts[chosen].judged, 'answer')} are right"]
    if chosen != best:
        parts.append(f"{names[best]} ({counts[best].right} right) needs more and is not shown to be better")
        parts.append(_more(comparison, chosen, best))
    elif others := [index for index in equal if index != best]:
        nearest = max(others, key=lambda index: counts[index].right)
        parts.append(f"{names[nearest]} ({counts[nearest].right} right) is not shown to be worse")
        parts.append(_more(comparison, best, nearest))
    else:
        parts.append("every other column is shown to be worse")
    parts.append(_invention(counts[chosen]))
    return Recommendation(names[chosen], "; ".join(part for part in parts if part))


def _between(comparison: ColumnComparison, one: int, other: int) -> ColumnDifference | None:
    pair = {comparison.names[one], comparison.names[other]}
    return next((found for found in comparison.differences if {found.first, found.second} == pair), None)


def _more(comparison: ColumnComparison, one: int, other: int) -> str:
    found = _between(comparison, one, other)
    if found is None or found.more_questions is None:
        return ""
    return f"about {count(found.more_questions, 'more question')} would show a difference of this size"


def _invention(counts: ColumnCounts) -> str:
    if not counts.num_removed or counts.invented is None or counts.invented < _MANY_INVENTED * counts.num_removed:
        return ""
    return f"but with the passages removed, it invents {counts.invented} of {count(counts.num_removed, 'answer')}"


def _none_is_good(name: str, counts: ColumnCounts) -> str:
    hint = "use a larger model"
    if counts.search_misses is not None and counts.reading_misses is not None:
        is_search = counts.search_misses > counts.reading_misses
        hint = (
            "most misses are search misses: tune the search with `tunewell index FOLDER --questions FILE`"
            if is_search
            else "most misses are reading misses: use a larger model, or train this one with "
            "`tunewell train --index INDEX`"
        )
    return f"the best column, {name}, has only {counts.right} of {count(counts.judged, 'answer')} right; {hint}"
