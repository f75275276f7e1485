"""Child processes: messages in both directions, limits, and a plain reason when one dies."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tunewell.core.child import Child, ChildDied, call, run
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress

_START = "from tunewell.core.child import answer, limit_resources; from tunewell.core.errors import UserError\n"
_START += "from tunewell.core.progress import Progress; import os, signal, sys, time\n"


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call a function of a module that is written for the test."""
    monkeypatch.chdir(tmp_path)

    def ask(body: str, request: Any = None, **options: Any) -> Any:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (tmp_path / "act.py").write_text(f"{_START}def act(request, progress):\n{lines}answer(act)\n", encoding="utf-8")
        return call("act", request, **options)

    return ask


def test_a_call_returns_the_result_and_shows_the_progress(ask: Any) -> None:
    """What libraries print must not be taken for a message."""
    seen: list[Progress] = []
    body = "print('{noise'); os.system('echo {more'); progress(Progress('é', 1, 2)); return {'twice': 2 * request['x']}"
    assert ask(body, {"x": 21}, progress=seen.append) == {"twice": 42}
    assert seen == [Progress("é", 1, 2)]


def test_a_user_error_of_the_child_is_raised_here(ask: Any) -> None:
    with pytest.raises(UserError, match="no such thing") as caught:
        ask("raise UserError('no such thing', where='there', fix='this')")
    assert (caught.value.where, caught.value.fix) == ("there", "this")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed, most likely because the machine ran out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)"),
        ("sys.exit(3)", "failed: exit code 3"),
        ("raise ValueError('not so')", "failed: ValueError: not so"),
        ("limit_resources(memory_bytes=1 << 28, processor_seconds=5); return len(bytes(1 << 29))", "MemoryError"),
        ("limit_resources(memory_bytes=1 << 40, processor_seconds=1)\nwhile True: pass", "crashed (SIGXCPU)"),
    ],
)
def test_a_child_that_dies_gives_the_reason(ask: Any, body: str, words: str) -> None:
    with pytest.raises(ChildDied) as caught:
        ask(body)
    assert words in str(caught.value)


def test_a_silent_child_is_killed_in_time(ask: Any) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="within 1 s"):
        ask("time.sleep(60)", seconds=1)
    assert time.monotonic() - started < 20


def test_a_large_message_in_both_directions_does_not_block(ask: Any) -> None:
    """Pipes hold 64 KiB: a parent that writes all before it reads would wait for ever."""
    assert ask("sys.stderr.write('x' * 1_000_000); return request", "y" * 1_000_000) == "y" * 1_000_000


def test_a_program_is_run_until_it_ends_or_its_time_is_over(tmp_path: Path) -> None:
    done = run(["sh", "-c", "pwd; echo bad >&2; exit 3"], folder=tmp_path)
    assert (done.code, done.out.strip(), done.last_error) == (3, str(tmp_path), "bad")
    assert run(["sh", "-c", "echo bad >&2"], merges_errors=True).out == "bad\n"
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        run(["sleep", "60"], seconds=0.2)
    with pytest.raises(FileNotFoundError):
        run([str(tmp_path / "missing")])


def test_a_child_that_is_closed_without_a_message_ends() -> None:
    with Child([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        assert not child.has_ended
    assert child.has_ended
