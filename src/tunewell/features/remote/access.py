"""Find the endpoint, region and access keys of a bucket: environment variables, then profiles in `~/.aws`.

Access keys stay in `Access.options`, which is passed to the storage library and excluded from `repr`.
"""

import configparser
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tunewell.config.schema import Storage
from tunewell.core.errors import UserError, did_you_mean
from tunewell.features.remote.address import Address

_KEY_PAIR = ("access_key_id", "secret_access_key")
_KEY_NAMES = (*_KEY_PAIR, "session_token")
_IDENTITIES = {  # with all variables of a group, the storage library does not ask the metadata service
    "s3": (
        "AWS_WEB_IDENTITY_TOKEN_FILE AWS_ROLE_ARN",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "SERVICE_ACCOUNT",
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_MASTER_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_TOKEN",
        "AZURE_CLIENT_ID AZURE_CLIENT_SECRET AZURE_TENANT_ID",
        "AZURE_CLIENT_ID AZURE_FEDERATED_TOKEN_FILE AZURE_TENANT_ID",
        "AZURE_USE_AZURE_CLI",
        "IDENTITY_ENDPOINT IDENTITY_HEADER",
    ),
}
_GOOGLE_LOGIN = "~/.config/gcloud/application_default_credentials.json"
_R2_ACCOUNT = ("R2_ACCOUNT_ID", "CLOUDFLARE_ACCOUNT_ID")
CLIENT_OPTIONS: dict[str, Any] = {
    "connect_timeout": "5s",
    "read_timeout": "30s",
    "timeout": "6h",  # of a whole request; the default of 30 seconds ends a long download
}
RETRY_CONFIG: dict[str, Any] = {  # of one request; `fetch.py` repeats downloads for longer
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2},
}


@dataclass(frozen=True)
class Access:
    """The endpoint, region and access keys of a bucket. `options` has the keys and must not be printed."""

    endpoint: str | None
    """None: the default of the provider."""
    region: str | None
    origin: str
    """Where the access keys come from, for errors: `environment variables`, `profile team`, or `none`."""
    options: dict[str, Any] = field(repr=False, default_factory=dict[str, Any])

    @property
    def shown_endpoint(self) -> str:
        return self.endpoint or "Amazon S3"


def find_access(address: Address, settings: Storage, environ: Mapping[str, str] = os.environ) -> Access:
    """Return the endpoint, region and keys of a bucket; raise UserError for a profile or account that is missing."""
    if address.is_web:
        return Access(f"{address.scheme}://{address.bucket}", None, "none")
    if address.scheme in ("gs", "az"):  # the storage library reads their usual variables
        origin = _identity(address.scheme, settings, environ)
        name = "Google Cloud Storage" if address.scheme == "gs" else "Azure Storage"
        return Access(name, None, origin, {"skip_signature": True} if origin == "none" else {})
    profile = _read_profile(settings.profile or environ.get("AWS_PROFILE"), environ)
    keys, origin = _find_keys(address.scheme, settings, profile, environ)
    endpoint = settings.endpoint or _environment_endpoint(address.scheme, environ) or profile.get("endpoint_url")
    region = settings.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or profile.get("region")
    if address.scheme == "r2":
        region = settings.region or "auto"
        endpoint = endpoint or _r2_endpoint(address, environ)
    _require_plain_endpoint(endpoint, address)
    options: dict[str, Any] = {"region": region or "us-east-1", **keys}
    if endpoint:
        options["endpoint"] = endpoint.rstrip("/")
    if origin == "none":
        options["skip_signature"] = True  # a public bucket
    return Access(endpoint, region or "us-east-1", origin, options)


def _find_keys(
    scheme: str, settings: Storage, profile: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """Return the access keys and where they come from. A profile in the config comes before the environment."""
    own = {name: profile[f"aws_{name}"] for name in _KEY_NAMES if profile.get(f"aws_{name}")}
    has_profile = own.keys() >= {*_KEY_PAIR}
    if settings.profile and has_profile:
        return own, f"profile `{settings.profile}`"
    for prefix in ("R2_", "AWS_") if scheme == "r2" else ("AWS_",):
        variables = {name: environ.get(f"{prefix}{name.upper()}", "") for name in _KEY_NAMES}
        found = {name: value for name, value in variables.items() if value}
        missing = [f"{prefix}{name.upper()}" for name in _KEY_PAIR if name not in found]
        if found and len(missing) == 1:
            raise UserError(
                f"the variable {missing[0]} is not set, but the other one of the pair is",
                where=f"{prefix}ACCESS_KEY_ID and {prefix}SECRET_ACCESS_KEY are needed together",
                fix=f"set {missing[0]}, or unset the other one",
            )
        if not missing:
            return found, f"the variables {prefix}ACCESS_KEY_ID and {prefix}SECRET_ACCESS_KEY"
    if has_profile:
        return own, f"profile `{environ.get('AWS_PROFILE', 'default')}`"
    # A role of Amazon's cloud is of no use at another endpoint, unless the user asks for it.
    has_endpoint = settings.endpoint or _environment_endpoint(scheme, environ)
    if scheme == "r2" or (has_endpoint and settings.role is None):
        return {}, "none"
    return {}, _identity(scheme, settings, environ)


def _identity(scheme: str, settings: Storage, environ: Mapping[str, str]) -> str:
    """Return where the storage library finds an identity; `none` if it would ask the metadata service."""
    groups = () if environ.get("AZURE_CREDENTIAL_TYPE") == "managed_identity" else _IDENTITIES[scheme]
    for group in groups:
        if all(environ.get(name, "").lower() not in ("", "0", "false") for name in group.split()):
            return f"the variable {group.replace(' ', ' and ')}"
    if scheme == "gs" and Path(_GOOGLE_LOGIN).expanduser().is_file():
        return f"`{_GOOGLE_LOGIN}`"
    if settings.role is None:
        return "none"
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise UserError(
            "`storage.role: instance` asks the metadata service, but AWS_EC2_METADATA_DISABLED forbids it",
            fix="unset AWS_EC2_METADATA_DISABLED, or remove `storage.role`",
        )
    return "the role of this machine"


def _environment_endpoint(scheme: str, environ: Mapping[str, str]) -> str | None:
    if scheme == "r2":
        return environ.get("R2_ENDPOINT_URL") or environ.get("R2_ENDPOINT")
    return environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or environ.get("AWS_ENDPOINT")


def _require_plain_endpoint(endpoint: str | None, address: Address) -> None:
    """Raise UserError, without the endpoint, if it is not an address or contains a password: errors show endpoints."""
    if endpoint is not None and not re.fullmatch(r"https?://[^\s/@?#]+(?:/[^\s@?#]*)?", endpoint):
        raise UserError(
            "the endpoint in AWS_ENDPOINT_URL, R2_ENDPOINT_URL or the profile is not valid",
            where=str(address),
            fix="write `https://HOST` or `http://HOST:PORT`, without a user name, a password or a query",
        )


def _r2_endpoint(address: Address, environ: Mapping[str, str]) -> str:
    account = next((environ[name] for name in _R2_ACCOUNT if environ.get(name)), None)
    if account is None:
        raise UserError(
            "the Cloudflare account for `r2://` is not set",
            where=str(address),
            fix="set the variable R2_ACCOUNT_ID, or `storage.endpoint` to the endpoint of your account",
        )
    return f"https://{account}.r2.cloudflarestorage.com"


def _read_profile(name: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a profile in `~/.aws/credentials` and `~/.aws/config`; of `default` if none is named."""
    found: dict[str, str] = {}
    names: list[str] = []
    for variable, default in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
        path = Path(environ.get(variable) or Path("~/.aws") / default).expanduser()
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            # The text of the error quotes a line, which may be a key.
            raise UserError(
                f"`{path}` cannot be read", fix="correct the file: `[PROFILE]`, then `name = value`"
            ) from None
        names += [section.removeprefix("profile ") for section in parser.sections()]
        for section in (f"profile {name or 'default'}", name or "default"):
            if parser.has_section(section):
                found |= dict(parser.items(section))
    if name is not None and name not in names:
        raise UserError(
            f"there is no profile `{name}`",
            where="~/.aws/credentials and ~/.aws/config",
            fix=did_you_mean(dict.fromkeys(names), "add it with `aws configure --profile NAME`, or set access keys"),
        )
    return found
