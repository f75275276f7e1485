"""Parse text that a chat template has already rendered back into a conversation.

Rows like `{"text": "<|im_start|>user..."}` are conversations, not plain text. Encoded as text, their markers would be
split into pieces, and their questions would be supervised. A row is a conversation only if the template renders the
same text again.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tunewell.core.errors import UserError
from tunewell.data.masking import placeholders
from tunewell.data.masking.placeholders import PLAIN, placeholder
from tunewell.data.rows.conversation import Conversation, Message, Rejected
from tunewell.data.templates.chat_template import BUILTIN_NAMES, ChatTemplate, TemplateFailed, builtin_template

_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>", "<｜begin▁of▁sentence｜>")
_DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>"}
# The start of a conversation in templates that are not known here.
_LOOKS_RENDERED = re.compile(
    r"(?:<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start_of_turn|seed:bos|extra_id_\d+|\|turn)>?|\[gMASK\]|\]~!?b[\[\]]"
    r"|\[INST\]|<<SYS>>)"
)
# Turns that are marked by words, as in openassistant-guanaco and Vicuna. Prose does not start like this.
_TURN_WORDS = re.compile(
    r"(?:a chat between [^\n]{0,300}?\s)?(?:#+ ?)?(?:user|human):\s.*?[\s#](?:assistant|ai|bot):"
    r"|\[INST\].*\[/INST\]",
    re.DOTALL | re.IGNORECASE,
)
# Alpaca's prompt, often without its introduction.
_ALPACA = re.compile(r"\s*(?:Below is an instruction[^\n]*\n\s*)?### ?Instruction:")
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>")
_PROMPT_END = re.compile(r"(?:assistant|ai|bot):\s*\Z|\[/INST\]\s*\Z", re.IGNORECASE)


@dataclass(frozen=True)
class _Frame:
    """The texts that a template writes around the turns of a conversation without or with a system message."""

    template: ChatTemplate
    start: str
    system: str | None
    """The text between a system message and the first question, or None if there is no system message."""
    reply: str
    question: str
    end: str

    def parse(self, text: str) -> list[Message] | None:
        """Return the messages of a rendered conversation, or None if the template does not render them as this text."""
        text = _without_bos(text, self.template)
        if not self.start or not text.startswith(self.start):
            return None
        rest, messages = text[len(self.start) :], list[Message]()
        if self.system is not None:
            content, found, rest = rest.partition(self.system)
            if not found:
                return None
            messages.append({"role": "system", "content": content})
        while True:
            question, found, rest = rest.partition(self.reply)
            if not found:
                return None
            reply, has_next, rest = rest.partition(self.question)
            if not has_next:
                reply = reply.rstrip("\n").removesuffix(self.end.strip()) if self.end.strip() else reply.rstrip("\n")
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
            if not has_next:
                return messages if self._renders(messages, text) else None

    def _renders(self, messages: list[Message], text: str) -> bool:
        try:
            rendered = _without_bos(self.template.render(messages), self.template).rstrip()
        except TemplateFailed:
            return False
        # Rows made for other trainers often lack the last end marker, which those trainers add.
        return text.rstrip() in (rendered, rendered.removesuffix(self.end.strip()).rstrip())


def _without_bos(text: str, template: ChatTemplate) -> str:
    text = text.lstrip()
    for bos in (template.bos, *_BOS):
        if bos and text.startswith(bos) and text.count(bos) == 1:  # SmolLM2 starts every turn with its bos token
            return text[len(bos) :].lstrip()
    return text


class RenderedTextParser:
    """A parser of conversations that the model's template or a built-in template has rendered."""

    def __init__(self, template: ChatTemplate | None, special_tokens: Mapping[str, str]) -> None:
        tokens = _DEFAULTS | dict(special_tokens)
        own = [template] if template else []
        # Text made for another model has the usual end token, which may differ from this tokenizer's.
        others = [
            ChatTemplate(builtin_template(name), special_tokens=some, name=name)
            for some in (tokens, tokens | _DEFAULTS)
            for name in BUILTIN_NAMES
        ]
        self._marks_input = template is not None and "has_input" in template.source
        self._ends = (tokens["eos_token"], *_ENDS)
        self._frames = [frame for one in (*own, *others) for frame in _frames(one)]

    def parse(
        self, text: str, source: str, *, completion: str | None = None, format_name: str = "text"
    ) -> tuple[Conversation, str] | None:
        """Return the conversation in a text, or in a prompt and its completion, and the name of its template.

        Returns None for plain text. Raises Rejected if the text starts like a conversation of a known template but is
        not one, and UserError for a conversation of an unknown template.
        """
        if (known := self._parse_known(text + (completion or ""))) is not None:
            return known
        shown = text.lstrip()
        plain = next((shown[len(bos) :].lstrip() for bos in _BOS if shown.startswith(bos)), shown)
        has_markers = _LOOKS_RENDERED.match(plain) and len(_LOOKS_RENDERED.findall(plain)) > 1
        is_prompt_end = completion is None or _PROMPT_END.search(plain)
        if has_markers or (_TURN_WORDS.match(plain) and is_prompt_end):
            effect = (
                "train on the whole text, markers included" if completion is None else "keep the prompts as they are"
            )
            raise UserError(
                f"`{source}` has conversations as text, rendered by an unknown chat template",
                where=f"a row starts with {shown[:60]!r}",
                fix="convert the rows to `messages`, set `template.name` to the `.jinja` file that rendered them, or "
                f"set `format: {format_name}` on the source to {effect}",
            )
        return None

    def _parse_known(self, text: str) -> tuple[Conversation, str] | None:
        start = None
        for frame in self._frames:
            if (messages := frame.parse(text)) is not None:
                return Conversation(messages), frame.template.name
            if start is None and _LOOKS_RENDERED.match(frame.start) and text.lstrip().startswith(frame.start):
                start = frame.template.name
        if start is not None:
            raise Rejected(
                "not_a_conversation",
                f"the text starts like the template `{start}`, but does not match it; convert the rows to `messages`",
            )
        return self._parse_alpaca(text)

    def _parse_alpaca(self, text: str) -> tuple[Conversation, str] | None:
        head, has_reply, reply = text.partition("### Response:")
        start = _ALPACA.match(head)
        if not has_reply or start is None or "### Instruction:" in reply:
            return None
        question, _, given = (part.strip() for part in head[start.end() :].partition("### Input:"))
        asked: Message = {"role": "user", "content": question}
        if given and self._marks_input:
            asked |= {"content": f"{question}\n\n### Input:\n{given}", "has_input": True}
        elif given:
            asked["content"] += f"\n\n{given}"
        reply = reply.strip()
        end = next((end for end in self._ends if reply.endswith(end)), "")
        return Conversation([asked, {"role": "assistant", "content": reply.removesuffix(end).rstrip()}]), "alpaca"


def _frames(template: ChatTemplate) -> Iterator[_Frame]:
    for roles in (("user", "assistant") * 2, ("system", *("user", "assistant") * 2)):
        messages = [{"role": role, "content": placeholder(index)} for index, role in enumerate(roles)]
        try:
            text = _without_bos(template.render(messages, template.probe_tools), template)
            literals, order = placeholders.split_at_placeholders(text, PLAIN, len(roles))
        except (TemplateFailed, Rejected):
            continue
        if order != list(range(len(roles))) or not all(literals[-4:-1]):
            continue
        system = literals[1] if len(roles) == 5 else None
        yield _Frame(template, literals[0], system, literals[-4], literals[-3], literals[-1])
