"""Say what a layout does not do as the chat template does: odd messages, words with a meaning, tools, thinking."""

from collections.abc import Iterator

from tunewell.exporting.chat_layout import Layout
from tunewell.exporting.chat_probes import QUESTIONS, saying, spelled_in
from tunewell.exporting.chat_trial import Trial

_MAX_LISTED = 5


def omissions(trial: Trial, layout: Layout, source: str | None) -> Iterator[str]:
    """Give a sentence for each thing left out; the template's source, if known, is searched for special words."""
    yield from _blanks(trial, layout)
    special = [text for text in spelled_in(source or "") if not _is_ordinary(trial, layout, text)]
    if special:
        listed = ", ".join(f"`{text}`".replace("\n", "\\n") for text in special[:_MAX_LISTED])
        more = f" and {len(special) - _MAX_LISTED} more" if len(special) > _MAX_LISTED else ""
        yield f"messages that hold {listed}{more} are shown as they are; the model's template edits them"
    if source is None or "tool" in source:
        yield "tools are left out: Ollama hands them to a template in another form than Jinja gets"
    if source is None or "reasoning" in source or "thinking" in source:
        yield "thinking is left out: it is neither shown apart from a reply nor turned on or off"


def _blanks(trial: Trial, layout: Layout) -> Iterator[str]:
    forms = QUESTIONS[:3] if layout.opening == "left out" else [("system", *form) for form in QUESTIONS[:3]]
    for role in ("system", "user", "assistant"):
        for words, kind in (("", "empty"), (" \n", "blank")):
            probes = [saying(form, role, words) for form in (*QUESTIONS[:3], *forms) if role in form]
            if not trial.agree(layout, probes):
                yield f"{kind} {role} messages are not laid out as in the model's template"


def _is_ordinary(trial: Trial, layout: Layout, text: str) -> bool:
    form = QUESTIONS[1] if layout.opening == "left out" else ("system", *QUESTIONS[1])
    spellings = (text, f"a{text}b", f"{text}b", f"a\n{text}\n\nb")
    return trial.agree(layout, [saying(form, role, words) for role in dict.fromkeys(form) for words in spellings])
