"""Whether llama.cpp computes a GGUF file that is spoken to or judged, and which."""

from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.exporting.llama_cpp import find_llama
from tunewell.exporting.llama_cpp_runtime import LlamaRuntime
from tunewell.hardware.probe import probe_device
from tunewell.workflows.model_ref import FoundSubject
from tunewell.workflows.text_to_tokens import TextToTokens

_INSTEAD = "the weights were dequantised, and transformers computes"


def open_in_llama_cpp(
    subject: FoundSubject, text: TextToTokens, *, device: str
) -> tuple[LlamaRuntime | None, list[str]]:
    """Open a `.gguf` file in llama.cpp; None where another way is asked for or the only one, with notes that say why.

    Raises UserError for a file that llama.cpp does not take: whoever it is made for would meet that too.
    """
    path = Path(subject.model).expanduser()
    if subject.kind != "model" or not (is_gguf(path) and is_gguf(subject.place)) or device not in ("auto", "cpu"):
        return None, []
    if added := [*subject.added_tokens, *text.tokenizer.added_by_us]:
        return None, [f"the template needs `{added[0]}`, which the file does not have, so {_INSTEAD}"]
    try:
        library = find_llama()
    except UserError as error:
        return None, [f"{error.what}, so {_INSTEAD}" + (f"; {error.fix}" if error.fix else "")]
    runtime = LlamaRuntime(library, path)
    if text.tokenizer.vocab_size > runtime.vocab_size:
        num_rows = runtime.vocab_size
        runtime.close()
        raise UserError(
            f"`{path.name}` knows {num_rows:,} tokens, but what it is compared with has {text.tokenizer.vocab_size:,}",
            where=str(path),
            fix="name the model it was made from",
        )
    best = probe_device(device)
    if best.kind == "cpu":
        return runtime, []
    return runtime, [f"llama.cpp computes on the processor; `--device {best.kind}` takes the dequantised weights there"]


def is_gguf(path: Path | None) -> bool:
    """Tell whether this is a GGUF file, and not a folder or a package with one inside."""
    return path is not None and path.suffix == ".gguf" and path.is_file()
