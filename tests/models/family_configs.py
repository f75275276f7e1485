"""Tiny settings of every causal text decoder in transformers, and the classes that are none, each with the reason."""

from typing import Any

import torch
from tiny_models import ARCHITECTURES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 131
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
_EXCLUDED = {
    "half of an encoder-decoder model": [
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
        "prophetnet",
    ],
    "bidirectional: it has a causal head, but was trained to fill gaps": [
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
        "xlm-roberta-xl", "xlnet", "xmod",
    ],
    "speech, image, bytes in patches or a draft of another model": [
        "blt", "git", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "trocr", "whisper",
        "gemma4_assistant", "gemma4_unified_assistant",
    ],
    "multimodal: its text part is listed by its own name, or is a family of this list": [
        "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "mllama",
        "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
    ],
}  # fmt: skip
"""Classes in transformers' table of causal models that are no causal text decoders."""
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {**ARCHITECTURES["deepseek_v3"], "head_dim": 8}
_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_INDEXED = {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 6}
EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "head_dim": 8,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 2, "num_key_value_heads": 4,
        "mamba_d_state": 4, "mamba_dt_rank": 4, "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_ngroups": 1, "n_mamba_heads": 8,
        "mamba_d_state": 8, "chunk_size": 8, "num_mem_blocks": 1, "num_key_value_heads": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_experts": 4, "num_dense_layers": 1, **_EXPERTS},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "minimax": {"num_local_experts": 4, "head_dim": 8, "block_size": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **_WINDOWS},
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
    },
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 5},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 128},
    "xglm": {"d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 48},
    "ctrl": {"dff": 48, "n_positions": 128},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "dots1": {**_ROUTED, "first_k_dense_replace": 1},
    "hyperclovax": {"attention_multiplier": 0.25},
    "xlstm": {"num_heads": 4, "chunk_size": 8, "hidden_size": 64, "embedding_dim": 64, "num_blocks": 4},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 6, "num_hidden_layers": 3},
    "cpmant": {"dim_ff": 48, "dim_head": 8, "segment_types": 4, "prompt_types": 4, "prompt_length": 4},
    "afmoe": {"head_dim": 8, "num_local_experts": 4, "num_experts": 4, "num_shared_experts": 1, **_EXPERTS},
    "axk1": {**_LATENT},
    "axk2": {**_INDEXED},
    "deepseek_v32": {**_INDEXED},
    "glm_moe_dsa": {**_INDEXED},
    "glm4_moe": {**_ROUTED, "head_dim": 8, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_LATENT, **_ROUTED},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "exaone_moe": {**_ROUTED, "num_experts": 4, "num_shared_experts": 1, "head_dim": 8, **_WINDOWS},
    "cwm": {"head_dim": 8, **_WINDOWS},
    "ministral3": {"head_dim": 8},
    "solar_open": {**_ROUTED, "head_dim": 8},
    "minicpm3": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "mellum": {"num_experts": 4, "head_dim": 8, **_EXPERTS},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": {"num_experts": 4, "head_dim": 8, **_EXPERTS, "num_shared_experts": 1},
    "youtu": {k: v for k, v in _LATENT.items() if "expert" not in k},
    "kimi_linear": {
        **_LATENT, **_ROUTED, "linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "longcat_flash": {
        **_LATENT, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 2,
        "moe_topk": 2, "num_layers": 2,
    },
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "gemma4_unified_text": {"head_dim": 8, "global_head_dim": 16, **_WINDOWS},
    "granite_swa": {"sliding_window": 5},
    "granitemoe_swa": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "cohere2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }, **_WINDOWS},
    "gemma4_text": {**ARCHITECTURES["gemma4_text"], "vocab_size_per_layer_input": VOCABULARY},
    "gemma3n_text": {**ARCHITECTURES["gemma3n_text"], "vocab_size_per_layer_input": VOCABULARY},
    "qwen4_exp_text": {
        **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "head_dim": 8, "hc_lowrank": 8,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2, "ngram_vocab_size_base": 64, "hc_count": 2,
        "ple_embed_dim": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
        "indexer_compress_ratio": 2,
    },
    "bailing_hybrid": {
        **_LATENT, "num_local_experts": 4, "num_experts": 4, **_EXPERTS, "num_shared_experts": 1, "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "beam": {"n_group": 2, "topk_group": 1, "head_dim": 8, "num_experts": 4, **_EXPERTS, "sliding_window": 5},
    "flint": {
        "head_dim": 8, "num_experts": 4, **_EXPERTS, "shared_expert_intermediate_size": 16, "sliding_window": 5,
    },
    "kolibri1": {
        "head_dim": 8, "num_experts": 4, **_EXPERTS, "shared_expert_intermediate_size": 16, "sliding_window": 5,
    },
    "laguna": {
        "head_dim": 8, "num_experts": 4, **_EXPERTS, "shared_expert_intermediate_size": 16, "sliding_window": 5,
    },
    "mimo_v2_flash": {"head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, **_EXPERTS, "sliding_window": 5},
    "hy_v4": {**_INDEXED, "head_dim": 16},
    "deepseek_v4": {
        "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "n_routed_experts": 4, **_EXPERTS,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 6, "sliding_window": 5,
    },
    "inkling_text": {
        "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
        "n_routed_experts": 4, **_EXPERTS, "sliding_window_size": 5, "rel_extent": 16, "d_rel": 4,
    },
    "minimax_m3_vl_text": {
        "head_dim": 8, "rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 48,
        "shared_intermediate_size": 16, "index_head_dim": 8,
    },
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "stablelm": {"partial_rotary_factor": 0.5},
    "zaya": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 8},
    "openai-gpt": {"n_positions": 128},
}  # fmt: skip


def excluded() -> dict[str, str]:
    """Return the reason why a class is no causal text decoder, by family."""
    return {kind: reason for reason, kinds in _EXCLUDED.items() for kind in kinds}


def kinds() -> list[str]:
    """Return the families of causal text decoders."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(excluded()))


def config_of(kind: str) -> Any:
    """Make the settings of a tiny model of a family."""
    more = EXTRA.get(kind, ARCHITECTURES.get(kind, {}))
    sizes = {**_SIZES, "num_key_value_heads": 4} if "kv_lora_rank" in more else _SIZES
    if kind == "recurrent_gemma":
        sizes = {name: value for name, value in sizes.items() if name != "max_position_embeddings"}
    config = AutoConfig.for_model(kind, **sizes | more)
    for name, value in config.to_dict().items():  # its results would depend on random numbers
        if ("dropout" in name or name.endswith(("pdrop", "jitter_noise"))) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def build(kind: str, *, seed: int = 0) -> PreTrainedModel:
    """Build a tiny model whose numbers are large enough that a mistake shows."""
    config = config_of(kind)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape)
            is_matrix = parameter.dim() > 1 and "A_log" not in name
            parameter.copy_(drawn * 0.3 if is_matrix else parameter + drawn * 0.1)
    model.tie_weights()
    return model
