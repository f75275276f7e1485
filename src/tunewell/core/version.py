"""Which tunewell wrote a file: its version, and the commit where one is known."""

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tunewell import __version__


@cache
def made_by() -> str:
    """Return the name and version of this program, with the commit of a checkout or of an installation from git."""
    commit = _installed_commit() or _checkout_commit(Path(__file__).parents[3])
    return f"tunewell {__version__}" + (f" ({commit[:9]})" if commit else "")


def _installed_commit() -> str:
    """Return the commit that pip recorded, or nothing."""
    try:
        origin = distribution("tunewell").read_text("direct_url.json") or "{}"
    except PackageNotFoundError:
        return ""
    return json.loads(origin).get("vcs_info", {}).get("commit_id", "")


def _checkout_commit(folder: Path) -> str:
    """Return the commit of a checkout of tunewell, or nothing."""
    git = folder / ".git"
    if not (folder / "src" / "tunewell").is_dir() or not git.is_dir():
        return ""
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        branch = head.removeprefix("ref: ")
        if branch == head:
            return head
        if (git / branch).is_file():
            return (git / branch).read_text(encoding="utf-8").strip()
        packed = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {branch}")), "")
    except OSError:
        return ""
