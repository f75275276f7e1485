"""Derive Ollama's template, in Go's syntax, from a model's own Jinja template by rendering probes.

    render marks -> cut at the marks -> rules -> compare with the template on hundreds of other conversations -> Go

Nothing is known of any template by name. What comes out renders byte for byte what the template renders, or the
difference is among the notes, or the template is refused with the conversation that shows why.
"""

import json
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tunewell.core.errors import UserError
from tunewell.data.templates.chat_template import TemplateFailed
from tunewell.export.ollama.layout import (
    Layout,
    Message,
    NoRule,
    Place,
    Render,
    Roles,
    Sight,
    find_rules,
    pieces_at,
    write_go,
)
from tunewell.export.ollama.probes import (
    GROUPS,
    LATER_SYSTEM,
    QUESTIONS,
    SYSTEM_ALONE,
    UNFINISHED,
    Group,
    Opening,
    Reader,
    fill_role,
    is_known,
    random_order,
    short_orders,
    spelled_in,
    talk,
)

# Compare a layout with the chat template that it was learned from, byte by byte.

NUM_LONGER = 100
"""Random conversations that a layout is compared on each time it has grown, besides all orders of few messages; about
30 ms for most templates."""


class Trial:
    """A chat template under examination, and how often a layout has agreed with it."""

    def __init__(self, render: Render) -> None:
        self._reader = Reader(render)
        self.closing: str | None = None
        """What stands after a finished reply at the end of a conversation; None until it is known."""
        self.num_same = 0
        """Random conversations on which a layout and the template gave the same bytes."""

    def sights(self, forms: Sequence[Roles], opening: Opening) -> list[Sight]:
        """Read conversations of these forms; none where the template refuses them all."""
        readings = [reading for form in forms if (reading := self._reader.read(form, opening))]
        return [sight for reading in readings for sight in reading.sights]

    def find_closing(self, forms: Sequence[Roles], opening: Opening) -> None:
        """Find what stands after a finished reply; raise `NoRule` where it is not always the same."""
        readings = [reading for form in forms if (reading := self._reader.read(form, opening))]
        odd = next((reading for reading in readings if reading.closing != readings[0].closing), None)
        if odd:
            raise NoRule("the text after the last reply varies", odd.sights[0].conversation)
        self.closing = readings[0].closing

    def check(self, layout: Layout, groups: Collection[Group]) -> None:
        """Compare a layout with the template on conversations it was not learned from; raise `NoRule` on the first
        that differs. Beyond questions and replies in turn the template may refuse some."""
        draw = random.Random(len(groups))
        has_system = layout.opening != "left out"
        longer = (random_order(draw, groups, has_system=has_system) for _ in range(NUM_LONGER))
        num_same = 0
        for roles in (*short_orders(groups, has_system=has_system), *longer):
            messages = talk(roles, draw)
            expected = self._expected(messages)
            if expected is None and not groups:
                raise NoRule("it rejects some conversations of alternating questions and replies", messages)
            if expected is not None and layout.lay_out(messages) != expected:
                raise NoRule("the rendered text depends on more than the order of the messages", messages)
            num_same += expected is not None
        self.num_same += num_same

    def agree(self, layout: Layout, probes: Sequence[list[dict[str, str]]]) -> bool:
        """Say whether a layout gives the template's texts of conversations that ask for a reply and are not refused."""
        try:
            texts = [self._reader.text_of(probe) for probe in probes]
        except NoRule:
            return False
        return all(text is None or layout.lay_out(probe) == text for text, probe in zip(texts, probes, strict=True))

    def _expected(self, messages: list[dict[str, str]]) -> str | None:
        """Render a conversation with the template, up to where the reply begins or goes on."""
        text = self._reader.text_of(messages)
        if text is None or messages[-1]["role"] != "assistant":
            return text
        if self.closing is None or not text.endswith(self.closing):
            raise NoRule("the text after the last reply varies", messages)
        return text.removesuffix(self.closing)


# Say what a layout does not do as the chat template does: odd messages, words with a meaning, tools, thinking.

_MAX_LISTED = 5


def omissions(trial: Trial, layout: Layout, source: str | None) -> Iterator[str]:
    """Give a sentence for each thing left out; the template's source, if known, is searched for special words."""
    yield from _blanks(trial, layout)
    special = [text for text in spelled_in(source or "") if not _is_ordinary(trial, layout, text)]
    if special:
        listed = ", ".join(f"`{text}`".replace("\n", "\\n") for text in special[:_MAX_LISTED])
        more = f" and {len(special) - _MAX_LISTED} more" if len(special) > _MAX_LISTED else ""
        yield f"messages that contain {listed}{more} are rendered unchanged; the model's template edits them"
    if source is None or "tool" in source:
        yield "tools are left out: Ollama passes them to templates in a different form than Jinja"
    if source is None or "reasoning" in source or "thinking" in source:
        yield "thinking is left out: it is not separated from the reply and cannot be turned on or off"


def _blanks(trial: Trial, layout: Layout) -> Iterator[str]:
    forms = QUESTIONS[:3] if layout.opening == "left out" else [("system", *form) for form in QUESTIONS[:3]]
    for role in ("system", "user", "assistant"):
        for words, kind in (("", "empty"), (" \n", "blank")):
            probes = [fill_role(form, role, words) for form in (*QUESTIONS[:3], *forms) if role in form]
            if not trial.agree(layout, probes):
                yield f"{kind} {role} messages are rendered differently from the model's template"


def _is_ordinary(trial: Trial, layout: Layout, text: str) -> bool:
    form = QUESTIONS[1] if layout.opening == "left out" else ("system", *QUESTIONS[1])
    spellings = (text, f"a{text}b", f"{text}b", f"a\n{text}\n\nb")
    return trial.agree(layout, [fill_role(form, role, words) for role in dict.fromkeys(form) for words in spellings])


@dataclass(frozen=True)
class GoTemplate:
    """A chat template for Ollama."""

    text: str
    """What follows TEMPLATE in a Modelfile, in Go's syntax."""
    closing: str
    """The text after a finished reply at the end of a conversation; empty if the model's template has none."""
    next_question: str
    """The text between a reply and the next question."""
    num_checked: int
    """Conversations on which this and the model's template gave the same bytes."""
    notes: tuple[str, ...] = ()
    """Differences from the model's own template."""


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
            f"the chat template cannot be converted exactly for Ollama: {failure.reason}",
            where=_shown(failure.conversation),
            fix="export `gguf` without `ollama`: llama.cpp reads the model's own template from the file",
        ) from failure
    notes += omissions(trial, layout, source)
    if render_another_day and _differ(render, render_another_day, layout):
        notes.append(
            f"the date in the text stays at {date or 'the date of the export'}; the model's own template writes "
            "today's date"
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
        notes.append("system messages are left out; the model's template rejects them")
    known: list[Group] = []
    for group in GROUPS:
        try:
            wider, more = _widened(trial, layout, sights, (*known, group))
        except NoRule as failure:
            notes.append(f"{group.name} {group.otherwise}; the model's template differs: {failure.reason}")
            continue
        if more:
            layout, sights = wider, sights + more
            known.append(group)
        elif group is not SYSTEM_ALONE:
            notes.append(f"{group.name} {group.otherwise}; the model's template rejects it")
    return layout


def _questions(trial: Trial, opening: Opening) -> tuple[Layout, list[Sight]]:
    """Learn how questions and replies in turn are laid out, with a system message and without."""
    without = trial.sights(QUESTIONS, opening)
    if not without:
        raise NoRule("it rejects every conversation of questions and replies", fill_role(QUESTIONS[0], "user", "Hello"))
    within = trial.sights([("system", *form) for form in QUESTIONS], opening)
    layout = Layout(find_rules(without + within), opening=opening if within else "left out")
    empty = [fill_role(("system", *form), "system", "") for form in QUESTIONS]
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
        render(fill_role(form, "user", "Hello"), True) != other(fill_role(form, "user", "Hello"), True)
        for form in forms
    )


def _shown(conversation: Sequence[Message], max_chars: int = 60) -> str:
    """Show a conversation on one line, long messages and long conversations cut."""
    whole = [dict(message) for message in conversation[:8]]
    for message in whole:
        if len(message["content"]) > max_chars:
            message["content"] = message["content"][:max_chars] + "..."
    more = f" and {len(conversation) - 8} more" if len(conversation) > 8 else ""
    return json.dumps(whole, ensure_ascii=False) + more


# Texts at which generation is to stop, found in what a model's template writes after a reply.


def stop_texts(template: GoTemplate, *, control_tokens: Collection[str]) -> tuple[str, ...]:
    """List what ends a reply or would begin another turn, what ends it first.

    Control tokens between a reply and the next question, for these never stand in a reply. Where there are none, the
    text itself that follows a reply: `\\n\\nUser:`, say. Empty where the template writes nothing after a reply.

        Yes. <|eot_id|><|start_header_id|>user<|end_header_id|>\\n\\n     three control tokens
        Yes. \\n\\n### Instruction:\\n                                      none: the text up to its last line end
    """
    following = template.closing + template.next_question
    # Longer ones first, so that a token is not found inside another.
    tokens = sorted((token for token in control_tokens if token.strip()), key=len, reverse=True)
    if tokens and (found := re.findall("|".join(map(re.escape, tokens)), following)):
        return tuple(dict.fromkeys(found))
    for text in (template.closing, template.next_question):
        if text.strip():
            # A line end at the very end may be one token with what follows it, and would then never be seen.
            return (text.rstrip(),)
    return ()
