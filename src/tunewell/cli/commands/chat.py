"""`tunewell chat`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunewell.cli.options import AsJson

if TYPE_CHECKING:
    from tunewell.inference.chat import Answer, Chat


def command(
    place: Annotated[
        str | None,
        typer.Argument(help="A run, an adapter, a model folder, a `.gguf` file or a hub id; the run of this folder."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Answer this and leave; `-` reads it from stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 draws as learned.")] = 0.0,
    length: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 512,
    seed: Annotated[int, typer.Option(help="Start of the random choices.")] = 0,
    with_base: Annotated[
        bool, typer.Option("--with-base", help="Show beside it what the model it was made from answers.")
    ] = False,
    checkpoint: Annotated[str, typer.Option(help="Of a run: `best`, `last` or a step.")] = "best",
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="What it was made from, if that is unknown.")
    ] = None,
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda`, `cuda:1`, `mps`.")] = "auto",
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read weights from a `.pt` file; only from people you trust.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Talk with a model you trained, or any other; what it answers is what it learned."""
    import sys

    from tunewell.cli.screens.chat import converse, loading
    from tunewell.core.errors import UserError

    is_piped = not sys.stdin.isatty()
    if json and prompt is None and not is_piped:
        raise UserError("`--json` is for scripts", fix="add `--prompt TEXT`, or send the questions through a pipe")
    with loading("loading the model"):
        # Seconds go by before torch is there: not at a prompt that says nothing.
        from tunewell.inference.chat import Chat, ChatOptions
        from tunewell.inference.chat_model import open_chat_model
        from tunewell.runs.resolve import resolve_model

        options = ChatOptions(temperature, length, seed)
        subject = resolve_model(place, checkpoint=checkpoint, base=base)
        if with_base and subject.base is None:
            raise UserError("what this model was made from is not known", fix="name it with `--base MODEL`")
        voice = open_chat_model(
            subject, device=device, with_base=with_base, allow_pickle=allow_pickle, backend="llama_cpp"
        )
        chat = Chat(voice, system, options)
    if prompt is not None:
        _once(chat, sys.stdin.read().rstrip("\n") if prompt == "-" else prompt, with_base=with_base, json=json)
    elif is_piped:
        for line in sys.stdin:
            if line.strip():
                _once(chat, line.rstrip("\n"), with_base=with_base, json=json, is_line=True)
    else:
        converse(chat, with_base=with_base)


def _once(chat: "Chat", text: str, *, with_base: bool, json: bool, is_line: bool = False) -> None:
    """Answer one question of a script: the answer alone on stdout, or all about it as JSON."""
    import json as json_module
    import sys

    from tunewell.cli.render import emit, emit_json
    from tunewell.cli.screens.chat import report_dropped, write_answers

    parts = chat.reply(text)
    if not json:
        report_dropped(chat)
        write_answers(chat, parts, with_base=with_base)
        return
    for _ in parts:
        pass
    if with_base:
        for _ in chat.base_reply():
            pass
    found = as_json(chat, text)
    if is_line:
        emit(json_module.dumps(found))
        sys.stdout.flush()
    else:
        emit_json(found)


def as_json(chat: "Chat", prompt: str) -> dict[str, Any]:
    """Give the last answer as a program reads it."""
    subject = chat.model.ref
    return {
        "prompt": prompt,
        **_told(chat.answer),
        "forgotten_messages": chat.answer.num_dropped,
        "base": _told(chat.base_answer) if chat.base_answer else None,
        "model": subject.name,
        "kind": subject.kind,
        "checkpoint": subject.step,
        "because": subject.because or None,
        "made_from": subject.base,
        "computed_by": chat.model.computed_by or None,
    }


def _told(answer: "Answer") -> dict[str, Any]:
    return {
        "answer": answer.text,
        "ended": answer.ended,
        "tokens": answer.num_tokens,
        "prompt_tokens": answer.num_prompt_tokens,
        "seconds": round(answer.seconds, 4),
        "tokens_per_second": round(answer.tokens_per_second, 2),
    }
