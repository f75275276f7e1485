"""What a template writes around a reply, learned from the two simplest conversations."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunewell.core.errors import UserError
from tunewell.data.masking.placeholders import placeholder
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.data.tokenizers.load import AddedTokenInfo

# Tags that replies may write themselves: a token for each is how the tokenizer reads them, wherever they stand.
_REPLY_TAG = re.compile("think|thought|reason|tool", re.IGNORECASE)


@dataclass(frozen=True)
class ReplyFrame:
    """The frame of a reply, and which added tokens of the tokenizer are the template's markers."""

    header: str
    """What the generation prompt gives; empty where it gives nothing."""
    leading_space: str
    """White space between the generation prompt and a reply: the model has to write it."""
    end_marker: str
    """What ends the last reply."""
    ends: frozenset[str]
    """What ends a reply anywhere."""
    openers: frozenset[str]
    """Markers that begin turns and end none."""
    markers: tuple[str, ...]
    """Special tokens, and other added tokens that the template marks turns with."""
    turn_markers: tuple[str, ...]
    """Those of them that stand in every conversation."""


def probe_reply_frame(template: ChatTemplate, added: Mapping[str, AddedTokenInfo]) -> ReplyFrame:
    """Learn a template's frame; raise UserError when no reply could be learned whole and with an end."""
    first, *others = _render_probes(template)
    prompt, whole = others
    question, _, _ = whole.partition(placeholder(0))
    _, found, after = whole.rpartition(placeholder(1))
    if not found:
        raise UserError(
            f"the template `{template.name}` does not render the words of a reply as they are",
            fix="choose another with `template.name`",
        )
    markers = _markers(added, prompt, whole)
    marker = marker_pattern(markers)
    end = marker.search(after)
    if end is None:
        raise UserError(
            f"the template `{template.name}` ends a reply with no token of this tokenizer's",
            where=f"after a reply it writes {after!r}" if after else "after a reply it writes nothing",
            fix="a model trained so would never stop: choose another with `template.name`, "
            "or set `template.add_missing_tokens: true`",
        )
    header = prompt[len(first) :] if prompt.startswith(first) else ""
    given = prompt.rpartition(placeholder(0))[2]
    between = whole.rpartition(placeholder(1))[0].rpartition(placeholder(0))[2]
    own = between[len(given) :] if between.startswith(given) else ""
    ends = {end.group(), *_end_between_turns(template, marker, header, question)}
    in_headers = {*marker.findall(question), *marker.findall(header)}
    return ReplyFrame(
        header=header,
        leading_space=own if own.isspace() else "",
        end_marker=end.group(),
        ends=frozenset(ends),
        openers=frozenset(in_headers - ends),
        markers=markers,
        turn_markers=tuple(dict.fromkeys([*marker.findall(prompt), *sorted(ends)])),
    )


def marker_pattern(markers: Iterable[str]) -> re.Pattern[str]:
    """Make a pattern that finds markers, the longest that fits at each place."""
    ordered = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else re.compile(r"(?!)")


def _render_probes(template: ChatTemplate) -> tuple[str, str, str]:
    asked = [{"role": "user", "content": placeholder(0)}]
    replied = [*asked, {"role": "assistant", "content": placeholder(1)}]
    try:
        return (
            template.render(asked),
            template.render(asked, add_generation_prompt=True),
            template.render(replied),
        )
    except TemplateFailed as failure:
        raise UserError(
            f"the template `{template.name}` cannot render one question and one answer: {failure}",
            fix="choose another with `template.name`",
        ) from failure


def _markers(added: Mapping[str, AddedTokenInfo], *texts: str) -> tuple[str, ...]:
    special = [text for text, facts in added.items() if facts.special]
    others = [text for text, facts in added.items() if not facts.special and text.strip()]
    used = {found for text in texts for found in marker_pattern(others).findall(text) if not _REPLY_TAG.search(found)}
    markers = [*special, *sorted(used)]
    if broken := [text for text in markers if added[text].single_word and any(text in rendered for rendered in texts)]:
        raise UserError(
            f"the tokenizer reads `{broken[0]}` as a token only where no letter stands beside it (`single_word`)",
            fix="add it to the tokenizer as an ordinary special token",
        )
    return tuple(markers)


def _end_between_turns(template: ChatTemplate, marker: re.Pattern[str], header: str, question: str) -> list[str]:
    """Find what ends a reply that another turn follows; nothing where it is the next turn's own header."""
    turns = [{"role": role, "content": placeholder(n)} for n, role in enumerate(["user", "assistant"] * 2)]
    try:
        text = template.render(turns)
    except TemplateFailed:
        return []
    gap = text.partition(placeholder(1))[2].partition(placeholder(2))[0]
    end = marker.search(gap)
    if end is None or end.group() in marker.findall(header):
        return []
    if end.group() in question and not marker.search(gap, end.end()):
        return []
    return [end.group()]
