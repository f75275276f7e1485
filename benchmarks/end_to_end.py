"""Benchmark whole commands against a TRL script that reads the same rows: from JSON lines to a saved adapter.

    python benchmarks/end_to_end.py --rows gsm8k.jsonl --tokenizer FOLDER              1.1B, one epoch, on one GPU
    python benchmarks/end_to_end.py ... --kind long           rows of 2 to 28 questions, up to some 6,000 tokens
    python benchmarks/end_to_end.py ... --kind full           full fine-tuning, twice with bf16 and with fp32 masters
    python benchmarks/end_to_end.py --cases smoke --rows rows.jsonl --tokenizer FOLDER     do the scripts run?

`--rows` has `question` and `answer` in each line. The model has random weights and is written before the clock starts.
Every command is a new process, timed from its start to its exit. `tunewell train` runs twice: the second time torch's
compile cache is warm. The config is the one that `tunewell init` writes, with one epoch. The model of an
earlier call in `--work` is used again. "Reserved" is
the memory that torch holds, idle memory included; for TRL, the maximum of allocated tensors is shown too.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from loads import CASES
from setting import ROOT, setting, table, tunewell_command

TRL = "TRL script, packing, flash, Liger"
FULL = ["--set=method.kind=full", "--set=train.learning_rate=2e-5", "--set=evaluate.samples=0"]
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
MAX_STEPS = {"8b": 60}
"""Steps of larger cases, where an epoch would take too long; TRL takes as many."""


def main() -> int:
    """Run the commands and print a table."""
    parser = argparse.ArgumentParser(description="Time whole commands against TRL.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["1.1b"])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json and chat template")
    parser.add_argument("--work", type=Path, default=Path("demo/end_to_end"), help="folder to work in")
    parser.add_argument("--without", nargs="*", default=[], choices=["trl", "validate", "second"])
    parser.add_argument("--kind", choices=["short", "long", "full"], default="short")
    parser.add_argument("--masters", nargs="+", choices=DTYPES, default=list(DTYPES), help="of full fine-tuning")
    parser.add_argument("--max-steps", type=int, default=None, help="steps of each run; by default one epoch")
    parser.add_argument("--set", nargs="*", default=[], help="more settings for `tunewell train`")
    wanted = parser.parse_args()
    wanted.work.mkdir(parents=True, exist_ok=True)
    print(setting("torch", "transformers", "trl", "peft"), flush=True)
    for case in wanted.cases:
        folder = wanted.work.resolve() / case
        for old in folder.iterdir() if folder.is_dir() else ():
            if old.is_dir() and old.name != "model":
                shutil.rmtree(old)
        folder.mkdir(exist_ok=True)
        write_messages(wanted.rows, folder / "rows.jsonl", is_long=wanted.kind == "long")
        if not (folder / "model").is_dir():
            subprocess.run([sys.executable, __file__, "--make", case, folder / "model", wanted.tokenizer], check=True)
        results = measure(case, folder, wanted)
        print(table(["command", "wall s", "of TRL", "train s", "first step s", "note"], rows_of(results)), flush=True)
        (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


def write_messages(rows: Path, out: Path, *, is_long: bool = False) -> None:
    """Write rows as messages, one question per row, or 2 to 28 in long rows."""
    questions = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    draw, at = random.Random(0), 0
    with out.open("w", encoding="utf-8") as file:
        while at < len(questions):
            number = draw.choice([2, 4, 8, 16, 28]) if is_long else 1
            messages = []
            for row in questions[at : at + number]:
                messages.append({"role": "user", "content": row["question"]})
                messages.append({"role": "assistant", "content": row["answer"]})
            file.write(json.dumps({"messages": messages}) + "\n")
            at += number


def make_model(case: str, folder: str, tokenizer: str) -> None:
    """Write a model with random weights and a tokenizer."""
    import torch
    from gpu_peers import random_model

    model = random_model(CASES[case].shape, "sdpa")
    size = len(json.loads((Path(tokenizer) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    if size > model.config.vocab_size:
        model.resize_token_embeddings(-(-size // 64) * 64)
    model.config.max_position_embeddings = 8192
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in Path(tokenizer).iterdir():
        shutil.copy(file, folder)


def measure(case: str, folder: Path, wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every command in a new process."""
    command, results = tunewell_command(), []
    masters = wanted.masters if wanted.kind == "full" else ["bf16"]
    steps = wanted.max_steps or MAX_STEPS.get(case)
    limit = f"train.max_steps={steps}" if steps else "train.epochs=1"
    (folder / "tunewell.yaml").unlink(missing_ok=True)
    run([*command, "init", "rows.jsonl", "--model", "model"], folder)
    results.append(run([*command, "prepare"], folder, "tunewell prepare"))
    is_plain = case not in MAX_STEPS and wanted.kind == "short"
    more = [] if is_plain else ["--no-validate"]
    sets = [f"--set={text}" for text in [limit, *wanted.set]]
    if wanted.kind == "full":
        variants = [[f"--set=train.masters={kind}", *FULL] for kind in wanted.masters for _ in range(2)]
    else:
        variants = [[]] * (1 if "second" in wanted.without else 2)
    for number, own in enumerate(variants, 1):
        name = f"tunewell train{', evaluation, samples and verdict' if is_plain else ' --no-validate'}, run {number}"
        line = [*command, "train", *sets, *more, *own, "--out", f"run-{number}"]
        events = folder / f"run-{number}" / "events.jsonl"
        result = run(line, folder, f"{name} {' '.join(own[:1])}".strip(), events=events)
        results.append(result | _events(folder / f"run-{number}"))
        if wanted.kind == "full":
            shutil.rmtree(folder / f"run-{number}")
    if "validate" not in wanted.without and is_plain:
        results.append(run([*command, "validate", "run-1"], folder, "tunewell validate, base and tuned"))
    for dtype in () if "trl" in wanted.without else [DTYPES[kind] for kind in masters]:
        script = [sys.executable, __file__, "--trl", case, "rows.jsonl", "model", wanted.kind, dtype, str(steps or -1)]
        name = TRL if dtype == "bfloat16" else f"{TRL}, weights in {dtype}"
        results.append(run(script, folder, name, environment=_with_flash()))
    return results


def _with_flash() -> dict[str, str]:
    """Let transformers find a flash kernel where flash-attn is not installed: the stand-in calls torch's."""
    import importlib.util

    if importlib.util.find_spec("flash_attn") is not None:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks" / "stand_in"), os.environ.get("PYTHONPATH", "")])}


def run(
    line: list[Any], folder: Path, name: str = "", *, environment: Any = None, events: Path | None = None
) -> dict[str, Any]:
    """Run a command to its end and time it; with `events`, also note when the first step is in that file."""
    started_at, result = time.time(), dict[str, Any]()
    with (folder / "log.txt").open("a+", encoding="utf-8") as log:
        begin = log.tell()
        done = subprocess.Popen(
            line, cwd=folder, env=os.environ | (environment or {}), stdout=log, stderr=subprocess.STDOUT
        )
        while done.poll() is None:
            if events is not None and events.is_file() and '"kind": "step"' in events.read_text(encoding="utf-8"):
                result["first_step"], events = time.time() - started_at, None
            time.sleep(0.05)
        seconds = time.time() - started_at
        log.seek(begin)
        text = log.read()
    if done.returncode not in (0, 3, 4):
        print(text[-3000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(map(str, line))} ended with {done.returncode}")
    result |= {"name": name, "seconds": seconds}
    for found in (json.loads(row.removeprefix("TRL ")) for row in text.splitlines() if row.startswith("TRL {")):
        result |= found | {"first_step": found["first_step_at"] - started_at}
    if name:
        print(f"{name}: {seconds:.1f} s", flush=True)
    return result


def _events(run_folder: Path) -> dict[str, Any]:
    """Read what evaluation took, how fast the steps were, and how much memory they needed."""
    events = [json.loads(line) for line in (run_folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    outcome = json.loads((run_folder / "outcome.json").read_text(encoding="utf-8"))
    steps = [event for event in events if event["kind"] == "step"]
    looks = [event for event in events if event["kind"] == "held_out"]
    training = sum(step["seconds"] for step in steps)
    evaluating = sum(look["seconds"] for look in looks)
    memory = max(step["memory_bytes"] for step in steps) / 2**30
    late = steps[len(steps) // 2 :]
    late_rate = sum(step["tokens"] for step in late) / sum(step["seconds"] for step in late)
    note = (
        f"{len(looks)} evaluations, {evaluating:.1f} s = {evaluating / training:.0%} of training, {memory:.1f} GiB "
        f"reserved, {sum(step['tokens'] for step in steps) / training:,.0f} tokens/s, {late_rate:,.0f} in the last half"
    )
    return {"train_seconds": training, "note": note, "outcome": outcome.get("seconds"), "steps": len(steps)}


def rows_of(results: list[dict[str, Any]]) -> list[list[str]]:
    """Compare with TRL."""
    trl = next((result["seconds"] for result in results if result["name"] == TRL), None)
    return [
        [
            result["name"],
            f"{result['seconds']:.1f}",
            f"{result['seconds'] / trl:.2f}" if trl else "-",
            f"{result['train_seconds']:.1f}" if "train_seconds" in result else "-",
            f"{result['first_step']:.1f}" if "first_step" in result else "-",
            result.get("note", ""),
        ]
        for result in results
    ]


def train_with_trl(case: str, rows: str, model_folder: str, kind: str, dtype: str, max_steps: str) -> None:
    """Train with the fast settings of TRL: best-fit packing, flash kernel, Liger, no checkpoints."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    has_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        model_folder,
        dtype=getattr(torch, dtype) if has_gpu else torch.float32,
        attn_implementation="flash_attention_2" if has_gpu else "sdpa",
    )
    data, length = load_dataset("json", data_files=rows, split="train"), 8192 if kind == "long" else 1024
    if kind != "long":
        data = data.map(
            lambda row: {"prompt": row["messages"][:1], "completion": row["messages"][1:]}, remove_columns=["messages"]
        )
    settings = SFTConfig(
        "trl",
        num_train_epochs=1,
        max_steps=int(max_steps),
        per_device_train_batch_size=max(1, CASES[case].step_tokens // length),
        packing=True,
        max_length=length,
        learning_rate=2e-5 if kind == "full" else 2e-4,
        bf16=has_gpu,
        use_cpu=not has_gpu,
        use_liger_kernel=has_gpu,
        gradient_checkpointing=False,
        optim="adamw_torch_fused" if has_gpu else "adamw_torch",
        logging_steps=10,
        report_to=[],
        save_strategy="no",
        dataloader_num_workers=4 if has_gpu else 0,
        dataset_num_proc=8 if has_gpu else None,
        disable_tqdm=True,
    )
    adapter = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", target_modules="all-linear")
    adapter = None if kind == "full" else adapter
    times: list[float] = []

    class FirstStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(time.time())

    trainer = SFTTrainer(
        model.cuda() if has_gpu else model,
        args=settings,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        peft_config=adapter,
        callbacks=[FirstStep()],
    )
    begin = time.time()
    trainer.train()
    seconds = time.time() - begin
    trainer.save_model("trl/final")
    peak = torch.cuda.max_memory_allocated() / 2**30 if has_gpu else 0.0
    held = torch.cuda.max_memory_reserved() / 2**30 if has_gpu else 0.0
    tokens = next((entry["num_tokens"] for entry in reversed(trainer.state.log_history) if "num_tokens" in entry), 0)
    note = f"{len(times)} steps, peak {peak:.1f} GiB, {held:.1f} reserved, {tokens / seconds:,.0f} tokens/s"
    print("TRL " + json.dumps({"train_seconds": seconds, "first_step_at": times[0], "note": note}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_model(*sys.argv[2:5])
    elif sys.argv[1:2] == ["--trl"]:
        train_with_trl(*sys.argv[2:8])
    else:
        raise SystemExit(main())
