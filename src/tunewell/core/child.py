"""Start child processes: the one place that does, with their messages, their limits and how they ended.

run(command)         a program, until it ends: its output, its errors and its exit code
Child(command)       a process that gets lines of JSON on stdin and writes lines of JSON to stdout
call(module, ...)    one request to a module that is run in a new Python process: progress, then a result or an error
answer(act)          the other side of `call` and of `Child.ask`, inside that process
start_in_group(...)  a process in its own group, which the supervisor forwards signals to
start_detached(...)  a process that goes on when this one ends
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from tunewell.core.errors import UserError
from tunewell.core.files import open_file
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.redact import redact

Process = subprocess.Popen[Any]
_EXIT_ERROR = 2
_LOG_SECONDS = 5.0
"""How long the log of an ended process is waited for. A process that it started may keep its stderr open."""


@dataclass(frozen=True)
class Ended:
    """How a process ended, with what it wrote."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def signal_name(self) -> str:
        """The signal that killed the process, or an empty text."""
        return signal.Signals(-self.code).name if self.code < 0 else ""

    @property
    def last_error(self) -> str:
        """The last line on stderr, or an empty text."""
        return (self.err.strip().splitlines() or [""])[-1]

    def __str__(self) -> str:
        """Return how the process ended, as the end of a sentence."""
        if self.signal_name == "SIGKILL":
            return "was killed, most likely because the machine ran out of memory"
        if self.signal_name:
            return f"crashed ({self.signal_name})"
        return f"failed: {self.last_error or f'exit code {self.code}'}"


class ChildDied(Exception):
    """A child process ended without a result."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(str(ended))
        self.ended = ended


def run(
    command: Sequence[str], *, seconds: float | None = None, folder: Path | None = None, merges_errors: bool = False
) -> Ended:
    """Run a program until it ends. Raise TimeoutError if that takes too long, and OSError if it cannot be started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merges_errors else subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    finally:
        if process.poll() is None:
            process.kill()  # it is not waited for: a process that a driver has blocked does not end
    return Ended(process.returncode, out, err or "")


def start_in_group(command: Sequence[str], *, inherited: tuple[int, ...]) -> Process:
    """Start a process in its own group, with these file descriptors.

    Ctrl-C in a terminal then reaches only this process. A background group that reads from the terminal is stopped, so
    the child gets stdin only if it is no terminal.
    """
    stdin = subprocess.DEVNULL if os.isatty(0) else None
    return subprocess.Popen(command, pass_fds=inherited, process_group=0, stdin=stdin)


def start_detached(command: Sequence[str], *, out: Path, err: Path, folder: Path) -> Process:
    """Start a process in a session of its own, whose output goes to new files. It goes on when this process ends."""
    with out.open("xb") as out_file, err.open("xb") as err_file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file, cwd=folder, start_new_session=True
        )


class Child:
    """A process that gets lines of JSON on stdin and writes lines of JSON to stdout. It is killed when it is closed."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        has_session: bool = False,
        shows_errors: bool = False,
        log: Path | None = None,
    ) -> None:
        """Start the process. With a session of its own, it gets no signals of the terminal.

        `log` is a file for what it writes to stderr, without secrets.
        """
        self._errors: IO[bytes] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        if not shows_errors:
            self._errors = open_file(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._process: Process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if log else self._errors,
            text=True,
            errors="replace",
            env={**os.environ, **(environment or {})},
            start_new_session=has_session,
        )
        self._logger = threading.Thread(target=self._write_log, daemon=True)
        self._logger.start()

    def _write_log(self) -> None:
        """Write to the log line by line: redacted at the end, it would keep secrets if this process was killed."""
        if self._process.stderr is None or self._errors is None:
            return
        with self._process.stderr as stream:
            for line in stream:
                with suppress(OSError, ValueError):  # a full disk, or a closed log: the process must not wait for us
                    self._errors.write(redact(line).encode())
                    self._errors.flush()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, message: Any) -> None:
        """Write a message. Nothing happens if the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def messages(self, seconds: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects that the process writes, until it closes its stdout.

        Other lines are skipped. Raise TimeoutError if nothing comes for `seconds`.
        """
        stream, self._process.stdout = self._process.stdout, None
        if stream is not None:
            # A thread, because Windows cannot wait for a pipe with a time limit.
            threading.Thread(target=_read, args=[stream, self._lines], daemon=True).start()
        try:
            while (line := self._lines.get(timeout=seconds)) is not None:
                if line.startswith("{"):
                    yield json.loads(line)
        except queue.Empty:
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    def ask(self, request: Any, *, progress: ProgressListener = silent, seconds: float | None = None) -> Any:
        """Return the result of a process that uses `answer`; see `call` for what is raised."""
        self.send(request)
        for message in self.messages(seconds):
            if "progress" in message:
                progress(Progress(**message["progress"]))
            elif "error" in message:
                raise UserError(**message["error"])
            elif "result" in message:
                return message["result"]
        raise ChildDied(self.wait())

    def wait(self) -> Ended:
        """Wait until the process ends, and return how it did."""
        code = self._process.wait()
        if self._errors is None:
            return Ended(code)
        self._logger.join(_LOG_SECONDS)
        self._errors.seek(0)
        return Ended(code, err=self._errors.read().decode(errors="replace"))

    def close(self) -> None:
        """Kill the process if it has not ended."""
        if not self.has_ended:
            self._process.kill()
            self.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    """Pass on every line, then None. A process that was started by the child may keep the stream open for longer."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def call(
    module: str,
    request: Any,
    *,
    progress: ProgressListener = silent,
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run a module that uses `answer` in a new Python process, and return its result.

    Raise the UserError of the process, ChildDied if it ends without a result, and TimeoutError if it is silent for
    `seconds`.
    """
    with Child([sys.executable, "-m", module], environment=environment) as child:
        return child.ask(request, progress=progress, seconds=seconds)


def answer(act: Callable[[Any, ProgressListener], Any], *, is_repeated: bool = False) -> None:
    """Carry out the request of the parent process, and send it the progress and the result, or a UserError.

    What libraries print to stdout goes to stderr. Without a request, nothing is done. If `is_repeated`, one request
    after another is carried out, until the parent closes stdin or ends.
    """
    line = sys.stdin.readline()
    if not line:
        return
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(kind: str, content: Any) -> None:
        out.write(json.dumps({kind: content}) + "\n")
        out.flush()

    while line:
        try:
            send("result", act(json.loads(line), lambda progress: send("progress", asdict(progress))))
        except UserError as error:
            send("error", {"what": error.what, "where": error.where, "fix": error.fix})
            if not is_repeated:
                sys.exit(_EXIT_ERROR)
        line = sys.stdin.readline() if is_repeated else ""


def limit_resources(*, memory_bytes: int, processor_seconds: int) -> None:
    """Limit this process where the system can: address space and processor time; it writes no core dump."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (processor_seconds, processor_seconds + 1))
