"""What a config wants exported, held against its model, tokenizer and template before anything is trained."""

import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from tunewell.config.load import LoadedConfig
from tunewell.config.methods import METHODS
from tunewell.core.errors import UserError
from tunewell.core.model_files import WEIGHT_SUFFIXES, hub_is_out_of_reach, locate
from tunewell.core.optional import import_optional
from tunewell.core.presets import find_preset, is_preset, llama_settings
from tunewell.data.text_pipeline import TextPipeline
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.export.gguf.architecture import can_write
from tunewell.export.gguf.tokenizer import read_vocabulary
from tunewell.export.ollama.chat_template import SavedTemplate, saved_template
from tunewell.export.ollama.modelfile import derive_for_ollama
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.models.gguf import read_gguf_config
from tunewell.models.key_map import find_key_map
from tunewell.models.pretrained import read_config
from tunewell.models.support import text_part
from tunewell.records.manifest import MANIFEST


def require_exportable(loaded: LoadedConfig) -> None:
    """Raise UserError for whatever of `export.to` cannot be made of this config, while nothing is written yet."""
    config = loaded.config
    wanted = set(config.export.to)
    if not wanted:
        return
    if "adapter" in wanted:
        if not METHODS.entry(config.method.kind).is_adapter:
            raise UserError(
                f"`export.to` lists an adapter, and `method.kind: {config.method.kind}` makes none",
                fix="list `merged` instead",
            )
        import_optional("peft", extra="export", purpose="proving an adapter (`export.to`)")
    has_gguf = bool({"gguf", "ollama"} & wanted)
    if has_gguf:
        import_optional("gguf", extra="export", purpose="writing a GGUF file (`export.to`)")
        find_llama()
    text = TextPipeline.load(_with_corpus_tokenizer(loaded))
    masker = text.chat_masker(config.data.sources)
    if masker is None:
        raise UserError(
            "this model has no chat template, so no export of it can be proven",
            where=f"`export.to` lists {', '.join(config.export.to)}",
            fix="name a template with `template.name`, or take `export.to` out",
        )
    special = text.tokenizer.special_tokens
    saved = saved_template(masker.template, arguments=config.template.arguments, special_tokens=special)
    if has_gguf:
        require_writable(_settings(text), tokenizer=text.tokenizer, template=saved, for_ollama="ollama" in wanted)


def require_writable(
    settings: dict[str, Any], *, tokenizer: LoadedTokenizer, template: SavedTemplate, for_ollama: bool
) -> None:
    """Raise UserError where a model with these settings, or its tokenizer, or for Ollama its template, has no GGUF."""
    can_write(settings)
    own = settings | (settings.get("text_config") or {})
    with tempfile.TemporaryDirectory(prefix="tunewell-tokenizer-") as folder:
        tokenizer.save(Path(folder), template.source)
        # Rows for tokens that the template needs are added when the model is loaded.
        num_rows = max(own.get("vocab_size") or 0, tokenizer.vocab_size)
        adds_bos = read_vocabulary(Path(folder), num_rows=num_rows, config=own).adds_bos
    if for_ollama:
        derive_for_ollama(template.source, tokenizer=tokenizer, adds_bos=adds_bos, date=template.date)


def _with_corpus_tokenizer(loaded: LoadedConfig) -> LoadedConfig:
    """Where nothing but a corpus is named to train on, its tokenizer is the one that will be exported."""
    folder = loaded.path(loaded.config.corpus)
    if loaded.config.data.sources or not (folder / MANIFEST).is_file():
        return loaded
    return replace(loaded, config=loaded.config.model_copy(update={"tokenizer": str(folder / "tokenizer")}))


def _settings(text: TextPipeline) -> dict[str, Any]:
    """Give the settings that the model will have when it is loaded, from its small files."""
    model, path = text.model, Path(text.model).expanduser()
    size = text.tokenizer.vocab_size
    if is_preset(model):
        return LlamaConfig(**llama_settings(find_preset(model), size, {})).to_dict()
    files = locate(model)
    if files.origin == "hub":
        return _text_settings(model, is_local=hub_is_out_of_reach() is not None)
    folder = next((file.parent for file in [*files.small.values(), files.gguf] if file is not None), path)
    if files.origin == "file" and path.suffix in WEIGHT_SUFFIXES:
        shape = find_key_map(path).model
        if shape is not None:
            return LlamaConfig(**llama_settings(find_preset(shape), size, {})).to_dict()
        return _text_settings(str(path.parent), is_local=True)
    has_weights = any(next(folder.glob(kind), None) for kind in ("*.safetensors*", "*.bin"))
    gguf = files.gguf or (None if has_weights else next(iter(sorted(folder.glob("*.gguf"))), None))
    return read_gguf_config(gguf).to_dict() if gguf is not None else _text_settings(str(folder), is_local=True)


def _text_settings(place: str, *, is_local: bool) -> dict[str, Any]:
    config = read_config(place, is_local=is_local)
    part = text_part(config)
    return (config if part is None else part.config).to_dict()


# What proving an export takes beside its files: said where it is missing, for that is no fault of the export.


def require_proof_tools(kinds: Collection[str]) -> None:
    """Raise UserError, with the command that installs it, for whatever one of these kinds cannot be proven without."""
    if "adapter" in kinds:
        import_optional("peft", extra="export", purpose="proving an adapter")
    if {"gguf", "ollama"} & set(kinds):
        import_optional("gguf", extra="export", purpose="a GGUF file")
        find_llama()
