"""What attacks are aimed at: commands, readers, a server, and clients of a hostile server."""

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from exports import exported, rehash, write_adapter, write_base
from payloads import payload, rows
from serving import Letters, chat, send, served
from tiny import write_tiny_model
from tiny_embedder import write_tiny_embedder

from corpora import write_sums
from forked import _fork, _run, run_command
from tunewell.core.errors import UserError
from tunewell.core.remote_api import RemoteApi  # noqa: F401  imported before the forks
from tunewell.features.serve import connections
from tunewell.features.serve.server import AccessRules
from tunewell.model_files.gguf import read_header

TOKEN = "a-token-that-nobody-guesses"
PAGE = "http://localhost:3000"
_PRELOADED = (
    "docx",
    "pypdf",
    "selectolax.lexbor",
    "tantivy",
    "transformers.models.bert",
    "tunewell.features.retrieval.indexing",
)
_TRAIN = ["train.max_steps=4", "train.batch_documents=4", "train.threads=1", "train.learning_rate=5e-3"]
_TRAIN += ["evaluate.every_steps=2", "evaluate.samples=0", "checkpoints.every_steps=2", "data.held_out=0.2"]
_TRAIN += ["verdict.after_training=false", "device=cpu"]


@dataclass
class Outcome:
    """What an attack led to."""

    code: int
    text: str
    seconds: float = 0.0
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)


class Scenes:
    """The targets of attacks, each made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ["TUNEWELL_CACHE"] = str(folder / "cache")
        torch.set_num_threads(1)
        self.model = write_tiny_model(folder / "model")
        self.embedder = write_tiny_embedder(folder / "embedder")
        for name in _PRELOADED:  # imported once, not in every child
            importlib.import_module(name)
        self._stack = ExitStack()
        self._servers: dict[str, str] = {}

    def __enter__(self) -> "Scenes":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, case: dict[str, Any], work: Path) -> Outcome:
        """Set the scene of a case and attack."""
        if scene := case.get("scene"):
            shutil.copytree(getattr(self, scene), work, dirs_exist_ok=True, symlinks=True)
        for place, files in ((work, case.get("files", {})), (work.parent, case.get("beside", {}))):
            for name, spec in files.items():
                self._write(place / name, spec)
        for change in case.get("changes", []):
            _change(work, change)
        started = time.monotonic()
        outcome: Outcome = getattr(self, f"_{case['do']}")(case, work)
        outcome.seconds = outcome.seconds or time.monotonic() - started
        return outcome

    def _write(self, path: Path, spec: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(spec, dict) and "link" in spec:
            path.symlink_to(spec["link"])
        elif isinstance(spec, dict) and "fifo" in spec:
            os.mkfifo(path)
        elif isinstance(spec, dict) and "model" in spec:  # a copy of the tiny model with another file in it
            shutil.copytree(self.model, path, dirs_exist_ok=True)
        else:
            path.write_bytes(payload(spec).replace(b"{model}", str(self.model).encode()))

    # Commands, in forked children.

    def _command(self, case: dict[str, Any], work: Path) -> Outcome:
        arguments = tuple(payload(part).decode().replace("{model}", str(self.model)) for part in case["args"])
        arguments = tuple(part.replace("{embedder}", str(self.embedder)) for part in arguments)
        out = self.folder / "printed"

        def act() -> None:
            os.chdir(work)
            os.environ.update({"CI": "1", **case.get("env", {})})
            handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with open(os.devnull) as nothing:  # noqa: PTH123
                os.dup2(nothing.fileno(), 0)
            _run(arguments, handle, handle)

        return _watched(act, out, limit=case.get("seconds", 60) + 10)

    def _prepare(self, case: dict[str, Any], work: Path) -> Outcome:
        data = case.get("data", [name for name in case.get("files", {}) if not name.endswith((".yaml", ".jinja"))])
        arguments = ["prepare", *(part for name in data for part in ("--data", name)), *case.get("args", [])]
        if not (work / "tunewell.yaml").exists():
            arguments += ["--model", case.get("model", "{model}")]
        return self._command(case | {"args": arguments}, work)

    # Readers.

    def _gguf(self, case: dict[str, Any], work: Path) -> Outcome:
        return self._call(lambda: read_header(work / "model.gguf"), case)

    def _remote(self, case: dict[str, Any], work: Path) -> Outcome:
        """Let a hostile server answer a client of ours."""
        from tunewell.features.retrieval.embedders.server import EmbeddingServer
        from tunewell.inference.chat import ChatOptions
        from tunewell.inference.remote import RemoteChat

        with _hostile_server(case) as url:
            os.environ["TUNEWELL_MODEL_KEY"] = os.environ["TUNEWELL_EMBEDDER_KEY"] = "a-secret-key"
            if case["client"] == "chat":
                return self._call(lambda: list(RemoteChat(f"{url}#m", ChatOptions()).reply("hello")), case)
            return self._call(lambda: EmbeddingServer(f"{url}#m").embed(["a", "b"]), case)

    def _call(self, act: Callable[[], Any], case: dict[str, Any]) -> Outcome:
        """Call a function in a child that exits with 2 for a UserError, as a command does."""
        out = self.folder / "printed"

        def in_child() -> None:
            code = 1
            try:
                result = repr(act())[:500]
                code = 0
            except UserError as error:
                result, code = str(error), 2
            except Exception as error:  # noqa: BLE001
                result = f"Traceback (most recent call last): {type(error).__name__}: {error}"
            out.write_text(result, encoding="utf-8", errors="backslashreplace")
            os._exit(code)

        return _watched(in_child, out, limit=case.get("seconds", 60) + 10)

    # The server.

    def _http(self, case: dict[str, Any], work: Path) -> Outcome:
        """Send bytes over a socket; afterwards an honest client must be answered."""
        url = self._server(case.get("server", "open"))
        host, port = urlsplit(url).netloc.split(":")
        with ExitStack() as stack:
            held = [
                stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
                for _ in range(case.get("times", 1))
            ]
            for connection in held:
                with contextlib.suppress(OSError):
                    connection.sendall(payload(case["send"]))
            answer = b"" if case.get("silent") else _received(held[-1], case.get("wait", 15))
            problems = self._honest(url, case)
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 0
        shown = "\n".join([head.decode("latin-1"), body.decode("utf-8", "replace")]).replace("\r", "")
        return Outcome(status, shown, problems=problems)

    def _honest(self, url: str, case: dict[str, Any]) -> list[str]:
        headers = {"authorization": f"Bearer {TOKEN}"} if case.get("server", "open") != "open" else {}
        started = time.monotonic()
        try:
            status = send(url, chat(max_tokens=1), **headers)[0]
        except OSError as error:
            return [f"an honest client gets {error}"]
        seconds = time.monotonic() - started
        problems = [f"an honest client gets {status}"] if status != 200 else []
        return problems + ([f"an honest client waits {seconds:.1f} s"] if seconds > 3 else [])

    def _server(self, kind: str) -> str:
        if kind not in self._servers:
            rules = {
                "open": AccessRules(),
                "token": AccessRules(token=TOKEN),
                "page": AccessRules(token=TOKEN, origins=[PAGE]),
            }
            connections.SECONDS.update(head=2, body=3, rest=1)  # so that an attack takes seconds
            self._servers[kind] = self._stack.enter_context(served(_Ready(), rules[kind]))
        return self._servers[kind]

    # Finished work to damage: made once, copied for each attack.

    @cached_property
    def project(self) -> Path:
        """A folder with rows, a config, a corpus and a run of four steps."""
        folder = self.folder / "project"
        folder.mkdir()
        write_sums(folder, self.model, model="preset:tiny-1m", num_rows=40)
        done = run_command("train", *(part for own in _TRAIN for part in ("--set", own)), cwd=folder)
        assert done.returncode == 0, done.stderr
        return folder

    def _resume(self, case: dict[str, Any], work: Path) -> Outcome:
        sets = [*_TRAIN, "train.max_steps=6", *case.get("sets", [])]
        arguments = ["train", "--resume", "--no-supervisor", "--allow-change", "num_steps"]
        arguments += [part for own in sets for part in ("--set", own)]
        return self._command(case | {"args": arguments}, work)

    @cached_property
    def export(self) -> Path:
        """A proven export of an adapter, merged weights and a GGUF file."""
        adapter = write_adapter(self.folder / "adapter", write_base(self.folder / "base"))
        done = exported(adapter, self.folder / "export", to=("adapter", "merged"), precision="fp32")
        assert done.parity.is_ok
        return self.folder / "export"

    def _verify(self, case: dict[str, Any], work: Path) -> Outcome:
        if only := case.get("rehash"):
            rehash(work, only=only)
        return self._command(case | {"args": ["verify", ".", *case.get("args", [])]}, work)

    @cached_property
    def index(self) -> Path:
        """An index of two pages."""
        folder = self.folder / "indexed"
        (folder / "docs").mkdir(parents=True)
        (folder / "docs" / "fees.md").write_text("# Fees\n\nThe fee is 12 pounds a term.\n")
        (folder / "docs" / "hours.md").write_text("# Hours\n\nThe library opens at nine.\n")
        done = run_command("index", "docs", "--embedder", str(self.embedder), cwd=folder)
        assert done.returncode == 0, done.stderr
        return folder


class _Ready(Letters):
    """A model that answers at once."""

    context_length = 512

    def __init__(self) -> None:
        super().__init__()
        self.may_write.release(1_000_000)


def _watched(act: Callable[[], None], out: Path, *, limit: float) -> Outcome:
    """Run something in a child, end it if it takes too long, and return what it printed."""
    out.unlink(missing_ok=True)
    pid, started = _fork(act), time.monotonic()
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - started > limit:
            os.kill(pid, signal.SIGKILL)
            os.wait4(pid, 0)
            return Outcome(-9, f"no end after {limit:.0f} s", time.monotonic() - started, 0, ["it does not end"])
        time.sleep(0.005)
    text = out.read_text(encoding="utf-8", errors="replace") if out.exists() else ""
    return Outcome(os.waitstatus_to_exitcode(status), text, time.monotonic() - started, usage.ru_maxrss * 1024)


def _received(connection: socket.socket, seconds: float) -> bytes:
    """Read an answer until the connection ends, the answer is complete, or some seconds have passed."""
    data, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            part = connection.recv(65_536)
        except OSError:
            break
        data += part
        head, _, body = data.partition(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
        if not part or (length is not None and len(body) >= int(length.split(b":")[1])):
            break
    return data


def _change(work: Path, change: dict[str, Any]) -> None:
    """Damage a file: flip a bit, cut or delete it, make it a link or a pipe, replace text, or set a JSON value."""
    paths = sorted(path for path in work.glob(change["file"]) if path.is_file() or "delete" in change)
    assert paths, f"{change['file']} is not there"
    path = paths[-1]
    if "delete" in change:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif "link" in change or "fifo" in change:
        path.unlink()
        path.symlink_to(change["link"]) if "link" in change else os.mkfifo(path)
    elif "flip" in change:
        data = bytearray(path.read_bytes())
        at = random.Random(change["flip"]).randrange(len(data))
        data[at] ^= 1
        path.write_bytes(data)
    elif "cut" in change:
        path.write_bytes(path.read_bytes()[: change["cut"]])
    elif "replace" in change:
        old, new = change["replace"]
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{old} is not in {path.name}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
    elif "append" in change:
        path.write_bytes(path.read_bytes() + payload(change["append"]))
    else:
        tree = json.loads(path.read_text(encoding="utf-8"))
        *steps, last = change["at"]
        inner = tree
        for step in steps:
            inner = inner[step]
        if change.get("remove"):
            del inner[last]
        else:
            inner[last] = change["value"]
        path.write_text(json.dumps(tree), encoding="utf-8")


@contextlib.contextmanager
def _hostile_server(case: dict[str, Any]) -> Any:
    """Answer every connection with the bytes of a case, as often as it says."""
    listener = socket.create_server(("127.0.0.1", 0))
    is_over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 20)
            for _ in range(case.get("times", 1)):
                connection.sendall(payload(case["send"]))
                if is_over.wait(case.get("pause", 0)):
                    return
            # A server that closes before it has read the whole request resets the connection.
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 20):
                pass

    def serve() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                threading.Thread(target=answer, args=[listener.accept()[0]], daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        is_over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


__all__ = ["Outcome", "Scenes", "rows"]
