"""The screen of `tunewell profile`: the verdict, the parts of a step, speed, ceilings, and what was tried."""

from typing import TYPE_CHECKING

from tunewell.cli.render import folded_table, hanging, one_line, table
from tunewell.cli.screens.numbers import format_speed
from tunewell.core.units import count, percent
from tunewell.features.profile.bottlenecks import (
    PARTS,
    Bottleneck,
    ProfileResult,
    covered_share,
    time_by_part,
)

if TYPE_CHECKING:
    from tunewell.features.profile.records import Profile


def profile_screen(result: ProfileResult) -> str:
    """Return the screen of a profile."""
    profile = result.profile
    lines = [hanging("", result.sentence), ""]
    lines += [_parts_table(profile), "", folded_table(_rows(profile))]
    others = result.bottlenecks[1:]
    lines += [hanging("also: ", bottleneck.sentence) for bottleneck in others]
    lines += [hanging("note: ", one_line(note)) for note in profile.notes]
    if result.applied is not None:
        lines += ["", *_applied(result, result.bottlenecks[0], result.applied)]
    elif result.bottlenecks and profile.source == "steps":
        lines.append(hanging("next: ", "add `--apply` to try it; then change the line in `tunewell.yaml`"))
    elif profile.source == "run":
        lines.append(hanging("next: ", "add `--steps 20` to measure steps and try threads and micro-batches"))
    return "\n".join(lines)


def _parts_table(profile: "Profile") -> str:
    parts = sorted(time_by_part(profile).items(), key=lambda part: (part[0] == "other", -part[1]))
    total = profile.total_seconds
    rows = [
        [PARTS[name][0] if name in PARTS else name, _milliseconds(seconds), percent(seconds / total)]
        for name, seconds in parts
        if seconds >= 0.0005 * total
    ]
    return table([["", "ms/step", "share"], *rows, ["a step", _milliseconds(total), ""]], right=(1, 2))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.{2 if seconds < 0.1 else 0}f}"


def _rows(profile: "Profile") -> list[list[str]]:
    speed = profile.tokens / profile.total_seconds
    where = f"{profile.device}, {profile.precision}" + (
        "" if profile.is_gpu else f", {count(profile.threads, 'thread')}"
    )
    rows = [
        ["measured", f"{count(profile.num_measured, 'step')} of {count(profile.num_steps)} on {where}"],
        ["speed", f"{format_speed(speed)}; {count(round(profile.tokens))} tokens per step"],
    ]
    if profile.computed_tokens:
        rows.append(["padding", _padding(profile.tokens, profile.computed_tokens)])
    if profile.kernels is not None and profile.is_gpu:
        rows.append(["GPU", f"busy {percent(profile.kernels.busy_seconds / profile.seconds, 0)} of a step"])
    if (covered := covered_share(profile)) is not None:
        rows.append(["accounted", f"{percent(covered)} of the time is in a named part"])
    return rows


def _padding(tokens: float, computed: float) -> str:
    if computed < tokens:
        return f"none; a prefix that documents share is computed once, which saves {percent(1 - computed / tokens, 0)}"
    return f"{percent(1 - tokens / computed)} of the computed tokens" if computed > tokens else "none"


def _applied(result: ProfileResult, best: Bottleneck, applied: "Profile") -> list[str]:
    gain = result.measured_gain or 0.0
    rows = [
        ["", "ms/step", "times as fast"],
        ["now", _milliseconds(best.before_seconds), ""],
        ["predicted", _milliseconds(best.after_seconds), f"{best.gain:.2f}"],
        ["measured", _milliseconds(applied.total_seconds), f"{gain:.2f}"],
    ]
    return [f"tried `{best.key}: {best.value}`", "", table(rows, right=(1, 2))]
