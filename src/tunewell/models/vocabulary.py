"""Make a model's vocabulary and a corpus's tokenizer fit each other, or say why they cannot."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.core.errors import UserError


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
