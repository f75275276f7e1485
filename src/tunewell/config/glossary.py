"""The glossary: terms and drop reasons, read from `glossary.md` in this folder."""

import difflib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from tunewell.core.errors import UserError, did_you_mean

_ENTRY = re.compile(r"^- \*\*(.+?)\*\*: (.+?)(?=^- |^#|^$|\Z)", re.MULTILINE | re.DOTALL)


def glossary_text() -> str:
    """Return the whole glossary as Markdown."""
    return files("tunewell.config").joinpath("glossary.md").read_text(encoding="utf-8")


@cache
def entries() -> dict[str, str]:
    """Return every term and drop reason with a definition in one line."""
    return {word.strip("`"): " ".join(meaning.split()) for word, meaning in _ENTRY.findall(glossary_text())}


def find_entry(word: str) -> tuple[str, str]:
    """Find a term, ignoring case, hyphens and plural; raise UserError with the closest terms if it is unknown."""
    by_form = {_form(known): known for known in entries()}
    if (known := by_form.get(_form(word))) is not None:
        return known, entries()[known]
    close = [by_form[form] for form in difflib.get_close_matches(_form(word), by_form, n=3, cutoff=0.6)]
    fix = did_you_mean(close, "`tunewell glossary` lists every term")
    raise UserError(f"the glossary has no entry `{word}`", fix=fix)


def explain_losses(dropped: Mapping[str, int], num_rows: int) -> list[str]:
    """Return what each reason means that drops more than a third of the rows, with the setting that decides it."""
    return [f"{reason}: {entries()[reason]}" for reason, number in dropped.items() if number > num_rows / 3]


def _form(word: str) -> str:
    bare = re.sub(r"[\W_]+", "", word.lower())
    if bare.endswith(("ies", "ches")):
        return bare[:-3] + "y" if bare.endswith("ies") else bare[:-2]
    return bare[:-1] if bare.endswith("s") and not bare.endswith("ss") else bare
