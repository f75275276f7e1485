"""Ollama's template and stops, derived from a saved chat template and the tokenizer beside it."""

from dataclasses import dataclass

from tunewell.core.errors import UserError
from tunewell.data.templates import ChatTemplate
from tunewell.data.tokenizer import LoadedTokenizer
from tunewell.exporting.chat_clock import another_day
from tunewell.exporting.chat_layout import Render
from tunewell.exporting.chat_opening import missing_opening
from tunewell.exporting.go_template import GoTemplate, derive_go_template
from tunewell.exporting.stops import stop_texts


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
