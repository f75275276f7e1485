"""Tiny models of many architectures, and what it takes to load one, for the tests of this folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tunewell.models.load import LoadOptions

VOCABULARY = 99
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2}
# What each needs beyond the common sizes. Windows are shorter than the documents of the tests, caps and scales bite.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "head_dim": 8, **_WINDOWS},
    "deepseek_v2": {**_LATENT, **_EXPERTS},
    "deepseek_v3": {**_LATENT, **_EXPERTS},
    "ernie4_5": {},
    "exaone4": _WINDOWS,
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5, **_WINDOWS},
    "gemma3_text": {"head_dim": 8, **_WINDOWS},
    "gemma3n_text": {
        "head_dim": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        **_PER_LAYER,
        **_WINDOWS,
    },
    "gemma4_text": {"head_dim": 8, "global_head_dim": 16, **_PER_LAYER, **_WINDOWS},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gpt2": {"n_inner": 48},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "granitemoe": {"logits_scaling": 8.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {"head_dim": 8},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "ministral": {"head_dim": 8, **_WINDOWS},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nanochat": {"final_logit_softcapping": 0.5},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16, **_EXPERTS},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, **_EXPERTS},
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "starcoder2": {},
    "vaultgemma": {"head_dim": 8, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5, **_WINDOWS},
}


def tiny_config(kind: str, **more: Any) -> Any:
    """Make the settings of a tiny model of an architecture."""
    return AutoConfig.for_model(kind, **_SIZES | ARCHITECTURES.get(kind, {}) | more)


def tiny(kind: str, *, seed: int = 0, **more: Any) -> PreTrainedModel:
    """Make a tiny model whose numbers are large enough that a mistake shows."""
    config = tiny_config(kind, **more)
    # transformers 5.17 computes capped attention by a kernel that leaves the cap out.
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if is_capped else None).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.3 if parameter.dim() > 1 else parameter + drawn * 0.1)
    model.tie_weights()
    return model


def order(model: str | Path, tokenizer: Path, **more: Any) -> LoadOptions:
    """Order a model on the CPU in fp32, with transformers' own attention."""
    wanted = {"device": torch.device("cpu"), "dtype": torch.float32, "attention": "sdpa"} | more
    return LoadOptions(str(model), tokenizer, **wanted)


def logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Compute a model's own logits for one text."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
