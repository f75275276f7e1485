"""The layout of a chat template: the text before each message, and the generation prompt.

A layout is what rendering probes tells about a chat template. `go_syntax` writes it as a Go template, and `lay_out`
renders it here in Python, so that it can be compared with the template it was learned from.

    <|im_start|>system\\n WORDS | <|im_end|>\\n<|im_start|>user\\n WORDS | <|im_end|>\\n<|im_start|>assistant\\n
    ----- a system message ---- | ------------ a question ------------ | ---------------- the end ------------
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Message = Mapping[str, str]
Roles = tuple[str, ...]
Render = Callable[[list[dict[str, str]], bool], str]
"""Messages, and whether the text is to ask for a reply; the text. Raises `TemplateFailed` where it refuses them."""


@dataclass(frozen=True)
class Words:
    """The words of a message, or those of the system message that opened the conversation."""

    of: Literal["message", "system"]
    lead: str = ""
    """The characters taken off the beginning."""
    trail: str = ""
    """The characters taken off the end."""

    def __call__(self, text: str) -> str:
        text = text.lstrip(self.lead) if self.lead else text
        return text.rstrip(self.trail) if self.trail else text


Pieces = tuple[str | Words, ...]


@dataclass(frozen=True)
class Place:
    """Where in a conversation something stands: all that a layout may depend on."""

    role: str
    """The role of the message here; `end` after the last one."""
    left: str
    """The role of the message before; empty at the beginning."""
    has_system: bool
    """Whether a system message opened the conversation."""
    has_asked: bool
    """Whether a question stands before."""
    has_replied: bool
    """Whether a reply stands before."""
    num_left: int
    """Messages from here on, this one included."""


@dataclass(frozen=True)
class Condition:
    """Something that can be asked about a place, in Python and in Go."""

    holds: Callable[[Place], bool]
    go: str


@dataclass(frozen=True)
class Choice:
    """One rule or another."""

    when: Condition
    yes: "Rule"
    no: "Rule"


Rule = Pieces | Choice


@dataclass(frozen=True)
class Layout:
    """How a template lays out conversations."""

    rules: Mapping[str, Rule]
    """By the role of a place."""
    opening: Literal["in place", "kept", "left out"] = "in place"
    """What is done with the words of a system message that opens a conversation: shown like another message's, kept for
    where a rule puts them (before the last question, say), or left out because the template refuses them."""
    skips_empty_system: bool = False
    """Whether an empty system message that opens a conversation counts as none."""
    takes_later_system: bool = False
    """Whether system messages after the first message are shown; if not they are left out."""

    def lay_out(self, messages: Sequence[Message]) -> str:
        """Render a conversation up to where the reply begins, or goes on if the last message is the assistant's."""
        kept = messages[0]["content"] if self.opening == "kept" and messages[0]["role"] == "system" else ""
        texts = []
        for place, words in self.places(messages):
            for piece in pieces_at(self.rules[place.role], place):
                texts.append(piece if isinstance(piece, str) else piece(words if piece.of == "message" else kept))
        return "".join(texts)

    def places(self, messages: Sequence[Message]) -> Iterator[tuple[Place, str]]:
        """Walk through a conversation: each message's place with its words, then the end if a reply is asked for."""
        left, has_system = "", False
        seen: set[str] = set()
        for index, message in enumerate(messages):
            role, words = message["role"], message["content"]
            if not index and role == "system":
                if self.opening == "left out" or (self.skips_empty_system and not words):
                    continue
                has_system = True
            if role == "system" and index and not self.takes_later_system:
                continue
            if self.opening == "in place" or index or role != "system":
                yield Place(role, left, has_system, "user" in seen, "assistant" in seen, len(messages) - index), words
            left = role
            seen.add(role)
        if left not in ("", "assistant"):
            yield Place("end", left, has_system, "user" in seen, "assistant" in seen, 0), ""


def pieces_at(rule: Rule, place: Place) -> Pieces:
    """Follow a rule's choices to what stands at a place."""
    while isinstance(rule, Choice):
        rule = rule.yes if rule.when.holds(place) else rule.no
    return rule


# Learn rules from observed positions: a small decision tree for each role.

CONDITIONS = (
    Condition(lambda place: place.left == "assistant", 'eq $left "assistant"'),
    Condition(lambda place: place.left == "", "not $left"),
    Condition(lambda place: place.left == "system", 'eq $left "system"'),
    Condition(lambda place: place.left == "user", 'eq $left "user"'),
    Condition(lambda place: place.has_system, "$has_system"),
    Condition(lambda place: place.num_left == 1, "eq $num_left 1"),
    Condition(lambda place: place.num_left == 2, "eq $num_left 2"),
    Condition(lambda place: place.has_asked, "$has_asked"),
    Condition(lambda place: place.has_replied, "$has_replied"),
)
"""In the order of preference among those that sort equally well."""


@dataclass(frozen=True)
class Sight:
    """What was seen at a place, and in which conversation."""

    place: Place
    pieces: Pieces
    conversation: Sequence[Message]


class NoRule(Exception):
    """No exact layout exists; `conversation` shows why."""

    def __init__(self, reason: str, conversation: Sequence[Message]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.conversation = conversation


def find_rules(sights: Sequence[Sight]) -> dict[str, Rule]:
    """Find a rule for each role; raise `NoRule` where two places look alike and hold different texts."""
    roles = dict.fromkeys(sight.place.role for sight in sights)
    return {role: _grow([sight for sight in sights if sight.place.role == role]) for role in roles}


def _grow(sights: Sequence[Sight]) -> Rule:
    if _num_kinds(sights) == 1:
        return sights[0].pieces
    splits = []
    for condition in CONDITIONS:
        yes = [sight for sight in sights if condition.holds(sight.place)]
        no = [sight for sight in sights if not condition.holds(sight.place)]
        if yes and no:
            splits.append((_num_kinds(yes) + _num_kinds(no), condition, yes, no))
    if not splits:
        odd = next(sight for sight in sights if sight.pieces != sights[0].pieces)
        role = odd.place.role
        name = "the generation prompt" if role == "end" else f"the text before the {role} message"
        raise NoRule(f"{name} depends on more than the adjacent messages", odd.conversation)
    _, condition, yes, no = min(splits, key=lambda split: split[0])
    return Choice(condition, _grow(yes), _grow(no))


def _num_kinds(sights: Sequence[Sight]) -> int:
    return len({sight.pieces for sight in sights})


# Go syntax.

_VARIABLES = {"$system": '""', "$has_system": "false", "$left": '""', "$has_asked": "false", "$has_replied": "false"}
_SEEN = {
    "system": '{{ $left = "system" }}{{ $has_system = or $has_system (not $i) }}',
    "user": '{{ $left = "user" }}{{ $has_asked = true }}',
    "assistant": '{{ $left = "assistant" }}{{ $has_replied = true }}',
}
_UNSAFE = re.compile(r'\{{2,}|\{\Z|"{3,}|[^\x20-\x7e\n\t]+')
"""What may have to be written as a Go string: the opening of an action, three quotes (they end a text in a Modelfile),
and letters outside ASCII, of which a Modelfile loses those that Go does not call printable."""
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

Strips = dict[tuple[str, str], str]
"""A name for each pair of white space to take off: from the beginning, from the end."""


def write_go(layout: Layout) -> str:
    """Write a layout as a Go template."""
    strips: Strips = {}
    turns = [f"{when} }}}}{shown}" for when, shown in _turns(layout, strips)]
    body = (
        "{{ range $i, $message := .Messages }}{{ $num_left := len (slice $.Messages $i) }}"
        f"{{{{ if {'{{ else if '.join(turns)}{{{{ end }}}}{{{{ end }}}}"
        f'{{{{ if eq $left "user" "system" }}}}{_rule(layout.rules["end"], strips)}{{{{ end }}}}'
    )
    declared = "".join(f"{{{{ {name} := {value} }}}}" for name, value in _VARIABLES.items())
    return "".join(_definitions(strips)) + _without_unused(declared + body)


def go_string(text: str) -> str:
    """Write a text as a Go string in ASCII."""
    return '"' + "".join(map(_go_character, text)) + '"'


def _go_character(character: str) -> str:
    code = ord(character)
    if character in _ESCAPES:
        return _ESCAPES[character]
    if 0x20 <= code < 0x7F:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _turns(layout: Layout, strips: Strips) -> Iterator[tuple[str, str]]:
    """Give the kinds of messages that are not left out: a condition, and what is done with them."""
    is_system = 'eq .Role "system"'
    opens = f"and ({is_system}) (not $i)" + (" .Content" if layout.skips_empty_system else "")
    if layout.opening == "kept":
        yield opens, "{{ $system = .Content }}" + _SEEN["system"]
    if layout.opening == "in place":
        at_any_place = f"and ({is_system}) (or $i .Content)" if layout.skips_empty_system else is_system
        system_shown = at_any_place if layout.takes_later_system else opens
    else:
        system_shown = f"and ({is_system}) $i"
    for role, seen in _SEEN.items():
        if role in layout.rules:
            when = system_shown if role == "system" else f'eq .Role "{role}"'
            yield when, _rule(layout.rules[role], strips) + seen


def _without_unused(text: str) -> str:
    """Take out the variables that are set and never asked for."""
    for name in (*_VARIABLES, "$num_left"):
        bare = re.sub(rf"\{{\{{ {re.escape(name)} :?= [^}}]*\}}\}}", "", text)
        text = text if name in bare else bare
    return text


# Rules.


def _rule(rule: Rule, strips: Strips) -> str:
    head, tail = _head_and_tail(rule, strips)
    return head + _written(tail, strips)


def _head_and_tail(rule: Rule, strips: Strips) -> tuple[str, Pieces]:
    """Write a rule but for the pieces that all its choices end with, so that these are written once."""
    if not isinstance(rule, Choice):
        return "", rule
    (yes, yes_tail), (no, no_tail) = (_head_and_tail(side, strips) for side in (rule.yes, rule.no))
    shared = _shared_tail(yes_tail, no_tail)
    yes += _written(_without_tail(yes_tail, shared), strips)
    no += _written(_without_tail(no_tail, shared), strips)
    if not yes:
        return f"{{{{ if {_negated(rule.when.go)} }}}}{no}{{{{ end }}}}", shared
    otherwise = f"{{{{ else }}}}{no}" if no else ""
    return f"{{{{ if {rule.when.go} }}}}{yes}{otherwise}{{{{ end }}}}", shared


def _negated(condition: str) -> str:
    if condition.startswith("not "):
        return condition.removeprefix("not ")
    return "ne " + condition.removeprefix("eq ") if condition.startswith("eq ") else f"not {condition}"


def _shared_tail(one: Pieces, other: Pieces) -> Pieces:
    shared: list[str | Words] = []
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if mine != theirs:
            if isinstance(mine, str) and isinstance(theirs, str):
                ending = _common_ending(mine, theirs)
                shared += [ending] if ending else []
            break
        shared.append(mine)
    return tuple(reversed(shared))


def _common_ending(one: str, other: str) -> str:
    num_same = 0
    while num_same < min(len(one), len(other)) and one[-1 - num_same] == other[-1 - num_same]:
        num_same += 1
    return one[len(one) - num_same :]


def _without_tail(pieces: Pieces, tail: Pieces) -> Pieces:
    if not tail:
        return pieces
    rest = pieces[: len(pieces) - len(tail)]
    cut = pieces[len(rest)]
    first = tail[0]
    return (*rest, cut.removesuffix(first)) if isinstance(cut, str) and isinstance(first, str) else rest


def _written(pieces: Pieces, strips: Strips) -> str:
    return "".join(
        _UNSAFE.sub(_guarded, piece) if isinstance(piece, str) else _words(piece, strips) for piece in pieces
    )


def _guarded(match: re.Match[str]) -> str:
    text = match[0]
    # Beyond the first plane Go's table of printable letters may be older than Python's.
    if ord(text[0]) > 0x7E and text.isprintable() and max(text) <= "\uffff":
        return text
    return f"{{{{ {go_string(text)} }}}}"


# White space at the ends of words.


def _words(words: Words, strips: Strips) -> str:
    value = "$system" if words.of == "system" else ".Content"
    if not words.lead and not words.trail:
        return f"{{{{ {value} }}}}"
    name = strips.setdefault((words.lead, words.trail), str(len(strips) + 1))
    return f'{{{{ template "{"lead" if words.lead else "trail"}{name}" {value} }}}}'


def _definitions(strips: Strips) -> Iterator[str]:
    for (lead, trail), name in strips.items():
        if lead:
            rest = f'{{{{ template "trail{name}" . }}}}' if trail else "{{ . }}"
            listed = " ".join(map(go_string, lead))
            yield (
                f'{{{{ define "lead{name}" }}}}{{{{ if eq (printf "%.1s" .) {listed} }}}}'
                f'{{{{ template "lead{name}" (slice . (len (printf "%.1s" .))) }}}}'
                f"{{{{ else }}}}{rest}{{{{ end }}}}{{{{ end }}}}"
            )
        if trail:
            yield f'{{{{ define "trail{name}" }}}}{_trail(name, trail)}{{{{ end }}}}'


def _trail(name: str, trail: str) -> str:
    """Write the choice between a text without its last letter, if that is one of these, and the text as it is.

    Go cannot count letters from the end, so the letters are asked about by how many bytes they take.
    """
    by_size: dict[int, list[str]] = {}
    for character in trail:
        by_size.setdefault(len(character.encode()), []).append(go_string(character))
    branches = []
    for size, listed in sorted(by_size.items()):
        # The length less `size`: there is no subtraction.
        shorter = f"(len (slice . {size}))"
        branches.append(
            f"if and (ge (len .) {size}) (eq (slice . {shorter}) {' '.join(listed)}) }}}}"
            f'{{{{ template "trail{name}" (slice . 0 {shorter}) }}}}'
        )
    return "{{ " + "{{ else ".join(branches) + "{{ else }}{{ . }}{{ end }}"
