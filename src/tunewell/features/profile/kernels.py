"""The kernels of a GPU by kind, from a trace of torch's profiler: matmul, attention, optimizer, copy, pointwise."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tunewell.features.profile.records import Kernels

_KINDS = {
    "copy": r"^(memcpy|memset)",
    "attention": r"flash|fmha|varlen|attention|^_(forward|backward_(queries|keys))$",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|matmul|triton_tem",
    "optimizer": r"multi_tensor_apply|adam",
}
"""What the names of kernels contain. Others are pointwise. `_forward` is of `models/triton_attention.py`."""


def sum_kernels(averages: Iterable[Any], num_steps: int) -> Kernels:
    """Return the time of the kernels per step. `averages` is `key_averages()` of the profiler."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in averages:
        if event.device_type.name != "CPU" and not event.is_user_annotation:  # those contain kernels that count
            kind = next((kind for kind, names in _KINDS.items() if re.search(names, event.key, re.I)), "pointwise")
            seconds[kind] += event.self_device_time_total / 1e6 / num_steps
    return Kernels(seconds=dict(sorted(seconds.items())), busy_seconds=sum(seconds.values()))
