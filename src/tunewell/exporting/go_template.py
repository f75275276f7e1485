"""Derive Ollama's template, in Go's syntax, from a model's own Jinja template by rendering probes.

    render marks -> cut at the marks -> rules -> compare with the template on hundreds of other conversations -> Go

Nothing is known of any template by name. What comes out renders byte for byte what the template renders, or the
difference is among the notes, or the template is refused with the conversation that shows why.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tunewell.core.errors import UserError
from tunewell.data.templates import TemplateFailed
from tunewell.exporting.chat_layout import Layout, Message, Place, Render, pieces_at
from tunewell.exporting.chat_omissions import omissions
from tunewell.exporting.chat_probes import (
    GROUPS,
    LATER_SYSTEM,
    QUESTIONS,
    SYSTEM_ALONE,
    UNFINISHED,
    Group,
    is_known,
    saying,
)
from tunewell.exporting.chat_reading import Opening
from tunewell.exporting.chat_rules import NoRule, Sight, find_rules
from tunewell.exporting.chat_trial import Trial
from tunewell.exporting.go_syntax import write_go


@dataclass(frozen=True)
class GoTemplate:
    """A chat template for Ollama."""

    text: str
    """What follows TEMPLATE in a Modelfile, in Go's syntax."""
    closing: str
    """What stands after a finished reply at the end of a conversation; empty if the model's template does not say."""
    next_question: str
    """What stands between a reply and the next question."""
    num_checked: int
    """Conversations on which this and the model's template gave the same bytes."""
    notes: tuple[str, ...] = ()
    """What this template does not do as the model's own does."""


def derive_go_template(
    render: Render,
    *,
    bos: str | None = None,
    adds_bos: bool = False,
    source: str | None = None,
    render_another_day: Render | None = None,
    date: str | None = None,
) -> GoTemplate:
    """Derive Ollama's template from a rendering function; raise UserError where no exact one can be had.

    `render` takes messages of `role` and `content`, and whether to ask for a reply. With `adds_bos` (the GGUF says so)
    Ollama puts `bos` before the text by itself, and the template leaves it out. The template's `source` is searched
    for words that it may treat in its own way; `render_another_day` tells whether the date is in the text, and `date`
    which day `render` sees.
    """
    notes: list[str] = []
    if adds_bos and bos:
        has_bos = _begins_with(bos, render)
        trial = Trial(_without(bos, render, has_bos=has_bos))
        if not has_bos:
            notes.append(f"the GGUF begins every prompt with `{bos}`; the model's template does not")
    else:
        trial = Trial(render)
    try:
        layout = _learn(trial, notes)
    except NoRule as failure:
        raise UserError(
            f"the chat template cannot be written for Ollama byte for byte: {failure.reason}",
            where=_shown(failure.conversation),
            fix="export `gguf` without `ollama`: llama.cpp reads the model's own template from the file",
        ) from failure
    notes += omissions(trial, layout, source)
    if render_another_day and _differ(render, render_another_day, layout):
        notes.append(
            f"the date in the text stands still at {date or 'the one it was made with'}; the model's template writes "
            "today's"
        )
    after_reply = pieces_at(layout.rules["user"], Place("user", "assistant", False, True, True, 1))
    return GoTemplate(
        text=write_go(layout),
        closing=trial.closing or "",
        next_question=after_reply[0] if isinstance(after_reply[0], str) else "",
        num_checked=trial.num_same,
        notes=tuple(notes),
    )


# Learning.


def _learn(trial: Trial, notes: list[str]) -> Layout:
    """Learn questions and replies in turn, which must be exact, then whatever else can be had exactly."""
    try:
        layout, sights = _questions(trial, "in place")
    except NoRule:
        layout, sights = _questions(trial, "kept")
    if layout.opening == "left out":
        notes.append("system messages are left out; the model's template refuses them")
    known: list[Group] = []
    for group in GROUPS:
        try:
            wider, more = _widened(trial, layout, sights, (*known, group))
        except NoRule as failure:
            notes.append(f"{group.name} {group.otherwise}; not so in the model's template: {failure.reason}")
            continue
        if more:
            layout, sights = wider, sights + more
            known.append(group)
        elif group is not SYSTEM_ALONE:
            notes.append(f"{group.name} {group.otherwise}; the model's template refuses it")
    return layout


def _questions(trial: Trial, opening: Opening) -> tuple[Layout, list[Sight]]:
    """Learn how questions and replies in turn are laid out, with a system message and without."""
    without = trial.sights(QUESTIONS, opening)
    if not without:
        raise NoRule("it refuses every conversation of questions and replies", saying(QUESTIONS[0], "user", "Hello"))
    within = trial.sights([("system", *form) for form in QUESTIONS], opening)
    layout = Layout(find_rules(without + within), opening=opening if within else "left out")
    empty = [saying(("system", *form), "system", "") for form in QUESTIONS]
    skipping = replace(layout, skips_empty_system=True)
    if within and not trial.agree(layout, empty) and trial.agree(skipping, empty):
        layout = skipping
    trial.check(layout, ())
    return layout, without + within


def _widened(trial: Trial, layout: Layout, sights: list[Sight], groups: Sequence[Group]) -> tuple[Layout, list[Sight]]:
    """Learn the last of these groups too; no sights where the template refuses it, `NoRule` where it is not exact."""
    group = groups[-1]
    opening: Opening = "kept" if layout.opening == "kept" else "in place"
    forms = [form for form in group.forms if is_known(form, groups, has_system=layout.opening != "left out")]
    more = trial.sights(forms, opening)
    if not more:
        return layout, []
    if group is UNFINISHED:
        trial.find_closing(forms, opening)
    takes_later_system = layout.takes_later_system or group is LATER_SYSTEM
    wider = replace(layout, rules=find_rules(sights + more), takes_later_system=takes_later_system)
    trial.check(wider, groups)
    return wider, more


# Texts.


def _begins_with(bos: str, render: Render) -> bool:
    try:
        return render([{"role": "user", "content": "Hello"}], True).startswith(bos)
    except TemplateFailed:
        return False


def _without(bos: str, render: Render, *, has_bos: bool) -> Render:
    """Take the first token off every text; all of them must have it, or none."""

    def bare(messages: list[dict[str, str]], asks: bool) -> str:
        text = render(messages, asks)
        if text.startswith(bos) != has_bos:
            raise NoRule(f"some texts begin with `{bos}` and some do not", messages)
        return text.removeprefix(bos)

    return bare


def _differ(render: Render, other: Render, layout: Layout) -> bool:
    forms = (QUESTIONS[1],) if layout.opening == "left out" else (QUESTIONS[1], ("system", *QUESTIONS[1]))
    return any(
        render(saying(form, "user", "Hello"), True) != other(saying(form, "user", "Hello"), True) for form in forms
    )


def _shown(conversation: Sequence[Message], max_chars: int = 60) -> str:
    """Show a conversation on one line, long messages and long conversations cut."""
    whole = [dict(message) for message in conversation[:8]]
    for message in whole:
        if len(message["content"]) > max_chars:
            message["content"] = message["content"][:max_chars] + "..."
    more = f" and {len(conversation) - 8} more" if len(conversation) > 8 else ""
    return json.dumps(whole, ensure_ascii=False) + more
