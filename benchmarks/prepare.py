"""Benchmark data preparation: `tunewell prepare` compared with the bare tokenizer and with TRL, on the same rows.

    python benchmarks/prepare.py                    100,000 rows, three rounds
    python benchmarks/prepare.py --rows 5000 --rounds 1

Bars: at least 60% of the bare tokenizer's rows per second with the same threads, and at least three times TRL with the
faster of `dataset_num_proc` 1 and 2. Each round runs every contender once, in a different order.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setting import MODEL, setting, spread, table, tunewell_command, write_rows

BATCH = 4096
CONTEXT = 1024


@dataclass
class Contest:
    """The rows, and what each contender left behind for the next."""

    folder: Path
    num_rows: int
    texts: list[str] = field(default_factory=list)
    backend: Any = None
    trainer: Any = None
    dataset: Any = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    def clear(self) -> Path:
        """Remove the corpus and the cache of the run before, so that everything is done again."""
        for name in ("corpus", ".tunewell"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / "corpus"


def bare(contest: Contest) -> float:
    """Encode the rendered texts and throw the ids away: no reading, no template, no mask, no packing, no writing."""
    started = time.perf_counter()
    for start in range(0, len(contest.texts), BATCH):
        contest.backend.encode_batch_fast(contest.texts[start : start + BATCH], add_special_tokens=False)
    return time.perf_counter() - started


def command(contest: Contest) -> float:
    """Run `tunewell prepare` as a user does: the start of Python and the loading of the tokenizer count."""
    out = contest.clear()
    line = [*tunewell_command(), "prepare", "--model", MODEL, "--data", contest.rows, "--out", out, "--json"]
    started = time.perf_counter()
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    report = json.loads(done.stdout)
    assert report["rows_in"] == contest.num_rows
    full = report["packing"]["efficiency"]
    contest.notes["tunewell"] = f"{report['packing']['sequences']:,} sequences, {full:.2%} full"
    return seconds


def library(contest: Contest) -> float:
    """Call `tunewell.prepare` in this process."""
    import tunewell

    out = contest.clear()
    started = time.perf_counter()
    result = tunewell.prepare(model=MODEL, data=str(contest.rows), out=out)
    assert result.manifest.rows_in == contest.num_rows
    return time.perf_counter() - started


def trl(num_proc: int) -> Callable[[Contest], float]:
    """Run what SFTTrainer does with a data set: tokenise, mask by prompt and completion, pack by bfd."""

    def run(contest: Contest) -> float:
        trainer = contest.trainer
        trainer.args.dataset_num_proc = num_proc
        started = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            packed = trainer._prepare_dataset(
                contest.dataset, trainer.processing_class, trainer.args, True, None, f"train-{started}"
            )
        seconds = time.perf_counter() - started
        tokens = sum(map(sum, packed["seq_lengths"]))
        contest.notes["TRL"] = f"{packed.num_rows:,} sequences, {tokens / packed.num_rows / CONTEXT:.2%} full"
        return seconds

    return run


CONTENDERS: dict[str, Callable[[Contest], float]] = {
    "bare `encode_batch_fast`": bare,
    "`tunewell prepare`, the command": command,
    "`tunewell.prepare`, in this process": library,
    "TRL, `dataset_num_proc=1`": trl(1),
    "TRL, `dataset_num_proc=2`": trl(2),
}


def set_up(contest: Contest) -> None:
    """Render the texts, and make a trainer with a model too small to matter; none of this is timed."""
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    from tunewell.data.templates.chat_template import ChatTemplate
    from tunewell.data.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer(MODEL)
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
    pairs = [json.loads(line) for line in contest.rows.read_text(encoding="utf-8").splitlines()]
    turns = [
        ([{"role": "user", "content": pair["question"]}], [{"role": "assistant", "content": pair["answer"]}])
        for pair in pairs
    ]
    contest.texts = [template.render(prompt + completion) for prompt, completion in turns]
    contest.backend = tokenizer.backend
    datasets.disable_caching()
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"prompt": prompt, "completion": completion} for prompt, completion in turns])
    rows.save_to_disk(str(contest.folder / "rows"))
    contest.dataset = datasets.load_from_disk(str(contest.folder / "rows"))
    tokenizer.save(contest.folder / "tokenizer", tokenizer.chat_template)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocab_size, **shape))
    config = SFTConfig(str(contest.folder / "out"), packing=True, max_length=CONTEXT, bf16=False, report_to=[])
    contest.trainer = SFTTrainer(
        model,
        args=config,
        train_dataset=contest.dataset.select(range(2)),
        processing_class=AutoTokenizer.from_pretrained(contest.folder / "tokenizer"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the speed of preparing a corpus.")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    wanted = parser.parse_args()
    print(setting("tunewell", "tokenizers", "trl", "transformers", "datasets"))
    with tempfile.TemporaryDirectory() as name:
        contest = Contest(Path(name), wanted.rows)
        origin = write_rows(contest.rows, wanted.rows)
        set_up(contest)
        seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        for number in range(wanted.rounds):
            order = list(CONTENDERS) if number % 2 == 0 else list(reversed(CONTENDERS))
            for contender in order:
                # `datasets` switches the tokenizer's threads off for its forks and leaves them off for us.
                os.putenv("TOKENIZERS_PARALLELISM", "true")
                seconds[contender].append(CONTENDERS[contender](contest))
    print(f"\n{wanted.rows:,} rows of {origin}, median of {wanted.rounds} rounds.\n")
    print(report(wanted.rows, seconds))
    print("\n" + "; ".join(f"{who}: {note}" for who, note in contest.notes.items()))


def report(num_rows: int, seconds: dict[str, list[float]]) -> str:
    """Compare each contender with the bare tokenizer and the faster TRL."""
    rates = {name: num_rows / statistics.median(times) for name, times in seconds.items()}
    bare_rate = next(rate for name, rate in rates.items() if name.startswith("bare"))
    trl_rate = max(rate for name, rate in rates.items() if name.startswith("TRL"))
    rows = [
        [name, spread(seconds[name]), f"{rate:,.0f}", f"{rate / bare_rate:.0%}", f"{rate / trl_rate:.1f}x"]
        for name, rate in rates.items()
    ]
    return table(["", "time", "rows/s", "of the bare tokenizer", "against TRL's better"], rows)


if __name__ == "__main__":
    main()
