"""The delete test: copies of the repository without a feature, or without all of them, still check and collect.

`python tests/house/without_features.py [FEATURE ...]` tries each named feature (by default every one, then all at
once): types, import contracts, generated pages and the collection of all tests.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TABLE = Path("src/tunewell/core/features.toml")
_CHECKS = {
    "pages": ("python", "docs/generate.py"),
    "types": ("pyright",),
    "contracts": ("lint-imports", "--no-cache"),
    "collection": ("python", "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", ""),
}


def feature_names(root: Path = ROOT) -> list[str]:
    """Return the folders of features."""
    return sorted(path.parent.name for path in (root / "src/tunewell/features").glob("*/__init__.py"))


def remove_feature(root: Path, name: str) -> None:
    """Delete a feature from a copy of the repository: its folder, tests, guide and entry, and its contracts."""
    for folder in (root / "src/tunewell/features" / name, root / "tests/features" / name):
        shutil.rmtree(folder, ignore_errors=True)
    table = root / _TABLE
    parts = re.split(r"^(?=\[\w+\]$)", table.read_text(encoding="utf-8"), flags=re.MULTILINE)
    table.write_text("".join(part for part in parts if not part.startswith(f"[{name}]")), encoding="utf-8")
    for file in (root / ".importlinter", root / "src/tunewell/__init__.py"):
        kept = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if not _names(line, name)]
        file.write_text("".join(kept), encoding="utf-8")


def _names(line: str, name: str) -> bool:
    return re.search(rf"tunewell\.features\.{name}\b", line) is not None


def copy_without(names: list[str], folder: Path) -> Path:
    """Copy the tracked files of the repository, without some features."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    for name in names:
        remove_feature(folder, name)
    return folder


def check(names: list[str]) -> dict[str, str]:
    """Return the output of each check that fails without some features."""
    failed = {}
    with tempfile.TemporaryDirectory(prefix="tunewell-without-") as made:
        folder = copy_without(names, Path(made))
        env = os.environ | {"PYTHONPATH": str(folder / "src")}
        for label, (program, *arguments) in _CHECKS.items():
            command = [str(ROOT / ".venv/bin" / program), *arguments]
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                failed[label] = (done.stdout + done.stderr)[-4000:]
    return failed


def main() -> int:
    """Try each feature, print a line for each, and return 1 if one of them cannot be deleted."""
    features = feature_names()
    code = 0
    for names in [[name] for name in sys.argv[1:]] or [*([name] for name in features), features]:
        failed = check(names)
        label = names[0] if len(names) == 1 else "all of them"
        sys.stdout.write(f"without {label:<14}{'ok' if not failed else 'FAILED: ' + ', '.join(failed)}\n")
        for output in failed.values():
            sys.stdout.write(output + "\n")
        sys.stdout.flush()
        code = code or int(bool(failed))
    return code


if __name__ == "__main__":
    sys.exit(main())
