"""Write an Ollama Modelfile from which Ollama reads every text unchanged.

Ollama reads a value up to the end of the line. A value that begins with three quotes ends at the next line that ends
with three quotes. There are no escapes, and Ollama drops characters that are not printable in Go. Texts that cannot be
written this way are rejected.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.templates.chat_template import ChatTemplate
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.export.chat_template import another_day, missing_generation_prompt
from tunewell.export.ollama.layout import Render
from tunewell.export.ollama.template import GoTemplate, derive_go_template, stop_texts
from tunewell.model_files.gguf import read_metadata

_MAX_CONTEXT = 131_072
_ENDS_EARLY = re.compile(r'"""\s*?[\r\n]')


def derive_modelfile(
    gguf: Path,
    *,
    template: str,
    tokenizer: LoadedTokenizer,
    date: str | None,
    config: Mapping[str, Any],
    license: str | None,
) -> tuple[str, GoTemplate]:
    """Return the Modelfile of a GGUF file and its template, derived from the chat template, tokenizer and config."""
    derived = derive_template(template, tokenizer=tokenizer, adds_bos=gguf_adds_bos(gguf), date=date)
    context_length = min(config.get("max_position_embeddings") or _MAX_CONTEXT, _MAX_CONTEXT)
    text = modelfile(gguf.name, derived, stops=derived.stops, context_length=context_length, license=license)
    return text, derived


def derive_template(source: str, *, tokenizer: LoadedTokenizer, adds_bos: bool, date: str | None) -> GoTemplate:
    """Derive Ollama's template from a Jinja template; raise UserError if it cannot be converted or has no end of turn.

    `date` is the date used in training. It is written into the template, because Ollama's templates cannot read the
    current date.
    """
    special = tokenizer.special_tokens
    fixed: dict[str, Any] = {"date": date} if date is not None else {}
    own = ChatTemplate(source, special_tokens=special, **fixed)
    other = ChatTemplate(source, special_tokens=special, date=another_day(own.date)) if own.uses_clock else None
    render = _render_with(own)
    if missing := missing_generation_prompt(render):
        raise UserError(
            "the chat template has no generation prompt, so Ollama could not request a reply",
            where=f"the template writes {missing[-60:]!r} before a reply, but not with `add_generation_prompt`",
            fix="train with a template that has a generation prompt (`template.name`), or export without `ollama`",
        )
    go = derive_go_template(
        render,
        bos=special.get("bos_token"),
        adds_bos=adds_bos,
        source=source,
        render_another_day=_render_with(other) if other else None,
        date=own.date,
    )
    stops = stop_texts(go, control_tokens=tokenizer.added)
    if not stops:
        raise UserError(
            "the chat template writes no text at the end of a reply, so Ollama would not stop",
            fix="export `gguf`, or train with a template that ends turns",
        )
    return replace(go, stops=stops)


def gguf_adds_bos(gguf: Path) -> bool:
    """Return True if the file's metadata makes llama.cpp add the BOS token."""
    return bool(read_metadata(gguf).get("tokenizer.ggml.add_bos_token", False))


def modelfile(
    gguf_name: str, template: GoTemplate, *, stops: Sequence[str], context_length: int, license: str | None = None
) -> str:
    """Return the Modelfile for a GGUF file in the same folder; raise UserError for text that it cannot contain.

    The template's notes become comments. Decoding is greedy, as in the verification.
    """
    lines = ["# Read by `ollama create NAME -f Modelfile`, in this folder."]
    lines += [f"# {' '.join(note.split())}" for note in template.notes]
    lines += [f"FROM ./{gguf_name}", f"TEMPLATE {_quote(template.text, 'the template')}"]
    lines.append(f"PARAMETER num_ctx {context_length}")
    lines += [f"PARAMETER stop {_quote_stop(text)}" for text in dict.fromkeys(stops)]
    lines.append("PARAMETER temperature 0.0")
    if license is not None:
        # Licence texts contain form feeds, which Ollama would drop anyway.
        lines.append(f"LICENSE {_quote(''.join(filter(_is_preserved, license)), 'the licence')}")
    return "\n".join(lines) + "\n"


def _quote(text: str, what: str) -> str:
    if lost := [character for character in text if not _is_preserved(character)]:
        raise UserError(f"{what} contains {lost[0]!r}, which Ollama drops from a Modelfile", fix="remove it")
    # Three quotes at the end of any line close the value.
    if early := _ENDS_EARLY.search(text):
        where = repr(text[max(0, early.start() - 40) : early.end()])
        raise UserError(
            f"{what} has a line that ends with three quotes, which would end the value in a Modelfile",
            where=where,
            fix="remove the quotes",
        )
    return f'"""{text}"""'


def _is_preserved(character: str) -> bool:
    return character.isprintable() or character in "\n\r\t"


def _quote_stop(text: str) -> str:
    is_plain = '"' not in text and "\n" not in text and "\r" not in text
    return f'"{text}"' if is_plain and all(map(_is_preserved, text)) else _quote(text, f"the stop text {text!r}")


def _render_with(template: ChatTemplate) -> Render:
    return lambda messages, asks: template.render(messages, None, add_generation_prompt=asks)
