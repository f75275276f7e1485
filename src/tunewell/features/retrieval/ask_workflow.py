"""`tunewell ask`: answer questions from an index with a model."""

from collections.abc import Callable

from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.data.row_statistics import LANGUAGES
from tunewell.features.retrieval.answer import RetrievalChat
from tunewell.features.retrieval.search import open_retriever
from tunewell.inference.chat import Chat, ChatOptions
from tunewell.inference.chat_model import open_chat_model
from tunewell.inference.remote import RemoteChat
from tunewell.runs.resolve import find_current_run, resolve_model


def open_reader(model: str | None, options: ChatOptions, *, device: str = "auto") -> Chat | RemoteChat:
    """Open a run, an adapter, a model, a `.gguf` file, or a server by its address."""
    if model is not None and is_url(model):
        return RemoteChat(model, options)
    chat_model = open_chat_model(resolve_model(model), device=device, backend="llama_cpp")
    if chat_model.masker is None:
        raise UserError(
            f"`{chat_model.ref.name}` has no chat template, so it cannot be asked",
            fix="name a chat model with `--model`: `tunewell models` lists some; or train this one on conversations",
        )
    return Chat(chat_model, options=options)


def open_retrieval_chat(
    address: str,
    model: str | None,
    options: ChatOptions,
    *,
    choose_model: Callable[[str | None], str],
    device: str = "auto",
    num_passages: int | None = None,
) -> RetrievalChat:
    """Open an index and a model: the named one, this folder's run, or the one chosen for the language of the index."""
    retriever = open_retriever(address)
    if model is None and find_current_run() is None:
        names = {name.lower(): code for code, name in LANGUAGES.items()}
        model = choose_model(names.get(retriever.store.manifest.language.value))
    return RetrievalChat(retriever, open_reader(model, options, device=device), num_passages=num_passages)
