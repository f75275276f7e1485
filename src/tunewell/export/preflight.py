"""Check, before training or loading a model, that it can be exported to the targets of `export.to` or `--to`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from tunewell.config.extensions import METHODS
from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.optional import import_optional
from tunewell.data.masking.masker import Masker
from tunewell.data.text_pipeline import TextPipeline
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.export.chat_template import saved_template
from tunewell.export.targets.base import ExportTarget, PreflightFacts, load_targets
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.inference.model_ref import ModelRef
from tunewell.model_files.files import WEIGHT_SUFFIXES, locate
from tunewell.model_files.presets import find_preset, is_preset, llama_settings
from tunewell.model_files.weights import find_key_map
from tunewell.models.gguf import read_gguf_config
from tunewell.models.pretrained import read_config
from tunewell.models.support import text_part
from tunewell.records.manifest import MANIFEST

_OTHER_TARGETS = "export `merged` or `gguf`"


def require_exportable(loaded: LoadedConfig) -> None:
    """Raise UserError if the model of a config cannot be exported to its `export.to`; no weights are loaded."""
    config = loaded.config
    if not config.export.to:
        return
    targets = load_targets(config.export.to)
    for target in targets:
        if target.requires.adapter and not METHODS.entry(config.method.kind).is_adapter:
            raise UserError(
                f"`export.to` lists `{target.name}`, but `method.kind: {config.method.kind}` trains no adapter",
                fix="list `merged` instead",
            )
    require_tools(targets)
    text = TextPipeline.load(_with_corpus_tokenizer(loaded))
    masker = text.chat_masker(config.data.sources)
    facts = preflight_facts(text.tokenizer, masker, config.template.arguments, lambda: _read_config(text))
    for target in targets:
        target.preflight(facts)


def require_adapter(targets: Iterable[ExportTarget], ref: ModelRef) -> None:
    """Raise UserError if a target needs an adapter and the model has none that other programs could load."""
    for target in targets:
        if target.requires.adapter and ref.adapter is None:
            raise UserError("the model has no adapter: it was fully fine-tuned", fix=_OTHER_TARGETS)
        if target.requires.adapter and ref.base is not None and is_preset(ref.base):
            raise UserError(
                f"the adapter cannot be used alone: no other program has the random weights of its base `{ref.base}`",
                fix=_OTHER_TARGETS,
            )


def require_tools(targets: Iterable[ExportTarget]) -> None:
    """Raise UserError with the install command if a package or llama.cpp is missing."""
    for target in targets:
        for package in target.requires.packages:
            import_optional(package, extra="export", purpose=f"the export target `{target.name}`")
        if target.requires.llama_cpp:
            find_llama()
        require_tools(load_targets(target.requires.targets))


def preflight_facts(
    tokenizer: LoadedTokenizer, masker: Masker | None, arguments: Mapping[str, Any], read_config: Any
) -> PreflightFacts:
    """Collect the tokenizer, template and config that targets check; raise UserError if there is no chat template."""
    if masker is None:
        raise UserError(
            "this model has no chat template, so its export cannot be verified",
            where="`export.to` or `--to`",
            fix="choose a template, e.g. `--set template.name=chatml`, or do not export",
        )
    template = saved_template(masker.template, arguments=arguments, special_tokens=tokenizer.special_tokens)
    return PreflightFacts(tokenizer, template, read_config)


def _with_corpus_tokenizer(loaded: LoadedConfig) -> LoadedConfig:
    """Return the config with the corpus's tokenizer, which is the one exported, if the config has no sources."""
    folder = loaded.path(loaded.config.corpus)
    if loaded.config.data.sources or not (folder / MANIFEST).is_file():
        return loaded
    return replace(loaded, config=loaded.config.model_copy(update={"tokenizer": str(folder / "tokenizer")}))


def _read_config(text: TextPipeline) -> dict[str, Any]:
    """Return the `config.json` that the loaded model will have, without loading its weights."""
    model, path = text.model, Path(text.model).expanduser()
    if is_preset(model):
        return _preset_config(model, text)
    files = locate(model)
    if files.origin == "file" and path.suffix in WEIGHT_SUFFIXES and (preset := find_key_map(path).model):
        return _preset_config(preset, text)
    written = files.small.get("config.json")
    gguf = files.gguf or (None if written else next(iter(sorted(path.glob("*.gguf"))), None))
    if gguf is not None:
        return read_gguf_config(gguf).to_dict()
    config = read_config(str(written.parent if written else path), is_local=True)
    part = text_part(config)
    return (config if part is None else part.config).to_dict()


def _preset_config(preset: str, text: TextPipeline) -> dict[str, Any]:
    return LlamaConfig(**llama_settings(find_preset(preset), text.tokenizer.vocab_size, {})).to_dict()
