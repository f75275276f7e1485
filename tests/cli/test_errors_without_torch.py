"""Errors that need no model are reported before torch is imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys
from tunewell.cli.main import main

for line in sys.stdin.read().splitlines():
    code = main(line.split())
    print(code, "torch" in sys.modules or "transformers" in sys.modules, line)
"""

COMMANDS = """
validate
validate nope
validate .
validate empty
validate model --data none.jsonl
validate nope --against model
export
export nope
export . --to gguuf
verify nope
verify empty
chat nope --prompt hello
serve nope
train --no-supervisor
train --no-supervisor --config bad.yaml
train --no-supervisor --config none.yaml
train --no-supervisor --model nope --data rows.jsonl
train --no-supervisor --model model --data none.jsonl
plan --config bad.yaml
profile nope
profile --config bad.yaml --steps 5
prepare --model nope --data rows.jsonl
prepare --model model --data none.jsonl
inspect none.jsonl --model model
notebook --config none.yaml
diagnose none.log
""".strip()


def test_errors_about_names_and_files_do_not_import_torch(tmp_path: Path, tiny_model: Path) -> None:
    """Guards against ten seconds of `importing torch` before `there is no run in this folder`."""
    (tmp_path / "bad.yaml").write_text("model: nope\ntrian: 3\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").symlink_to(tiny_model)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], input=COMMANDS, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    found = done.stdout.splitlines()
    assert len(found) == len(COMMANDS.splitlines()), done.stderr
    wrong = [line for line in found if not line.startswith("2 False ")]
    assert not wrong, "\n".join(wrong)
