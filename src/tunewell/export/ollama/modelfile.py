"""Write an Ollama Modelfile, so that Ollama's own reader gets back every text as it was.

Ollama reads a value up to the end of the line, or up to a line that ends with three quotes if it began with three. It
knows no escapes, and drops letters that Go does not call printable; what cannot be written so is refused.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tunewell.core.errors import UserError
from tunewell.data.templates.chat_template import ChatTemplate
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.export.ollama.chat_template import another_day, missing_opening
from tunewell.export.ollama.layout import Render
from tunewell.export.ollama.template import GoTemplate, derive_go_template, stop_texts

PARAMETERS: Mapping[str, type] = MappingProxyType(
    {
        **dict.fromkeys(("num_keep", "seed", "num_predict", "top_k", "repeat_last_n", "num_batch", "num_gpu"), int),
        **dict.fromkeys(("main_gpu", "num_thread", "draft_num_predict"), int),
        **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repeat_penalty"), float),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), float),
        "use_mmap": bool,
    }
)
"""What Ollama takes besides `num_ctx` and `stop`, as of August 2026; `ollama create` fails on any other name."""

_ENDS_EARLY = re.compile(r'"""\s*?[\r\n]')


def modelfile(
    gguf_name: str,
    template: GoTemplate,
    *,
    stops: Sequence[str],
    context_length: int,
    system: str | None = None,
    parameters: Mapping[str, int | float] = MappingProxyType({}),
    license: str | None = None,
) -> str:
    """Write the Modelfile for a GGUF that lies beside it; raise UserError for what a Modelfile cannot say.

    The notes of the template become comments.
    """
    if context_length < 1:
        raise UserError(f"a context of {context_length} tokens holds nothing", fix="give the model's context length")
    lines = ["# Read by `ollama create NAME -f Modelfile`, in this folder."]
    lines += [f"# {' '.join(note.split())}" for note in template.notes]
    lines += [f"FROM ./{_file_name(gguf_name)}", f"TEMPLATE {_quoted(template.text, 'the template')}"]
    if system is not None:
        lines.append(f"SYSTEM {_quoted(system, 'the system message')}")
    lines += [
        f"PARAMETER num_ctx {context_length}",
        *(f"PARAMETER stop {_stop(text)}" for text in dict.fromkeys(stops)),
    ]
    lines += [f"PARAMETER {name} {_number(name, value)}" for name, value in parameters.items()]
    if license is not None:
        # Licences hold form feeds, which no reader misses.
        lines.append(f"LICENSE {_quoted(''.join(filter(_is_kept, license)), 'the licence')}")
    return "\n".join(lines) + "\n"


def _file_name(name: str) -> str:
    if not name or "/" in name or "\\" in name or name != name.strip() or not name.isprintable():
        raise UserError(f"{name!r} cannot be a file beside a Modelfile", fix="give the GGUF a plain file name")
    return name


def _quoted(text: str, what: str) -> str:
    if lost := [character for character in text if not _is_kept(character)]:
        raise UserError(f"{what} holds {lost[0]!r}, which Ollama drops from a Modelfile", fix="take it out")
    # Quotes followed by the end of a line end the value, wherever they stand.
    if early := _ENDS_EARLY.search(text):
        where = repr(text[max(0, early.start() - 40) : early.end()])
        raise UserError(f"{what} has a line that ends with three quotes, which end it in a Modelfile", where=where)
    return f'"""{text}"""'


def _is_kept(character: str) -> bool:
    return character.isprintable() or character in "\n\r\t"


def _stop(text: str) -> str:
    if not text:
        raise UserError("an empty text cannot stop a reply", fix="leave it out")
    is_plain = '"' not in text and "\n" not in text and "\r" not in text
    return f'"{text}"' if is_plain and all(map(_is_kept, text)) else _quoted(text, f"the stop text {text!r}")


def _number(name: str, value: int | float) -> str:
    kind = PARAMETERS.get(name)
    if kind is None:
        known = ", ".join(sorted(PARAMETERS))
        raise UserError(f"Ollama has no parameter `{name}` to set here", fix=f"it knows {known}")
    if isinstance(value, bool) != (kind is bool) or (kind is int and not isinstance(value, int)):
        raise UserError(f"`{name}` is {value!r}; Ollama wants {kind.__name__}")
    if not math.isfinite(value):
        raise UserError(f"`{name}` is {value!r}, which is no number")
    return str(value).lower()


# Ollama's template and stops, derived from a saved chat template and the tokenizer beside it.


@dataclass(frozen=True)
class OllamaTemplate:
    """What a Modelfile says of a template."""

    go: GoTemplate
    stops: tuple[str, ...]


def derive_for_ollama(source: str, *, tokenizer: LoadedTokenizer, adds_bos: bool, date: str | None) -> OllamaTemplate:
    """Derive Ollama's template from the one that is saved; raise UserError where it cannot be had, or never stops.

    `date` is the day that training saw, at which the text stands still: Ollama's templates have no clock.
    """
    special = tokenizer.special_tokens
    own = ChatTemplate(source, special_tokens=special)
    if date is not None:
        own = ChatTemplate(source, special_tokens=special, date=date)
    other = ChatTemplate(source, special_tokens=special, date=another_day(own.date)) if own.uses_clock else None
    render = _renders(own)
    _refuse_unopened(render)
    go = derive_go_template(
        render,
        bos=special.get("bos_token"),
        adds_bos=adds_bos,
        source=source,
        render_another_day=_renders(other) if other else None,
        date=own.date,
    )
    stops = stop_texts(go, control_tokens=tokenizer.added)
    if not stops:
        raise UserError(
            "nothing in the template says where a reply ends, so Ollama would not stop",
            fix="export `gguf`, or train with a template that ends turns",
        )
    return OllamaTemplate(go, stops)


def _refuse_unopened(render: Render) -> None:
    """Refuse a template that leaves the beginning of a reply to the model, which Ollama takes for another turn's."""
    if missing := missing_opening(render):
        raise UserError(
            "the chat template does not begin a reply when one is asked for, so Ollama would ask for none",
            where=f"before a reply it writes {missing[-60:]!r}, with `add_generation_prompt` nothing",
            fix="train with a template that has a generation prompt (`template.name`), or export without `ollama`",
        )


def _renders(template: ChatTemplate) -> Render:
    return lambda messages, asks: template.render(messages, None, add_generation_prompt=asks)
