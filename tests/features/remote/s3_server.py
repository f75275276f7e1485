"""A real S3 server (SeaweedFS) on this machine, and a proxy before it that makes faults."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY, SECRET = "AKLOCALTESTKEY00", "local+test/SECRET00value"
_WAIT_SECONDS = 60


def free_ports(number: int) -> list[int]:
    """Return free ports whose successor by 10,000 is also free, as SeaweedFS uses both."""
    found: list[int] = []
    while len(found) < number:
        with socket.socket() as probe, socket.socket() as second:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] % 10_000 + 20_000
        try:
            with socket.socket() as probe, socket.socket() as second:
                probe.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10_000))
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run the server; yield its endpoint."""
    master, volume, filer, s3 = free_ports(4)
    # Other services of the server, off: their fixed ports would stop a second server on this machine.
    identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity | {"actions": actions}]}))
    command = [
        *(Path(sys.executable).with_name("weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}"),
        *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"),
        *(f"-s3.config={config}", "-master.volumeSizeLimitMB=256", "-volume.max=100"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_until_up(process, s3, folder / "server.log")
        yield f"http://127.0.0.1:{s3}"
    finally:
        process.kill()  # it would take 25 seconds to end by itself
        process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/")
            if connection.getresponse().status == 403:  # it answers, and it asks for keys
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the S3 server did not start: {log.read_text(errors='replace')[-2000:]}")


@dataclass
class Request:
    number: int
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Fault:
    """What the proxy does instead of answering: a status with a body, or the first bytes of the real answer."""

    status: int | None = None
    body: bytes = b""
    cut_after: int | None = None


@dataclass
class Proxy:
    """A proxy that forwards requests unchanged, so signatures stay valid, unless `decide` returns a fault."""

    endpoint: str
    decide: Callable[[Request], Fault | None] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    url: str = ""


@contextmanager
def faulty_proxy(endpoint: str) -> Iterator[Proxy]:
    """Run a proxy before the server."""
    proxy, lock = Proxy(endpoint), threading.Lock()
    upstream = urllib.parse.urlsplit(endpoint).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                request = Request(len(proxy.requests), self.command, self.path, dict(self.headers.items()))
                proxy.requests.append(request)
            fault = proxy.decide(request)
            if fault is not None and fault.status is not None:
                self.send_response(fault.status)
                self.send_header("Content-Length", str(len(fault.body)))
                self.end_headers()
                self.wfile.write(fault.body if self.command != "HEAD" else b"")
                return
            connection = http.client.HTTPConnection(upstream, timeout=60)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            if answer.getheader("Content-Length") is None:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if fault is not None and fault.cut_after is not None:
                self.wfile.write(data[: fault.cut_after])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
