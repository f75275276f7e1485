"""Write to a screen that may go away."""

from collections.abc import Callable
from typing import Any, TextIO


class LastingStream:
    """A stream that may go away, as stderr does with its terminal or its reader; a run goes on without it."""

    def __init__(self, stream: TextIO, *, is_gone: bool = False) -> None:
        self._stream = stream
        self._is_gone = is_gone

    def write(self, text: str) -> int:
        """Write, or forget it; what the stream cannot encode is spelled out."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        writable = text.encode(encoding, "backslashreplace").decode(encoding)
        self._try(lambda: self._stream.write(writable))
        return len(text)

    def flush(self) -> None:
        """Flush, or forget it."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        if self._is_gone:
            return
        try:
            action()
        except (OSError, ValueError):  # ValueError: the file was closed
            self._is_gone = True
