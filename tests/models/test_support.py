"""What a model does is honoured, or the model is refused by name; nothing is left out without a word."""

import pytest
import torch
from family_configs import kinds
from tiny_models import ARCHITECTURES, logits, tiny, tiny_config
from transformers import AutoConfig, BertConfig, Gemma3nConfig, GPT2Config, LlamaConfig, T5Config

from tunewell.core.errors import UserError
from tunewell.model_files import families
from tunewell.models import attention
from tunewell.models.support import fit_packing, head_shape, notes_on, text_part

LENGTHS = [7, 3, 3, 13, 1]


def notes(config, *, longest=1, attention=""):
    """What loading a model for training says."""
    return notes_on(config, fit_packing(config, longest=longest, attention=attention))


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_a_verified_architecture_keeps_packed_documents_apart_and_its_head_is_known(kind):
    """Every name in the table of verified ones: windows, caps and scales of each against transformers' own logits."""
    attention.register()
    model = tiny(kind)
    assert not [note for note in notes(model.config, longest=13) if "not tested" in note]
    head = head_shape(model)
    texts = [torch.randint(3, 99, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
    alone = [logits(model, text.tolist()) for text in texts]
    model.set_attn_implementation(attention.SDPA)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=torch.cat(texts)[None],
            position_ids=positions,
            use_cache=False,
            packed_runs=attention.runs_of(LENGTHS),
        ).last_hidden_state[0]
        packed = head.apply(model.get_output_embeddings()(hidden)).split(LENGTHS)
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_every_causal_text_decoder_is_in_the_table_once():
    """A new one in transformers shows up here; `families.py` then tells its level."""
    table = families.table()
    listed = [*table["verified"], *table["states"], *(kind for kinds in table["documents"].values() for kind in kinds)]
    assert sorted(listed) == kinds()
    assert set(ARCHITECTURES) <= set(table["verified"])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen2_5_vl", "is multimodal"),
        ("llava", "is multimodal"),
        ("t5", "encoder-decoder"),
        ("bert", "bidirectional"),
        ("vit", "no causal language model"),
    ],
)
def test_what_does_not_generate_text_is_refused_by_name(kind, reason):
    with pytest.raises(UserError, match=reason) as caught:
        fit_packing(AutoConfig.for_model(kind), longest=1)
    assert f"`{kind}`" in caught.value.what


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("llama", families.ATTENTION),
        ("gpt_oss", families.ATTENTION),
        ("stablelm", families.ATTENTION),
        ("lfm2", families.STATES),
        ("qwen3_next", families.STATES),
        ("granitemoehybrid", families.STATES),
        ("jamba", families.STATES),
        ("bloom", families.DOCUMENTS),
        ("mamba", families.DOCUMENTS),
        ("llama4_text", families.DOCUMENTS),
        ("gptj", families.DOCUMENTS),
        ("deepseek_v32", families.DOCUMENTS),
    ],
)
def test_the_level_of_a_family_is_known_from_its_settings(kind, level):
    packing = fit_packing(AutoConfig.for_model(kind), longest=1)
    assert packing.level == level
    assert bool(packing.because) == (level == families.DOCUMENTS), "the reason is named"


def test_a_flag_is_enough_to_lower_the_level_or_to_refuse():
    """Falcon, Gemma 4 and others switch such things on by a setting, not by another name."""
    assert fit_packing(tiny_config("llama", alibi=True), longest=1).level == families.DOCUMENTS
    strange = tiny_config("qwen2")
    strange.layer_types = ["full_attention", "chunked_attention"]
    assert "`chunked_attention`" in fit_packing(strange, longest=1).because
    with pytest.raises(UserError, match="bidirectional"):
        fit_packing(tiny_config("gemma3_text", use_bidirectional_attention=True), longest=1)


def test_quantised_weights_are_refused_with_their_method():
    config = tiny_config("llama", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match=r"quantised \(gptq\)"):
        fit_packing(config, longest=1)


def test_documents_longer_than_learned_positions_are_refused():
    """Else the embedding of position 128 is read behind its end."""
    assert notes(GPT2Config(n_positions=128), longest=128) == []
    with pytest.raises(UserError, match=r"has 128 positions.* 129") as caught:
        fit_packing(GPT2Config(n_positions=128), longest=129)
    assert "packing.context_length" in str(caught.value.fix)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def test_positions_that_depend_on_a_neighbour_are_packed_only_where_they_do_not():
    """A short document beside a long one would get other positions than alone."""
    rope = LONG | {"original_max_position_embeddings": 64}
    config = tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert fit_packing(config, longest=64).level == families.ATTENTION
    assert fit_packing(config, longest=65).level == families.DOCUMENTS
    config = tiny_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    fit_packing(config, longest=128)
    with pytest.raises(UserError, match="`dynamic`"):
        fit_packing(config, longest=129)


def test_a_cap_on_attention_is_refused_where_the_kernel_has_none():
    fit_packing(tiny_config("gemma2"), longest=1, attention=attention.SDPA)
    with pytest.raises(UserError, match="softcap") as caught:
        fit_packing(tiny_config("gemma2"), longest=1, attention=attention.FLASH)
    assert caught.value.fix == "set `train.attention: sdpa`"


def test_what_is_left_out_is_said():
    assert "load-balancing loss" in notes(tiny_config("mixtral"))[0]
    unknown = LlamaConfig()
    unknown.model_type = "llama_of_tomorrow"
    assert "not tested with `llama_of_tomorrow`" in notes(unknown)[0]
    assert notes(tiny_config("llama")) == []


def test_only_the_text_part_of_some_models_is_known():
    config = Gemma3nConfig()
    part = text_part(config)
    assert part is not None
    assert part.config is config.get_text_config()
    # `AutoModelForCausalLM` gives the whole, in which PEFT is to find what was trained.
    assert part.text_prefix == "model.language_model."
    assert text_part(tiny_config("llama")) is None
    assert fit_packing(config, longest=1).level == families.ATTENTION


def test_an_unknown_head_is_refused_when_it_is_tried():
    """A bias or a cap that no setting names would make every loss wrong."""

    class Louder(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.weight = head.weight

        def forward(self, hidden):
            return torch.nn.functional.linear(hidden, self.weight)

    model = tiny("llama")
    assert head_shape(model).scale == 1.0
    before = model.forward
    model.forward = lambda **given: type("Out", (), {"logits": before(**given).logits * 1.01})()
    with pytest.raises(UserError, match="more than a matrix product"):
        head_shape(model)
    model.forward = before
    model.lm_head = Louder(model.lm_head)
    assert head_shape(model).scale == 1.0, "a head without a bias"


def test_trying_the_head_leaves_the_model_as_it_was():
    attention.register()
    model = tiny("llama")
    model.set_attn_implementation(attention.SDPA)
    model.train()
    head_shape(model)
    assert model.training
    assert model.config._attn_implementation == attention.SDPA


def test_the_table_is_well_formed():
    """A name in two lists would be verified and refused at once."""
    table = families.table()
    refused = [kind for kinds in table["refused"].values() for kind in kinds]
    assert len(set(refused)) == len(refused)
    assert not set(refused) & set(table["verified"])
    assert not set(table["text_parts"]) & set(refused)


def test_encoders_and_pairs_of_models_are_refused_from_their_settings_alone():
    for config in (BertConfig(), T5Config()):
        with pytest.raises(UserError):
            fit_packing(config, longest=1)
