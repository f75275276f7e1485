"""Identities of cloud machines are used only if the config asks for them, and web addresses never lead to them."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tunewell.config.rules import Storage
from tunewell.core.errors import UserError
from tunewell.data.sources.base import SourceOptions, find_files
from tunewell.features.remote import access, redirects
from tunewell.features.remote.access import find_access
from tunewell.features.remote.address import parse_address
from tunewell.features.remote.store import RemoteStore

_ROLE = b'{"AccessKeyId":"AK","SecretAccessKey":"S","Token":"T","Expiration":"2099-01-01T00:00:00Z","Code":"Success"}'
_ROWS = b'{"text": "a row"}\n'


@pytest.fixture
def loopback(monkeypatch, tmp_path):
    """A server that is storage, metadata service and web site in one; `requests` are the paths it was asked for."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            requests.append(self.path)
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", f"http://{self.path.removeprefix('/to/')}")
                self.end_headers()
                return
            body = _ROLE if self.path.endswith("/my-role") else b"my-role" if "meta-data" in self.path else b"token"
            body = _ROWS if self.path.endswith(".jsonl") else body
            is_known = self.path.startswith(("/latest", "/rows"))
            self.send_response(200 if is_known else 403)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"v1"')
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_PUT = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for scheme in access._IDENTITIES.values():
        for name in " ".join(scheme).split():
            monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_METADATA_ENDPOINT", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.setenv(name, url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{url}/msi")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(access.RETRY_CONFIG, "max_retries", 0)
    monkeypatch.setitem(access.CLIENT_OPTIONS, "allow_http", True)
    yield url, requests
    server.shutdown()
    server.server_close()


def _is_metadata(path: str) -> bool:
    return path.startswith(("/latest", "/msi"))


@pytest.mark.parametrize("url", ["s3://bucket-1/rows.jsonl", "az://container/rows.jsonl"])
def test_the_metadata_service_is_asked_only_with_the_setting(url, loopback):
    """The role of a company's machine was used for an address in a stranger's config."""
    _, requests = loopback
    address = parse_address(url)
    with pytest.raises(UserError, match="no access keys were found") as caught:
        RemoteStore(address, Storage()).find(address)
    assert "KEY" in (caught.value.fix or "") and "storage.role: instance" in (caught.value.fix or "")
    assert requests and not any(map(_is_metadata, requests))
    with pytest.raises(UserError, match="denied"):
        RemoteStore(address, Storage(role="instance")).find(address)
    assert any(map(_is_metadata, requests))


@pytest.mark.parametrize(
    ("url", "variables", "is_signed"),
    [
        ("s3://bucket-1/x", {}, False),
        ("gs://bucket-1/x", {}, False),
        ("az://bucket-1/x", {}, False),
        ("s3://bucket-1/x", {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/x"}, True),
        ("s3://bucket-1/x", {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "arn"}, True),
        # With half of a pair, the storage library would go on to the metadata service.
        ("s3://bucket-1/x", {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, False),
        ("s3://bucket-1/x", {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1/x"}, False),
        ("gs://bucket-1/x", {"GOOGLE_APPLICATION_CREDENTIALS": "/key.json"}, True),
        ("az://bucket-1/x", {"AZURE_CLIENT_ID": "id", "AZURE_TENANT_ID": "t"}, False),
        ("az://bucket-1/x", {"AZURE_STORAGE_ACCOUNT_KEY": "k", "AZURE_CREDENTIAL_TYPE": "managed_identity"}, False),
        ("az://bucket-1/x", {"AZURE_USE_AZURE_CLI": "false"}, False),
    ],
)
def test_requests_are_not_signed_unless_an_identity_is_complete(url, variables, is_signed, tmp_path, monkeypatch):
    """The storage library asks the metadata service if no other credentials are complete, unless it must not sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    found = find_access(parse_address(url), Storage(), variables)
    assert ("skip_signature" not in found.options) == is_signed


def test_a_role_that_the_environment_forbids_is_an_error(tmp_path, monkeypatch):
    """Tests and CI set AWS_EC2_METADATA_DISABLED; no config may undo it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="AWS_EC2_METADATA_DISABLED"):
        find_access(parse_address("s3://b-1/x"), Storage(role="instance"), {"AWS_EC2_METADATA_DISABLED": "true"})


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "2852039166", "[::ffff:169.254.169.254]", "[fe80::1]", "[fd00:ec2::254]"]
)
@pytest.mark.parametrize("is_redirect", [True, False])
def test_no_web_address_leads_to_a_metadata_service(host, is_redirect, loopback, monkeypatch):
    """A web server answered with a redirect to the metadata service, which was followed."""
    url, requests = loopback
    real = socket.socket.connect
    asked: list[object] = []

    def connect(self, target):
        asked.append(target)
        assert target[0] == "127.0.0.1"
        return real(self, target)

    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(UserError, match="metadata service"):
        find_files(f"{url}/to/{host}/x.jsonl" if is_redirect else f"http://{host}/x.jsonl", **_OPTIONS)
    assert len(requests) == len(asked) == int(is_redirect)


_OPTIONS = {"base": Path(), "options": SourceOptions(Storage())}


def test_the_manifest_names_the_host_that_a_web_address_redirects_to(loopback):
    """The rows came from another host than the one in the manifest."""
    url, _ = loopback
    target = f"localhost:{url.rpartition(':')[2]}"
    (file,) = find_files(f"{url}/to/{target}/rows.jsonl", **_OPTIONS)
    assert file.source.version() == f"v1 from {target}"
    with file.open() as stream:
        assert stream.read() == _ROWS
    (plain,) = find_files(f"{url}/rows.jsonl", **_OPTIONS)
    assert plain.source.version() == "v1"


def test_a_public_server_cannot_redirect_into_a_private_network(monkeypatch):
    """A public address in a config would otherwise read a server that only this machine can reach."""
    addresses = {"public.example": "93.184.216.34", "inside.example": "10.0.0.7"}
    monkeypatch.setattr(redirects.socket, "getaddrinfo", lambda host, _: [(0, 0, 0, "", (addresses[host], 0))])
    hops = {"http://public.example/x": "http://inside.example/x"}
    monkeypatch.setattr(redirects, "_redirect", lambda _opener, url, _method: hops.get(url))
    with pytest.raises(UserError, match="private network"):
        redirects.final_host("http://public.example/x")
    assert redirects.final_host("http://inside.example/x") == "inside.example"
