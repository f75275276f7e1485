"""Count what makes the code easy or hard to enter, and compare it with `counts.json`: `make counts`.

A figure that grows is an error until `counts.json` has the new figure with its reason, in the same commit.
`python tests/house/counts.py --lower` writes the figures that have become smaller.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tunewell"
RECORD = Path(__file__).with_name("counts.json")
_TRACER = Path(__file__).with_name("trace_train.py")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count() -> dict[str, int]:
    """Return every figure by its name; a child process trains a tiny model with each method."""
    tokens, statements, classes = Counter[str](), 0, Counter[str]()
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts
        room = f"features/{parts[1]}" if parts[0] == "features" and len(parts) > 2 else "spine"
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        tokens[f"code tokens, {room}"] += _num_tokens(text, tree)
        nodes = [*ast.walk(tree)]
        statements += sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in nodes)
        classes.update(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {
        **dict(sorted(tokens.items(), key=lambda one: (one[0] != "code tokens, spine", one[0]))),
        "statements": statements,
        "class names defined twice": sum(number > 1 for number in classes.values()),
        **trace(),
    }


def trace() -> dict[str, int]:
    """Return how many functions one optimizer step enters with each method, and a whole `train` with LoRA."""
    with tempfile.TemporaryDirectory(prefix="tunewell-trace-") as folder:
        env = os.environ | {"TUNEWELL_CACHE": folder}  # functions that fill a cache count
        command = [sys.executable, str(_TRACER)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def read_record() -> dict[str, tuple[int, str]]:
    """Return each recorded figure with the reason for it."""
    return {name: (figure, because) for name, (figure, because) in json.loads(RECORD.read_text()).items()}


def _num_tokens(text: str, tree: ast.Module) -> int:
    """Return the number of tokens without layout, comments and docstrings: line lengths do not change it."""
    inside = {
        line
        for node in ast.walk(tree)
        if _is_docstring(node) and isinstance(node, ast.Expr)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        token.type not in _LAYOUT and not (token.type == tokenize.STRING and token.start[0] in inside)
        for token in found
    )


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> None:
    """Print every figure beside the recorded one; with `--lower`, write those that have become smaller."""
    found, record = count(), read_record()
    if "--lower" in sys.argv:
        known = {name: record.get(name, (figure, "first count")) for name, figure in found.items()}
        lower = {name: (min(figure, known[name][0]), known[name][1]) for name, figure in found.items()}
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in lower.items()]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        record = read_record()
    for name, figure in found.items():
        before = record.get(name, (0, ""))[0]
        sys.stdout.write(f"{name:<40}{figure:>9,}{before:>9,}{figure - before:>+8,}\n".replace("      +0", ""))


if __name__ == "__main__":
    main()
