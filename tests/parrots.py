"""Tiny models that say what they are told to, for tests of what is done with answers."""

import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

END = "<|im_end|>"


def write_parrot(folder: Path, tokenizer: Path, says: str, *, then: str = END, prompt: str = "\n") -> Path:
    """Write a model that answers every question with one text, and goes on with a token (its end) for ever.

    Each token alone decides the next, so none may come twice in the text, nor what prompts end with. The tokenizer is
    that of `tiny_model`.
    """
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    start = backend.encode(f"assistant{prompt}", add_special_tokens=False).ids[-1]
    chain = [start, *backend.encode(says, add_special_tokens=False).ids]
    last = backend.token_to_id(then)
    assert last is not None and len({*chain, last}) == len(chain) + 1, "a token comes twice"
    model = LlamaForCausalLM(_config(backend.get_vocab_size(), hidden=512))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        size = backend.get_vocab_size()
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        model.lm_head.weight[last] = 1  # whatever else was the last word
        for token, following in zip(chain, [*chain[1:], last], strict=True):
            model.lm_head.weight[following, token] = 2
    return _save(model, folder, tokenizer)


def write_random(folder: Path, tokenizer: Path, *, seed: int = 0) -> Path:
    """Write a model with weights large enough that every token counts."""
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    model = LlamaForCausalLM(_config(backend.get_vocab_size(), hidden=32))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.3 if parameter.dim() > 1 else parameter + drawn * 0.1)
    return _save(model, folder, tokenizer)


def _config(size: int, *, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size,
        hidden_size=hidden,
        num_hidden_layers=1 if hidden > 32 else 2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8 if hidden > 32 else 48,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


def _save(model: LlamaForCausalLM, folder: Path, tokenizer: Path) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder
