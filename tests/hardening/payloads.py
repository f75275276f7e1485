"""Bytes described in JSON, so that an attack is one line.

"text"                                  UTF-8
["GGUF", {"u32": 3}, {"u64": 1}]        parts, one after the other
{"repeat": "a", "times": 1000}          also `hex`, `u32`, `u64`, `i32`, `str` (with its length, as in GGUF)
{"gzip": ...}  {"zstd": ...}            compressed
{"text": "x", "encoding": "utf-16"}
{"rows": 12}                            good rows
{"open": "[", "close": "]", "depth": 100}
{"json": value}                         JSON; {"safetensors": header, "data": ...}; {"zip": {name: ...}}
"""

import gzip
import io
import json
import struct
import zipfile
from typing import Any

import zstandard


def rows(number: int) -> bytes:
    """Return good rows as JSON lines."""
    lines = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}."} for n in range(number)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def payload(spec: Any) -> bytes:
    """Return the bytes of a description."""
    if isinstance(spec, str):
        return spec.encode("utf-8", "surrogatepass")
    if isinstance(spec, list):
        return b"".join(map(payload, spec))
    kind = next(iter(spec))
    value = spec[kind]
    makers: dict[str, Any] = {
        "repeat": lambda: payload(value) * spec["times"],
        "hex": lambda: bytes.fromhex(value),
        "u8": lambda: struct.pack("<B", value),
        "u32": lambda: struct.pack("<I", value),
        "i32": lambda: struct.pack("<i", value),
        "u64": lambda: struct.pack("<Q", value),
        "str": lambda: struct.pack("<Q", len(payload(value))) + payload(value),
        "gzip": lambda: gzip.compress(payload(value), 1),
        "zstd": lambda: zstandard.compress(payload(value)),
        "cut": lambda: payload(value)[: spec["to"]],
        "text": lambda: value.encode(spec["encoding"]),
        "rows": lambda: rows(value),
        "open": lambda: (value * spec["depth"] + spec.get("middle", "") + spec["close"] * spec["depth"]).encode(),
        "json": lambda: json.dumps(value).encode(),
        "safetensors": lambda: _safetensors(value, spec),
        "zip": lambda: _zip(value),
        "length": lambda: str(len(payload(value))).encode() + b"\r\n\r\n" + payload(value),
    }
    return makers[kind]()


def _safetensors(header: Any, spec: dict[str, Any]) -> bytes:
    text = payload(header) if spec.get("raw") else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload(spec.get("data", ""))


def _zip(members: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, spec in members.items():
            archive.writestr(name, payload(spec))
    return file.getvalue()
