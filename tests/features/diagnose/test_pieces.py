"""Pieces of reports and of logs, as people paste them: a section, two lines, a sentence, a list of requirements."""

import pytest

from tunewell.features.diagnose.diagnose import diagnose_text
from tunewell.features.diagnose.findings import LIKELY

STALLED = [
    "Training started..., 887 minutes, no output",
    'Process: a.py\nCPU Usage: 1094.5% (maxed)\nRuntime: 887 minutes\nStatus: STUCK at "Training started..."',
    "2025-10-25 08:00:01 INFO Loading model\n2025-10-25 08:01:00 INFO Training started\n2025-10-25 09:48:00 INFO alive",
    "[10:00:00] Training started\n[11:40:00] still waiting",
    "***** Running training *****\n  Num examples = 500\n  0%|          | 0/750 [14:47:03<?, ?it/s]",
    "My training hangs at 0% for 3 hours and nothing is printed",
    "started training 3 hours ago, GPU at 0%, no step finished yet",
]
NOT_STALLED = [
    "Training started\nstep 10 loss 2.3\nstep 20 loss 2.1\nfinished in 90 minutes",
    "Training started 20 minutes ago and everything is fine: loss falls from 2.3 to 1.9",
    "[10:00:00] Training started\n[10:00:40] compiling",
    "{'loss': 2.1, 'step': 10}\nTraining started\n887 minutes",
]
SLOWER = {
    "batch_size=32: 1.2 it/s\nbatch_size=8: 6.74 it/s": "38.4 rows/s at a micro-batch of 32, 53.9 rows/s at 8",
    "per_device_train_batch_size=32\n 10%|# | 9/99 [01:20<12:00, 1.25it/s]\nper_device_train_batch_size=8, "
    "gradient_accumulation_steps=2\n 10%|# | 9/99 [00:15<02:00, 6.74it/s]": "40.0 rows/s at a micro-batch of 32, 107.8",
    "batch size 32, 1.5s/it\nbatch size 8, 6.7it/s": "21.3 rows/s at a micro-batch of 32, 53.6 rows/s at 8",
    "bs=64: 900 tokens/s\nbs=16: 2,100 tokens/s": "900.0 tokens/s at a micro-batch of 64, 2,100.0 tokens/s at 16",
    "I lowered the batch from 32 to 8 and went from 1.2 it/s to 6.7 it/s": "38.4 rows/s at a micro-batch of 32, 53.6",
}
CONFLICTS = {
    "trl==0.8.6\ntransformers==5.0.0\n": "trl>=0.29",
    "trl~=0.8.6\ntransformers>=5\npeft\n": "trl>=0.29",
    "trl==0.8.6 ; python_version>'3.8'\ntransformers==5.0.0  # new\n--index-url https://host\n": "trl>=0.29",
    "Package      Version\n------------ -------\ntransformers 5.2.0\ntrl          0.9.6\n": "trl>=0.29",
    "Name: trl\nVersion: 0.8.6\n---\nName: transformers\nVersion: 5.1.0\n": "trl>=0.29",
    "torch\ntransformers\ntrl==0.8.6\ndatasets\n": "trl>=0.29",
    "pip install trl==0.8.6 transformers==5.1.0": "trl>=0.29",
    "accelerate==0.34.2\ntransformers==5.2.0": "accelerate>=1.10.1",
    "torch==2.1.0\nnumpy==2.0.1": "numpy<2",
    "peft==0.17.1\ntransformers==5.22.2": "peft>=0.18",
}
PIECES = {
    "TypeError: device() received an invalid combination of arguments - got (NoneType)": "bnb-no-cuda",
    "empty responses on MPS with fp16": "mps-nan-fp16",
    "on apple silicon with float16 all responses are blank": "mps-nan-fp16",
    "### Batch size too large\n**Problem:**\nBatch size of 32 caused massive computation, saturating the GPU.\n"
    '**Solution:**\n```json\n{\n  "per_device_train_batch_size": 8,\n  "gradient_accumulation_steps": 2\n}\n```\n'
    "**Result:** 6.74 it/s\n": "batch-too-large-slow",
    "The trainer was re-tokenizing and packing data at runtime, which is slow.": "runtime-preprocessing-stall",
    "After the downgrade there was a mix of an old TRL and a new transformers.": "incompatible-versions",
    "The optimizer states and a batch of two exceeded 16GB VRAM.": "oom-cuda",
    "The prompt format makes the model output the EOS token immediately.": "degenerate-answers",
    "Config values not loaded correctly": "config-not-applied",
}
ADVICE = [
    "def find_batch_size(model):\n    # Start with a large batch, reduce until no OOM\n    return best\n",
    "// start large, reduce on OOM\nimport os\nbatch = 32\n",
    "### Dataset\n- Apply the chat template in preprocessing, not during training\n- Force num_proc=1 for filters\n",
    "- [ ] Disable workers on WSL\n- [ ] Avoid out of memory: reduce the batch\n- [ ] Never pad to max_length on a GPU",
]


@pytest.mark.parametrize("text", STALLED)
def test_a_training_without_a_first_step_is_named(text: str) -> None:
    """Such a log has one line and then nothing; the answer was UNKNOWN."""
    [finding, *_] = diagnose_text(text).findings
    assert finding.id == "first-step-slow" and finding.confidence >= LIKELY and "padded" in finding.cause


@pytest.mark.parametrize("text", NOT_STALLED)
def test_a_training_that_logs_steps_is_not_stalled(text: str) -> None:
    """A duration alone is not evidence."""
    assert "first-step-slow" not in [finding.id for finding in diagnose_text(text).findings]


def test_padding_explains_a_slow_first_step() -> None:
    """The cause comes first, and the stall is its consequence."""
    text = (
        "Training started...\nmax_seq_length=1024 padding='max_length'\nmean length 34\n887 minutes later: no output\n"
    )
    findings = diagnose_text(text).findings
    assert [finding.id for finding in findings] == ["padding-waste", "first-step-slow"]
    assert findings[1].because_of == "padding-waste"


@pytest.mark.parametrize(("text", "compared"), SLOWER.items())
def test_two_speeds_are_compared_by_rows_or_tokens_per_second(text: str, compared: str) -> None:
    """6.7 it/s against 0.6 looks like 11 times as fast, and is 2.8 times."""
    [finding] = diagnose_text(text).findings
    assert finding.id == "batch-too-large-slow" and compared in finding.evidence[0].note


def test_more_iterations_of_fewer_rows_are_no_failure() -> None:
    """A smaller micro-batch has more iterations per second and may still process fewer rows."""
    diagnosis = diagnose_text("batch 32: 1.2 it/s\nbatch 8: 3.0 it/s")
    assert diagnosis.status == "healthy"
    assert diagnosis.notes[0] == "harmless: line 1: 38.4 rows/s at a micro-batch of 32, 24.0 rows/s at 8"


@pytest.mark.parametrize(("text", "mend"), CONFLICTS.items())
def test_requirements_that_fail_together_are_named_with_the_fix(text: str, mend: str) -> None:
    """`doctor` knew the pair, but `diagnose requirements.txt` said UNKNOWN."""
    [finding] = diagnose_text(text).findings
    assert finding.id == "incompatible-versions" and finding.confidence >= LIKELY
    assert f"pip install '{mend}'" in finding.fix and " with " in finding.evidence[0].note


def test_requirements_that_fit_are_healthy() -> None:
    """A check that finds nothing must say so."""
    good = "torch==2.9.0+cu126\ntransformers==5.22.2\ntrl==1.0.0\naccelerate==1.10.1\npeft==0.18.1\nnumpy==2.3.1\n"
    assert diagnose_text(good).status == "healthy"


@pytest.mark.parametrize(("text", "name"), PIECES.items())
def test_a_section_or_a_sentence_of_a_report_is_named(text: str, name: str) -> None:
    """Users paste one paragraph, not the whole report."""
    assert diagnose_text(text).findings[0].id == name


@pytest.mark.parametrize("text", ADVICE)
def test_advice_and_comments_of_code_are_no_failure(text: str) -> None:
    """A comment about OOM was `oom-cuda`, and a good practice was a stall."""
    assert [finding.id for finding in diagnose_text(text).findings] in ([], ["unknown"])
