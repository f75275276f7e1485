"""Failures provoked on a GPU by `benchmarks/gpu_failures.py`: `pytest -m gpu tests/diagnosis/test_live_gpu.py`."""

import sys
from pathlib import Path

import pytest

from tunewell.diagnosis.diagnose import diagnose_source

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from gpu_failures import FAILURES, provoke

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_on_the_gpu_is_named(name: str, tmp_path: Path) -> None:
    """Guards signatures of messages that only CUDA and NCCL print."""
    provoke(name, tmp_path)
    findings = diagnose_source(tmp_path / f"{name}.log").findings
    assert findings and findings[0].id == FAILURES[name].expected, (tmp_path / f"{name}.log").read_text()[-3000:]
