"""Derive Ollama's Go template from a model's Jinja chat template by rendering probes.

    render markers -> split at markers -> learn rules -> compare with the original on hundreds of conversations -> Go

There is no list of known templates. The result renders the same bytes as the original; known differences are listed in
the notes. A template without an exact counterpart is rejected, with a conversation that shows the difference.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tunewell.core.errors import UserError
from tunewell.core.text import shorten
from tunewell.data.templates.chat_template import TemplateFailed
from tunewell.export.ollama.layout import (
    Layout,
    Message,
    NoExactLayout,
    Observation,
    Render,
    TurnPosition,
    follow_rule,
    learn_rules,
    write_go,
)
from tunewell.export.ollama.probes import (
    GROUPS,
    LATER_SYSTEM,
    QUESTIONS,
    SYSTEM_ALONE,
    OriginalTemplate,
    RoleGroup,
    SystemPlacement,
    fill_role,
    is_covered,
    string_literals,
)

_MAX_LISTED = 5


@dataclass(frozen=True)
class GoTemplate:
    """A chat template for Ollama."""

    text: str
    """The value of TEMPLATE in a Modelfile."""
    closing: str
    """The text after a finished reply at the end of a conversation; empty if the original writes none."""
    next_question: str
    """The text between a reply and the next question."""
    num_checked: int
    """Number of conversations that this template and the original rendered identically."""
    notes: tuple[str, ...] = ()
    """Differences from the original."""
    stops: tuple[str, ...] = ()
    """The texts that end a reply, if the tokenizer is known."""


def derive_go_template(
    render: Render,
    *,
    bos: str | None = None,
    adds_bos: bool = False,
    source: str | None = None,
    render_another_day: Render | None = None,
    date: str | None = None,
) -> GoTemplate:
    """Derive Ollama's template from a rendering function; raise UserError if there is no exact counterpart.

    With `adds_bos` (metadata of the GGUF file), Ollama adds `bos` to every prompt, so the template omits it. String
    literals in `source` are tested as content. `render` uses the day `date`; a difference from `render_another_day`
    shows that the text contains the date.
    """
    notes: list[str] = []
    if adds_bos and bos:
        has_bos = _begins_with_bos(bos, render)
        original = OriginalTemplate(_without_bos(bos, render, has_bos=has_bos))
        if not has_bos:
            notes.append(f"the GGUF file adds `{bos}` to every prompt; the model's template does not")
    else:
        original = OriginalTemplate(render)
    try:
        layout = _learn_layout(original, notes)
    except NoExactLayout as failure:
        raise UserError(
            f"the chat template cannot be converted exactly for Ollama: {failure.reason}",
            where=_format_conversation(failure.conversation),
            fix="export `gguf` without `ollama`: llama.cpp reads the model's own template from the file",
        ) from failure
    notes += _find_differences(original, layout, source)
    if render_another_day and _renders_differ(render, render_another_day, layout):
        notes.append(
            f"the date in the text stays at {date or 'the date of the export'}; the model's own template writes "
            "today's date"
        )
    after_reply = follow_rule(layout.rules["user"], TurnPosition("user", "assistant", False, True, True, 1))
    return GoTemplate(
        text=write_go(layout),
        closing=original.closing or "",
        next_question=after_reply[0] if isinstance(after_reply[0], str) else "",
        num_checked=original.num_same,
        notes=tuple(notes),
    )


def stop_texts(template: GoTemplate, *, control_tokens: Collection[str]) -> tuple[str, ...]:
    """Return the texts that end a reply or begin another turn, in the order in which they follow a reply.

    These are the control tokens between a reply and the next question, because a reply never contains them. If there
    are no control tokens, it is the whole text after a reply. Empty if the template writes nothing after a reply.

        Yes. <|eot_id|><|start_header_id|>user<|end_header_id|>\\n\\n     three control tokens
        Yes. \\n\\n### Instruction:\\n                                      none: the text without its last newline
    """
    following = template.closing + template.next_question
    # Longest first, so that a token is not found inside a longer one.
    tokens = sorted((token for token in control_tokens if token.strip()), key=len, reverse=True)
    if tokens and (found := re.findall("|".join(map(re.escape, tokens)), following)):
        return tuple(dict.fromkeys(found))
    for text in (template.closing, template.next_question):
        if text.strip():
            # A final newline may share a token with the text after it, and would then never match.
            return (text.rstrip(),)
    return ()


# Learning.


def _learn_layout(original: OriginalTemplate, notes: list[str]) -> Layout:
    """Derive rules for alternating questions and replies, then for each further group that renders exactly."""
    try:
        layout, observations = _learn_questions(original, "inline")
    except NoExactLayout:
        layout, observations = _learn_questions(original, "moved")
    if not layout.has_system:
        notes.append("system messages are left out; the model's template rejects them")
    covered: list[RoleGroup] = []
    for group in GROUPS:
        try:
            extended, new = _extend_layout(original, layout, observations, (*covered, group))
        except NoExactLayout as failure:
            notes.append(f"{group.name} {group.fallback}; the model's template differs: {failure.reason}")
            continue
        if new:
            layout, observations = extended, observations + new
            covered.append(group)
        elif group is not SYSTEM_ALONE:
            notes.append(f"{group.name} {group.fallback}; the model's template rejects it")
    return layout


def _learn_questions(original: OriginalTemplate, placement: SystemPlacement) -> tuple[Layout, list[Observation]]:
    """Learn alternating questions and replies, with and without a system message."""
    plain = original.observe(QUESTIONS, placement)
    if not plain:
        conversation = fill_role(QUESTIONS[0], "user", "Hello")
        raise NoExactLayout("the template rejects every conversation of questions and replies", conversation)
    with_system = original.observe([("system", *roles) for roles in QUESTIONS], placement)
    layout = Layout(learn_rules(plain + with_system), system_placement=placement if with_system else "dropped")
    empty = [fill_role(("system", *roles), "system", "") for roles in QUESTIONS]
    skipping = replace(layout, skips_empty_system=True)
    if with_system and not original.matches(layout, empty) and original.matches(skipping, empty):
        layout = skipping
    original.require_match(layout, ())
    return layout, plain + with_system


def _extend_layout(
    original: OriginalTemplate, layout: Layout, observations: list[Observation], groups: Sequence[RoleGroup]
) -> tuple[Layout, list[Observation]]:
    """Extend a layout by the last of these groups; return no observations if the template rejects the group."""
    group = groups[-1]
    placement: SystemPlacement = "moved" if layout.system_placement == "moved" else "inline"
    sequences = [roles for roles in group.sequences if is_covered(roles, groups, has_system=layout.has_system)]
    new = original.observe(sequences, placement)
    if not new:
        return layout, []
    shows_later_system = layout.shows_later_system or group is LATER_SYSTEM
    extended = replace(layout, rules=learn_rules(observations + new), shows_later_system=shows_later_system)
    original.require_match(extended, groups)
    return extended, new


# Differences from the original: empty messages, content with a special meaning, tools, thinking, the date.


def _find_differences(original: OriginalTemplate, layout: Layout, source: str | None) -> Iterator[str]:
    """Yield a note for each difference; string literals of the template's source are tested as content."""
    sequences = [*QUESTIONS[:3], *(("system", *roles) for roles in QUESTIONS[:3] if layout.has_system)]
    for role in ("system", "user", "assistant"):
        for content, kind in (("", "empty"), (" \n", "blank")):
            conversations = [fill_role(roles, role, content) for roles in sequences if role in roles]
            if not original.matches(layout, conversations):
                yield f"{kind} {role} messages are rendered differently from the model's template"
    special = [text for text in string_literals(source or "") if not _is_ordinary(original, layout, text)]
    if special:
        listed = ", ".join(f"`{text}`".replace("\n", "\\n") for text in special[:_MAX_LISTED])
        more = f" and {len(special) - _MAX_LISTED} more" if len(special) > _MAX_LISTED else ""
        yield f"messages that contain {listed}{more} are rendered unchanged; the model's template edits them"
    if source is None or "tool" in source:
        yield "tools are left out: Ollama passes them to templates in a different form than Jinja"
    if source is None or "reasoning" in source or "thinking" in source:
        yield "thinking is left out: it is not separated from the reply and cannot be turned on or off"


def _is_ordinary(original: OriginalTemplate, layout: Layout, text: str) -> bool:
    """Return True if messages that contain this text are rendered like other messages."""
    roles = ("system", *QUESTIONS[1]) if layout.has_system else QUESTIONS[1]
    contents = (text, f"a{text}b", f"{text}b", f"a\n{text}\n\nb")
    conversations = [fill_role(roles, role, content) for role in dict.fromkeys(roles) for content in contents]
    return original.matches(layout, conversations)


def _renders_differ(render: Render, other: Render, layout: Layout) -> bool:
    sequences = (QUESTIONS[1], *([("system", *QUESTIONS[1])] if layout.has_system else []))
    conversations = [fill_role(roles, "user", "Hello") for roles in sequences]
    return any(render(messages, True) != other(messages, True) for messages in conversations)


def _begins_with_bos(bos: str, render: Render) -> bool:
    try:
        return render([{"role": "user", "content": "Hello"}], True).startswith(bos)
    except TemplateFailed:
        return False


def _without_bos(bos: str, render: Render, *, has_bos: bool) -> Render:
    """Return a rendering function that removes the BOS token; either all texts must begin with it, or none."""

    def render_without(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text = render(messages, add_generation_prompt)
        if text.startswith(bos) != has_bos:
            raise NoExactLayout(f"some texts begin with `{bos}` and some do not", messages)
        return text.removeprefix(bos)

    return render_without


def _format_conversation(conversation: Sequence[Message]) -> str:
    """Format a conversation on one line; long messages and conversations are truncated."""
    shown = [{**message, "content": shorten(message["content"], 60)} for message in conversation[:8]]
    more = f" and {len(conversation) - 8} more" if len(conversation) > 8 else ""
    return json.dumps(shown, ensure_ascii=False) + more
