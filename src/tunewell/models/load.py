"""Load a model from a folder, the hub, a GGUF file, a preset or another checkpoint, and check every weight."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.files import read_text
from tunewell.core.options import WeightsOptions
from tunewell.model_files.families import DOCUMENTS
from tunewell.model_files.files import WEIGHT_SUFFIXES, hub_is_out_of_reach, locate
from tunewell.model_files.presets import find_preset, is_preset, llama_settings
from tunewell.model_files.weights import find_key_map
from tunewell.models import attention as packed_attention
from tunewell.models import shared
from tunewell.models.attention import is_packed
from tunewell.models.external import fit_weights, read_external_weights, split_rotary_pairs
from tunewell.models.gguf import quantization_of, read_gguf_config, read_gguf_weights
from tunewell.models.pretrained import first_names, from_files, from_tensors, read_config, require_safe_folder, skeleton
from tunewell.models.quantized import dequantize_model, quantize_model, take_over
from tunewell.models.states import prepare_packing
from tunewell.models.support import fit_packing, notes_on, quiet, text_part
from tunewell.records.plan import QuantizedBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of each precision of a plan."""

# Verify a loaded model: every weight on the right device, in the right dtype, and finite.

_SHOWN = 5


def verify_placement(
    model: nn.Module, *, device: torch.device, dtype: torch.dtype, trainable: torch.dtype = torch.float32
) -> None:
    """Check that all tensors are on `device` and finite, frozen ones in `dtype`, and trainable ones in `trainable`.

    Buffers, and modules that the model's class keeps in fp32, may also be in fp32. Integer buffers may have any dtype,
    because a quantised layer stores its packed weight in one. Raises RuntimeError for a wrong device or dtype, and
    UserError for NaN or infinity.
    """
    wrong = [*_on_wrong_device(model, device), *_in_wrong_dtype(model, dtype, trainable)]
    if wrong:
        raise RuntimeError(
            f"the model should be on {device} with frozen parameters in {_short(dtype)} and trainable ones in "
            f"{_short(trainable)}, but {_listed(wrong)}"
        )
    if broken := not_finite_names(model):
        listed = _listed([f"`{name}` contains NaN or infinity" for name in broken])
        raise UserError(
            f"the model's weights are damaged: {listed}",
            fix="download the model again; these weights may come from a run that diverged",
        )


def not_finite_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that contain NaN or infinity."""
    tensors = [(name, tensor) for name, tensor in _tensors(model) if tensor.is_floating_point() and tensor.numel()]
    # Read all results together, because each read from a GPU waits for earlier work.
    are_finite = torch.stack([_is_finite(tensor) for _, tensor in tensors]).tolist() if tensors else []
    return [name for (name, _), is_finite in zip(tensors, are_finite, strict=True) if not is_finite]


def count_nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the number of NaN and infinite values by name. Finite tensors are left out."""
    return {
        name: tensor.numel() - int(torch.isfinite(tensor).sum())
        for name, tensor in tensors
        # This is ten times as fast as a count.
        if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor)
    }


def _is_finite(tensor: Tensor) -> Tensor:
    # The minimum and maximum propagate NaN and infinity, and need no mask as large as the tensor.
    low, high = torch.aminmax(tensor.detach())
    return torch.isfinite(low) & torch.isfinite(high)


def _on_wrong_device(model: nn.Module, device: torch.device) -> Iterator[str]:
    for name, tensor in _tensors(model):
        if tensor.device.type == "meta":
            yield f"`{name}` was never loaded"
        elif tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
            yield f"`{name}` is on {tensor.device}"


def _in_wrong_dtype(model: nn.Module, dtype: torch.dtype, trainable: torch.dtype) -> Iterator[str]:
    # Name parts of modules that the model's classes always keep in fp32.
    attributes = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept = {part for module in model.modules() for name in attributes for part in getattr(module, name, None) or ()}
    for name, parameter in model.named_parameters():
        expected = trainable if parameter.requires_grad else dtype
        is_kept = parameter.dtype == torch.float32 and any(part in name for part in kept)
        if parameter.dtype != expected and not is_kept:
            yield f"`{name}` is in {_short(parameter.dtype)}"
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.dtype not in (dtype, torch.float32):
            yield f"`{name}` is in {_short(buffer.dtype)}"
        elif "inv_freq" in name and buffer.dtype != torch.float32:
            yield f"`{name}` is in {_short(buffer.dtype)}, which is not precise enough for positions"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _listed(wrong: list[str]) -> str:
    more = f", and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
    return f"{', '.join(wrong[:_SHOWN])}{more} ({len(wrong):,} in all)"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Vocabulary:
    """The token ids of a tokenizer folder."""

    size: int
    """The highest id plus one."""
    special_ids: dict[str, int]
    """Token ids of `bos_token`, `eos_token` and `pad_token`, if present."""
    new_ids: list[int]


def read_vocabulary(folder: Path, added_tokens: tuple[str, ...] = ()) -> Vocabulary:
    """Read the token ids of a tokenizer folder written by `prepare`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError("tokenizer.json is missing", where=str(folder), fix="run `tunewell prepare` again")
    ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(read_text(config_path)) if config_path.is_file() else {}
    special: dict[str, int] = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if content in ids:
            special[name] = ids[content]
    return Vocabulary(max(ids.values(), default=-1) + 1, special, sorted(ids[token] for token in added_tokens))


def fit_vocabulary(model: PreTrainedModel, vocabulary: Vocabulary, source: str) -> bool:
    """Resize the embedding and the head for tokens added to the tokenizer. Return True if they were resized.

    New rows are initialised with the mean of the old rows. Raises UserError if the tokenizer has other ids that the
    model does not have, because it is then not the tokenizer of this model.
    """
    num_rows = len(_tables(model)[0].weight)
    num_unknown = vocabulary.size - num_rows - sum(number >= num_rows for number in vocabulary.new_ids)
    if num_unknown > 0:
        raise UserError(
            f"the corpus was prepared with a tokenizer of {vocabulary.size:,} ids, but `{source}` has {num_rows:,}",
            fix="run `tunewell prepare` with this model, or train the model for which the corpus was prepared",
        )
    if vocabulary.size <= num_rows:
        return False
    means = [table.weight.float().mean(0) for table in _tables(model)]
    # transformers first initialises the new rows randomly; `fork_rng` leaves the random generator unchanged.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.resize_token_embeddings(vocabulary.size, mean_resizing=False)
        for table, mean in zip(_tables(model), means, strict=True):
            table.weight[num_rows:] = mean.to(table.weight.dtype)
        bias = getattr(model.get_output_embeddings(), "bias", None)
        if isinstance(bias, Tensor):
            bias[num_rows:] = bias[:num_rows].float().mean().to(bias.dtype)
    return True


def _tables(model: Any) -> list[Any]:
    """Return the embedding, and the head unless they are tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return [embedding] if head is None or head.weight is embedding.weight else [embedding, head]


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, including those of quantised layers, which are buffers."""
    quantized: list[Any] = [module for module in model.modules() if getattr(module, "is_matrix", False)]
    number = sum(parameter.numel() for parameter in model.parameters())
    return number + sum(part.in_features * part.out_features for part in quantized)


@dataclass(frozen=True)
class LoadOptions(WeightsOptions):
    """The model to load, and the options for loading it."""

    model: str
    """A folder, a hub id, a `.gguf` file, `package:NAME`, `preset:NAME`, or a checkpoint of other training code."""
    tokenizer_folder: Path
    """The folder of the tokenizer with which the corpus was prepared."""
    device: torch.device
    dtype: torch.dtype
    attention: str | None = packed_attention.SDPA
    """Our packed attention, or transformers' own by name; None: the one that transformers chooses."""
    added_tokens: tuple[str, ...] = ()
    """Tokens added to the tokenizer for the chat template."""
    longest_document: int = 0
    seed: int = 0
    """Seed for the random weights of a preset."""
    is_packed: bool = True
    """Whether the model will run on packed documents, which not every model supports."""
    is_whole: bool = False
    """Whether to load a complete multimodal model, as `AutoModelForCausalLM` does, instead of only its text part."""
    quantized: QuantizedBase | None = None
    """How to quantise the linear layers after loading. A model that was saved quantised is used as it is."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `from_pretrained`."""
        # On a GPU, each weight is loaded directly to the device, not through main memory. A model that is quantised
        # after loading would not fit there.
        is_direct = self.device.type != "cpu" and (self.quantized is None or self.quantized.is_saved)
        device_map = {"device_map": {"": self.device}} if is_direct else {}
        return {"dtype": self.dtype, "attn_implementation": self.attention, **device_map}

    def fit(self, config: PreTrainedConfig) -> tuple["LoadOptions", list[str]]:
        """Return the options with the attention that suits a model, and notes. Raise UserError if it cannot be trained.

        Documents that cannot be packed are computed with transformers' own attention.
        """
        if not self.is_packed:
            return self, []
        packing = fit_packing(config, longest=self.longest_document, attention=self.attention or "")
        part = text_part(config)
        notes = notes_on(config if part is None else part.config, packing)
        return (replace(self, attention=None) if packing.level == DOCUMENTS else self), notes


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, in eval mode, with all parameters frozen."""

    model: PreTrainedModel
    notes: list[str] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)
    """Ids of the tokens added to the tokenizer. Their embeddings are untrained."""
    text_prefix: str = ""
    """Path of the text part within a multimodal model loaded by `AutoModelForCausalLM`; otherwise empty."""


def load_model(options: LoadOptions, *, may_share: bool = True) -> LoadedModel:
    """Load a model and verify its weights, device, dtype and vocabulary. Raise UserError if it cannot be used."""
    return shared.load(options, _load_model) if may_share and shared.has(options.model) else _load_model(options)


def _load_model(options: LoadOptions) -> LoadedModel:
    packed_attention.register()
    vocabulary = read_vocabulary(options.tokenizer_folder, options.added_tokens)
    with quiet():
        found = _load(options, vocabulary)
        model = found.model
        is_resized = fit_vocabulary(model, vocabulary, options.model)
    if is_resized:
        number = len(vocabulary.new_ids)
        found.notes.append(
            f"{number} new token{'' if number == 1 else 's'}: embedding and head now have {vocabulary.size:,} rows; "
            "new rows start as the mean of the others"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        take_over(model, options.dtype)
        nn.Module.to(model, options.device)
    elif options.quantized is not None:
        quantize_model(model, options.quantized, options.device)
    # Documents are never padded, so the padding token (in SmolLM2 the end of a turn) is trained like any other.
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = None
    model.eval().requires_grad_(False)
    if is_packed(model):
        prepare_packing(model)
    verify_placement(model, device=options.device, dtype=options.dtype)
    return replace(found, new_token_ids=vocabulary.new_ids)


def load_dequantized(options: LoadOptions, trained_dtype: torch.dtype) -> LoadedModel:
    """Load a quantised model as it was trained, and dequantise it to plain layers in the dtype of the options."""
    found = load_model(replace(options, dtype=trained_dtype))
    dequantize_model(found.model, options.dtype)
    return found


def _load(options: LoadOptions, vocabulary: Vocabulary) -> LoadedModel:
    if is_preset(options.model):
        return _from_preset(options, vocabulary)
    files = locate(options.model)
    path = Path(options.model).expanduser()
    if files.origin == "file" and path.suffix in WEIGHT_SUFFIXES:
        return _from_external(path, options)
    if files.origin == "hub":
        return _from_transformers(options.model, options)
    folder = next((file.parent for file in [*files.small.values(), files.gguf] if file is not None), path)
    if files.gguf is None and any(next(folder.glob(kind), None) for kind in ("*.safetensors*", "*.bin")):
        return _from_transformers(str(folder), options)
    found = [files.gguf] if files.gguf else sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise UserError(
            f"`{options.model}` has no weights",
            where=str(folder),
            fix="use a folder with `model.safetensors`, a `.gguf` file, a hub id or `preset:NAME`",
        )
    return _from_gguf(found[0], options)


def _from_preset(options: LoadOptions, vocabulary: Vocabulary) -> LoadedModel:
    preset = find_preset(options.model)
    config = LlamaConfig(**llama_settings(preset, vocabulary.size, vocabulary.special_ids))
    options, notes = options.fit(config)
    # Always initialise on the CPU in fp32, so that a seed gives the same model on every device.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=options.attention)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(options.dtype)
    model.config.dtype = options.dtype
    return LoadedModel(model.to(options.device), [*notes, "the weights are random: training starts from scratch"])


def _from_gguf(path: Path, options: LoadOptions) -> LoadedModel:
    config = read_gguf_config(path)
    options, notes = options.fit(config)
    model = from_tensors(config, read_gguf_weights(path, config), source=options.model, arguments=options.arguments())
    if name := quantization_of(path):
        notes.append(f"`{path.name}` is quantised ({name}); its weights were dequantised")
    return LoadedModel(model, notes)


def _from_external(path: Path, options: LoadOptions) -> LoadedModel:
    key_map = find_key_map(path)
    weights = read_external_weights(path, key_map, allow_pickle=options.allow_pickle)
    if key_map.model is not None:
        table = weights.get("model.embed_tokens.weight")
        num_rows = 1 if table is None else len(table)
        config: PreTrainedConfig = LlamaConfig(**llama_settings(find_preset(key_map.model), num_rows, {}))
    else:
        config = read_config(str(path.parent), is_local=True)
    options, notes = options.fit(config)
    if key_map.interleaved_rotary:
        weights = split_rotary_pairs(weights, config)
    fit_weights(weights, skeleton(config), path)
    model = from_tensors(config, weights, source=options.model, arguments=options.arguments())
    return LoadedModel(model, notes)


def _from_transformers(source: str, options: LoadOptions) -> LoadedModel:
    is_folder = Path(source).is_dir()
    is_local = is_folder or hub_is_out_of_reach() is not None
    if is_folder:
        require_safe_folder(Path(source), allow_pickle=options.allow_pickle)
    config = read_config(source, is_local=is_local)
    options, notes = options.fit(config)
    part = None if options.is_whole else text_part(config)
    model, unused = from_files(
        source, config, part=part, allow_pickle=options.allow_pickle, is_local=is_local, arguments=options.arguments()
    )
    left_out = [f"{len(unused):,} weights in the model's files are not used: {first_names(unused)}"] if unused else []
    if part is not None:
        left_out = ["; ".join([f"only the text part of `{config.model_type}` is trained", *left_out])]
    notes += left_out
    return LoadedModel(model, notes, text_prefix="" if part is None else part.text_prefix)
