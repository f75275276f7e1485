"""Check where a web address leads before its file is requested: never to a metadata service, which gives out keys."""

import http.client
import ipaddress
import socket
import urllib.error
import urllib.request
from urllib.parse import urljoin, urlsplit

from tunewell.core.errors import UserError
from tunewell.core.remote_api import NoRedirects

_MAX_REDIRECTS = 10
_SECONDS = 30
_METADATA = frozenset({"100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"})
"""Metadata services outside of the link-local networks: Alibaba, Azure, Oracle, Amazon and Google over IPv6."""


def final_host(url: str) -> str:
    """Return the host that a web address leads to; raise UserError for a metadata service.

    A public host may not redirect to a private network. Errors of the connection are left to the download.
    """
    opener, is_public = urllib.request.build_opener(NoRedirects), False
    for _ in range(_MAX_REDIRECTS):
        is_public |= _require_allowed(url, is_after_public=is_public)
        target = _redirect(opener, url, "HEAD")
        if target is None:
            break
        url = urljoin(url, target)
        if urlsplit(url).scheme not in ("http", "https"):
            raise UserError("the server redirects to an address that is not on the web", where=url[:200])
    return urlsplit(url).netloc.rpartition("@")[2]


def _redirect(opener: urllib.request.OpenerDirector, url: str, method: str) -> str | None:
    try:
        opener.open(urllib.request.Request(url, method=method), timeout=_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
        if 300 <= error.code < 400:
            return error.headers.get("Location")
        return _redirect(opener, url, "GET") if method == "HEAD" else None  # some servers refuse HEAD
    except (OSError, ValueError, http.client.HTTPException):
        pass
    return None


def _require_allowed(url: str, *, is_after_public: bool) -> bool:
    """Return whether the host of an address is public; raise UserError if it must not be read."""
    host = urlsplit(url).hostname or ""
    try:
        names = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False  # behind a proxy, only the proxy may know the name
    found = [getattr(ip, "ipv4_mapped", None) or ip for ip in map(ipaddress.ip_address, names)]
    if any(ip.is_link_local or str(ip) in _METADATA for ip in found):
        raise UserError(
            f"`{host}` is a metadata service of a cloud or a link-local address; tunewell never reads from it",
            where=url[:200],
            fix="use the address of the file itself",
        )
    is_public = any(ip.is_global for ip in found)
    if is_after_public and not all(ip.is_global for ip in found):
        raise UserError(
            f"a public server redirects to `{host}` in a private network",
            where=url[:200],
            fix="if you trust that address, use it directly",
        )
    return is_public
