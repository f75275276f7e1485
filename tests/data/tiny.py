"""A tiny tokenizer folder, rows to feed it, and `prepare` run on them in this process."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tunewell.cli.main import main

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
SENTENCES = (
    "The college opens its doors on the first Monday of September and closes them in June.",
    "What is the deadline for the application, and how much is the tuition for one year?",
    "A student who asks the same question twice should get the same answer twice.",
    "Numbers such as 1984, 42 and 7,473 are read digit by digit; so is 3.14.",
    "def answer(question): return 'yes' if question.endswith('?') else 'no'",
    "Grüße aus Köln, señor! Zażółć gęślą jaźń. 東京の天気は晴れです。",
)


def write_tiny_model(folder: Path) -> Path:
    """Write a tokenizer folder as transformers saves it: byte-level BPE of 512 ids, ChatML, `<|im_end|>` as the end."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512 - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def prepare(folder: Path, model: Path, *data: Path | str, sets: Iterable[str] = (), code: int = 0) -> dict[str, Any]:
    """Run `tunewell prepare --json` in a folder, check its exit code, and give what it printed."""
    arguments = ["prepare", "--json", "--model", str(model)]
    arguments += [part for path in data for part in ("--data", str(path))]
    arguments += [part for setting in sets for part in ("--set", setting)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = main(arguments)
    assert found == code, f"exit code {found}\n{out.getvalue()}\n{err.getvalue()}"
    return json.loads(out.getvalue())


def dropped_rows(folder: Path) -> list[dict[str, Any]]:
    """Read `dropped.jsonl` of the corpus in a folder."""
    text = (folder / "corpus" / "dropped.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def run_limited(
    code: str, *arguments: str, address_space: int, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run code in a process that may not have more than so many bytes of address space."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({address_space}, {address_space}))\n"
    command = [sys.executable, "-c", limit + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
