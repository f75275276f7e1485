"""Build the wheel and the sdist of a commit, so that everyone who builds it gets the same bytes.

    python tests/house/release.py --out dist

The files come from the commit, not from the folder, so nothing untracked is shipped. The build tools have the versions
of `constraints.txt`; times and modes in the archives come from the commit.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")


def build(commit: str, out: Path, *, root: Path = ROOT) -> list[Path]:
    """Build a commit of a clone into a folder, and return the files."""

    def git(*command: str) -> bytes:
        return subprocess.run(["git", *command], cwd=root, check=True, capture_output=True).stdout

    when = git("show", "--no-patch", "--format=%ct", commit).decode().strip()
    out = out.resolve()
    with tempfile.TemporaryDirectory(prefix="tunewell-release-") as folder:
        archive = Path(folder, "tree.tar")
        archive.write_bytes(git("archive", "--format=tar", commit))
        with tarfile.open(archive) as tree:
            tree.extractall(Path(folder, "tree"), filter="data")
        subprocess.run(
            [
                UV,
                "build",
                "--quiet",
                "--build-constraints=constraints.txt",
                f"--python={sys.executable}",
                f"--out-dir={out}",
            ],
            cwd=Path(folder, "tree"),
            env=os.environ | {"SOURCE_DATE_EPOCH": when},
            check=True,
        )
    return sorted(path for path in out.iterdir() if path.name.startswith("tunewell-"))


def main() -> None:
    """Build HEAD, and print the hash of each file."""
    parser = argparse.ArgumentParser(description="Build the wheel and the sdist of a commit.")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    options = parser.parse_args()
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    if changed and options.commit == "HEAD":
        sys.stderr.write("note: changes that are not committed are not part of the release\n")
    for path in build(options.commit, options.out):
        sys.stdout.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")


if __name__ == "__main__":
    main()
