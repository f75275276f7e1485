"""Benchmark decoding against transformers' `generate`: 64 prompts, 128 new tokens each, one adapter, not merged.

    python benchmarks/decoding.py                     135M, 1.1B and 8B in bf16 on one GPU
    python benchmarks/decoding.py --cases smoke       a few seconds on any CPU: does the script run?
    python benchmarks/decoding.py --cases 135m --device cpu --prompts 16 --new-tokens 32

transformers runs the same weights with PEFT's adapter. Both answer greedily in full length. Where the answers of a
prompt part, it is a near-tie if transformers' own logits of the two tokens differ by no more than their rounding: twice
the largest change of a logit when the same prompt is padded.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from gpu_peers import random_model
from loads import ALPHA, CASES, LINEARS, RANK
from setting import setting, table
from transformers import GenerationConfig

from tunewell.config.schema import MethodSettings
from tunewell.inference.decoder import Decoding
from tunewell.inference.generate import generate
from tunewell.methods.lora import Lora
from tunewell.models import attention

BARS = {"135m": 10.0, "1.1b": 10.0, "8b": 4.0}
_PADDING = 37


def main() -> int:
    """Measure each case and print a table; exit with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="Compare the speed of decoding with transformers.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["135m", "1.1b", "8b"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=None, help="also write the figures there, as JSON")
    wanted = parser.parse_args()
    attention.register()
    print(setting("torch", "transformers", "peft"), flush=True)
    results = []
    for case in wanted.cases:
        results.append(measure(case, wanted.device, wanted.prompts, wanted.new_tokens))
        gc.collect()
        torch.cuda.empty_cache()
    header = [
        "case",
        "transformers ms/token",
        "ours ms/token",
        "ratio",
        "ours tokens/s",
        "equal",
        "near-ties",
        "others",
    ]
    rows = [
        [
            result["case"],
            f"{result['theirs_ms']:.1f}",
            f"{result['ours_ms']:.2f}",
            f"{result['ratio']:.1f}",
            f"{result['tokens_per_second']:,.0f}",
            f"{result['equal']} of {wanted.prompts}",
            str(result["near_ties"]),
            str(result["others"]),
        ]
        for result in results
    ]
    print(table(header, rows))
    if wanted.out:
        wanted.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    is_gpu = wanted.device.startswith("cuda")
    missed = [r["case"] for r in results if r["ratio"] < (BARS.get(r["case"], 0.0) if is_gpu else 1.0) or r["others"]]
    if missed:
        print(f"bar missed: {', '.join(missed)}")
    return 1 if missed else 0


@torch.no_grad()
def measure(name: str, device: str, num_prompts: int, num_new: int) -> dict[str, Any]:
    """Time both on one case; the first call of each is a warm-up."""
    shape = CASES[name].shape
    model = random_model(shape, "sdpa").to(device).eval()
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(96, 161, (num_prompts,), generator=draw).tolist()
    prompts = [torch.randint(10, shape.vocabulary, (length,), generator=draw).tolist() for length in lengths]
    settings = MethodSettings(rank=RANK, alpha=ALPHA, targets=LINEARS)
    adapter = Lora.apply(model, settings, seed=0)
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            parameter.normal_(std=0.02, generator=torch.Generator(parameter.device).manual_seed(2))
    tensors = {key: tensor.clone() for key, tensor in adapter.tensors().items()}

    def ours(number: int) -> tuple[list[list[int]], float]:
        _wait(device)
        begin = time.perf_counter()
        # No stop token: every answer has its full length.
        found = generate(model, prompts, max_new_tokens=number, stop_ids=[], decoding=Decoding())
        _wait(device)
        return [answer.ids for answer in found], time.perf_counter() - begin

    ours(4)
    own, own_seconds = ours(num_new)
    peer = _peft(model, adapter, tensors)
    theirs, seconds = _transformers(peer, prompts, num_new, device)
    equal, near, others = _compare(peer, prompts, own, theirs, device)
    result = {
        "case": name,
        "theirs_ms": 1000 * seconds / num_new,
        "ours_ms": 1000 * own_seconds / num_new,
        "ratio": seconds / own_seconds,
        "tokens_per_second": num_prompts * num_new / own_seconds,
        "equal": equal,
        "near_ties": near,
        "others": others,
    }
    print(json.dumps(result), flush=True)
    return result


def _peft(model: Any, adapter: Lora, tensors: dict[str, torch.Tensor]) -> Any:
    """Give the same weights to PEFT: the frozen layers go back into their places, and PEFT puts its own beside them."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    for name, layer in [(n, m) for n, m in model.named_modules() if hasattr(m, "base_layer")]:
        model.set_submodule(name, layer.base_layer)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=list(LINEARS))
    peer = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    peer = peer.to(model.dtype)
    loaded = set_peft_model_state_dict(peer, {key: tensor.to(model.dtype) for key, tensor in tensors.items()})
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    return peer


def _transformers(peer: Any, prompts: list[list[int]], num_new: int, device: str) -> tuple[list[list[int]], float]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)

    def run(number: int) -> tuple[list[list[int]], float]:
        settings = GenerationConfig(
            max_new_tokens=number, min_new_tokens=number, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        _wait(device)
        begin = time.perf_counter()
        written = peer.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        _wait(device)
        return written[:, longest:].tolist(), time.perf_counter() - begin

    run(4)
    return run(num_new)


def _compare(
    peer: Any, prompts: list[list[int]], own: list[list[int]], theirs: list[list[int]], device: str
) -> tuple[int, int, int]:
    """Count prompts with equal answers, answers that part at a near-tie, and others."""
    equal = near = others = 0
    for prompt, ours, other in zip(prompts, own, theirs, strict=True):
        if ours == other:
            equal += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, other, strict=True)) if a != b)
        text = prompt + other[:at]
        logits, again = (_next_logits(peer, text, padding, device) for padding in (0, _PADDING))
        # Padding changes nothing but the rounding.
        rounding = float((logits - again).abs().max())
        is_near = float(logits.max() - logits[ours[at]]) <= 2 * rounding
        near, others = near + is_near, others + (not is_near)
    return equal, near, others


def _next_logits(peer: Any, text: list[int], padding: int, device: str) -> torch.Tensor:
    ids = torch.tensor([[0] * padding + text], device=device)
    mask = torch.tensor([[0] * padding + [1] * len(text)], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return peer(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1).logits[0, -1].float()


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
