"""Every parser of foreign bytes as a function of bytes. Only the errors named here may leave it."""

import asyncio
import io
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), *(str(TESTS / name) for name in ("data", "hardening", "integrations", "retrieval"))]

from tunewell.core.errors import UserError  # noqa: E402


@dataclass(frozen=True)
class _Memory:
    """A file of rows in memory."""

    name: str
    data: bytes

    def open(self) -> BinaryIO:
        return io.BytesIO(self.data)

    def size(self) -> int:
        return len(self.data)

    def stamp(self) -> str:
        return ""


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tunewell-fuzz-"))
    os.environ["TUNEWELL_CACHE"] = str(folder / "cache")
    return folder


def _rows(data: bytes, name: str) -> None:
    from tunewell.data.rows.conversation import Rejected
    from tunewell.data.rows.formats import Converter
    from tunewell.data.sources.base import SourceFile, detect_format
    from tunewell.data.sources.blocks import ReadOptions, parse_item, read_blocks

    file_format, compression = detect_format(name)
    file = SourceFile(_Memory(name, data), name, str(file_format), compression)
    options = ReadOptions(max_row_bytes=1 << 20, max_nesting=64)
    with suppress(UserError):
        for block in read_blocks(file, options):
            converter = Converter()
            for item in block.items:
                with suppress(Rejected):
                    converter.convert(parse_item(item, options))


def rows_text(data: bytes) -> None:
    """Read rows of JSON, CSV or text, plain or compressed; the first byte chooses."""
    names = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.md", "a.jsonl.gz", "a.jsonl.zst"]
    if data:
        _rows(data[1:], names[data[0] % len(names)])


def rows_binary(data: bytes) -> None:
    """Read rows of Parquet, Arrow, Excel or a .zip file; the first byte chooses."""
    names = ["a.parquet", "a.arrow", "a.zip", "a.xlsx"]
    if data:
        _rows(data[1:], names[data[0] % len(names)])


def config(data: bytes) -> None:
    """Load a config."""
    from tunewell.config.load import load_config

    path = _folder() / "tunewell.yaml"
    path.write_bytes(data)
    with suppress(UserError):
        load_config(path)


def migration(data: bytes) -> None:
    """Migrate a config, a script, a notebook, a command line or a job; the first byte chooses. Nothing may be run."""
    from tunewell.features.migrate.workflow import migrate

    names = ["a.yaml", "a.py", "a.json", "a.ipynb", "a.sh", "a.txt"]
    folder = _folder() / "migrate"
    folder.mkdir(exist_ok=True)
    path = folder / (names[data[0] % len(names)] if data else names[0])
    path.write_bytes(data[1:])
    with suppress(UserError):
        migrate([path], out=folder / "tunewell.yaml", is_overwriting=True)
    assert {one.name for one in folder.iterdir()} <= {*names, "tunewell.yaml"}


def tokenizer(data: bytes) -> None:
    """Load a `tokenizer.json` and encode a text. Its regular expressions are tried in a child, which is left out."""
    from tokenizers import Tokenizer

    from tunewell.data.tokenizers import hub
    from tunewell.data.tokenizers.load import load_tokenizer

    folder = _folder() / "tokenizer"
    if not folder.exists():
        from tiny import write_tiny_model

        write_tiny_model(folder)
    (folder / "tokenizer.json").write_bytes(data)
    with suppress(UserError), patch.object(hub, "_require_safe", lambda backend, files: None):
        backend = load_tokenizer(folder).backend
        if isinstance(backend, Tokenizer) and b"Regex" not in data and b"Replace" not in data:
            backend.encode("Hello, wörld! 12")


def sentencepiece(data: bytes) -> None:
    """Load a SentencePiece model."""
    from tunewell.data.tokenizers.sentencepiece import build_tokenizer, read_model

    path = _folder() / "tokenizer.model"
    path.write_bytes(data)
    with suppress(UserError):
        build_tokenizer(read_model(path))


def template(data: bytes) -> None:
    """Render a chat template."""
    from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    with suppress(UserError, TemplateFailed):
        ChatTemplate(data.decode("utf-8", "replace"), special_tokens={"eos_token": "</s>"}).render(
            messages, None, add_generation_prompt=True
        )


def gguf(data: bytes) -> None:
    """Read the header of a GGUF file, and the tokenizer in it."""
    from tunewell.data.tokenizers.gguf import load_gguf
    from tunewell.model_files.gguf import read_header

    path = _folder() / "model.gguf"
    path.write_bytes(data)
    with suppress(UserError):
        read_header(path)
        load_gguf(path)


def safetensors(data: bytes) -> None:
    """Check the header of a safetensors file, and read it with the library."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    from tunewell.model_files import shape
    from tunewell.model_files.checks import weight_problem

    path = _folder() / "model.safetensors"
    path.write_bytes(data)
    problem = weight_problem(path)
    shape._safetensors_shapes([path])
    try:
        load(data)
    except (SafetensorError, ValueError, TypeError, KeyError):
        return
    assert problem is None, f"a good file is called damaged: {problem}"


def adapter(data: bytes) -> None:
    """Resolve an adapter folder with this `adapter_config.json`."""
    from tunewell.runs.resolve import resolve_model

    folder = _folder() / "adapter"
    if not folder.exists():
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (folder / "adapter_config.json").write_bytes(data)
    with suppress(UserError):
        resolve_model(str(folder))


def log(data: bytes) -> None:
    """Diagnose a log, a trainer state, a config or a TensorBoard file; the first byte chooses the name."""
    from tunewell.features.diagnose.diagnose import diagnose_paths, diagnose_text

    names = ["", "trainer_state.json", "a.ipynb", "config.yaml", "events.out.tfevents.1.x", "train.log"]
    if not data:
        return
    name = names[data[0] % len(names)]
    with suppress(UserError):
        if not name:
            diagnose_text(data[1:])
            return
        path = _folder() / name
        path.write_bytes(data[1:])
        diagnose_paths([path])


def document(data: bytes) -> None:
    """Read a document of an index; the first byte chooses its format."""
    from tunewell.features.retrieval.documents import FoundFile, parse
    from tunewell.features.retrieval.readers.blocks import Unreadable

    names = ["a.md", "a.txt", "a.html", "a.csv", "a.jsonl", "a.pdf", "a.docx"]
    if data:
        name = names[data[0] % len(names)]
        with suppress(Unreadable, UserError):
            parse(FoundFile(Path(name), name), data[1:], "")


def request(data: bytes) -> None:
    """Parse the body of a chat request."""
    from tunewell.features.serve.requests import read_request
    from tunewell.web.errors import ApiError

    with suppress(ApiError):
        read_request(data, max_messages=64, max_chars=10_000).conversation()


def http(data: bytes) -> None:
    """Feed a connection of the server with bytes, in two parts, and end it."""
    loop, protocol, transport = _connection()
    protocol.connection_made(transport)
    half = len(data) // 2
    for part in (data[:half], data[half:]):
        if part and not transport.is_closed:
            protocol.data_received(part)
            loop.run_until_complete(_turns())
    protocol.connection_lost(None)
    loop.run_until_complete(_turns())


async def _turns() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


class _Transport:
    is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@cache
def _server() -> tuple[asyncio.AbstractEventLoop, Any, Any]:
    import uvicorn
    from serving import Letters
    from uvicorn.server import ServerState

    from tunewell.features.serve.server import AccessRules, build_app
    from tunewell.web.connections import WaitingConnections

    model = Letters()
    app = build_app(model, access=AccessRules())
    settings = uvicorn.Config(app, log_config=None, log_level="critical", lifespan="off", ws="none", http="h11")
    settings.load()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(_raise)
    return loop, settings, (ServerState(), WaitingConnections())


def _raise(_: Any, context: dict[str, Any]) -> None:
    raise context.get("exception") or RuntimeError(context["message"])


def _connection() -> tuple[asyncio.AbstractEventLoop, Any, _Transport]:
    from tunewell.web.connections import LimitedProtocol

    loop, settings, (state, waiting) = _server()
    protocol = LimitedProtocol(waiting, config=settings, server_state=state, app_state={}, _loop=loop)
    return loop, protocol, _Transport()


PARSERS: dict[str, Callable[[bytes], None]] = {
    parser.__name__: parser
    for parser in [
        *(rows_text, rows_binary, config, migration, tokenizer, sentencepiece, template, gguf, safetensors),
        *(adapter, log, document, request, http),
    ]
}


def seeds(name: str) -> Iterator[bytes]:
    """Yield good inputs of a parser, from which others are made."""
    from payloads import payload, rows

    sample = rows(3)
    chosen: dict[str, Callable[[], list[bytes]]] = {
        "rows_text": lambda: [
            b"\x00" + sample,
            b"\x01" + json.dumps([{"instruction": "a", "output": "b"}]).encode(),
            b"\x02question,answer\na,b\n",
            b"\x03question\tanswer\na\tb\n",
            b"\x04A paragraph.\n\nAnother.\n",
            b"\x05# Title\n\nText.\n",
            b"\x06" + payload({"gzip": {"rows": 3}}),
            b"\x07" + payload({"zstd": {"rows": 3}}),
            b'\x00{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
            b'\x00{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n',
        ],
        "rows_binary": lambda: [
            b"\x00" + _parquet(),
            b"\x01" + _arrow(),
            b"\x02" + payload({"zip": {"a.jsonl": {"rows": 2}}}),
        ],
        "config": lambda: [
            b"model: m\ndata:\n  sources: rows.jsonl\ntrain: {epochs: 2, learning_rate: 1e-4}\nseed: 1\n"
        ],
        "migration": lambda: [
            b"\x00base_model: m\ndatasets:\n  - path: a.jsonl\n    type: alpaca\nmicro_batch_size: 2\nadapter: lora\n",
            b"\x00model_name_or_path: m\nstage: sft\ndataset: a,b\ntemplate: qwen\ncutoff_len: 512\n",
            b"\x01N = 2\nargs = SFTConfig(learning_rate=1e-4 * N, output_dir=f'o{N}', **dict(seed=1))\n"
            b"data = load_dataset('a/b', split='train[:9]').map(f)\nt = SFTTrainer(model='m', train_dataset=data)\n",
            b'\x02{"training_file": "f", "model": "m", "hyperparameters": {"n_epochs": 2}} // end',
            b'\x03{"cells": [{"cell_type": "code", "source": ["!pip\\n", "c = LoraConfig(r=8)"]}]}',
            b"\x04torchrun --nproc_per_node 2 sft.py --lr 1e-4 \\\n  --output_dir $OUT --packing\n",
        ],
        "tokenizer": lambda: [_tiny_tokenizer()],
        "sentencepiece": lambda: [_sentencepiece()],
        "template": lambda: [
            b"{% for m in messages %}<|{{ m['role'] }}|>{{ m.content|trim }}{{ eos_token }}{% endfor %}",
            b"{% if messages[0]['role'] == 'system' %}{% set s = messages[0] %}{% endif %}{{ raise_exception('x') }}",
        ],
        "gguf": lambda: [_gguf()],
        "safetensors": lambda: [
            payload({"safetensors": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "data": "01234567"})
        ],
        "adapter": lambda: [
            b'{"peft_type": "LORA", "base_model_name_or_path": "m", "r": 8, "target_modules": ["q_proj"]}'
        ],
        "log": lambda: [
            b"\x00{'loss': 2.3, 'grad_norm': 1.0, 'learning_rate': 0.1, 'epoch': 0.1}\nRuntimeError: CUDA error",
            b'\x01{"log_history": [{"loss": 1.5, "step": 1}, {"eval_loss": 2, "step": 2}]}',
            b'\x02{"cells": [{"cell_type": "code", "outputs": [{"output_type": "stream", "text": ["loss"]}]}]}',
            b"\x03learning_rate: 1e-4\nper_device_train_batch_size: 4\n",
            b'\x05step 1 loss 2.5\nTraceback (most recent call last):\n  File "a.py", line 1\nValueError: x\n',
        ],
        "document": lambda: [
            b"\x00---\ntitle: a\n---\n# Head\n\ntext\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
            b"\x02<html><title>t</title><h1>h</h1><table><tr><td>a</td></tr></table><p>text</html>",
            b"\x03title,text\na,b\n",
            b'\x04{"title": "a", "text": "b"}\n',
            b"\x05%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[]/Count 0>>endobj\n"
            b"trailer<</Root 1 0 R>>\n%%EOF",
        ],
        "request": lambda: [
            b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stop": ["a"]}',
            b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 1}',
        ],
        "http": lambda: [
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 2\r\n\r\n{}",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n\r\n",
        ],
    }
    yield from chosen[name]()


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table({"question": ["a", "b"], "answer": ["c", "d"]}), file)
    return file.getvalue()


def _arrow() -> bytes:
    import pyarrow as pa

    file = io.BytesIO()
    table = pa.table({"question": ["a"], "answer": ["c"]})
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def _tiny_tokenizer() -> bytes:
    from tiny import write_tiny_model

    folder = Path(tempfile.mkdtemp())
    data = json.loads((write_tiny_model(folder / "m") / "tokenizer.json").read_bytes())
    shutil.rmtree(folder)
    data["model"]["merges"] = data["model"]["merges"][:6]
    kept = {token: number for token, number in data["model"]["vocab"].items() if number < 280}
    data["model"]["vocab"] = kept
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def _sentencepiece() -> bytes:
    def piece(text: bytes, kind: int) -> bytes:
        return b"\x0a" + bytes([len(text) + 4, 0x0A, len(text)]) + text + bytes([0x18, kind])

    return piece(b"<unk>", 2) + piece(b"<s>", 3) + piece("▁a".encode(), 1) + b"\x12\x02\x18\x02"


def _gguf() -> bytes:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    pairs = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"tokenizer.ggml.model") + struct.pack("<I", 8) + text(b"llama"),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + text(b"<unk>") + text(b"<s>") + text(b"a"),
        text(b"tokenizer.ggml.scores") + struct.pack("<IIQ3f", 9, 6, 3, 0.0, 0.0, -1.0),
        text(b"tokenizer.ggml.token_type") + struct.pack("<IIQ3i", 9, 5, 3, 2, 3, 1),
    ]
    table = text(b"token_embd.weight") + struct.pack("<I2QIQ", 2, 8, 3, 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + table + bytes(256)
