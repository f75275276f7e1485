"""On CUDA: the kernels of a profiled step are those that torch's own profiler measures around the same steps.

python -m pytest -m gpu -s tests/features/profile/test_kernels_on_cuda.py        prints both, by kind
"""

from collections import defaultdict
from typing import Any

import pytest
import torch
from lessons import RandomDocuments
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from tunewell.config.schema import MethodSettings, Train
from tunewell.data.batches import FixedShape, make_batch
from tunewell.features.profile.kernels import sum_kernels
from tunewell.methods.full import Full
from tunewell.methods.lora import Lora
from tunewell.models import attention
from tunewell.training.compile import compile_model
from tunewell.training.step import TrainableModel

pytestmark = pytest.mark.gpu
_STEPS = 4
_PLAIN = {
    "attention": ("flash", "fmha", "_forward", "_backward_queries", "_backward_keys"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
}
"""Words in the names of kernels, independent of where they were launched."""


def _learner(method: type, settings: dict[str, Any]) -> TrainableModel:
    attention.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        attn_implementation=attention.FLASH,
        tie_word_embeddings=True,
    )
    dtype = torch.float32 if method is Full else torch.bfloat16
    model = LlamaForCausalLM(config).to("cuda", dtype)
    method.apply(model, MethodSettings(kind="full" if method is Full else "lora", **settings), seed=0)
    return TrainableModel(model, "bf16", 512, settings=Train())


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("method", [Lora, Full], ids=["lora", "full"])
def test_the_kernels_are_those_of_torchs_profiler(method: type, is_compiled: bool, capsys: Any) -> None:
    """Within 5%: the whole kernel time of a step. Its kinds are compared with a sorting by names alone."""
    learner = _learner(method, {})
    documents = RandomDocuments(64, longest=512)
    batch = make_batch(documents, range(len(documents)))
    if is_compiled:
        tokens = -(-batch.num_tokens // 128) * 128
        compile_model(learner, FixedShape(tokens, 96, 512))

    def steps(first: int) -> None:
        for number in range(first, first + _STEPS):
            learner.take_step([batch], number=number, rate=1e-4)

    steps(0)
    steps(_STEPS)
    torch.cuda.synchronize()
    trace = profile(activities=[ProfilerActivity.CUDA])
    trace.start()
    steps(2 * _STEPS)
    torch.cuda.synchronize()
    trace.stop()
    ours = sum_kernels(trace.key_averages(), _STEPS)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as plain:
        steps(3 * _STEPS)
        torch.cuda.synchronize()
    theirs: defaultdict[str, float] = defaultdict(float)
    for event in plain.key_averages():
        if event.self_device_time_total > 0 and str(event.device_type).endswith("CUDA"):
            name = event.key.lower()
            kind = next((kind for kind, words in _PLAIN.items() if any(word in name for word in words)), "rest")
            theirs[kind] += event.self_device_time_total / 1e6 / _STEPS
    total = sum(theirs.values())
    with capsys.disabled():
        print(f"\n  ours   {sum(ours.seconds.values()) * 1e3:8.3f} ms  {_shown(ours.seconds)}")  # noqa: T201
        print(f"  theirs {total * 1e3:8.3f} ms  {_shown(theirs)}")  # noqa: T201
    assert sum(ours.seconds.values()) == pytest.approx(total, rel=0.05)
    assert ours.seconds["attention"] == pytest.approx(theirs["attention"], rel=0.15)
    assert ours.seconds["matmul"] == pytest.approx(theirs["matmul"], rel=0.15)
    assert ours.busy_seconds == pytest.approx(sum(ours.seconds.values()))


def _shown(seconds: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value * 1e3:.3f}" for kind, value in sorted(seconds.items()))
