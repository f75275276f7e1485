"""Facts about a model, read without torch: name, architecture, sizes, context limit, number of parameters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.model_files.files import ModelFiles
from tunewell.model_files.shape import HIDDEN, LAYERS, first_count, num_parameters, read_config, text_part

_MAX_LAYERS = 10_000
"""Maximum number of layers. transformers makes a list of them before anything else; real models have up to 130."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length")


@dataclass(frozen=True)
class ModelFacts:
    """The name and sizes of a model. Unknown values are None."""

    name: str
    architecture: str | None
    context_limit: int | None
    """The longest supported sequence, after rope scaling."""
    vocab_size: int | None
    """Number of rows of the embedding, which may exceed the tokenizer's vocabulary."""
    hidden_size: int | None
    num_parameters: int | None
    """None for a preset, because the size of its embedding depends on the tokenizer."""
    quantization: dict[str, Any] | None = None
    """`quantization_config` of a model that was saved quantised."""


def read_facts(model: str | Path) -> ModelFacts:
    """Read a model's facts from its `config.json` or GGUF file. For a tokenizer without a model, all are None."""
    config, files = read_config(model)
    text, name = text_part(config), _name(files)
    for key in LAYERS:
        if (first_count(text, key) or 0) > _MAX_LAYERS:
            raise UserError(
                f"the config of `{name}` is damaged: it has too many layers",
                where=f"`{key}` in config.json is {text[key]:,}",
                fix="download the model again, or use another one",
            )
    architectures, saved = config.get("architectures"), config.get("quantization_config")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    return ModelFacts(
        name=name,
        architecture=named if isinstance(named, str) else None,
        context_limit=first_count(text, *_CONTEXT_KEYS),
        vocab_size=first_count(text, "vocab_size"),
        hidden_size=first_count(text, *HIDDEN),
        num_parameters=num_parameters(str(model), config),
        quantization=saved if isinstance(saved, dict) else None,
    )


def _name(files: ModelFiles) -> str:
    if files.origin == "hub":
        return files.source
    if files.origin in ("ollama", "preset"):
        return files.source.partition(":")[2]
    # Not `general.name` from a GGUF file, because converters store the name of a training folder there.
    if files.gguf is not None and "config.json" not in files.small:
        return files.gguf.stem
    if files.origin == "package":
        return files.source.partition(":")[2]
    path = Path(files.source).expanduser()
    return path.resolve().name if path.is_dir() else path.stem
