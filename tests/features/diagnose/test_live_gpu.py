"""Failures provoked on a GPU by `benchmarks/gpu_failures.py`: `pytest -m gpu tests/features/diagnose/test_live_gpu.py`.

`data/gpu` has the logs of an H200 with torch 2.11 and transformers 5.17, with shorter paths.
"""

import sys
from pathlib import Path

import pytest

from tunewell.features.diagnose.diagnose import diagnose_source
from tunewell.features.diagnose.findings import LIKELY

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from gpu_failures import FAILURES, provoke

RECORDED = Path(__file__).with_name("data") / "gpu"


@pytest.mark.parametrize("name", FAILURES)
def test_a_recorded_failure_is_named(name: str) -> None:
    """Guards the names of failures that a machine without a GPU cannot provoke."""
    [first, *_] = diagnose_source(RECORDED / f"{name}.log").findings
    assert first.id == FAILURES[name].expected and first.confidence >= LIKELY
    place = {"oom-load": "while the model was being loaded", "oom-optimizer": "the optimizer states do not"}.get(
        name, ""
    )
    assert place in first.cause


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_on_the_gpu_is_named(name: str, tmp_path: Path) -> None:
    """Guards signatures of messages that only CUDA and NCCL print."""
    provoke(name, tmp_path)
    findings = diagnose_source(tmp_path / f"{name}.log").findings
    assert findings and findings[0].id == FAILURES[name].expected, (tmp_path / f"{name}.log").read_text()[-3000:]
