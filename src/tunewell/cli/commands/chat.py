"""`tunewell chat`: chat with a model in a terminal, or answer prompts in a script."""

import json as json_module
import sys
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any

from tunewell.cli.options import AllowPickle, AsJson, BaseModel, Checkpoint, Device, IndexOption, ModelArgument, Option
from tunewell.cli.render import AsIs, emit, json_text
from tunewell.cli.screens.chat import converse, loading, print_aside, show_answer, start_answer
from tunewell.core.errors import UserError
from tunewell.core.features import require_hook
from tunewell.core.options import WeightsOptions

if TYPE_CHECKING:
    from tunewell.inference.chat import Chat, ChatAnswer

_CHAT_TEMPERATURE = 0.7
_TEMPERATURE = (
    "0 is greedy; 1 samples with the model's own probabilities. Default: 0, and 0.7 for a run on conversations between "
    "people."
)


def command(
    model: ModelArgument = None,
    prompt: Annotated[str | None, Option("Answer this prompt and exit. `-` reads it from stdin.", "TEXT")] = None,
    system: Annotated[str | None, Option("System prompt.", "TEXT")] = None,
    temperature: Annotated[float | None, Option(_TEMPERATURE, "X")] = None,
    length: Annotated[int, Option("Maximum tokens of an answer.", "N")] = 512,
    seed: Annotated[int, Option("Random seed.", "N")] = 0,
    with_base: Annotated[bool, Option("Also show the answers of the base model.")] = False,
    index: IndexOption = None,
    checkpoint: Checkpoint = "best",
    base: BaseModel = None,
    device: Device = "auto",
    *,
    allow_pickle: AllowPickle,
    json: AsJson = False,
) -> None:
    """Chat with your trained model (or any other)."""
    is_piped = not sys.stdin.isatty()
    if json and prompt is None and not is_piped:
        raise UserError("`--json` needs a prompt", fix="add `--prompt TEXT`, or send prompts through a pipe")
    from tunewell.records.report import REPORT, read_report
    from tunewell.runs.resolve import resolve_model

    # Whatever is wrong with the model's name is reported before torch is imported.
    ref = resolve_model(model, checkpoint=checkpoint, base=base)
    if with_base and ref.base is None:
        raise UserError("the base model is unknown", fix="set it with `--base MODEL`")
    report = read_report(ref.path) if ref.kind == "run" and ref.path and (ref.path / REPORT).is_file() else None
    if temperature is None:
        temperature = _CHAT_TEMPERATURE if report and report.task and report.task.value == "chat" else 0.0
    with loading("loading the model"):
        # Importing torch takes seconds, so the status line is shown first.
        from tunewell.inference.chat import Chat, ChatOptions
        from tunewell.inference.chat_model import open_chat_model

        options = ChatOptions(temperature, length, seed)
        chat_model = open_chat_model(
            ref,
            device=device,
            with_base=with_base,
            weights=WeightsOptions(allow_pickle=allow_pickle),
            backend="llama_cpp",
        )
        chat = Chat(chat_model, system, options)
        retrieval = None
        if index is not None:
            retrieval = require_hook("retrieval", "open_chat", needed_by="`--index`")(index, chat)
    if prompt is None and not is_piped:
        converse(chat, with_base=with_base, retrieval=retrieval, report=report)
        return
    if report is not None and report.verdict != "PASS":
        print_aside(f"verdict of this run: {report.verdict}: {report.summary}")
    if prompt is None:
        texts = (line.rstrip("\n") for line in sys.stdin if line.strip())
    else:
        texts = [sys.stdin.read().rstrip("\n") if prompt == "-" else prompt]
    for text in texts:
        if not json:
            show_answer(chat, text, with_base=with_base, retrieval=retrieval)
            continue
        deque(start_answer(chat, text, retrieval), maxlen=0)
        if with_base and chat.answer.num_prompt_tokens:
            deque(chat.base_reply(), maxlen=0)
        payload = as_json(chat, text) | {"verdict": report.verdict if report else None}
        payload |= retrieval.answer.as_json() if retrieval is not None else {}
        emit(AsIs(json_module.dumps(payload)) if prompt is None else json_text(payload, has_answer=True))
        sys.stdout.flush()


def as_json(chat: "Chat", prompt: str) -> dict[str, Any]:
    """Return the last answer as a JSON object."""
    ref = chat.model.ref
    return {
        "prompt": prompt,
        **_answer_json(chat.answer),
        "forgotten_messages": chat.answer.num_dropped,
        "base": _answer_json(chat.base_answer) if chat.base_answer else None,
        "model": ref.name,
        "kind": ref.kind,
        "checkpoint": ref.step,
        "because": ref.because or None,
        "made_from": ref.base,
        "computed_by": chat.model.computed_by or None,
    }


def _answer_json(answer: "ChatAnswer") -> dict[str, Any]:
    return {
        "answer": answer.text,
        "ended": answer.ended,
        "tokens": answer.num_tokens,
        "prompt_tokens": answer.num_prompt_tokens,
        "seconds": round(answer.seconds, 4),
        "tokens_per_second": round(answer.tokens_per_second, 2),
    }
