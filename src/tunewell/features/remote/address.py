"""Addresses of remote files: `s3://BUCKET/KEY`, `r2://BUCKET/KEY`, `https://HOST/PATH`, and patterns for several."""

import re
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from tunewell.core.errors import UserError

WEB_SCHEMES = ("https", "http")
BUCKET_SCHEMES = ("s3", "r2", "gs", "az")
_MAGIC = re.compile(r"[*?\[]")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class Address:
    """The address of a file, of a folder (a common prefix of keys), or of all files that match a pattern."""

    scheme: str
    bucket: str
    """The bucket, or the host of a web address with its port."""
    key: str
    """The name in the bucket, without a slash at the start."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    @property
    def is_web(self) -> bool:
        return self.scheme in WEB_SCHEMES

    @property
    def is_pattern(self) -> bool:
        return not self.is_web and _MAGIC.search(self.key) is not None

    def with_key(self, key: str) -> "Address":
        """Return the address of another key in the same bucket."""
        return replace(self, key=key)


def parse_address(url: str) -> Address:
    """Parse an address; raise UserError if it is incomplete or contains a password or a signature."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that do not enclose an IPv6 address
        raise UserError("the address is not valid: its host has a `[` or `]`", fix="check the address") from None
    scheme = parts.scheme.lower()
    # A key may contain `?` and `#` as in a pattern. In a web address they begin the query and the fragment.
    is_web = scheme in WEB_SCHEMES
    rest = url.partition("://")[2]
    bucket, _, key = rest.partition("/")
    shown = f"{scheme}://{bucket.rpartition('@')[2]}/..."
    if "@" in bucket:
        raise UserError(
            f"the address `{shown}` contains a user name or a password",
            fix="remove it: access keys are read from environment variables or from a profile in `~/.aws`",
        )
    if is_web and (parts.query or parts.fragment):
        raise UserError(
            f"the address `{shown}` has a query, which may contain a signature",
            where="everything after `?` or `#`: addresses are written to configs and manifests",
            fix="use `s3://BUCKET/KEY` with access keys from the environment, or download the file and give its path",
        )
    if not bucket:
        raise UserError(f"`{url}` does not name a bucket", fix=f"write `{scheme}://BUCKET/KEY`")
    if not is_web and not _BUCKET.fullmatch(bucket):
        raise UserError(
            f"`{bucket}` is not a valid bucket name",
            where=shown,
            fix=f"write `{scheme}://BUCKET/KEY`; a bucket has 3 to 63 lower-case letters, digits, dots and hyphens",
        )
    return Address(scheme, bucket, unquote(key) if is_web else key)


def listing_prefix(pattern: str) -> str:
    """Return the folder above the first `*`, `?` or `[` of a pattern. Only its keys have to be listed."""
    magic = _MAGIC.search(pattern)
    return pattern[: magic.start()].rpartition("/")[0] if magic else pattern


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a glob: `*` and `?` stop at a slash, `**/` matches any folders."""
    out, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            out, at = out + "(?:[^/]+/)*", at + 3
        elif pattern.startswith("**", at):
            out, at = out + ".*", at + 2
        elif pattern[at] == "[" and (end := pattern.find("]", at + 2)) > 0:
            chars = pattern[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            out, at = out + f"[{'^' + chars[1:] if chars[0] == '!' else chars}]", end + 1
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(pattern[at], re.escape(pattern[at]))
            at += 1
    try:
        return re.compile(out)
    except re.error:
        raise UserError(
            f"`{pattern}` is not a valid pattern", fix="correct the characters in `[...]`, for example `[0-9]`"
        ) from None
