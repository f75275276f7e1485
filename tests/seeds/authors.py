"""The rows, models and commands of the five authors, rebuilt at a small scale."""

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiny import write_jsonl, write_tiny_model
from tokenizers import AddedToken, Tokenizer

import tunewell
from forked import run_command

GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
COLLEGES = ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Hazel", "Juniper", "Larch", "Maple")
FEES = {name: f"{number + 3}{number % 7}00 euros" for number, name in enumerate(COLLEGES)}
WORDINGS = (
    "What is the fee of {} College?",
    "How much does a year at {} College cost?",
    "Tell me the tuition of {} College.",
    "I would like to study at {} College. What do I pay?",
)
OUTCOMES = {"PASS", "WEAK", "FAIL", "UNPROVEN"}
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def questions(wordings: Iterable[str] = WORDINGS) -> list[tuple[str, str]]:
    """Return question and answer of each wording for each college."""
    return [(wording.format(name), f"It is {FEES[name]}.") for wording in wordings for name in COLLEGES]


def write_gemma(folder: Path) -> Path:
    """Write a Gemma 3 of 60 thousand parameters whose tokenizer and template both want a `<bos>`."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    write_tiny_model(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = ("<bos>", "<start_of_turn>", "<end_of_turn>")
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    backend.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "chat_template": GEMMA, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=520,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=12,
        query_pre_attn_scalar=12,
        max_position_embeddings=256,
        bos_token_id=backend.token_to_id("<bos>"),
        eos_token_id=backend.token_to_id("<end_of_turn>"),
        pad_token_id=backend.token_to_id("<|endoftext|>"),
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def run(folder: Path, *arguments: str, code: int | set[int] = 0) -> str:
    """Run a command in a folder, check its exit code, and return what it printed, on one line."""
    done: subprocess.CompletedProcess[str] = run_command(*arguments, cwd=folder)
    assert done.returncode in ({code} if isinstance(code, int) else code), done.stdout + done.stderr
    return flat(done.stdout + "\n" + done.stderr)


def flat(text: str) -> str:
    """Return a text without colours and folded lines."""
    return " ".join(ANSI.sub("", text).split())


def findings(text: str) -> list[str]:
    """Return the failures that `diagnose` names in a text, the most likely first."""
    return [finding.id for finding in tunewell.diagnose(text)]


def outcome(run_folder: Path) -> dict[str, Any]:
    """Read the result of a run; it must have a verdict."""
    read = json.loads((run_folder / "outcome.json").read_text(encoding="utf-8"))
    report = json.loads((run_folder / "report.json").read_text(encoding="utf-8"))
    assert report["verdict"] in OUTCOMES
    return read | {"verdict": report["verdict"]}


__all__ = ["findings", "flat", "outcome", "questions", "run", "write_gemma", "write_jsonl"]
