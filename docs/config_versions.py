"""Write `src/tunewell/config/foreign_releases.toml`: which release of a library knows which config key.

    python docs/config_versions.py FOLDER       a folder with wheels or source archives, one per minor release

They are read as archives, never installed or imported: the fields of dataclasses and pydantic models are taken from
the syntax tree. Wheels are fetched with `pip download --no-deps --only-binary=:all: -d FOLDER NAME==VERSION`.
"""

import ast
import re
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

OUTPUT = Path(__file__).parents[1] / "src/tunewell/config/foreign_releases.toml"
_WHEEL = re.compile(r"([a-z_]+)-(\d+)\.(\d+)[\w.]*[-.]")
_ROOTS = {  # config -> (library, files with its classes, its class or None for all classes of the files)
    "TrainingArguments": ("transformers", r"transformers/training_args(_seq2seq)?\.py", None),
    "SFTConfig": ("trl", r"trl/.*\.py", "SFTConfig"),
    "DPOConfig": ("trl", r"trl/.*\.py", "DPOConfig"),
    "GRPOConfig": ("trl", r"trl/.*\.py", "GRPOConfig"),
    "KTOConfig": ("trl", r"trl/.*\.py", "KTOConfig"),
    "RewardConfig": ("trl", r"trl/.*\.py", "RewardConfig"),
    "Trainer": ("transformers", r"transformers/trainer\.py", "Trainer"),
    "SFTTrainer": ("trl", r"trl/trainer/sft_trainer\.py", "SFTTrainer"),
    "DPOTrainer": ("trl", r"trl/trainer/dpo_trainer\.py", "DPOTrainer"),
    "GRPOTrainer": ("trl", r"trl/trainer/grpo_trainer\.py", "GRPOTrainer"),
    "LoraConfig": ("peft", r"peft/(config|utils/peft_types|tuners/lora/.*|tuners/lora|mixed_model)\.py", "LoraConfig"),
}
_HEADER = """\
# Which release knows which config key. Written by docs/config_versions.py; do not edit.
# `all`: keys of all releases; `A B`: keys from release A to release B.
"""


def classes_of(wheel: Path, files: str) -> dict[str, tuple[list[str], set[str]]]:
    """Return the bases and the fields of every class in the files of a wheel."""
    found: dict[str, tuple[list[str], set[str]]] = {}
    for source in sources_of(wheel, files):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                fields = {target.id for target in targets if isinstance(target, ast.Name)}
                fields |= {alias for part in node.body if isinstance(part, ast.AnnAssign) for alias in _aliases(part)}
                if node.name.endswith("Trainer"):  # not a dataclass: its keys are the parameters of its constructor
                    fields = {
                        name for part in node.body if isinstance(part, ast.FunctionDef) for name in _parameters(part)
                    }
                known_bases, known = found.get(node.name, ([], set()))
                found[node.name] = (known_bases + bases, known | fields)
    return found


def _aliases(field: ast.AnnAssign) -> list[str]:
    """Return the other names of a pydantic field."""
    keywords = [part for part in ast.walk(field) if isinstance(part, ast.keyword) and part.arg and "alias" in part.arg]
    constants = [part for keyword in keywords for part in ast.walk(keyword) if isinstance(part, ast.Constant)]
    return [part.value for part in constants if isinstance(part.value, str) and part.value.isidentifier()]


def _parameters(function: ast.FunctionDef) -> list[str]:
    if function.name != "__init__":
        return []
    names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs) if argument.arg != "self"]
    # A decorator such as `@deprecate_kwarg("tokenizer", ...)` still accepts the old names that it lists.
    constants = [part for line in function.decorator_list for part in ast.walk(line) if isinstance(part, ast.Constant)]
    return names + [part.value for part in constants if isinstance(part.value, str) and part.value.isidentifier()]


def sources_of(archive: Path, files: str) -> Iterator[bytes]:
    """Yield the content of the files of an archive whose path matches."""
    pattern = re.compile(rf"(?:.*/)?(?:src/)?{files}")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from (wheel.read(name) for name in wheel.namelist() if pattern.fullmatch(name))
        return
    with tarfile.open(archive) as source:
        for member in source:
            if pattern.fullmatch(member.name) and (file := source.extractfile(member)) is not None:
                yield file.read()


def fields_of(
    name: str, classes: dict[str, tuple[list[str], set[str]]], seen: frozenset[str] = frozenset()
) -> set[str]:
    """Return the fields of a class and of its bases in the same files."""
    if name not in classes or name in seen:
        return set()
    bases, fields = classes[name]
    return fields.union(*(fields_of(base, classes, seen | {name}) for base in bases))


def _span(first: tuple[int, int], last: tuple[int, int]) -> str:
    return f"{first[0]}.{first[1]} {last[0]}.{last[1]}"


def main() -> None:
    folder = Path(sys.argv[1])
    wheels: dict[str, list[tuple[tuple[int, int], Path]]] = defaultdict(list)
    for wheel in [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]:
        if match := _WHEEL.match(wheel.name):
            wheels[match[1]].append(((int(match[2]), int(match[3])), wheel))
    lines = [_HEADER]
    for config, (library, files, root) in _ROOTS.items():
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        releases: list[tuple[int, int]] = []
        for release, wheel in sorted(wheels[library]):
            classes = classes_of(wheel, files)
            fields = set().union(*(own for _, own in classes.values())) if root is None else fields_of(root, classes)
            fields = {field for field in fields if not field.startswith("_") and not field.isupper()}
            if not fields:
                continue
            releases.append(release)
            for field in fields:
                spans[field].append(release)
        first, last = releases[0], releases[-1]
        sys.stderr.write(f"{config}: {len(releases)} releases of {library}, {len(spans)} keys\n")
        lines.append(f'\n[{config}]\nlibrary = "{library}"\nreleases = "{_span(first, last)}"\n')
        by_span: dict[tuple[tuple[int, int], tuple[int, int]], list[str]] = defaultdict(list)
        for field, known in sorted(spans.items()):
            by_span[known[0], known[-1]].append(field)
        for span, fields in sorted(by_span.items(), key=lambda entry: (entry[0] != (first, last), entry[0])):
            name = "all" if span == (first, last) else f'"{_span(*span)}"'
            lines.append(f'{name} = "{" ".join(fields)}"\n')
    OUTPUT.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
