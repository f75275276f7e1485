"""Failures provoked on a GPU: `pytest -m gpu tests/diagnosis/test_live_gpu.py`. Each runs in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunewell.diagnosis.diagnose import diagnose_text

pytestmark = pytest.mark.gpu
_MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from datasets import Dataset
def model(**changes):
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=8000, max_position_embeddings=65536, **sizes, **changes))
def train(rows, **options):
    sizes = dict(per_device_train_batch_size=1, per_device_eval_batch_size=1)
    arguments = TrainingArguments(output_dir=".", report_to="none", logging_steps=1, **sizes, **options)
    data = dict(train_dataset=Dataset.from_list(rows))
    if "eval_strategy" in options:  # with a metric, the logits of all rows are kept on the GPU
        data |= dict(eval_dataset=Dataset.from_list([row(8000)] * 64), compute_metrics=lambda _: {})
    Trainer(model(), arguments, **data).train()
def row(length):
    return {"input_ids": [1] * length, "labels": [1] * length}
torch.cuda.set_per_process_memory_fraction(2.5 * 2**30 / torch.cuda.mem_get_info()[1])
"""
# 8,000 logits in fp32 are 32 kB per token: 1.9 GB for a row of 60,000 tokens, 0.26 GB for one of 8,000.
FAILURES = {
    "oom-cuda": "train([row(60000)] * 4, max_steps=4)",
    "oom-long-sequence": "train([row(16)] * 30 + [row(60000)], max_steps=60, seed=3)",
    "oom-eval": "train([row(16)] * 4, max_steps=4, eval_strategy='steps', eval_steps=2)",
    "embedding-index-out-of-range": "model().cuda()(input_ids=torch.tensor([[9000]]).cuda()); torch.cuda.synchronize()",
    "fp16-unscale-gradients": "m = model().half().cuda(); ids = torch.tensor([[1, 2]]).cuda()\n"
    "s = torch.amp.GradScaler('cuda'); o = torch.optim.SGD(m.parameters(), 1e-3)\n"
    "s.scale(m(input_ids=ids, labels=ids).loss).backward(); s.step(o)",
    "nan-gradients": "m = model().half().cuda(); ids = torch.tensor([[1, 2, 3, 4]]).cuda()\n"
    "o = torch.optim.SGD(m.parameters(), 1e4)\n"
    "for step in range(1, 9):\n"
    "    loss = m(input_ids=ids, labels=ids).loss; loss.backward()\n"
    "    norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9)\n"
    "    o.step(); o.zero_grad(); print({'loss': loss.item(), 'grad_norm': norm.item(), 'step': step})\n"
    "raise SystemExit(1)",
    "sampling-nan-logits": "m = model().half().cuda(); m.lm_head.weight.data.fill_(float('inf'))\n"
    "m.generate(torch.tensor([[1]]).cuda(), do_sample=True, max_new_tokens=3); torch.cuda.synchronize()",
    "cuda-in-forked-worker": "torch.zeros(1).cuda()\n"
    "from torch.utils.data import DataLoader\n"
    "list(DataLoader(range(4), num_workers=1, collate_fn=lambda rows: torch.tensor(rows).cuda()))",
}


def _run(code: str, folder: Path, *launcher: str) -> str:
    script = folder / "train.py"
    script.write_text(code)
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False, env=os.environ)
    assert done.returncode != 0, "nothing failed"
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_on_the_gpu_is_named(name: str, tmp_path: Path) -> None:
    text = _run(_MODEL + FAILURES[name], tmp_path)
    found = [finding.id for finding in diagnose_text(text).findings]
    assert found and found[0] == name, text[-3000:]


def test_two_processes_on_one_gpu_are_named(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one device."""
    code = (
        "import torch, torch.distributed as d\ntorch.cuda.set_device(0)\nd.init_process_group('nccl')\n"
        "d.all_reduce(torch.ones(1).cuda()); torch.cuda.synchronize()\n"
    )
    text = _run(code, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found = [finding.id for finding in diagnose_text(text).findings]
    assert found and found[0] == "nccl-system-error", text[-3000:]
