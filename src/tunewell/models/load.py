"""Load a model to be trained, wherever it comes from, and account for every weight."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.model_files import WEIGHT_SUFFIXES, hub_is_out_of_reach, locate
from tunewell.core.presets import find_preset, is_preset, llama_settings
from tunewell.models import attention as packed_attention
from tunewell.models.external import fit_weights, read_external_weights, turn_rotary_pairs
from tunewell.models.gguf import quantization_of, read_gguf_config, read_gguf_weights
from tunewell.models.key_map import find_key_map
from tunewell.models.placement import verify_placement
from tunewell.models.pretrained import from_files, from_tensors, named, read_config, refuse_folder, skeleton, wanted
from tunewell.models.quiet import quiet
from tunewell.models.support import require_supported, text_part

# Make a model's vocabulary and a corpus's tokenizer fit each other, or say why they cannot.


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer folder says about its ids."""

    size: int
    """The highest id plus one."""
    special_ids: dict[str, int]
    """`bos_token`, `eos_token`, `pad_token`: those it has."""
    new_ids: list[int]
    """Of the tokens that were added for the template's sake."""


def read_vocabulary(folder: Path, added_tokens: tuple[str, ...] = ()) -> Vocabulary:
    """Read the ids of a tokenizer folder as `prepare` writes it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError("there is no tokenizer.json", where=str(folder), fix="run `tunewell prepare` again")
    backend = Tokenizer.from_file(str(path))
    ids = backend.get_vocab(with_added_tokens=True)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    named = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    special = {name: ids[token] for name, token in contents.items() if token in ids}
    return Vocabulary(max(ids.values(), default=-1) + 1, special, sorted(ids[token] for token in added_tokens))


def fit_vocabulary(model: PreTrainedModel, vocabulary: Vocabulary, source: str) -> bool:
    """Lengthen a model's tables where tokens were added to its tokenizer, and tell whether that was needed.

    New rows begin as the mean of the old ones. Raises UserError when the tokenizer has other ids that the model does
    not: then it is not this model's tokenizer.
    """
    num_rows = len(_weight(model.get_input_embeddings()))
    strangers = vocabulary.size - num_rows - sum(number >= num_rows for number in vocabulary.new_ids)
    if strangers > 0:
        raise UserError(
            f"the corpus was made with a tokenizer of {vocabulary.size:,} ids, but `{source}` knows {num_rows:,}",
            fix="run `tunewell prepare` with this model, or train the model the corpus was made for",
        )
    if vocabulary.size <= num_rows:
        return False
    means = [_weight(table).float().mean(0) for table in _tables(model)]
    # transformers draws random rows first; ours replace them, and nothing else may notice the draw.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.resize_token_embeddings(vocabulary.size, mean_resizing=False)
        for table, mean in zip(_tables(model), means, strict=True):
            weight = _weight(table)
            weight[num_rows:] = mean.to(weight.dtype)
        bias = getattr(model.get_output_embeddings(), "bias", None)
        if isinstance(bias, Tensor):
            bias[num_rows:] = bias[:num_rows].float().mean().to(bias.dtype)
    return True


def _tables(model: PreTrainedModel) -> list[nn.Module]:
    """Give the embedding, and the head where it is a table of its own."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or _weight(head) is _weight(embedding):
        return [embedding]
    return [embedding, head]


def _weight(table: nn.Module) -> Tensor:
    weight = table.weight
    assert isinstance(weight, Tensor)
    return weight


@dataclass(frozen=True)
class LoadOptions:
    """Which model, and how it is wanted."""

    model: str
    """A folder, a hub id, a `.gguf` file, `package:NAME`, `preset:NAME`, or a checkpoint of other code."""
    tokenizer_folder: Path
    """The tokenizer the corpus was made with."""
    device: torch.device
    dtype: torch.dtype
    attention: str = packed_attention.SDPA
    added_tokens: tuple[str, ...] = ()
    """Tokens that were added to the tokenizer for the template's sake."""
    longest_document: int = 0
    """Tokens of the longest document that will be trained on."""
    seed: int = 0
    """Of the first weights of a preset."""
    is_packed: bool = True
    """Whether it will read documents laid end to end, which not every model can."""
    is_whole: bool = False
    """Whether it is wanted as `AutoModelForCausalLM` gives it to anyone: with the parts that see or hear, if any."""
    allow_pickle: bool = False
    key_map: Path | None = None
    """How a checkpoint of other code names its weights; by default the `.keys.json` beside it."""

    def how(self) -> dict[str, Any]:
        """Say to transformers where and how the model is wanted."""
        return wanted(self.device, self.dtype, self.attention)

    def refuse(self, config: PreTrainedConfig) -> list[str]:
        """Refuse a model that would not be trained as it is meant; give what there is to say of one that will be."""
        if not self.is_packed:
            return []
        return require_supported(config, longest_document=self.longest_document, attention=self.attention)


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, in eval mode, with nothing yet to be trained."""

    model: PreTrainedModel
    notes: list[str] = field(default_factory=list)
    was_resized: bool = False
    """Whether rows were added to the embedding and the head, which must then be trained."""
    new_token_ids: list[int] = field(default_factory=list)
    """Ids of the tokens that were added to the tokenizer; nothing is known of them yet, resized or not."""
    text_prefix: str = ""
    """Where it lies in what `AutoModelForCausalLM` makes of its files, if it is the text part of a larger model."""


def load_model(order: LoadOptions) -> LoadedModel:
    """Load a model, refuse what would not be trained as it is meant, and check that it lies where it should.

    Raises UserError for a model that is not there, not whole, not supported, or not the tokenizer's.
    """
    packed_attention.register()
    vocabulary = read_vocabulary(order.tokenizer_folder, order.added_tokens)
    with quiet():
        model, notes, text_prefix = _load(order, vocabulary)
        was_resized = fit_vocabulary(model, vocabulary, order.model)
    if was_resized:
        number = len(vocabulary.new_ids)
        notes.append(
            f"{number} new token{'' if number == 1 else 's'}: embedding and head now have {vocabulary.size:,} rows, "
            "the new ones begin as the mean of the others"
        )
    # Documents are never padded: the padding token (in SmolLM2 the one that ends every turn) learns as others do.
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = None
    model.eval().requires_grad_(False)
    verify_placement(model, device=order.device, dtype=order.dtype)
    return LoadedModel(model, notes, was_resized, vocabulary.new_ids, text_prefix)


def _load(order: LoadOptions, vocabulary: Vocabulary) -> tuple[PreTrainedModel, list[str], str]:
    if is_preset(order.model):
        return *_from_preset(order, vocabulary), ""
    files = locate(order.model)
    path = Path(order.model).expanduser()
    if files.origin == "file" and path.suffix in WEIGHT_SUFFIXES:
        return *_from_foreign(path, order), ""
    if files.origin == "hub":
        return _from_transformers(order.model, order)
    folder = next((file.parent for file in [*files.small.values(), files.gguf] if file is not None), path)
    if files.gguf is None and any(next(folder.glob(kind), None) for kind in ("*.safetensors*", "*.bin")):
        return _from_transformers(str(folder), order)
    gguf = files.gguf or _only_gguf(folder)
    if gguf is None:
        raise UserError(
            f"`{order.model}` has no weights",
            where=str(folder),
            fix="give a folder with `model.safetensors`, a `.gguf` file, a hub id, or `preset:NAME`",
        )
    return *_from_gguf(gguf, order), ""


def _only_gguf(folder: Path) -> Path | None:
    found = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    return found[0] if len(found) == 1 else None


def _from_preset(order: LoadOptions, vocabulary: Vocabulary) -> tuple[PreTrainedModel, list[str]]:
    preset = find_preset(order.model)
    config = LlamaConfig(**llama_settings(preset, vocabulary.size, vocabulary.special_ids))
    notes = order.refuse(config)
    # Drawn on the CPU in fp32 whatever the device, so that a seed means the same model everywhere.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(order.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=order.attention)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(order.dtype)
    model.config.dtype = order.dtype
    return model.to(order.device), [*notes, "the weights are random: this model has learned nothing yet"]


def _from_gguf(path: Path, order: LoadOptions) -> tuple[PreTrainedModel, list[str]]:
    config = read_gguf_config(path)
    notes = order.refuse(config)
    model = from_tensors(config, read_gguf_weights(path, config), source=order.model, how=order.how())
    if name := quantization_of(path):
        notes.append(f"`{path.name}` is compressed ({name}); it was unpacked")
    return model, notes


def _from_foreign(path: Path, order: LoadOptions) -> tuple[PreTrainedModel, list[str]]:
    key_map = find_key_map(path, order.key_map)
    weights = read_external_weights(path, key_map, allow_pickle=order.allow_pickle)
    if key_map.model is not None:
        table = weights.get("model.embed_tokens.weight")
        num_rows = 1 if table is None else len(table)
        config: PreTrainedConfig = LlamaConfig(**llama_settings(find_preset(key_map.model), num_rows, {}))
    else:
        config = read_config(str(path.parent), is_local=True)
    notes = order.refuse(config)
    if key_map.interleaved_rotary:
        weights = turn_rotary_pairs(weights, config)
    fit_weights(weights, skeleton(config), path)
    return from_tensors(config, weights, source=order.model, how=order.how()), notes


def _from_transformers(place: str, order: LoadOptions) -> tuple[PreTrainedModel, list[str], str]:
    is_folder = Path(place).is_dir()
    is_local = is_folder or hub_is_out_of_reach() is not None
    if is_folder:
        refuse_folder(Path(place), allow_pickle=order.allow_pickle)
    config = read_config(place, is_local=is_local)
    notes = order.refuse(config)
    part = None if order.is_whole else text_part(config)
    model, unused = from_files(
        place, config, part=part, allow_pickle=order.allow_pickle, is_local=is_local, how=order.how()
    )
    if unused:
        what = f"the text part of `{config.model_type}` is trained; " if part is not None else ""
        notes.append(f"{what}{len(unused):,} weights in its files are not part of the model: {named(unused)}")
    return model, notes, "" if part is None else part.text_prefix
