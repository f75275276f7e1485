"""Probe a template with two short conversations to find what it writes around a reply: header and end markers."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunewell.core.errors import UserError
from tunewell.data.masking.placeholders import placeholder
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.data.tokenizers.load import AddedTokenInfo

# Tags that replies can contain: the tokenizer reads each as one token, wherever it appears.
_REPLY_TAG = re.compile("think|thought|reason|tool", re.IGNORECASE)


@dataclass(frozen=True)
class ReplyFrame:
    """The text around a reply, and the added tokens of the tokenizer that the template uses as markers."""

    header: str
    """The text that the generation prompt adds; empty if it adds nothing."""
    leading_space: str
    """White space between the generation prompt and a reply, which the model must generate."""
    end_marker: str
    """The marker that ends the last reply."""
    ends: frozenset[str]
    """All markers that can end a reply."""
    openers: frozenset[str]
    """Markers that begin a turn and do not end one."""
    markers: tuple[str, ...]
    """All special tokens, and the other added tokens that the template writes around turns."""
    turn_markers: tuple[str, ...]
    """The markers that appear in every conversation."""


def probe_reply_frame(template: ChatTemplate, added: Mapping[str, AddedTokenInfo]) -> ReplyFrame:
    """Return the reply frame of a template; raise UserError if a reply cannot be supervised with an end marker."""
    question_only, prompt, whole = _render_probes(template)
    question, _, _ = whole.partition(placeholder(0))
    _, found, after = whole.rpartition(placeholder(1))
    if not found:
        raise UserError(
            f"the template `{template.name}` changes the text of a reply, so the loss mask cannot be found",
            fix="choose another template with `template.name`",
        )
    markers = _markers(added, prompt, whole)
    marker = marker_pattern(markers)
    end = marker.search(after)
    if end is None:
        raise UserError(
            f"the template `{template.name}` does not end replies with a token of this tokenizer",
            where=f"after a reply, the template writes {after!r}"
            if after
            else "after a reply, the template writes nothing",
            fix="without an end token the model would never stop: choose another template with `template.name`, "
            "or set `template.add_missing_tokens: true`",
        )
    header = prompt[len(question_only) :] if prompt.startswith(question_only) else ""
    prompt_gap = prompt.rpartition(placeholder(0))[2]
    reply_gap = whole.rpartition(placeholder(1))[0].rpartition(placeholder(0))[2]
    space = reply_gap[len(prompt_gap) :] if reply_gap.startswith(prompt_gap) else ""
    ends = {end.group(), *_end_between_turns(template, marker, header, question)}
    in_headers = {*marker.findall(question), *marker.findall(header)}
    return ReplyFrame(
        header=header,
        leading_space=space if space.isspace() else "",
        end_marker=end.group(),
        ends=frozenset(ends),
        openers=frozenset(in_headers - ends),
        markers=markers,
        turn_markers=tuple(dict.fromkeys([*marker.findall(prompt), *sorted(ends)])),
    )


def marker_pattern(markers: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds markers, the longest possible one at each position."""
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
            fix="choose another template with `template.name`",
        ) from failure


def _markers(added: Mapping[str, AddedTokenInfo], *texts: str) -> tuple[str, ...]:
    special = [text for text, facts in added.items() if facts.special]
    others = [text for text, facts in added.items() if not facts.special and text.strip()]
    used = {found for text in texts for found in marker_pattern(others).findall(text) if not _REPLY_TAG.search(found)}
    markers = [*special, *sorted(used)]
    if broken := [text for text in markers if added[text].single_word and any(text in rendered for rendered in texts)]:
        raise UserError(
            f"the tokenizer recognises `{broken[0]}` only between spaces or punctuation (`single_word`)",
            fix="add it to the tokenizer as a special token without `single_word`",
        )
    return tuple(markers)


def _end_between_turns(template: ChatTemplate, marker: re.Pattern[str], header: str, question: str) -> list[str]:
    """Return the marker that ends a reply before another turn; nothing if it belongs to the header of the next turn."""
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
