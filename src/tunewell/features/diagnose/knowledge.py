"""Load the knowledge about failures: one TOML file per failure class in `signatures/`.

The part of a file above `[page]` holds the signatures and is parsed when the knowledge is loaded. `[page]` holds the
texts: cause, fixes, an example. It is parsed when a finding needs it. `signatures/README.md` explains the format.
"""

import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tunewell.features.diagnose.patterns import Pattern

FOLDER = Path(__file__).parent / "signatures"
_PAGE = "\n[page]\n"
_SENTENCE_WITHIN = 4


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Evidence for a failure class: all of `all`, at least one of `any`, none of `none`."""

    confidence: float
    all: tuple[Pattern, ...] = ()
    any: tuple[Pattern, ...] = ()
    none: tuple[Pattern, ...] = ()
    within: int = 60
    """Lines within which all patterns must occur."""
    facts: tuple[str, ...] = ()
    """Facts that must hold: names of rules on the numbers of a log (`rules.py`)."""
    is_sentence: bool = False
    """Whether it describes sentences typed by a person. It is not searched for in large logs."""
    printed_by: str | None = None
    """The source file that prints the text, as a path below site-packages or a repository."""
    cause: str | None = None
    """Replaces the cause of the class, if this signature knows it better."""

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """All patterns of the signature."""
        return (*self.all, *self.any, *self.none)


@dataclass(frozen=True)
class FailureClass:
    """One kind of failure."""

    id: str
    title: str
    family: str
    severity: str
    """`failure`, `warning` or `harmless`."""
    is_symptom: bool
    """Whether it is only a consequence, so that any other failure explains it."""
    explains: tuple[str, ...]
    """Classes that are consequences or more general names of this one."""
    signatures: tuple[Signature, ...]
    path: Path

    @cached_property
    def page(self) -> dict[str, Any]:
        """The texts of the class."""
        _, _, page = self.path.read_text(encoding="utf-8").partition(_PAGE)
        return tomllib.loads(page)

    def fix_for(self, tool: str | None) -> str:
        """Return the fix for a tool, or the general one."""
        fixes = self.page.get("fixes", {})
        return str(fixes.get(tool, self.page["fix"])) if tool else str(self.page["fix"])


@cache
def load_phrases() -> dict[str, list[str]]:
    """Return the lists of phrases that patterns refer to as `{@name}`."""
    return tomllib.loads((FOLDER / "phrases.toml").read_text(encoding="utf-8"))


@cache
def load_classes() -> dict[str, FailureClass]:
    """Return every failure class by its id."""
    files = (file for file in sorted(FOLDER.glob("*.toml")) if file.stem not in ("phrases", "tools"))
    return {file.stem: read_class(file) for file in files}


def read_class(file: Path) -> FailureClass:
    """Read the signatures of one file; raise ValueError or KeyError if it is not valid."""
    head, _, _ = file.read_text(encoding="utf-8").partition(_PAGE)
    entry = tomllib.loads(head)
    signatures = tuple(_signature(file.stem, raw) for raw in entry.get("signature", ()))
    return FailureClass(
        id=file.stem,
        title=entry["title"],
        family=entry["family"],
        severity=entry.get("severity", "failure"),
        is_symptom=entry.get("symptom", False),
        explains=tuple(entry.get("explains", ())),
        signatures=signatures,
        path=file,
    )


def _signature(class_id: str, raw: dict[str, Any]) -> Signature:
    if raw.pop("sentence", False):
        raw = {"within": _SENTENCE_WITHIN, **raw, "is_sentence": True}
    if unknown := raw.keys() - Signature.__dataclass_fields__.keys():
        raise ValueError(f"{class_id}: unknown key {sorted(unknown)[0]}")
    if not raw.keys() & {"all", "any", "facts"}:
        raise ValueError(f"{class_id}: a signature needs `all`, `any` or `facts`")
    values: dict[str, Any] = raw | {"facts": tuple(raw.get("facts", ()))}
    values |= {name: tuple(map(_pattern, raw[name])) for name in ("all", "any", "none") if name in raw}
    return Signature(**values)


@cache
def _pattern(text: str) -> Pattern:
    return Pattern(text, load_phrases())


@dataclass(frozen=True)
class Tool:
    """A program whose logs are recognised by what it prints."""

    name: str
    label: str
    patterns: tuple[Pattern, ...]


@cache
def load_tools() -> tuple[Tool, ...]:
    """Return the tools in the order in which they are tried: the most specific first."""
    raw: dict[str, Any] = tomllib.loads((FOLDER / "tools.toml").read_text(encoding="utf-8"))
    return tuple(Tool(name, entry["label"], tuple(map(_pattern, entry["any"]))) for name, entry in raw.items())
