"""Provoke failures on one GPU, and show whether `tunewell diagnose` names each of them.

    python benchmarks/gpu_failures.py --out FOLDER                 all failures; needs CUDA, torch and transformers
    python benchmarks/gpu_failures.py --out FOLDER --only NAME     some of them
    python benchmarks/gpu_failures.py --read FOLDER                diagnose the logs of an earlier call; needs no GPU

Each failure happens in a process of its own, with little memory and a time limit. Nothing is pasted: the logs are what
the libraries print. `FOLDER/NAME.log` has the output of each process.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setting import setting, table

from tunewell.features.diagnose.diagnose import diagnose_paths

AT_ONCE = 5
_MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

def limit(size):
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])

def model(**changes):
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=8000)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 65536, **changes}))

def row(length):
    return {"input_ids": [1 + at % 7000 for at in range(length)], "labels": [1 + at % 7000 for at in range(length)]}

def train(model, rows, evaluate=None, **options):
    sizes = dict(per_device_train_batch_size=1, per_device_eval_batch_size=1)
    arguments = TrainingArguments(output_dir=".", report_to="none", logging_steps=1, **sizes, **options)
    data = dict(train_dataset=rows)
    if evaluate:  # with a metric, the Trainer keeps the logits of all rows on the GPU
        data |= dict(eval_dataset=evaluate, compute_metrics=lambda _: {})
    Trainer(model, arguments, **data).train()
"""
# Logits of 8,000 words in fp32 are 32 kB per token: 1.9 GB for a row of 60,000 tokens.


@dataclass(frozen=True)
class Failure:
    """A script that fails."""

    expected: str
    """The id of its failure class."""
    code: str
    seconds: int = 60


FAILURES = {
    "oom-load": Failure(
        "oom-cuda",
        _MODEL
        + """
model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=2).save_pretrained("base")
limit(64 * 2**20)
LlamaForCausalLM.from_pretrained("base", dtype=torch.float32, device_map="cuda")
""",
    ),
    "oom-forward": Failure("oom-cuda", _MODEL + "limit(2.5 * 2**30)\ntrain(model(), [row(60000)] * 4, max_steps=4)"),
    "oom-optimizer": Failure(
        "oom-cuda",
        _MODEL
        + """
large = model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=2)
weights = sum(p.numel() * p.element_size() for p in large.parameters())
limit(2.5 * weights)  # weights and gradients fit; the two moments of AdamW do not
train(large, [row(16)] * 4, max_steps=4)
""",
    ),
    "oom-long-row": Failure(
        "oom-long-sequence",
        _MODEL + "limit(2.5 * 2**30)\ntrain(model(), [row(16)] * 30 + [row(60000)], max_steps=60, seed=3)",
    ),
    "oom-evaluation": Failure(
        "oom-eval",
        _MODEL + "limit(2.5 * 2**30)\n"
        "train(model(), [row(16)] * 4, [row(8000)] * 64, max_steps=4, eval_strategy='steps', eval_steps=2)",
    ),
    "device-side-assert": Failure(
        "embedding-index-out-of-range",
        _MODEL + "train(model(), [{'input_ids': [9000] * 8, 'labels': [1] * 8}] * 4, max_steps=4)",
    ),
    "fp16-overflow": Failure(
        "nan-gradients",
        _MODEL
        + """
# The epsilon of AdamW, 1e-8, is 0 in fp16: the first update divides by 0.
train(model().half(), [row(32)] * 20, max_steps=12, optim="adamw_torch", logging_nan_inf_filter=False)
""",
    ),
    "fp16-gradients": Failure(
        "fp16-unscale-gradients", _MODEL + "train(model().half(), [row(16)] * 4, max_steps=4, fp16=True)"
    ),
    "nan-when-sampling": Failure(
        "sampling-nan-logits",
        _MODEL
        + """
broken = model().half().cuda()
broken.lm_head.weight.data.fill_(float("inf"))
broken.generate(torch.tensor([[1]]).cuda(), do_sample=True, max_new_tokens=3)
torch.cuda.synchronize()
""",
    ),
    "nccl-one-gpu": Failure(
        "nccl-system-error",
        """
import os, sys, torch, torch.distributed as dist
if "RANK" not in os.environ:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", sys.argv[0]]
    os.execv(sys.executable, launcher)
torch.cuda.set_device(0)
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1).cuda())
torch.cuda.synchronize()
""",
    ),
    "nccl-lost-peer": Failure(
        "nccl-timeout",
        """
import datetime, time, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, store):
    torch.cuda.set_device(0)
    seconds = datetime.timedelta(seconds=6)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2, timeout=seconds)
    if rank == 0:
        time.sleep(20)  # never reaches the all-reduce in which rank 1 waits
    dist.all_reduce(torch.ones(1).cuda())
    torch.cuda.synchronize()

if __name__ == "__main__":
    import os
    mp.spawn(work, (os.path.abspath("store"),), nprocs=2)
""",
    ),
    "forked-worker": Failure(
        "cuda-in-forked-worker",
        """
import torch
from torch.utils.data import DataLoader
torch.zeros(1).cuda()
workers = dict(num_workers=1, multiprocessing_context="fork")
list(DataLoader(range(4), collate_fn=lambda rows: torch.tensor(rows).cuda(), **workers))
""",
    ),
}
NO_ERROR = {"fp16-overflow"}
"""Failures that end without an error: only the numbers of the log are wrong."""


def provoke(name: str, out: Path) -> float:
    """Run a failure, write its output to `out`, and return the seconds it took."""
    failure, began = FAILURES[name], time.monotonic()
    log = out / f"{name}.log"
    with tempfile.TemporaryDirectory() as folder, log.open("w", encoding="utf-8") as file:
        script = Path(folder) / "train.py"
        script.write_text(failure.code, encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, str(script)], stdout=file, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
        try:
            code = child.wait(failure.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = None
    seconds = time.monotonic() - began
    ended = f"stopped after {failure.seconds} s" if code is None else f"exit {code}"
    is_wrong = code == 0 and name not in NO_ERROR
    print(f"{name}: {ended}, {seconds:.1f} s{'; NOTHING FAILED' if is_wrong else ''}", file=sys.stderr, flush=True)
    return seconds


def report(names: Iterable[str], out: Path) -> bool:
    """Print what `diagnose` says about each log; return whether each failure is named first."""
    rows: list[tuple[str, str, str, str, str]] = []
    for name in names:
        log = out / f"{name}.log"
        if not log.is_file():
            rows.append((name, FAILURES[name].expected, "no log", "", "NO"))
            continue
        findings = diagnose_paths([log]).findings
        first, sure = (findings[0].id, f"{findings[0].confidence:.2f}") if findings else ("healthy", "")
        expected = FAILURES[name].expected
        rows.append((name, expected, first, sure, "yes" if first == expected else "NO"))
    print(table(("failure", "expected", "named first", "confidence", "right"), rows))
    num_right = sum(row[-1] == "yes" for row in rows)
    print(f"\n{num_right} of {len(rows)} named first")
    return num_right == len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, metavar="FOLDER", help="provoke the failures, and write their logs here")
    place.add_argument("--read", type=Path, metavar="FOLDER", help="only diagnose the logs in this folder")
    parser.add_argument("--only", nargs="+", choices=FAILURES, default=list(FAILURES), metavar="NAME")
    options = parser.parse_args()
    if options.read:
        return 0 if report(options.only, options.read) else 1
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda name: provoke(name, options.out), options.only))
    print(f"{setting('torch', 'transformers', 'accelerate')}\n{time.monotonic() - began:.0f} s\n")
    return 0 if report(options.only, options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
