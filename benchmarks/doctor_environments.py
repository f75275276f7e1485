"""Does `tunewell doctor` name what is wrong first, and does its fix mend it? Real environments, broken on purpose.

Virtual environments are built from the package index, about 2 GB in all, and copied by hard links. Each broken one is
checked, its fix is run where it is a command, and it is checked again. Linux only.
"""

import argparse
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setting import ROOT, setting, table

TORCH = "torch==2.13.0"
OWN = ("typer", "rich", "pydantic", "orjson", "pyyaml", "jinja2", "pyarrow", "tokenizers", "numpy", "packaging")
STACK = (TORCH, "transformers==5.22.2", "trl==1.16.0", "peft==0.21.2", "datasets==5.2.0", "accelerate==1.15.0")
OLD = (
    *(TORCH, "trl==0.8.6", "transformers==4.41.2", "accelerate==0.30.1", "peft==0.11.1", "datasets==2.19.2"),
    *("numpy<2", "huggingface_hub<0.26", "pyarrow==16.1.0", "rich"),
)
T4 = "0, Tesla T4, 15360, 14900, 7.5, {driver}, 0"


@dataclass
class Place:
    """One environment under test, with the folder and the variables of its user."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    cwd: Path | None = None

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        return next((self.folder / "lib").glob("python3*/site-packages"))

    @property
    def user(self) -> Path:
        (self.folder / "user").mkdir(exist_ok=True)
        return self.cwd or self.folder / "user"

    def pip(self, *arguments: str) -> None:
        _run(
            [self.python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *arguments]
        )

    def metadata(self, name: str) -> Path:
        return next(self.packages.glob(f"{name}-*.dist-info"))

    def doctor(self) -> dict[str, Any]:
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "HF_HOME": str(self.folder / "hub"),
            **self.variables,
        }
        command = [self.python, "-m", "tunewell", "doctor", "--json", *self.arguments]
        started = time.perf_counter()
        done = subprocess.run(command, env=variables, cwd=self.user, capture_output=True, text=True)
        try:
            found = json.loads(done.stdout)
        except ValueError:
            raise SystemExit(f"{self.folder.name}: {done.stdout}\n{done.stderr}") from None
        assert found["exit_code"] == done.returncode, (found["exit_code"], done.returncode)
        return found | {"wall": time.perf_counter() - started}

    def write_program(self, name: str, text: str) -> None:
        """Put a program first on the PATH."""
        folder = self.folder / "stand_in"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
        self.variables["PATH"] = f"{folder}:{os.environ['PATH']}"

    def write_config(self, text: str) -> None:
        (self.user / "tunewell.yaml").write_text(text)


@dataclass(frozen=True)
class Case:
    """A way to break an environment, the finding that must come first, and how it is mended.

    `mend` is a function, or `commands`: those of the finding are run. None: no command can mend it here.
    """

    name: str
    finding: str
    spoil: Callable[[Place], None]
    mend: Callable[[Place], None] | str | None = "commands"
    base: str = "full"


def _run(command: list[Any], **options: Any) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _replace_text(path: Path, text: str) -> None:
    path.unlink()  # a hard link: the original must not change
    path.write_text(text)


def _double(place: Place) -> None:
    old = place.packages / "peft-0.17.1.dist-info"
    shutil.copytree(place.metadata("peft"), old)
    text = (old / "METADATA").read_text().replace("Version: 0.21.2", "Version: 0.17.1", 1)
    _replace_text(old / "METADATA", text)


def _incomplete(place: Place) -> None:
    for name in ("peft_model.py", "config.py", "tuners/lora/layer.py"):
        (place.packages / "peft" / name).unlink()


def _old_driver(place: Place) -> None:
    version = place.packages / "torch" / "version.py"
    text = version.read_text().replace("cuda: Optional[str] = None", "cuda: Optional[str] = '13.0'")
    _replace_text(version, text.replace("+cpu", "+cu130"))
    place.write_program("nvidia-smi", f"echo '{T4.format(driver='535.104.05')}'")


def _pointer(place: Place) -> None:
    model = place.user / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n"
    (model / "model.safetensors").write_text(text)
    place.write_config("model: model\n")


def _whole_weights(place: Place) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (place.user / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


def _truncated(place: Place) -> None:
    _pointer(place)
    _whole_weights(place)
    path = place.user / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _full_disk(place: Place) -> None:
    """Mount a file system of 8 MiB and fill it."""
    place.cwd = place.folder / "small"
    place.cwd.mkdir()
    _run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place.cwd])
    _run(["fallocate", "-l", "7m", place.cwd / "old-run"])


def _free_disk(place: Place) -> None:
    assert place.cwd is not None
    _run(["umount", place.cwd])


CASES = (
    Case("trl 0.8.6 beside transformers 5 (seed 001)", "trl-tokenizer-argument", lambda p: p.pip("trl==0.8.6")),
    Case("peft 0.17.1 beside transformers 5", "peft-hybrid-cache", lambda p: p.pip("--no-deps", "peft==0.17.1")),
    Case(
        "accelerate 0.34 beside transformers 5",
        "accelerate-too-old",
        lambda p: p.pip("--no-deps", "accelerate==0.34.2"),
    ),
    Case("half-removed metadata", "metadata-broken", lambda p: (p.metadata("transformers") / "METADATA").unlink()),
    Case("metadata gone, files there", "metadata-missing", lambda p: _remove(p.metadata("tokenizers"))),
    Case("metadata of two versions", "metadata-double", _double),
    Case("files of a package deleted", "files-missing", _incomplete),
    Case("NumPy 2 under an older pandas", "numpy-abi", lambda p: p.pip("pandas==2.0.3", "numpy==2.4.6")),
    Case("a requirement removed", "requirement-missing", lambda p: _uninstall(p, "xxhash")),
    Case("huggingface_hub too old", "requirement-unmet", lambda p: p.pip("--no-deps", "huggingface_hub==0.36.0")),
    Case(
        "torchvision of another torch",
        "torch-extension-mismatch",
        lambda p: p.pip("--no-deps", "torchvision==0.26.0", "pillow"),
    ),
    Case("an interrupted pip", "metadata-leftover", lambda p: (p.packages / "~rl").mkdir()),
    Case(
        "CPU torch, nvidia-smi reports a GPU",
        "torch-cpu-build",
        lambda p: p.write_program("nvidia-smi", f"echo '{T4.format(driver='580.65.06')}'"),
        mend=None,
    ),
    Case("CUDA 13 wheel, driver 535", "driver-too-old", _old_driver, mend=None),
    Case("nvidia-smi hangs", "nvidia-smi-hangs", lambda p: p.write_program("nvidia-smi", "exec sleep 60"), mend=None),
    Case("full disk", "disk-full", _full_disk, mend=_free_disk, base="light"),
    Case("weights are a Git LFS pointer", "model-lfs-pointer", _pointer, mend=_whole_weights, base="light"),
    Case("weights are truncated", "model-damaged", _truncated, mend=_whole_weights, base="light"),
)


def _uninstall(place: Place, name: str) -> None:
    _run([place.python, "-m", "pip", "uninstall", "--quiet", "--yes", name])


def _build(folder: Path, name: str, requirements: tuple[str, ...], python: str = sys.executable) -> Place:
    place = Place(folder / name)
    if not (place.folder / "complete").exists():
        shutil.rmtree(place.folder, ignore_errors=True)
        _run([python, "-m", "venv", place.folder])
        place.pip(*requirements)
        (place.folder / "complete").touch()
    return place


def _copy(base: Place, name: str) -> Place:
    """Copy an environment by hard links. Everything that breaks it removes files before it writes them."""
    target = base.folder.parent / f"broken-{name}"
    if target.is_dir():
        shutil.rmtree(target)
    _run(["cp", "-al", base.folder, target])
    shutil.rmtree(target / "user", ignore_errors=True)
    return Place(target)


def _sound(folder: Path, other: str) -> list[tuple[str, Place]]:
    """Return five environments in which nothing is wrong."""
    own = list(OWN)
    old = _build(folder, "old", OLD)
    # It has none of tunewell's requirements, so it is checked from outside.
    outside = Place(folder / "light", arguments=["--python", str(old.python)])
    places = [
        ("without torch", _build(folder, "light", OWN)),
        ("torch and transformers", _build(folder, "plain", (*own, TORCH, "transformers==5.22.2"))),
        ("trl, peft, datasets, accelerate", _build(folder, "full", (*own, *STACK))),
        ("trl 0.8.6 with packages of its time, by --python", outside),
    ]
    places.append((f"without torch, {Path(other).name}", _build(folder, "other", OWN, other)))
    return places


def _check(case: Case, base: Place, number: int) -> list[str]:
    place = _copy(base, str(number))
    case.spoil(place)
    try:
        found = place.doctor()
        first = found["findings"][0] if found["findings"] else {"id": "nothing", "commands": []}
        mended = "no command"
        if case.mend == "commands":
            script = "set -e\n" + "\n".join(first["commands"])
            _run(["sh", "-c", script], cwd=place.user)
        elif callable(case.mend):
            case.mend(place)
        if case.mend is not None:
            place.cwd = None if case.mend is _free_disk else place.cwd
            after = place.doctor()
            mended = "yes" if after["exit_code"] == 0 else f"no: {[one['id'] for one in after['findings']]}"
    finally:
        if case.spoil is _full_disk:
            subprocess.run(["umount", str(place.folder / "small")], capture_output=True)
        shutil.rmtree(place.folder, ignore_errors=True)
    others = ", ".join(f"`{one['id']}`" for one in found["findings"][1:]) or "none"
    ok = "yes" if first["id"] == case.finding else f"no: {first['id']}"
    row = [case.name, f"`{case.finding}`", ok, others, mended, f"{found['wall']:.1f} s"]
    print(" | ".join(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/tunewell-doctor"), help="where environments are built"
    )
    parser.add_argument("--cases", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--other-python", default=sys.executable, help="another version of Python, for a sound one")
    parser.add_argument("--no-sound", action="store_true", help="leave out the five sound environments")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bases = {"full": _build(options.folder, "full", (*OWN, *STACK)), "light": _build(options.folder, "light", OWN)}
    chosen = [case for case in CASES if not options.cases or any(part in case.name for part in options.cases)]
    print(setting() + "\n")
    rows = [_check(case, bases[case.base], number) for number, case in enumerate(chosen)]
    print(table(["broken environment", "cause", "named first", "other findings", "mended by its fix", "took"], rows))
    if not options.no_sound:
        rows = []
        for name, place in _sound(options.folder, options.other_python):
            found = place.doctor()
            listed = ", ".join(f"`{one['id']}`" for one in found["findings"]) or "nothing"
            rows.append([name, listed, f"{found['wall']:.1f} s"])
        print("\n" + table(["sound environment", "found", "took"], rows))


if __name__ == "__main__":
    main()
