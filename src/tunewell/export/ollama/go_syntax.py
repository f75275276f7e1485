r"""Write a layout as the text of a Go template, for Ollama's `.Messages`.

Ollama executes it with Go's `text/template`: strings are bytes, `slice` cuts them, `eq` takes several texts, `len` is
the only arithmetic, and a template can call itself, which is how white space is taken off the ends of a message:

    {{ define "lead1" }}{{ if eq (printf "%.1s" .) " " "\n" }}   does the text begin with one of these?
    {{ template "lead1" (slice . (len (printf "%.1s" .))) }}     then the same again without it
"""

import re
from collections.abc import Iterator

from tunewell.export.ollama.layout import Choice, Layout, Pieces, Rule, Words

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
