"""What pip installs in a notebook: the tunewell that writes it, from where that came, and packages with models."""

import importlib.metadata
import json
import urllib.parse
from pathlib import Path
from typing import Any

import tunewell
from tunewell.config.load import Loaded
from tunewell.core.errors import UserError
from tunewell.core.redact import redact

PACKAGE = "package:"
_EXTRAS = "[train,export]"
_NAME_IT = "name where pip finds it with `--package`: `git+https://HOST/OWNER/tunewell@COMMIT`, a wheel, or `none`"


def requirement(package: str | None, notes: list[str]) -> list[str]:
    """Say what pip is to install: what is installed here, or what the person names, with the extras where it has none.

    Raises UserError where this one came from a folder, which no other machine has, and for an address with a secret.
    """
    if package == "none":
        return []
    found = _installed() if package is None else package
    if redact(found) != found:
        raise UserError("the package's address holds a secret, which everyone could read", where="--package")
    if "://" in found:
        return [found if " @ " in found else f"tunewell{_EXTRAS} @ {found}"]
    if found.endswith((".whl", ".tar.gz")):
        notes.append(f"put `{Path(found).name}` beside the notebook; in Colab drop it into the files at the left")
        return [f"../{Path(found).name}{_EXTRAS}"]
    return [found]


def model_packages(loaded: Loaded) -> list[str]:
    """List the packages that a model or a tokenizer is read from, at the versions that are here."""
    named = [name for name in (loaded.config.model, loaded.config.tokenizer) if name and name.startswith(PACKAGE)]
    found = []
    for name in dict.fromkeys(name.removeprefix(PACKAGE) for name in named):
        modules = importlib.metadata.packages_distributions()
        try:
            package = importlib.metadata.distribution(modules.get(name.replace("-", "_"), [name])[0])
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"there is no installed package `{name}`", fix="install it, so that its version is known"
            ) from None
        found.append(f"--no-deps {package.name}=={package.version}")
    return found


def _installed() -> str:
    """Say how pip gets the tunewell that runs here: from an index, or from the address it came from, at its commit."""
    origin = direct_url()
    if origin is None:
        if "+" in tunewell.__version__:
            raise UserError(f"this is tunewell {tunewell.__version__}, which pip cannot find", fix=_NAME_IT)
        return f"tunewell{_EXTRAS}=={tunewell.__version__}"
    address = str(origin.get("url", ""))
    if urllib.parse.urlsplit(address).scheme in ("", "file"):
        raise UserError(
            "this tunewell was installed from a folder or a file, which the notebook cannot reach",
            where=address or None,
            fix=_NAME_IT,
        )
    marks = [f"subdirectory={origin['subdirectory']}"] if origin.get("subdirectory") else []
    if control := origin.get("vcs_info"):
        address = f"{control['vcs']}+{address}@{control['commit_id']}"
    elif sha := (origin.get("archive_info") or {}).get("hashes", {}).get("sha256"):
        marks.append(f"sha256={sha}")
    return f"{address}#{'&'.join(marks)}" if marks else address


def direct_url() -> dict[str, Any] | None:
    """Read where pip had this tunewell from; None where that is an index, as PEP 610 says."""
    try:
        text = importlib.metadata.distribution("tunewell").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {"url": Path(__file__).parents[1].as_uri()}  # not installed at all: run from its sources
    return json.loads(text) if text else None
