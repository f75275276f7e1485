"""Explain errors of the storage library: what failed, where, and what to do, without keys and signatures."""

import re

from tunewell.core.errors import UserError
from tunewell.core.redact import redact
from tunewell.features.remote.access import Access
from tunewell.features.remote.address import Address

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_EXPECTED_REGION = re.compile(r"expecting '([\w-]+)'|<Region>([\w-]+)</Region>")
_TEMPORARY_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "RequestLimitExceeded"}
)
_CONNECTION = re.compile(
    r"kind: (?:Connect|Interrupted|Timeout|Body|Decode|Request|IncompleteMessage)|(?<!Generic )HTTP error"
)
_PROFILE = "or `storage.profile` to a profile in `~/.aws/credentials`"
_ROLE = "; on a cloud machine with a role, set `storage.role: instance`"
_SET_KEYS = {
    "s3": f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, {_PROFILE}{_ROLE}",
    "r2": f"set R2_ACCESS_KEY_ID and R2_SECRET_ACCESS_KEY, {_PROFILE}",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key file" + _ROLE,
    "az": f"set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY{_ROLE}",
}


class Changed(UserError):
    """Raised if an object was replaced while it was read."""


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of an error, if the server answered."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def code_of(error: Exception) -> str:
    """Return the error code of S3, such as `NoSuchBucket`, or an empty text."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def is_missing(error: Exception) -> bool:
    """Return True if the object does not exist."""
    return isinstance(error, FileNotFoundError) or code_of(error) == "NoSuchKey"


def is_range_refused(error: Exception) -> bool:
    """Return True if a web server sends whole files only, as small ones do."""
    return "Range request not supported" in str(error)


def is_temporary(error: Exception) -> bool:
    """Return True if the same request may succeed later: throttling, server errors, lost connections."""
    status = status_of(error)
    if code_of(error) in _TEMPORARY_CODES or (status is not None and (status >= 500 or status in (408, 429))):
        return True
    return status is None and _CONNECTION.search(str(error)) is not None


def changed(address: Address) -> Changed:
    """Return the error for an object that was replaced between listing and reading."""
    return Changed(f"`{address}` changed while it was read", fix="run the command again when nothing writes to it")


def explain(error: Exception, address: Address, access: Access) -> UserError:
    """Return the UserError for an error of the storage library."""
    status, code = status_of(error), code_of(error)
    where, keys = f"{address} at {access.shown_endpoint}", _SET_KEYS.get(address.scheme, "")
    if status == 412 or code == "PreconditionFailed":
        return changed(address)
    if code == "NoSuchBucket" or (status == 404 and not address.key):
        return UserError(
            f"there is no bucket `{address.bucket}`", where=access.shown_endpoint, fix="check its name and the endpoint"
        )
    if is_missing(error) or status == 404:
        return UserError(f"there is no file `{address}`", where=access.shown_endpoint, fix="check the address")
    if code == "RequestTimeTooSkewed":
        return UserError(
            "the clock of this machine is wrong, so the storage server rejects its signatures",
            where=where,
            fix="set the clock, for example with `timedatectl set-ntp true`",
        )
    if code in ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"):
        region = _EXPECTED_REGION.search(str(error))
        name = (region[1] or region[2]) if region else "that of the bucket"
        return UserError(
            f"the bucket `{address.bucket}` is not in the region `{access.region}`",
            where=where,
            fix=f"set `storage.region` or AWS_REGION to `{name}`" if region else f"set `storage.region` to {name}",
        )
    if code in ("ExpiredToken", "TokenRefreshRequired"):
        return UserError(f"the access keys have expired ({access.origin})", where=where, fix="sign in again")
    if code in ("SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "InvalidSecurity"):
        which = "secret key" if code == "SignatureDoesNotMatch" else "access key"
        return UserError(
            f"the {which} is wrong ({access.origin})", where=where, fix=f"{keys}; check for a missing character"
        )
    if status in (401, 403) or code == "PublicAccessNotPermitted":
        if access.origin == "none" and not address.is_web:
            return UserError(f"no access keys were found for `{address}`", where=access.shown_endpoint, fix=keys)
        who = "" if address.is_web else f" with the access keys of {access.origin}"
        return UserError(
            f"access to `{address}` is denied{who}",
            where=access.shown_endpoint,
            fix="ask its owner for permission to read it"
            if address.is_web
            else "ask the owner of the bucket for permission, or use other access keys",
        )
    if status is not None and is_temporary(error):
        return UserError(
            f"the storage server is overloaded or has failed (status {status}{f', {code}' if code else ''})",
            where=where,
            fix="run the command again later; it continues where it stopped",
        )
    if status is None and is_temporary(error):
        return UserError(
            f"{access.shown_endpoint} cannot be reached",
            where=str(address),
            fix="check your network, the address and the endpoint (`storage.endpoint` or AWS_ENDPOINT_URL); "
            "`--offline` uses the files of an earlier download",
        )
    text = redact(str(error).partition("\n")[0].partition("<?xml")[0].rpartition(" - ")[2].strip(" :")) or "no answer"
    return UserError(
        f"`{address}` cannot be read: {text[:200]}{f' ({code})' if code else ''}",
        where=access.shown_endpoint,
        fix="download the file, and give its path" if address.is_web else "check the address and the endpoint",
    )
