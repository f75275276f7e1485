"""Kernels by kind: sorted by where they were launched, then by name; nothing is lost, and overlaps count once."""

import pytest
import torch
from lessons import RandomDocuments, tiny_llama

from tunewell.data.batches import make_batch
from tunewell.features.profile.kernels import KernelTrace, Operation, busy_seconds, kind_of, sum_kinds
from tunewell.methods.base import trainable_parameters
from tunewell.training.step import TrainableModel


@pytest.mark.parametrize(
    ("name", "parents", "kind"),
    [
        # Names in the style of CUDA libraries, of Triton and of torch's operators; not a recording.
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", ("aten::linear", "aten::mm"), "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", (), "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", ("aten::addmm",), "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", (), "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", (), "attention"),
        ("_forward", ("CompiledFunction",), "attention"),
        ("_backward_keys", (), "attention"),
        ("triton_poi_fused_add_mul_silu_2", ("CompiledFunction",), "pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", ("aten::mul",), "pointwise"),
        ("void at::native::multi_tensor_apply_kernel", ("phase:optimizer", "aten::_foreach_mul_"), "optimizer"),
        ("nvjet_hsh_256x128", ("phase:forward", "_SupervisedLoss", "aten::mm"), "head"),
        ("Memcpy HtoD (Pinned -> Device)", ("aten::copy_",), "copy"),
        ("aten::bmm", ("phase:forward", "_CausalProducts"), "attention"),
        ("aten::mm", ("phase:backward", "MmBackward0"), "matmul"),
        ("aten::addmm", (), "matmul"),
        ("aten::mul", ("phase:forward",), "pointwise"),
        ("aten::mean", ("phase:forward",), "pointwise"),
    ],
)
def test_a_kernel_has_one_kind(name: str, parents: tuple[str, ...], kind: str) -> None:
    assert kind_of(Operation(name, parents, 1.0, is_kernel=True)) == kind


def test_kernels_that_overlap_are_busy_once() -> None:
    """Two streams at the same time would make the GPU busier than the clock."""
    kernels = [
        Operation("a", (), 4.0, start=0.0),
        Operation("b", (), 1.0, start=1.0),
        Operation("c", (), 2.0, start=3.0),
    ]
    assert busy_seconds([*kernels, Operation("d", (), 1.0, start=9.0)]) == 6.0


def test_time_in_no_operator_is_the_host() -> None:
    operations = [
        Operation("phase:forward", (), 2.0),
        Operation("autograd::engine::evaluate_function: MmBackward0", ("phase:backward",), 1.0),
        Operation("aten::mm", ("phase:forward",), 4.0),
    ]
    assert sum_kinds(operations) == {"host": 3.0, "matmul": 4.0}


@pytest.mark.slow
def test_a_trace_of_a_step_accounts_for_what_torch_measured() -> None:
    """A name that no rule knows, or an operator outside of its phase, would drop time without a word."""
    model = tiny_llama(seed=0)
    learner = TrainableModel(model.requires_grad_(True), "fp32", 40)
    assert trainable_parameters(model)
    batch = make_batch(RandomDocuments(23), range(23))
    learner.take_step([batch], number=0, rate=1e-3)
    trace = KernelTrace(learner.phases, torch.device("cpu"))
    trace.start()
    for number in (1, 2):
        learner.take_step([batch], number=number, rate=1e-3)
    trace.stop()
    found = trace.read(num_steps=2, wall_seconds=1.0)
    assert found.seconds.keys() >= {"matmul", "attention", "head", "pointwise", "optimizer", "host"}
    theirs = sum(event.self_cpu_time_total for event in trace._profiler.key_averages()) / 1e6 / 2
    # A few operators are outside of all phases: the mean of the loss, and the copy of the metrics.
    assert 0.8 * theirs < sum(found.seconds.values()) < theirs
    assert found.num_syncs == 0
