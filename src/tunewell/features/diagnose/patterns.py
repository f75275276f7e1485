"""The pattern language of the signature files: plain text with a few wildcards, matched in linear time.

    Attempting to unscale FP16 gradients            text; case, kinds of quotes and amount of white space do not matter
    loss scale <*> at minimum                       <*>   up to 160 characters on the same line
    size mismatch for <**> torch.Size              <**>  up to 600 characters, also across lines
    ran for <#> milliseconds                        <#>   a number
    No module named <w>                             <w>   a name, a path or a version, or nothing
    babbl<~>                                        <~>   the rest of a word
    <%>                                             <%>   the percentage of a progress bar that has begun
    == <b><b>                                       <b>   a brace
    {bf16|bfloat16}                                 one of several texts; the bars of `<|im_end|>` do not separate them
    {@never-stops}                                  one of the texts of a list in `phrases.toml`

Every wildcard is bounded and atomic, so a pattern never backtracks. Texts are compared in the form of `fold`. A pattern
is searched for only where all its fixed words occur (`Pattern.words`), which is a cheap set operation.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property

_LOWER = bytes(range(ord("A"), ord("Z") + 1))
_FOLD = bytes.maketrans(_LOWER + b'"`', _LOWER.lower() + b"''")
_LETTERS = bytes(code if 97 <= code <= 122 or code == 95 else 32 for code in range(256))
_WORD = b"abcdefghijklmnopqrstuvwxyz0123456789_"
_GAPS = {"<*>": r"[^\n\x0b]{0,160}?", "<**>": r"[\s\S]{0,600}?", "<w>": r"[\w./\\:@+=~\[\]-]{0,200}?"}
_TAIL = 8192
_FAR_GAPS = ("<*>", "<**>")
"""Gaps beside which a word of the pattern is a whole word of the text."""
_PIECES = {
    "<#>": r"(?>[-+]?\d(?:[\d.,]{0,40}\d)?(?:e[-+]?\d{1,4})?)",
    "<~>": r"(?>[a-z]{0,14})",
    "<b>": r"[{}]",
    "<%>": r"%\|(?:(?<=[1-9]%\|)|(?<=[1-9]\d%\|)|(?<=100%\|))",  # begins with its rare characters, which is fast
}
_TOKENS = re.compile(r"<\*\*?>|<#>|<w>|<~>|<%>|<b>|\s+|[{}|]")


def fold(text: bytes) -> bytes:
    """Return a text in the form in which patterns are compared: ASCII lower case and one kind of quote."""
    return text.translate(_FOLD)


def words_of(folded: bytes) -> set[bytes]:
    """Return the words of a folded text: runs of letters and underscores."""
    return set(folded.translate(_LETTERS).split())


@dataclass(frozen=True)
class Pattern:
    """A pattern, compiled when it is first needed: most never are. Two patterns are equal if their texts are."""

    text: str
    phrases: dict[str, list[str]] = field(compare=False, repr=False)

    @cached_property
    def words(self) -> tuple[frozenset[bytes], ...]:
        """Sets of words. A text that matches contains all words of at least one set. `=m1` is a part of the text."""
        if "<" not in self.text and "{" not in self.text and (fixed := _whole_words(self.text, [], [])):
            return (frozenset(fixed),)  # no wildcards: most patterns, and three times as fast
        return tuple(_required(_split(self.text), self.phrases))

    @cached_property
    def expression(self) -> str:
        """The regular expression."""
        return _compile(self.text, self.phrases) + _edge(self.text)

    @cached_property
    def regex(self) -> re.Pattern[bytes]:
        """The compiled regular expression."""
        return re.compile(self.expression.encode("utf-8"))

    @cached_property
    def starts_in_word(self) -> bool:
        """Whether a match must begin at the beginning of a word."""
        first = _split(self.text)[0]
        options = _alternatives(first, self.phrases) if first.startswith("{") else [self.text]
        return all(bool(option) and (option[0].isalnum() or option[0] == "_") for option in options)

    def can_match(self, words: set[bytes], joined: bytes, folded: bytes) -> bool:
        """Return whether a folded text with these words may match. `joined` is the words in one text."""
        for needed in self.words:
            missing = needed - words
            if not missing or all(_occurs(part, joined, folded) for part in missing):
                return True
        return False

    def spans(self, folded: bytes, limit: int, *, at: int = 0) -> list[tuple[int, int]]:
        """Return the first matches in a folded text that end after `at`, at most `limit`, and as many near its end.

        A pattern that matches often, like a progress bar, is needed where the text ends: beside the error.
        """
        found = self._search(folded, 0, limit, at)
        if len(found) == limit:
            found += self._search(folded, max(found[-1][1], len(folded) - _TAIL), limit, at)
        return found

    def _search(self, folded: bytes, begin: int, limit: int, at: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for match in self.regex.finditer(folded, begin):
            start = match.start()
            if match.end() <= at:
                continue
            if self.starts_in_word and start and folded[start - 1] in _WORD:
                continue
            found.append(match.span())
            if len(found) >= limit:
                break
        return found


def _occurs(part: bytes, joined: bytes, folded: bytes) -> bool:
    """Return whether a part of a text occurs. Its letters are looked for in the words first, which are few."""
    if not part.startswith(b"="):
        return False
    letters = max(part.translate(_LETTERS).split(), key=len, default=b"")
    return letters in joined and part[1:] in folded


def compile_pattern(text: str, phrases: dict[str, list[str]]) -> Pattern:
    """Compile a pattern now; raise ValueError for an unknown list of phrases or a brace that is not closed."""
    if not text.strip():
        raise ValueError("a pattern is empty")
    pattern = Pattern(text, phrases)
    _ = pattern.regex, pattern.words
    return pattern


def _alternatives(text: str, phrases: dict[str, list[str]]) -> list[str]:
    """Return the texts between the braces of `{a|b}`; a list of phrases is replaced by its phrases."""
    options, depth = [""], 0
    for at, character in enumerate(text[1:-1], start=1):
        depth += (character == "{") - (character == "}")
        if character == "|" and not depth and text[at - 1] != "<" and text[at + 1] != ">":
            options.append("")
        else:
            options[-1] += character
    found: list[str] = []
    for option in options:
        if option.startswith("@"):
            if option[1:] not in phrases:
                raise ValueError(f"there is no list `{option[1:]}` in phrases.toml")
            found += phrases[option[1:]]
        else:
            found.append(option)
    return found


def _compile(text: str, phrases: dict[str, list[str]]) -> str:
    """Return the regular expression of a pattern, without its end."""
    parts = _split(text)
    gap, segments = "", [""]
    for at, part in enumerate(parts):
        if part in _GAPS:
            segments[-1] = _close_gap(gap, segments[-1])
            gap = _GAPS[part]
            segments.append("")
        elif part in _PIECES:
            segments[-1] += _PIECES[part]
        elif part.isspace():
            segments[-1] += r"\s{1,60}+"
        elif part.startswith("{"):
            options = sorted(_alternatives(part, phrases), key=len, reverse=True)
            is_last = at + 1 == len(parts) or parts[at + 1].isspace() or parts[at + 1] in _FAR_GAPS
            edges = [_edge(option) if is_last else "" for option in options]
            compiled = [_compile(option, phrases) + edge for option, edge in zip(options, edges, strict=True)]
            segments[-1] += f"(?>{'|'.join(compiled)})"
        else:
            # A message may quote a text that is itself quoted, so one quote stands for up to three.
            literal = re.sub("'+", "'", fold(part.encode()).decode())
            segments[-1] += re.escape(literal).replace("'", "'{1,3}+")
    segments[-1] = _close_gap(gap, segments[-1])
    return "".join(segments)


def _close_gap(gap: str, segment: str) -> str:
    # The gap ends at the first place where the next segment matches. It is atomic, so it is never tried again.
    return f"(?>{gap}{segment})" if gap else segment


def _edge(text: str) -> str:
    return r"(?![a-z0-9_])" if text and (text[-1].isalnum() or text[-1] == "_") else ""


def _split(text: str) -> list[str]:
    """Split a pattern into plain text, wildcards, white space and alternatives in braces."""
    parts: list[str] = [""]
    at = depth = start = 0
    for token in _TOKENS.finditer(text):
        if token[0] == "{":
            start = start if depth else token.start()
            depth += 1
        elif token[0] == "}":
            depth -= 1
        if depth or token[0] == "|":
            continue
        begin = start if token[0] == "}" else token.start()
        parts += [text[at:begin], text[begin : token.end()]]
        at = token.end()
    if depth:
        raise ValueError(f"a brace of the pattern `{text}` is not closed")
    return [part for part in [*parts, text[at:]] if part]


def _required(parts: list[str], phrases: dict[str, list[str]]) -> list[frozenset[bytes]]:
    fixed: set[bytes] = set()
    partial: list[bytes] = []
    choices: list[list[frozenset[bytes]]] = []
    for at, part in enumerate(parts):
        if part.startswith("{") and part.endswith("}"):
            options = [_required(_split(option), phrases) for option in _alternatives(part, phrases)]
            choices.append([needed for option in options for needed in option])
        elif part == "<%>":
            partial.append(b"=%|")
        elif part not in _GAPS and part not in _PIECES and not part.isspace():
            fixed |= _whole_words(part, parts[max(0, at - 1) : at], parts[at + 1 : at + 2])
            partial.append(b"=" + fold(part.encode()).strip(b"'"))  # one quote may stand for several
    if fixed:
        return [frozenset(fixed)]
    longest = max(partial, key=len, default=b"")
    if len(longest) > 3 or (longest and not choices):
        return [frozenset([longest])]
    return min((choice for choice in choices if choice), key=len, default=[frozenset[bytes]()])


def _whole_words(part: str, before: list[str], after: list[str]) -> set[bytes]:
    """Return the words of a part that cannot be longer in the text, because no wildcard touches them."""
    text = fold(part.encode())
    if before and not before[0].isspace() and before[0] not in _FAR_GAPS:
        text = text.lstrip(_WORD)
    if after and not after[0].isspace() and after[0] not in _FAR_GAPS:
        text = text.rstrip(_WORD)
    return {word for word in text.translate(_LETTERS).split() if len(word) > 1}
