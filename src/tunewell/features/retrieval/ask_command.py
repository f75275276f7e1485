"""`tunewell ask`: answer a question from an index."""

import sys
from pathlib import Path
from typing import Annotated

from tunewell.cli.commands.init import choose_model
from tunewell.cli.options import Argument, AsJson, Device, Option
from tunewell.cli.prompt import progress_and_questions
from tunewell.cli.render import AsIs, emit, json_text
from tunewell.cli.screens.chat import escape_controls, sources_text
from tunewell.core.files import is_url
from tunewell.core.progress import Progress


def command(
    question: Annotated[str, Argument("The question.", "QUESTION")],
    index: Annotated[str, Option("Index made by `tunewell index`.", "INDEX")] = "index",
    model: Annotated[
        str | None,
        Option(
            "A run, an adapter, a model folder, a `.gguf` file, a hub id or `URL#MODEL`. Default: this folder's run, "
            "else the model that `tunewell models` recommends.",
            "MODEL",
        ),
    ] = None,
    passages: Annotated[
        int | None, Option("Number of passages to read. Default: set by the index.", "N", min=1, max=50)
    ] = None,
    length: Annotated[int, Option("Maximum tokens of the answer.", "N")] = 256,
    show: Annotated[bool, Option("Also print the exact message that the model gets.")] = False,
    device: Device = "auto",
    json: AsJson = False,
) -> None:
    """Answer a question from your documents, with the sources."""
    from tunewell.features.retrieval.records import read_index

    with progress_and_questions(can_ask=not json) as (progress, ask):
        if not is_url(index):
            read_index(Path(index))  # a missing one is reported before torch is imported
        progress(Progress("opening the index and the model"))
        from tunewell.features.retrieval.ask_workflow import open_retrieval_chat
        from tunewell.inference.chat import ChatOptions

        def choose(language: str | None) -> str:
            return choose_model(None, language=language or "", ask=ask, progress=progress)

        options = ChatOptions(length=length)
        retrieval = open_retrieval_chat(
            index, model, options, choose_model=choose, device=device, num_passages=passages
        )
    parts = retrieval.ask(question)
    if json:
        for _ in parts:
            pass
        payload = retrieval.answer.as_json() | ({"prompt": retrieval.answer.prompt} if show else {})
        emit(json_text(payload, has_answer=True))
        return
    for part in parts:
        sys.stdout.write(escape_controls(part))
        sys.stdout.flush()
    sys.stdout.write("\n")
    emit(AsIs(sources_text(retrieval.answer)))
    if show and not retrieval.answer.prompt:
        emit("\nThe model was not asked.")
    elif show:
        emit(AsIs("\nThe model got this message:\n\n" + escape_controls(retrieval.answer.prompt)))
