"""Rows, corpora made of them, and what lies in a folder: for tests of prepare and of what it makes."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from tunewell.workflows.prepare import PrepareResult, prepare

_TEXT = "the answer is what it was when she asked him how many apples were left in the old basket"
_WORDS = _TEXT.split()


def row(number: int, *, words: int | None = None) -> dict[str, str]:
    """Make a question and an answer, unlike those of every other number."""
    chance = random.Random(number)
    length = words or chance.randint(2, 24)
    return {
        "question": f"{number}: " + " ".join(chance.choices(_WORDS, k=chance.randint(3, 12))) + "?",
        "answer": " ".join(chance.choices(_WORDS, k=length)) + f" {number}.",
    }


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    """Write rows as JSON lines, making the folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows), encoding="utf-8")
    return path


def rows_file(path: Path, number: int, *, first: int = 0) -> Path:
    """Write `number` rows, counted from `first`."""
    return write_rows(path, (row(index) for index in range(first, first + number)))


def prepare_in(folder: Path, model: Path, data: Path | Sequence[Path], *sets: str) -> PrepareResult:
    """Prepare `folder / "corpus"` from files of rows."""
    files = [data] if isinstance(data, Path) else data
    return prepare(model=str(model), data=[str(file) for file in files], out=folder / "corpus", sets=sets)


def tree(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def write_sums(folder: Path, tokenizer: Path, *, model: str, num_rows: int) -> None:
    """Write rows that ask for sums, and a config for a model that starts from nothing."""
    rows = [{"instruction": f"What is {n} plus {n}?", "output": f"It is {2 * n}."} for n in range(num_rows)]
    write_rows(folder / "rows.jsonl", rows)
    (folder / "tunewell.yaml").write_text(
        f"model: {model}\ntokenizer: {tokenizer}\ndata:\n  sources: rows.jsonl\nmethod:\n  kind: full\n"
    )
