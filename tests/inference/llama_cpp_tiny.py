"""A tiny llama as transformers has it and as a GGUF file, written by hand for the tests of llama.cpp."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
}
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}


def tiny_llama(tokenizer: Path, *, seed: int = 0, scale: float = 0.2, **more: Any) -> PreTrainedModel:
    """Make a random model for a tokenizer, with numbers large enough that a mistake shows."""
    ids = token_ids(tokenizer)
    known = {"vocab_size": len(ids), "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    config = AutoConfig.for_model("llama", **SIZES | known | {"bos_token_id": None} | more)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * scale if parameter.dim() > 1 else parameter + drawn * 0.1)
    model.tie_weights()
    return model


def write_tiny_gguf(path: Path, model: PreTrainedModel, tokenizer: Path) -> Path:
    """Write a model in fp32, with the rotary pairs side by side and the tokenizer as byte-level BPE."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if re.search(r"[qk]_proj", name):
            tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        for theirs, ours in PARTS.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def token_ids(folder: Path) -> dict[str, int]:
    """Read every token of a tokenizer folder."""
    saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return saved["model"]["vocab"] | {token["content"]: token["id"] for token in saved["added_tokens"]}


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in saved["added_tokens"]}
    ids = token_ids(folder)
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in saved["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_pad_token_id(special["<|endoftext|>"])
    writer.add_add_bos_token(False)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    writer.add_chat_template(settings["chat_template"])
