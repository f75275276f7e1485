"""`tunewell.load`: load a run, an adapter or a model for chat and generation."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import overload

from tunewell.core.errors import UserError
from tunewell.core.options import WeightsOptions
from tunewell.inference.chat import Chat, ChatOptions
from tunewell.inference.chat_model import ChatModel, open_chat_model
from tunewell.library.functions import ModelPath, text_of
from tunewell.runs.resolve import resolve_model

Messages = Sequence[Mapping[str, str]]
"""A conversation: `[{"role": "user", "content": "Hello"}]`, optionally after a message with the role `system`."""


class Model:
    """A loaded model with its tokenizer, chat template and one conversation."""

    def __init__(self, opened: ChatModel, *, name: str, system: str | None = None) -> None:
        self._opened = opened
        self._chat = Chat(opened, system)
        self.name = name

    def chat(self, message: str | Messages) -> str:
        """Return the model's reply to a text, or to the last of several messages, which replace the conversation.

        The next call continues the conversation; `reset()` starts a new one.
        """
        return "".join(self.stream(message))

    def stream(self, message: str | Messages) -> Generator[str, None, None]:
        """Yield the reply of `chat` as it is generated. Closing the iterator stops the reply."""
        if isinstance(message, str):
            return self._chat.reply(message)
        turns = [dict(turn) for turn in message]
        system = turns.pop(0).get("content") if turns and turns[0].get("role") == "system" else None
        roles = [turn.get("role") for turn in turns if isinstance(turn.get("content"), str)]
        if roles != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
            raise UserError(
                "the roles of the messages must alternate between `user` and `assistant`, and end with `user`",
                fix='pass messages like `[{"role": "user", "content": "Hello"}]`, optionally after a `system` message',
            )
        self.reset(system=system)
        self._chat.messages += turns[:-1]
        return self._chat.reply(turns[-1]["content"])

    def reset(self, *, system: str | None = None) -> None:
        """Start a new conversation, with a new system prompt if `system` is given."""
        self._chat.reset()
        if system is not None:
            self._chat.set_system(system)

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]  a text is a sequence of texts too
        self, prompts: str, *, max_new_tokens: int = ..., temperature: float = ..., seed: int = ...
    ) -> str: ...

    @overload
    def generate(
        self, prompts: Sequence[str], *, max_new_tokens: int = ..., temperature: float = ..., seed: int = ...
    ) -> list[str]: ...

    def generate(
        self, prompts: str | Sequence[str], *, max_new_tokens: int = 512, temperature: float = 0.0, seed: int = 0
    ) -> str | list[str]:
        """Return one reply for each prompt. Every prompt is a separate conversation.

        With a temperature of 0, all prompts are decoded together. Otherwise prompt number n is sampled with `seed` + n.
        """
        if is_single := isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sequence) or not all(isinstance(prompt, str) for prompt in prompts):
            raise UserError("`generate` takes a string or a list of strings")
        opened, system = self._opened, self._chat.system
        options = ChatOptions(temperature=temperature, length=max_new_tokens, seed=seed)
        if temperature > 0:
            sampled = [replace(options, seed=seed + number) for number in range(len(prompts))]
            chats = [Chat(opened, system, own) for own in sampled]
            replies = ["".join(chat.reply(prompt)) for chat, prompt in zip(chats, prompts, strict=True)]
        else:
            ids = [Chat(opened, system, options).prompt_for(prompt) for prompt in prompts]
            answers = opened.runtime.generate(ids, max_new_tokens=max_new_tokens, stop_ids=opened.stop_ids)
            replies = [opened.decode(answer.ids) for answer in answers]
        return replies[0] if is_single else replies

    def __repr__(self) -> str:
        return f"Model({self.name!r}, messages={len(self._chat.messages)})"


def load(
    model: ModelPath = None,
    *,
    checkpoint: str | int = "best",
    base: ModelPath = None,
    device: str = "auto",
    system: str | None = None,
    allow_pickle: bool = False,
) -> Model:
    """Load a run (by default the one of the config in the current folder), an adapter or a model.

    `checkpoint` is `best` by held-out loss, `last` or a step. `base` is the base model of an adapter that does not name
    it. Raises UserError if the model is not found.
    """
    ref = resolve_model(model, checkpoint=str(checkpoint), base=text_of(base))
    opened = open_chat_model(ref, device=device, weights=WeightsOptions(allow_pickle=allow_pickle), backend="llama_cpp")
    return Model(opened, name=ref.name, system=system)
