"""What a model does is honoured, or the model is refused by name; nothing is left out without a word."""

import json

import pytest
import torch
from tiny_models import ARCHITECTURES, logits, tiny, tiny_config
from transformers import AutoConfig, BertConfig, Gemma3nConfig, GPT2Config, T5Config

from tunewell.core.errors import UserError
from tunewell.models import attention, support
from tunewell.models.support import head_shape, require_supported, text_part

LENGTHS = [7, 3, 3, 13, 1]


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_a_verified_architecture_keeps_packed_documents_apart_and_its_head_is_known(kind):
    """Every name in the table of verified ones: windows, caps and scales of each against transformers' own logits."""
    attention.register()
    model = tiny(kind)
    assert not [note for note in require_supported(model.config, longest_document=13) if "not tested" in note]
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


def test_the_table_names_only_architectures_that_are_tested_here_or_were_by_hand():
    """The verified list must not grow by wish: what is not tested here is listed here."""
    by_hand = {"afmoe", "apertus", "cwm", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_dense", "ministral3", "persimmon"}
    assert set(support._table()["verified"]) == set(ARCHITECTURES) | by_hand | {"phimoe"}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt_oss", "sinks"),
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("mamba", "recurrent, state-space"),
        ("rwkv", "recurrent, state-space"),
        ("recurrent_gemma", "recurrent, state-space"),
        ("lfm2", "recurrent, state-space"),
        ("qwen3_next", "recurrent, state-space"),
        ("granitemoehybrid", "recurrent, state-space"),
        ("jamba", "recurrent, state-space"),
        ("llama4_text", "in chunks"),
        ("deepseek_v32", "by an index"),
        ("stablelm", "pass the layout"),
        ("falcon", "cannot be replaced"),
        ("gptj", "cannot be replaced"),
        ("modernbert-decoder", "not a single matrix"),
        ("qwen2_5_vl", "is multimodal"),
        ("llava", "is multimodal"),
        ("llama4", "in chunks"),
        ("t5", "encoder-decoder"),
        ("bert", "bidirectional"),
        ("vit", "no causal language model"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(kind, reason):
    with pytest.raises(UserError, match=reason) as caught:
        require_supported(AutoConfig.for_model(kind), longest_document=1)
    assert f"`{kind}`" in caught.value.what


def test_a_flag_is_enough_to_refuse():
    """Falcon, Gemma 4 and others switch such things on by a setting, not by another name."""
    with pytest.raises(UserError, match="ALiBi"):
        require_supported(tiny_config("llama", alibi=True), longest_document=1)
    strange = tiny_config("qwen2")
    strange.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UserError, match="`chunked_attention`"):
        require_supported(strange, longest_document=1)
    with pytest.raises(UserError, match="bidirectional"):
        require_supported(tiny_config("gemma3_text", use_bidirectional_attention=True), longest_document=1)


def test_quantised_weights_are_refused_with_their_method():
    config = tiny_config("llama", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match=r"quantised \(gptq\)"):
        require_supported(config, longest_document=1)


def test_documents_longer_than_learned_positions_are_refused():
    """Else the embedding of position 128 is read behind its end."""
    assert require_supported(GPT2Config(n_positions=128), longest_document=128) == []
    with pytest.raises(UserError, match=r"has 128 positions.* 129") as caught:
        require_supported(GPT2Config(n_positions=128), longest_document=129)
    assert "packing.context_length" in str(caught.value.fix)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("kind", "rope", "limit"),
    [
        ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 128),
        ("phi3", LONG | {"original_max_position_embeddings": 64}, 64),
    ],
)
def test_positions_that_depend_on_a_neighbour_are_refused_only_where_they_do(kind, rope, limit):
    """A short document beside a long one would get other positions than alone."""
    more = {"original_max_position_embeddings": 64} if kind == "phi3" else {}
    config = tiny_config(kind, rope_parameters=rope, **more)
    require_supported(config, longest_document=limit)
    with pytest.raises(UserError, match=f"`{rope['rope_type']}`"):
        require_supported(config, longest_document=limit + 1)


def test_a_cap_on_attention_is_refused_where_the_kernel_has_none():
    require_supported(tiny_config("gemma2"), longest_document=1, attention=attention.SDPA)
    with pytest.raises(UserError, match="softcap") as caught:
        require_supported(tiny_config("gemma2"), longest_document=1, attention=attention.FLASH)
    assert caught.value.fix == "set `train.attention: sdpa`"


def test_what_is_left_out_is_said():
    assert "load-balancing loss" in require_supported(tiny_config("mixtral"), longest_document=1)[0]
    assert "not tested" in require_supported(tiny_config("ctrl"), longest_document=1)[0]
    assert require_supported(tiny_config("llama"), longest_document=1) == []


def test_only_the_text_part_of_some_models_is_known():
    config = Gemma3nConfig()
    part = text_part(config)
    assert part is not None
    assert part.config is config.get_text_config()
    # `AutoModelForCausalLM` gives the whole, in which PEFT is to find what was trained.
    assert part.text_prefix == "model.language_model."
    assert text_part(tiny_config("llama")) is None
    assert require_supported(config, longest_document=1) == []


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
    table = json.loads((support.Path(support.__file__).with_name("architectures.json")).read_text())
    refused = [kind for kinds in table["refused"].values() for kind in kinds]
    assert len(set(refused)) == len(refused)
    assert not set(refused) & set(table["verified"])
    assert not set(table["text_parts"]) & set(refused)


def test_encoders_and_pairs_of_models_are_refused_from_their_settings_alone():
    for config in (BertConfig(), T5Config()):
        with pytest.raises(UserError):
            require_supported(config, longest_document=1)
