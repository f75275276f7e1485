"""Answers: in batches, each as if asked alone, and the model left as it was."""

import pytest
import torch
from tiny_models import ARCHITECTURES, logits, tiny
from tokenizers import Tokenizer
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM

from tunewell.data.tokenizers.load import corpus_stop_ids
from tunewell.inference.decoder import Decoding, Generated, KVCache, why_not_decoded
from tunewell.inference.generate import generate
from tunewell.inference.transformers_generate import generate_with_transformers
from tunewell.models import attention
from tunewell.records.manifest import TemplateRecord

PROMPTS = [[5, 9, 40], [7], [77, 3, 12, 64, 8, 30, 11], [5, 9, 40, 20, 21, 22], [33, 34], [7, 8, 9, 10]]


def alone(model, prompt: list[int], number: int, stops: tuple[int, ...] = ()) -> list[int]:
    """The likeliest continuation by plain forward passes over the whole text: no cache, no padding."""
    ids = list(prompt)
    for _ in range(number):
        ids.append(int(logits(model, ids)[-1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "gpt2", "opt", "phi3", "cohere2"])
def test_a_batch_answers_as_each_prompt_does_alone(kind):
    """Padding, positions, windows and caches: any of them wrong and the words change."""
    model = tiny(kind)
    found = generate(model, PROMPTS, max_new_tokens=12, stop_ids=[])
    assert [answer.ids for answer in found] == [alone(model, prompt, 12) for prompt in PROMPTS]
    assert not any(answer.ended for answer in found)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_gets_the_answers_of_transformers(kind):
    """Prompts with a common prefix are computed together; slots are used again."""
    model = tiny(kind)
    assert why_not_decoded(model, 30) is None
    prompts = [*PROMPTS[:3], *([*range(3, 15), *prompt] for prompt in PROMPTS[3:])]
    expected = generate_with_transformers(model, prompts, max_new_tokens=8, stop_ids=[])
    for chosen, tokens in ((slice(None), 60), (slice(3, None), None)):
        decoding = Decoding(batch_tokens=tokens)
        found = generate(model, prompts[chosen], max_new_tokens=8, stop_ids=[], decoding=decoding)
        assert found == expected[chosen]


@pytest.mark.parametrize("fault", ["position", "visible", "source"])
def test_a_fault_in_the_cache_changes_answers(fault, monkeypatch):
    """What the test above would see: a token in the wrong place, one that is not read, a prompt in another slot."""
    model = tiny("llama")
    whole = generate(model, PROMPTS, max_new_tokens=8, stop_ids=[])
    begin_step, begin_prompts = KVCache.begin_step, KVCache.begin_prompts

    def broken_step(cache):
        begin_step(cache)
        if fault == "position":
            cache._rows = (cache._rows - 1).clamp(min=0)
        if fault == "visible":
            cache.lengths.sub_(1)

    def broken_prompts(cache, rows, sources):
        begin_prompts(cache, rows, sources.roll(1) if fault == "source" else sources)

    monkeypatch.setattr(KVCache, "begin_step", broken_step)
    monkeypatch.setattr(KVCache, "begin_prompts", broken_prompts)
    assert generate(model, PROMPTS, max_new_tokens=8, stop_ids=[]) != whole


def test_an_architecture_without_attention_is_answered_by_transformers():
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
    assert "recurrence" in (why_not_decoded(model, 10) or "")
    found = generate(model, PROMPTS[:2], max_new_tokens=4, stop_ids=[])
    assert [answer.ids for answer in found] == [alone(model, prompt, 4) for prompt in PROMPTS[:2]]


def test_an_answer_ends_at_any_of_the_stop_ids_and_does_not_hold_it():
    model = tiny("llama")
    free = [alone(model, prompt, 12) for prompt in PROMPTS]
    stops = (free[0][3], free[2][5])
    found = generate(model, PROMPTS, max_new_tokens=12, stop_ids=stops)
    for answer, words in zip(found, free, strict=True):
        end = next((at for at, word in enumerate(words) if word in stops), None)
        assert answer == Generated(words[:end], end is not None)
    assert found[0].ended and found[2].ended


def test_how_prompts_are_batched_does_not_matter():
    model = tiny("llama")
    whole = generate(model, PROMPTS, max_new_tokens=6, stop_ids=[])
    for batch_tokens in (1, 20, 26, 10_000):
        decoding = Decoding(batch_tokens=batch_tokens)
        assert generate(model, PROMPTS, max_new_tokens=6, stop_ids=[], decoding=decoding) == whole
    assert generate(model, [], max_new_tokens=6, stop_ids=[]) == []


def test_a_prompt_near_the_end_of_the_context_is_cut_there_and_the_others_are_not():
    """Learned positions end: one more would be read from behind the table."""
    model = tiny("gpt2", max_position_embeddings=16, n_positions=16)
    prompts = [[5] * 3, [6] * 14, [7] * 16, [8] * 20]
    found = generate(model, prompts, max_new_tokens=8, stop_ids=[])
    assert [len(answer.ids) for answer in found] == [8, 2, 0, 0]
    assert found[1].ids == alone(model, prompts[1], 2)


def test_the_model_is_left_as_it_was_and_the_dice_too():
    """A question in the middle of a run must not change what is trained after it."""
    attention.register()
    model = tiny("llama")
    model.set_attn_implementation(attention.SDPA)
    model.train()
    model.config.use_cache = False
    own = model.generation_config
    dice = torch.get_rng_state()
    for temperature in (0.0, 1.0):
        generate(model, PROMPTS, max_new_tokens=4, stop_ids=[], decoding=Decoding(temperature=temperature))
    assert model.training
    assert model.config._attn_implementation == attention.SDPA
    assert model.generation_config is own
    assert torch.equal(torch.get_rng_state(), dice)


def test_the_settings_its_makers_recommend_are_not_used():
    """A penalty on repeating hides that a model repeats itself."""
    model = tiny("llama")
    plain = generate(model, PROMPTS, max_new_tokens=12, stop_ids=[])
    model.generation_config = GenerationConfig(
        repetition_penalty=5.0, suppress_tokens=plain[0].ids[:2], eos_token_id=plain[1].ids[0], do_sample=True, top_k=3
    )
    assert generate(model, PROMPTS, max_new_tokens=12, stop_ids=[]) == plain


def test_drawing_follows_the_seed_and_the_temperature():
    model = tiny("llama")

    def draw(**how) -> list[Generated]:
        return generate(model, PROMPTS, max_new_tokens=12, stop_ids=[], decoding=Decoding(**how))

    assert draw(temperature=1.0, seed=1) == draw(temperature=1.0, seed=1)
    assert draw(temperature=1.0, seed=1) != draw(temperature=1.0, seed=2)
    assert draw(temperature=1.0, top_p=1e-6, seed=1) == draw()


def test_drawing_takes_from_all_tokens():
    """transformers draws from the 50 likeliest unless told otherwise."""
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    drawn = generate(model, [[5]] * 20, max_new_tokens=50, stop_ids=[], decoding=Decoding(temperature=1.0))
    assert len({token for answer in drawn for token in answer.ids}) > 90


def test_generating_says_nothing(capfd, recwarn):
    generate(tiny("llama"), PROMPTS, max_new_tokens=4, stop_ids=[2])
    decoding = Decoding(temperature=0.7, top_p=0.9)
    generate(tiny("llama"), PROMPTS, max_new_tokens=4, stop_ids=[], decoding=decoding)
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_whoever_is_asked_before_each_token_can_end_it():
    model, asked = tiny("llama"), []

    def ask() -> None:
        asked.append(model.training)
        if len(asked) == 3:
            raise InterruptedError

    model.train()
    with pytest.raises(InterruptedError):
        generate(model, [[1, 2, 3]], max_new_tokens=20, stop_ids=[], before_token=ask)
    assert asked == [False] * 3 and model.training


def test_an_empty_prompt_is_a_mistake():
    with pytest.raises(ValueError, match="no tokens"):
        generate(tiny("llama"), [[1], []], max_new_tokens=4, stop_ids=[])


def test_answers_stop_where_the_corpus_ends_a_turn_or_a_text(tiny_model):
    """A template may end turns with another token than the tokenizer ends texts with."""

    class Loaded:
        backend = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
        special_tokens = {"eos_token": "<|endoftext|>"}  # noqa: RUF012  as the tokenizer's own class has it

    def corpus(*ends: str):
        records = [
            TemplateRecord(name="t", sha256="", learn_from="responses", learn_roles=[], end_of_turn=end) for end in ends
        ]
        return type("Manifest", (), {"templates": records})()

    ends = {name: Loaded.backend.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")}
    assert corpus_stop_ids(Loaded(), corpus("<|im_end|>", "<|im_end|>")) == sorted(ends.values())
    assert corpus_stop_ids(Loaded(), corpus("", "no single token")) == [ends["<|endoftext|>"]]
    Loaded.special_tokens = {}
    assert corpus_stop_ids(Loaded(), corpus()) == []


def test_a_very_low_temperature_is_greedy():
    model = tiny("llama")
    greedy = generate(model, PROMPTS, max_new_tokens=6, stop_ids=[])
    for temperature in (1e-3, 1e-40):
        decoding = Decoding(temperature=temperature)
        assert generate(model, PROMPTS, max_new_tokens=6, stop_ids=[], decoding=decoding) == greedy
