"""A run that is killed, crashes or hangs goes on by itself; one that asked to end is let go. Row 17.

Most of it is tried on small stand-ins for a run, which take a step in a hundredth of a second; one real run is killed
by default, and `make faults` also hangs and crashes one.
"""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corpora import write_rows
from tunewell.cli.main import main
from tunewell.config.rules import Healing
from tunewell.records.events import read_events
from tunewell.records.healing import read_healing
from tunewell.runs.hang_monitor import HangMonitor, process_cpu_seconds
from tunewell.runs.supervisor import supervise

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
folder, begin, pulse = Path(sys.argv[1]), sys.argv[2] == "again", int(sys.argv[3].split(",")[1])
log = folder / "events.jsonl"
first = len(log.read_bytes().splitlines()) + 1 if begin and log.exists() else 1
with (folder / "starts").open("a") as file: file.write("x")
starts = len((folder / "starts").read_text())
def steps(last):
    for step in range(first, last + 1):
        with log.open("a") as file: file.write(json.dumps({"kind": "step", "step": step, "loss": 1.0}) + "\\n")
        os.write(pulse, b"step 0.01\\n")
        time.sleep(0.01)
"""


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    """Supervise a stand-in whose last lines are given; gives the exit code and what was said."""

    def run(script: str, **rules: Any) -> tuple[int, list[str]]:
        path = tmp_path / "stand_in.py"
        path.write_text(STAND_IN + textwrap.dedent(script))
        told: list[str] = []

        def line(is_again: bool, handles: str) -> list[str]:
            return [sys.executable, str(path), str(tmp_path), "again" if is_again else "new", handles]

        code = supervise(line, settings=lambda: (tmp_path, Healing(hang_seconds=0.3, **rules)), report=told.append)
        return code, told

    return run


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Have signals do what they do in a terminal, however the tests were started."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int, once: Path, after: float = 0.0) -> None:
    """Send signals to this process from a thread, once a file is there."""

    def ask() -> None:
        upto(once.exists)
        for number in numbers:
            time.sleep(after)
            os.kill(os.getpid(), number)

    threading.Thread(target=ask).start()


def upto(is_so: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until something is so; False where it does not come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_so():
        time.sleep(0.01)
    return is_so()


@pytest.mark.parametrize("code", [0, 2, 3, 4, 130, 141, 143])
def test_an_end_of_its_own_is_an_end(watched: Any, tmp_path: Path, code: int) -> None:
    assert watched(f"steps(3); sys.exit({code})") == (code, [])
    assert (tmp_path / "starts").read_text() == "x" and not (tmp_path / "healing.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "name", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", "memory"),
        ("os.abort()", "crashed", "SIGABRT"),
        ("sys.exit(1)", "crashed", "exit code 1"),
        ("time.sleep(60)", "hung", "stopped responding"),
    ],
)
def test_what_ends_a_run_once_does_not_end_it(watched: Any, tmp_path: Path, end: str, name: str, words: str) -> None:
    code, told = watched(f"steps(5 if starts == 1 else 9)\nif starts == 1: {end}")
    assert code == 0 and len(told) == 1 and words in told[0] and "1 of 3" in told[0]
    [entry] = read_healing(tmp_path)
    assert (entry.step, entry.name, entry.action) == (5, name, "restart")
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == list(range(1, 10))


def test_the_same_step_is_tried_four_times_in_all(watched: Any, tmp_path: Path) -> None:
    code, told = watched("steps(5); os.abort()")
    assert code == 1 and (tmp_path / "starts").read_text() == "xxxx"
    assert "4 times at the same step" in told[-1]
    assert told[-1].endswith(f"next: `tunewell diagnose {tmp_path}`")
    assert [entry.action for entry in read_healing(tmp_path)] == [*["restart"] * 3, "stop"]


def test_a_run_that_gets_further_each_time_is_not_given_up(watched: Any, tmp_path: Path) -> None:
    script = """
    steps(starts * 2)
    (folder / "checkpoints" / f"step-{starts:06d}").mkdir(parents=True)
    if starts < 10: os.abort()
    """
    code, _ = watched(script)
    assert code == 0 and len((tmp_path / "starts").read_text()) == 10


def test_a_run_that_never_reaches_a_checkpoint_is_given_up(watched: Any, tmp_path: Path) -> None:
    """It dies at another step each time, so that no step is ever tried often enough."""
    script = """
    lines = log.read_bytes().splitlines(keepends=True)[:5] if log.exists() else []
    log.write_bytes(b"".join(lines))
    first = len(lines) + 1
    (folder / "checkpoints" / "step-000005").mkdir(parents=True, exist_ok=True)
    if starts < 20: steps(6 + starts % 11); os.abort()
    """
    code, told = watched(script)
    assert code == 1 and "without a new checkpoint" in told[-1]
    assert (tmp_path / "starts").read_text() == "x" * 7
    assert [entry.action for entry in read_healing(tmp_path)] == [*["restart"] * 6, "stop"]


@pytest.mark.parametrize("rules", [{}, {"on": False}])
def test_what_never_took_a_step_or_may_not_be_healed_is_not_started_again(
    watched: Any, tmp_path: Path, rules: dict[str, Any]
) -> None:
    code, told = watched("steps(0 if not sys.argv[4:] else 5); os.abort()", **rules)
    assert code == 1 and (tmp_path / "starts").read_text() == "x" and "SIGABRT" in told[0]


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])
def test_a_signal_is_handed_on_once(watched: Any, tmp_path: Path, numbers: list[int]) -> None:
    """A hang-up is told by the shell and by the system, and a run that is asked twice leaves without saving."""
    script = """
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    steps(3)
    while not seen: time.sleep(0.01); os.write(pulse, b"alive\\n")
    time.sleep(0.2)
    (folder / "seen").write_text(str(len(seen)))
    sys.exit(143)
    """
    send(*numbers, once=tmp_path / "events.jsonl", after=0.1)
    assert watched(script) == (143, []) and (tmp_path / "seen").read_text() == "1"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 143), ("SIGHUP", 143)])
def test_a_run_that_is_asked_to_stop_before_it_listens_is_not_started_again(
    watched: Any, tmp_path: Path, name: str, code: int
) -> None:
    """For seconds, while torch is imported, signals end a run at once."""
    send(signal.Signals[name], once=tmp_path / "listening")
    script = "steps(2); signal.signal(signal.SIGINT, signal.SIG_DFL); (folder / 'listening').touch(); time.sleep(2)"
    assert watched(script) == (code, [])
    assert (tmp_path / "starts").read_text() == "x"


@pytest.mark.parametrize("moment", ["before the first start", "between two tries"])
def test_a_signal_that_finds_no_run_is_not_lost(tmp_path: Path, moment: str) -> None:
    path, past = tmp_path / "stand_in.py", []
    path.write_text(STAND_IN + "steps(2)\nif starts == 1: os.abort()\ntime.sleep(2)")
    signal.signal(signal.SIGTERM, lambda number, frame: past.append(number))

    def line(is_again: bool, handles: str) -> list[str]:
        if not is_again and moment == "before the first start":
            os.kill(os.getpid(), signal.SIGTERM)
        return [sys.executable, str(path), str(tmp_path), "again" if is_again else "new", handles]

    def tell(words: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    began = time.monotonic()
    code = supervise(line, settings=lambda: (tmp_path, Healing(hang_seconds=9)), report=tell)
    assert (code, past) == (143, []) and time.monotonic() - began < 2


def test_what_goes_wrong_after_a_request_is_told_and_not_tried_again(watched: Any, tmp_path: Path) -> None:
    send(signal.SIGTERM, once=tmp_path / "listening")
    script = "signal.signal(signal.SIGTERM, lambda *_: os.abort()); steps(2); (folder / 'listening').touch()"
    code, told = watched(script + "\ntime.sleep(2)")
    assert code == 143 and told == ["while stopping, the run crashed (SIGABRT) after step 2"]


@pytest.mark.parametrize("end", ["sys.exit(1)", "sys.exit(141)", "os.abort()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_code_that_a_run_told_is_its_end_whatever_becomes_of_its_last_words(
    watched: Any, tmp_path: Path, end: str
) -> None:
    assert watched(f"steps(3); os.write(pulse, b'ended 3\\n'); {end}") == (3, [])
    assert not (tmp_path / "healing.jsonl").exists()


def test_a_run_that_nobody_reads_any_more_is_not_started_again(watched: Any) -> None:
    end = "signal.signal(signal.SIGPIPE, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGPIPE)"
    assert watched(f"steps(3); {end}") == (141, [])


@pytest.mark.parametrize("flag", ["--worker", "--supervised"])
@pytest.mark.parametrize(("is_read", "said"), [(True, b"ended 3\nprinted\n"), (False, b"ended 3\n")])
def test_the_command_tells_its_code_before_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool, said: bytes, flag: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "q", "answer": "a"}\n', encoding="utf-8")
    Path("tunewell.yaml").write_text("model: preset:tiny-1m\ndata: rows.jsonl\n", encoding="utf-8")
    result = SimpleNamespace(status="finished", exit_code=3, as_json=dict)
    monkeypatch.setitem(sys.modules, "tunewell.workflows.train", SimpleNamespace(run_training=lambda *_, **__: result))
    out_read, out_write = os.pipe()
    if not is_read:
        os.close(out_read)
    pulse_read, pulse_write = os.pipe()
    with os.fdopen(os.dup(out_write), "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        code = main(["train", "--json", flag, f"0,{pulse_write},0"])
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
    os.close(pulse_write)
    with os.fdopen(pulse_read, "rb") as pulse:
        assert code == (3 if is_read else 141) and pulse.read() == said


def test_a_hang_up_that_was_ignored_stays_ignored(watched: Any, tmp_path: Path) -> None:
    """`nohup tunewell train &`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    send(signal.SIGHUP, once=tmp_path / "events.jsonl")
    assert watched("steps(30)") == (0, [])


def test_an_interrupt_is_taken_also_where_it_was_ignored(watched: Any, tmp_path: Path) -> None:
    """Scripts start what they put into the background so; a run that is loading must not miss it either."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    send(signal.SIGINT, once=tmp_path / "events.jsonl", after=0.1)
    assert watched("steps(1)\nfor _ in range(40): time.sleep(0.05); os.write(pulse, b'alive\\n')") == (130, [])


def test_a_run_that_stands_still_hears_that_it_should_stop(watched: Any, tmp_path: Path) -> None:
    send(signal.SIGTERM, once=tmp_path / "pid", after=0.2)
    late = threading.Timer(4, lambda: os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL))
    late.start()
    began = time.monotonic()
    script = "(folder / 'pid').write_text(str(os.getpid())); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(9)"
    code, _ = watched(script)
    late.cancel()
    assert code == 143 and time.monotonic() - began < 3


ALONE = """
import sys
from pathlib import Path
from tunewell.config.rules import Healing
from tunewell.runs import supervisor
folder = Path(sys.argv[1])
supervisor._PAUSE_SECONDS = float(sys.argv[2])
def line(is_again, handles):
    return [sys.executable, str(folder / "stand_in.py"), str(folder), "again" if is_again else "new", handles]
sys.exit(supervisor.supervise(line, settings=lambda: (folder, Healing(hang_seconds=1.0)), report=print))
"""


def alone(folder: Path, script: str, *, stopped_seconds: float = 5.0, **how: Any) -> "subprocess.Popen[Any]":
    """Supervise a stand-in from a process of its own."""
    (folder / "stand_in.py").write_text(STAND_IN + textwrap.dedent(script))
    return subprocess.Popen([sys.executable, "-c", ALONE, str(folder), str(stopped_seconds)], **how)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGTSTP", "SIGSTOP"])
def test_a_pause_is_no_hang(tmp_path: Path, kind: str) -> None:
    """Ctrl-Z stops the supervisor, which stops the run; docker and schedulers stop both."""
    script = """
    (folder / "pid").write_text(str(os.getpid()))
    for step in range(8):
        os.write(pulse, b"step 0.01\\n")
        log.write_text('{"kind": "step", "step": 1, "loss": 1.0}\\n')
        time.sleep(0.2)
    """
    process = alone(tmp_path, script, stopped_seconds=5.0 if kind == "SIGTSTP" else 1.0)
    assert upto((tmp_path / "events.jsonl").exists)
    run = int((tmp_path / "pid").read_text())
    process.send_signal(signal.Signals[kind])
    if kind == "SIGSTOP":
        os.kill(run, signal.SIGSTOP)
    time.sleep(1.8)
    process.send_signal(signal.SIGCONT)
    if kind == "SIGSTOP":
        time.sleep(0.3)  # the supervisor looks first
        os.kill(run, signal.SIGCONT)
    assert process.wait(20) == 0 and not (tmp_path / "healing.jsonl").exists()


def test_a_terminal_that_stops_what_writes_in_the_background_does_not_stop_a_run(tmp_path: Path) -> None:
    """`stty tostop`; and the run does not read what is typed for somebody else."""
    ours, theirs = pty.openpty()
    modes = termios.tcgetattr(theirs)
    modes[3] |= termios.TOSTOP
    termios.tcsetattr(theirs, termios.TCSANOW, modes)

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    script = "steps(1); print('a word', flush=True); sys.exit(4 if sys.stdin.read() == '' else 1)"
    process = alone(tmp_path, script, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    try:
        assert process.wait(20) == 4 and b"a word" in os.read(ours, 1000)
    finally:
        process.kill()
        os.close(ours)


class _Clock:
    """A clock and the CPU time of a run, both set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = 100.0
        monkeypatch.setattr("tunewell.runs.hang_monitor.time.monotonic", lambda: self.now)
        self.monitor = HangMonitor(60.0, lambda: self.cpu, _last_beat=self.now, _active_at=self.now)

    def pass_time(self, seconds: float, *, cpu: float) -> bool:
        """Let time pass in polls of a second with so much CPU time in all; return whether the run hangs at the end."""
        for _ in range(int(seconds)):
            self.now, self.cpu = self.now + 1, self.cpu + cpu / seconds
            hangs = self.monitor.is_overdue
        return hangs


def test_on_a_gpu_silence_is_a_hang_after_three_of_the_slowest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    monitor = clock.monitor
    monitor.feed(b"gpu\nstage\nalive\nstep 2.0\nstep 4.0\nste")
    assert not clock.pass_time(70, cpu=70)
    assert clock.pass_time(3, cpu=3), "it spins, and that is no sign of life"
    monitor.feed(b"p 2.0\nstage\n")
    assert not clock.pass_time(1400, cpu=1400), "evaluations may be silent for longer"
    assert clock.pass_time(50, cpu=50)
    monitor.feed(b"ended 0\n")
    assert not clock.pass_time(5000, cpu=0) and monitor.exit_code == 0, "the reader of the result may take any time"
    monitor.feed(b"printed\n")
    assert clock.pass_time(1450, cpu=0), "a run that does not exit hangs"


def test_on_a_cpu_a_busy_machine_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    clock.monitor.feed(b"cpu\n")
    for _ in range(5):
        assert not clock.pass_time(2, cpu=4)
        clock.monitor.feed(b"step 2.0\n")
    assert not clock.pass_time(600, cpu=40), "ten minutes for one step, which is still computing"
    assert clock.pass_time(600, cpu=60), "25 times the CPU time of a step: an endless loop"
    clock.monitor.feed(b"alive\n")
    assert not clock.pass_time(55, cpu=0)
    assert clock.pass_time(10, cpu=0), "a thread asleep"


def test_a_run_that_sleeps_before_its_first_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    clock.monitor.feed(b"stage\n")
    assert not clock.pass_time(3600, cpu=360), "loading may take any time"
    assert not clock.pass_time(290, cpu=0)
    assert clock.pass_time(15, cpu=0), "a download that is stuck"


def test_the_cpu_time_of_a_process_is_that_of_the_system() -> None:
    before = process_cpu_seconds(os.getpid())
    while before is not None and sum(os.times()[:2]) < before + 0.05:
        pass
    after = process_cpu_seconds(os.getpid())
    assert (before is None) == (after is None) == (not sys.platform.startswith("linux"))
    assert after is None or before is None or after > before


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Path:
    rows = [{"instruction": f"What is {n} plus {n}?", "output": f"It is {2 * n}."} for n in range(40)]
    write_rows(tmp_path / "rows.jsonl", rows)
    settings = {
        "model": "preset:tiny-1m",
        "tokenizer": str(tiny_model),
        "method": {"kind": "full"},
        "data": {"sources": "rows.jsonl", "held_out": 0.2},
        "train": {"max_steps": 12, "batch_documents": 4, "threads": 1, "learning_rate": 5e-3},
        "evaluate": {"every_steps": 6, "samples": 0},
        "checkpoints": {"every_steps": 3},
        "verdict": {"after_training": False},
        "healing": {"hang_seconds": 5},
    }
    (tmp_path / "tunewell.yaml").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("kill", "killed"),
        pytest.param("hang", "hung", marks=pytest.mark.faults),
        pytest.param("crash", "crashed", marks=pytest.mark.faults),
    ],
)
def test_a_real_run_goes_on_where_it_died(project: Path, record_property: Any, kind: str, name: str) -> None:
    line = [sys.executable, "-m", "tunewell", "train", "--json", "--enable-fault-injection"]
    planted = {"CI": "1", "TUNEWELL_FAULTS": f"{kind}@step:step=7,marker={project / 'done'}"}
    began = time.monotonic()
    done = subprocess.run(line, cwd=project, capture_output=True, text=True, check=False, env=os.environ | planted)
    told = json.loads(done.stdout)
    record_property(
        "fault",
        {
            "row": 17,
            "fault": f"{kind} at step 8",
            "seed": 0,
            "ended": told["status"],
            "exit_code": done.returncode,
            "seconds": round(time.monotonic() - began, 1),
        },
    )
    assert done.returncode == 0, done.stderr
    assert told["status"] == "finished" and told["steps"] == 12
    assert name in [entry["name"] for entry in told["healing"]]
    assert "supervisor: the run" in done.stderr and "restarted" in done.stderr
    steps = [event["step"] for event in read_events(project / "run" / "events.jsonl") if event["kind"] == "step"]
    assert steps == list(range(1, 13))
    if kind == "hang":
        assert "in around_batch" in (project / "run" / "stacks.txt").read_text()


@pytest.mark.slow
@pytest.mark.faults
def test_a_run_whose_supervisor_is_killed_saves_and_leaves(project: Path) -> None:
    """Whoever ends the command with kill -9 means the run."""
    line = [sys.executable, "-m", "tunewell", "train", "--set", "train.max_steps=5000"]
    process = subprocess.Popen(line, cwd=project, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = project / "run" / "events.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.is_file() and len(log.read_bytes().splitlines()) > 8):
        time.sleep(0.02)
    process.kill()
    process.wait()
    while time.monotonic() < deadline and not (project / "run" / "outcome.json").is_file():
        time.sleep(0.05)
    outcome = json.loads((project / "run" / "outcome.json").read_text())
    assert outcome["status"] == "interrupted" and outcome["signal"] == "SIGTERM"
