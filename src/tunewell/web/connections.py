"""Limits on connections: time for a request to arrive, number per client, and memory of unfinished requests.

    connect ──> waiting for a head ──> waiting for the body ──> answering ──> waiting for the next head ...

Only waiting connections are closed: those that are too slow, and the oldest one if there are too many. A client that
sends its request at once waits for milliseconds, so slow clients cannot take its place.
"""

import asyncio
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunewell.core.units import count
from tunewell.web.errors import ApiError

SECONDS = {"head": 10, "body": 30, "rest": 2}
"""Time for each part of a request. Clients need milliseconds for a head; 30 s for the largest body are 140 kB/s.

`rest` is the rest of a body that was rejected. It is read and discarded, because most clients read the error only
after they have sent everything.
"""
MAX_REST_BYTES = 16 << 20
"""Maximum size of such a rest; above it the connection is closed and the client may not see the error."""
READ_SECONDS = 30
"""Time in which a client must read a part of an answer that fills the send buffers."""
MAX_HEAD_BYTES = 16 << 10
"""Maximum size of a head that arrives in parts, the default of h11."""
MAX_WAITING = 2048
"""Maximum number of waiting connections, but at most a quarter of the file handles of the process. A connection that
waits costs a file handle and some kilobytes; closing it costs more, because its client connects again."""
MAX_SHARE_PER_CLIENT = 0.75
"""Maximum share of one address, so that it cannot close the connections of every other client."""
MAX_WAITING_BYTES = 64 << 20
"""Maximum memory of all unfinished requests, 16 times the largest request."""
BACKLOG = 256
"""Connections accepted at once. With the waiting ones and the queue they stay below 1,024 file handles."""
_WANTED_FILES = 4 * MAX_WAITING
_DEFAULT_FILES = 1024
"""File handles of a process whose limit is unknown, as on Windows."""


Part = Literal["head", "body", "rest"]


def max_files() -> int:
    """Return the number of files and connections that this process may have open."""
    try:
        import resource  # Windows does not have it

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return _WANTED_FILES if soft == resource.RLIM_INFINITY else soft  # infinity is -1 on Linux
    except (ImportError, OSError):
        return _DEFAULT_FILES


def raise_max_files() -> None:
    """Raise the limit on open files of this process, as far as the system allows; for a process that only serves."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class WaitingConnections:
    """The connections without a complete request, oldest first, by client address."""

    def __init__(self) -> None:
        self._clients: dict[str, dict[LimitedProtocol, None]] = {}
        self._limit = min(MAX_WAITING, max_files() // 4)
        self._num_waiting = 0
        self._num_bytes = 0

    def add(self, connection: "LimitedProtocol") -> None:
        """Add the newest connection. If there are too many, close the oldest of the client with the most."""
        client = self._clients.setdefault(connection.address, {})
        client[connection] = None
        self._num_waiting += 1
        if len(client) > MAX_SHARE_PER_CLIENT * self._limit:
            next(iter(client)).give_way()
        elif self._num_waiting > self._limit:
            next(iter(max(self._clients.values(), key=len))).give_way()

    def discard(self, connection: "LimitedProtocol") -> None:
        """Remove a connection whose request is complete or that is closed."""
        client = self._clients.get(connection.address, {})
        if connection in client:
            del client[connection]
            self._num_waiting -= 1
            self._num_bytes -= connection.num_received
            if not client:
                del self._clients[connection.address]

    def add_bytes(self, num_bytes: int) -> None:
        """Count received bytes. If they are too many, close the connection that sent most of them."""
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_WAITING_BYTES:
            every = (connection for client in self._clients.values() for connection in client)
            max(every, key=lambda connection: connection.num_received).give_way()


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connection with deadlines, and with errors in OpenAI's format."""

    def __init__(self, waiting: WaitingConnections, **options: Any) -> None:
        super().__init__(**options)
        self.address = ""
        self.num_received = 0
        """Bytes received for the request that is not complete."""
        self._connections = waiting
        self._num_discarded = 0
        self._part: Part | None = None
        """The part of a request that the connection waits for; None while a request is answered."""
        self._deadline: asyncio.TimerHandle | None = None
        self._read_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._wait_for("head")

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        self._wait_for(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data, unless this connection was closed because memory is short."""
        if self._part == "rest":
            self._num_discarded += len(data)
            if self._num_discarded > MAX_REST_BYTES:
                self.transport.abort()
        elif self._part is not None:
            self.num_received += len(data)
            self._connections.add_bytes(len(data))
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        """Parse buffered data, and set the deadline of the next part."""
        super().handle_events()
        if not self.transport.is_closing():
            state = self.conn.their_state
            body: Part = "rest" if self.conn.our_state is h11.DONE else "body"
            self._wait_for("head" if state is h11.IDLE else body if state is h11.SEND_BODY else None)

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a request that was answered before it was complete."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._num_discarded = 0
            self._wait_for("rest")

    def send_400_response(self, msg: str) -> None:
        """Reject a request that h11 cannot parse."""
        if self.num_received > MAX_HEAD_BYTES:
            message = f"the head of the request is larger than {count(MAX_HEAD_BYTES)} bytes"
            self._refuse(ApiError(431, message, code="head_too_large"))
        else:
            self._refuse(ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http"))

    def give_way(self) -> None:
        """Close this connection, because there are too many."""
        message = "the server has too many unfinished requests and closed this one; send the request again"
        self._refuse(ApiError(503, message, code="too_many_connections"))

    def pause_writing(self) -> None:
        """Set the deadline of a client that does not read its answer."""
        super().pause_writing()
        self._read_deadline = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the deadline of a client that reads again."""
        if self._read_deadline is not None:
            self._read_deadline.cancel()
        super().resume_writing()

    def _wait_for(self, part: Part | None) -> None:
        if part == self._part:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        before, self._part = self._part, part
        if part is None:
            self._connections.discard(self)
            return
        late = f"the {part} of the request was not complete after {SECONDS[part]} seconds"
        error = ApiError(408, late, code="request_timeout")
        self._deadline = self.loop.call_later(SECONDS[part], self._refuse, error)
        if before is None:
            self.num_received = 0
            self._connections.add(self)

    def _refuse(self, error: ApiError) -> None:
        """Send an error and close the connection."""
        # A client that has sent nothing yet would take an error for the answer to its next request.
        can_answer = self.num_received > 0 and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        self._wait_for(None)
        if can_answer and not self.transport.is_closing():
            response = error.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            reason = HTTPStatus(response.status_code).phrase.encode()
            head = h11.Response(status_code=response.status_code, headers=headers, reason=reason)
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
