"""Embeddings and heads in fp32 inside a 16-bit model, compared with transformers."""

from collections.abc import Callable

import pytest
import torch
from gguf_tiny import tiny
from transformers import PreTrainedModel

from tunewell.config.schema import MethodSettings
from tunewell.inference.decoder import Decoder, decoding_mode
from tunewell.methods.dora import Dora
from tunewell.methods.lora import Lora
from tunewell.models import attention
from tunewell.models.fp32_modules import compute_dtype

PROMPT = [3, 50, 12, 7, 90]
NUM_STEPS = 4


def _logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", [Lora.apply, Dora.apply], ids=["lora", "dora"])
@pytest.mark.parametrize("case", ["llama", "llama-tied", "gemma3"])
def test_a_new_adapter_with_fp32_tables_computes_what_the_model_computed(
    case: str, method: Callable[..., Lora], dtype: torch.dtype
) -> None:
    """Gemma's embedding is a subclass that scales: as a plain embedding, its output was 8 times too small."""
    attention.register()
    model = tiny(case).to(dtype)
    expected = _logits(model, PROMPT)
    method(model, MethodSettings(rank=2, modules_to_save=("embed_tokens", "lm_head")), seed=0)
    assert model.dtype == torch.float32 and compute_dtype(model) == dtype
    found = _logits(model, PROMPT)
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= (0.05 if dtype == torch.bfloat16 else 0.01) * expected.abs().max()


@pytest.mark.parametrize("saved", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")], ids=str)
@pytest.mark.parametrize("method", [Lora.apply, Dora.apply], ids=["lora", "dora"])
def test_decoding_from_a_cache_computes_in_16_bits_beside_fp32_tables(
    method: Callable[..., Lora], saved: tuple[str, ...]
) -> None:
    """Decoding cast the adapters to the dtype of the first weight, and the evaluation before step 1 crashed."""
    attention.register()
    model = tiny("llama").bfloat16()
    method(model, MethodSettings(rank=2, modules_to_save=saved), seed=0)
    with decoding_mode(model):
        decoder = Decoder(model, num_slots=1, capacity=16)
        decoder.add([0], [PROMPT])
        ids = list(PROMPT)
        for _ in range(NUM_STEPS):
            ids.append(int(decoder.tokens[0]))
            decoder.step()
    expected = _logits(model, ids)[-1]
    assert decoder.logits.dtype == torch.bfloat16
    assert (decoder.logits[0] - expected).abs().max() <= 0.05 * expected.abs().max()
