"""The answers of a report in the order a reader wants them: a few that tell most, the wrong, the right."""

from dataclasses import dataclass

from tunewell.records.report import Exchange, Report

_TELLING = 6
_MOST = 500
"""Exchanges on a page; all of them are in `report.json`."""


@dataclass(frozen=True)
class Answers:
    """Every exchange of a report in one of three lists."""

    telling: list[Exchange]
    wrong: list[Exchange]
    right: list[Exchange]
    left_out: int


def sorted_answers(report: Report, *, telling: int = _TELLING, most: int = _MOST) -> Answers:
    """Sort the exchanges: half of the telling ones wrong, half right, and more of one where the other lacks."""
    ranked = sorted(report.exchanges, key=_rank)
    wrong = [exchange for exchange in ranked if _is_wrong(exchange)]
    right = [exchange for exchange in ranked if not _is_wrong(exchange)]
    num_wrong = max(min(len(wrong), telling // 2), min(len(wrong), telling - len(right)))
    num_right = min(len(right), telling - num_wrong)
    more_wrong = wrong[num_wrong:][:most]
    more_right = right[num_right:][: most - len(more_wrong)]
    return Answers(
        telling=[*wrong[:num_wrong], *right[:num_right]],
        wrong=more_wrong,
        right=more_right,
        left_out=len(ranked) - num_wrong - num_right - len(more_wrong) - len(more_right),
    )


def _is_wrong(exchange: Exchange) -> bool:
    return exchange.tuned.right is False or bool(exchange.tuned.faults)


def _rank(exchange: Exchange) -> tuple[bool, bool, bool, int]:
    """Put faults first, then what the base knew and the tuned model does not, then what it learned."""
    was_right = exchange.base is not None and bool(exchange.base.right)
    has_changed = was_right != bool(exchange.tuned.right)
    return (not exchange.tuned.faults, exchange.tuned.right is not False, not has_changed, exchange.document)
