"""Which tunewell wrote a file: its version, and the commit where one is known."""

from functools import cache
from pathlib import Path

from tunewell import __version__
from tunewell.core.optional import direct_url


@cache
def made_by() -> str:
    """Return the name and version of this program, with the commit of a checkout or of an installation from git."""
    installed = (direct_url() or {}).get("vcs_info", {}).get("commit_id", "")
    commit = installed or _checkout_commit(Path(__file__).parents[3])
    return f"tunewell {__version__}" + (f" ({commit[:9]})" if commit else "")


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
