"""Kernels by kind: sorted by their names, per step; operators of the host are no kernels."""

from types import SimpleNamespace
from typing import Any

import pytest

from tunewell.features.profile.kernels import sum_kernels


def _average(key: str, seconds: float, device: str = "CUDA", *, is_annotation: bool = False) -> Any:
    return SimpleNamespace(
        key=key,
        self_device_time_total=seconds * 1e6,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=is_annotation,
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        # Names in the style of CUDA libraries, of Triton and of torch's operators; not a recording.
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("_forward", "attention"),
        ("_backward_keys", "attention"),
        ("triton_poi_fused_add_mul_silu_2", "pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "pointwise"),
        ("void at::native::multi_tensor_apply_kernel", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
    ],
)
def test_a_kernel_has_one_kind(name: str, kind: str) -> None:
    assert sum_kernels([_average(name, 1.0)], 1).seconds == {kind: 1.0}


def test_kernels_are_added_up_per_step_without_operators_of_the_host() -> None:
    """The row of an operator repeats the time of the kernels that it launched."""
    averages = [
        _average("aten::mm", 4.0, "CPU"),
        _average("gemm_a", 4.0),
        _average("gemm_b", 2.0),
        _average("add", 1.0),
        _average("ProfilerStep*", 9.0, is_annotation=True),
    ]
    found = sum_kernels(averages, 2)
    assert found.seconds == {"matmul": 3.0, "pointwise": 0.5} and found.busy_seconds == 3.5
