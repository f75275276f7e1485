r"""Describe a chat template as rules that depend on the messages before, and write the rules as a Go template.

A layout has a small decision tree for each role, which returns the text to write before a message's content. One more
tree returns the generation prompt. The rules are learned from rendered probes. `Layout.render` renders them in Python
for a comparison with the original, and `write_go` writes them for Ollama.

    <|im_start|>system\n CONTENT | <|im_end|>\n<|im_start|>user\n CONTENT | <|im_end|>\n<|im_start|>assistant\n
    -- rule for `system` ------- | ------ rule for `user` --------------- | ---------- rule for `end` ----------
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, Literal

Message = Mapping[str, str]
Roles = tuple[str, ...]
Render = Callable[[list[dict[str, str]], bool], str]
"""Function of messages and `add_generation_prompt`; raises `TemplateFailed` if the template rejects the messages."""


@dataclass(frozen=True)
class ContentSlot:
    """The place of a message's content in rendered text: the current message, or the first system message."""

    source: Literal["message", "system"]
    left_strip: str = ""
    """Characters stripped from the start of the content."""
    right_strip: str = ""
    """Characters stripped from the end of the content."""

    def strip(self, content: str) -> str:
        """Return the content as the template writes it."""
        content = content.lstrip(self.left_strip) if self.left_strip else content
        return content.rstrip(self.right_strip) if self.right_strip else content


Segments = tuple[str | ContentSlot, ...]


@dataclass(frozen=True)
class TurnPosition:
    """A position in a conversation, with everything that a rule may depend on."""

    role: str
    """The role of the message, or `end` after the last message."""
    previous_role: str
    """The role of the previous message, empty for the first message."""
    has_system: bool
    """Whether the conversation began with a system message."""
    has_user: bool
    """Whether there is an earlier user message."""
    has_assistant: bool
    """Whether there is an earlier assistant message."""
    num_remaining: int
    """Number of messages from here on, including this one."""


@dataclass(frozen=True)
class Condition:
    """A yes/no test of a position, in Python and in Go."""

    attribute: str
    value: object
    go: str

    def holds(self, position: TurnPosition) -> bool:
        """Return True if the position has this value."""
        return getattr(position, self.attribute) == self.value


@dataclass(frozen=True)
class Branch:
    """An inner node of a decision tree."""

    condition: Condition
    yes: "Rule"
    no: "Rule"


Rule = Segments | Branch


@dataclass(frozen=True)
class Layout:
    """The rules by which a template renders conversations."""

    rules: Mapping[str, Rule]
    """The rule of each role; `end` is the rule of the generation prompt."""
    system_placement: Literal["inline", "moved", "dropped"] = "inline"
    """TurnPosition of the first system message: before the next message (`inline`), inside another message such as the
    last question (`moved`), or left out because the template rejects it (`dropped`)."""
    skips_empty_system: bool = False
    """Whether an empty first system message is ignored."""
    shows_later_system: bool = False
    """Whether system messages after the first message are rendered; otherwise they are left out."""

    @property
    def has_system(self) -> bool:
        """Whether the template accepts a first system message."""
        return self.system_placement != "dropped"

    def render(self, messages: Sequence[Message]) -> str:
        """Render a conversation up to the start of the reply, or to the end of an unfinished last reply."""
        is_moved = self.system_placement == "moved" and messages[0]["role"] == "system"
        system = messages[0]["content"] if is_moved else ""
        texts = []
        for position, content in self.positions(messages):
            for segment in follow_rule(self.rules[position.role], position):
                if isinstance(segment, str):
                    texts.append(segment)
                else:
                    texts.append(segment.strip(content if segment.source == "message" else system))
        return "".join(texts)

    def positions(self, messages: Sequence[Message]) -> Iterator[tuple[TurnPosition, str]]:
        """Yield the position and content of each rendered message, then `end` if the next turn is a reply."""
        previous_role, has_system = "", False
        seen: set[str] = set()

        def position(role: str, num_remaining: int) -> TurnPosition:
            return TurnPosition(role, previous_role, has_system, "user" in seen, "assistant" in seen, num_remaining)

        for index, message in enumerate(messages):
            role, content = message["role"], message["content"]
            is_first_system = role == "system" and not index
            if is_first_system:
                if self.system_placement == "dropped" or (self.skips_empty_system and not content):
                    continue
                has_system = True
            elif role == "system" and not self.shows_later_system:
                continue
            if self.system_placement == "inline" or not is_first_system:
                yield position(role, len(messages) - index), content
            previous_role = role
            seen.add(role)
        if previous_role not in ("", "assistant"):
            yield position("end", 0), ""


def follow_rule(rule: Rule, position: TurnPosition) -> Segments:
    """Return the segments that a rule produces at a position."""
    while isinstance(rule, Branch):
        rule = rule.yes if rule.condition.holds(position) else rule.no
    return rule


# Learning: build a small decision tree for each role from observed positions.

_CONDITIONS = (
    Condition("previous_role", "assistant", 'eq $left "assistant"'),
    Condition("previous_role", "", "not $left"),
    Condition("previous_role", "system", 'eq $left "system"'),
    Condition("previous_role", "user", 'eq $left "user"'),
    Condition("has_system", True, "$has_system"),
    Condition("num_remaining", 1, "eq $num_left 1"),
    Condition("num_remaining", 2, "eq $num_left 2"),
    Condition("has_user", True, "$has_asked"),
    Condition("has_assistant", True, "$has_replied"),
)
"""Conditions for the decision trees; if several split equally well, the first is used."""


@dataclass(frozen=True)
class Observation:
    """The text that a template rendered at one position of a conversation."""

    position: TurnPosition
    segments: Segments
    conversation: Sequence[Message]


class NoExactLayout(Exception):
    """Raised if no layout renders exactly what the template renders; `conversation` is a counterexample."""

    def __init__(self, reason: str, conversation: Sequence[Message]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.conversation = conversation


def learn_rules(observations: Sequence[Observation]) -> dict[str, Rule]:
    """Learn a rule for each role; raise `NoExactLayout` if the same position was rendered differently."""
    roles = dict.fromkeys(one.position.role for one in observations)
    return {role: _learn_rule([one for one in observations if one.position.role == role]) for role in roles}


def _learn_rule(observations: Sequence[Observation]) -> Rule:
    if _num_texts(observations) == 1:
        return observations[0].segments
    splits = []
    for condition in _CONDITIONS:
        yes = [one for one in observations if condition.holds(one.position)]
        no = [one for one in observations if not condition.holds(one.position)]
        if yes and no:
            splits.append((_num_texts(yes) + _num_texts(no), condition, yes, no))
    if not splits:
        different = next(one for one in observations if one.segments != observations[0].segments)
        role = different.position.role
        name = "the generation prompt" if role == "end" else f"the text before the {role} message"
        raise NoExactLayout(f"{name} depends on more than the adjacent messages", different.conversation)
    _, condition, yes, no = min(splits, key=lambda split: split[0])
    return Branch(condition, _learn_rule(yes), _learn_rule(no))


def _num_texts(observations: Sequence[Observation]) -> int:
    return len({one.segments for one in observations})


# Go syntax. Ollama executes a template with Go's `text/template`: strings are bytes, `slice` cuts them, `eq` compares
# with several strings, and `len` is the only arithmetic. White space is stripped by a template that calls itself:
#
#     {{ define "lead1" }}{{ if eq (printf "%.1s" .) " " "\n" }}   if the text begins with one of these,
#     {{ template "lead1" (slice . (len (printf "%.1s" .))) }}     call it again without that character
#
# `tunewell verify` derives the template again and compares it with the Modelfile, so its text must not change.

_VARIABLES = {"$system": '""', "$has_system": "false", "$left": '""', "$has_asked": "false", "$has_replied": "false"}
_UPDATES = {
    "system": '{{ $left = "system" }}{{ $has_system = or $has_system (not $i) }}',
    "user": '{{ $left = "user" }}{{ $has_asked = true }}',
    "assistant": '{{ $left = "assistant" }}{{ $has_replied = true }}',
}
_UNSAFE = re.compile(r'\{{2,}|\{\Z|"{3,}|[^\x20-\x7e\n\t]+')
"""Text that may have to be written as a Go string: the start of an action, three quotes (which end a value in a
Modelfile), and non-ASCII characters (Ollama drops those that are not printable in Go)."""
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

StripTemplates = dict[tuple[str, str], str]
"""The number of the Go template that strips a pair of (left, right) characters."""


def write_go(layout: Layout) -> str:
    """Return a layout as a Go template."""
    strips: StripTemplates = {}
    turns = [f"{condition} }}}}{body}" for condition, body in _turns(layout, strips)]
    body = (
        "{{ range $i, $message := .Messages }}{{ $num_left := len (slice $.Messages $i) }}"
        f"{{{{ if {'{{ else if '.join(turns)}{{{{ end }}}}{{{{ end }}}}"
        f'{{{{ if eq $left "user" "system" }}}}{_write_rule(layout.rules["end"], strips)}{{{{ end }}}}'
    )
    declared = "".join(f"{{{{ {name} := {value} }}}}" for name, value in _VARIABLES.items())
    return "".join(_strip_definitions(strips)) + _remove_unused(declared + body)


def go_string(text: str) -> str:
    """Return a text as a Go string literal in ASCII."""
    return '"' + "".join(map(_go_character, text)) + '"'


def _go_character(character: str) -> str:
    code = ord(character)
    if character in _ESCAPES:
        return _ESCAPES[character]
    if 0x20 <= code < 0x7F:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _turns(layout: Layout, strips: StripTemplates) -> Iterator[tuple[str, str]]:
    """Yield the Go condition and the body for each kind of rendered message."""
    is_system = 'eq .Role "system"'
    is_first_system = f"and ({is_system}) (not $i)" + (" .Content" if layout.skips_empty_system else "")
    if layout.system_placement == "moved":
        yield is_first_system, "{{ $system = .Content }}" + _UPDATES["system"]
    if layout.system_placement != "inline":
        is_shown_system = f"and ({is_system}) $i"
    elif not layout.shows_later_system:
        is_shown_system = is_first_system
    else:
        is_shown_system = f"and ({is_system}) (or $i .Content)" if layout.skips_empty_system else is_system
    for role, update in _UPDATES.items():
        if role in layout.rules:
            condition = is_shown_system if role == "system" else f'eq .Role "{role}"'
            yield condition, _write_rule(layout.rules[role], strips) + update


def _remove_unused(text: str) -> str:
    """Remove variables that are set but never read."""
    for name in (*_VARIABLES, "$num_left"):
        bare = re.sub(rf"\{{\{{ {re.escape(name)} :?= [^}}]*\}}\}}", "", text)
        text = text if name in bare else bare
    return text


def _write_rule(rule: Rule, strips: StripTemplates) -> str:
    head, tail = _write_head(rule, strips)
    return head + _write_atoms(tail, strips)


def _write_head(rule: Rule, strips: StripTemplates) -> tuple[str, list[Any]]:
    """Return a rule in Go without the characters and slots at the end of all its branches, and these shared atoms."""
    if not isinstance(rule, Branch):
        return "", [atom for segment in rule for atom in (segment if isinstance(segment, str) else [segment])]
    (yes, yes_atoms), (no, no_atoms) = (_write_head(side, strips) for side in (rule.yes, rule.no))
    pairs = zip(reversed(yes_atoms), reversed(no_atoms), strict=False)
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    shared = yes_atoms[len(yes_atoms) - num_shared :]
    yes += _write_atoms(yes_atoms[: len(yes_atoms) - num_shared], strips)
    no += _write_atoms(no_atoms[: len(no_atoms) - num_shared], strips)
    condition = rule.condition.go
    if not yes:
        return f"{{{{ if {_negate(condition)} }}}}{no}{{{{ end }}}}", shared
    otherwise = f"{{{{ else }}}}{no}" if no else ""
    return f"{{{{ if {condition} }}}}{yes}{otherwise}{{{{ end }}}}", shared


def _negate(condition: str) -> str:
    if condition.startswith("not "):
        return condition.removeprefix("not ")
    return "ne " + condition.removeprefix("eq ") if condition.startswith("eq ") else f"not {condition}"


def _write_atoms(atoms: Sequence[Any], strips: StripTemplates) -> str:
    """Return characters and slots in Go; neighbouring characters are one text."""
    texts: list[str] = []
    for is_text, run in groupby(atoms, key=lambda atom: isinstance(atom, str)):
        if is_text:
            texts.append(_UNSAFE.sub(_escape_unsafe, "".join(run)))
        else:
            texts += [_write_slot(slot, strips) for slot in run]
    return "".join(texts)


def _escape_unsafe(match: re.Match[str]) -> str:
    text = match[0]
    # Beyond U+FFFF, Go's table of printable characters may be older than Python's.
    if ord(text[0]) > 0x7E and text.isprintable() and max(text) <= "\uffff":
        return text
    return f"{{{{ {go_string(text)} }}}}"


def _write_slot(slot: ContentSlot, strips: StripTemplates) -> str:
    value = "$system" if slot.source == "system" else ".Content"
    if not slot.left_strip and not slot.right_strip:
        return f"{{{{ {value} }}}}"
    name = strips.setdefault((slot.left_strip, slot.right_strip), str(len(strips) + 1))
    return f'{{{{ template "{"lead" if slot.left_strip else "trail"}{name}" {value} }}}}'


def _strip_definitions(strips: StripTemplates) -> Iterator[str]:
    """Yield the Go templates that strip characters from both ends of a text."""
    for (left, right), name in strips.items():
        if left:
            rest = f'{{{{ template "trail{name}" . }}}}' if right else "{{ . }}"
            listed = " ".join(map(go_string, left))
            yield (
                f'{{{{ define "lead{name}" }}}}{{{{ if eq (printf "%.1s" .) {listed} }}}}'
                f'{{{{ template "lead{name}" (slice . (len (printf "%.1s" .))) }}}}'
                f"{{{{ else }}}}{rest}{{{{ end }}}}{{{{ end }}}}"
            )
        if right:
            yield f'{{{{ define "trail{name}" }}}}{_strip_right(name, right)}{{{{ end }}}}'


def _strip_right(name: str, characters: str) -> str:
    """Return Go code that removes the last character of a text if it is one of `characters`.

    Go cannot index characters from the end, so there is one branch for each number of bytes.
    """
    by_size: dict[int, list[str]] = {}
    for character in characters:
        by_size.setdefault(len(character.encode()), []).append(go_string(character))
    branches = []
    for size, listed in sorted(by_size.items()):
        # The length minus `size`: Go templates have no subtraction.
        shorter = f"(len (slice . {size}))"
        branches.append(
            f"if and (ge (len .) {size}) (eq (slice . {shorter}) {' '.join(listed)}) }}}}"
            f'{{{{ template "trail{name}" (slice . 0 {shorter}) }}}}'
        )
    return "{{ " + "{{ else ".join(branches) + "{{ else }}{{ . }}{{ end }}"
