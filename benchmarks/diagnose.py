"""How often `tunewell diagnose` names the right failure, how sure it is, and how fast it reads.

    python benchmarks/diagnose.py ../shared/atlas/dev.jsonl ../shared/atlas/dev2.jsonl      tables per kind and class
    python benchmarks/diagnose.py FILES --needles       each message in 20,000 lines of a healthy log
    python benchmarks/diagnose.py FILES --mutate 20000  changed inputs: nothing may crash
    python benchmarks/diagnose.py --speed               100 MB: seconds, memory, growth

A row has `id`, `source`, `kind`, `evidence` and `class`. Leave-one-source-out repeats the table without the signatures
that no library prints (`printed_by`) and that fit rows of that one source only. Leave-one-class-out diagnoses each
failure without its own class: a confident name is then wrong, unless it is a related class.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tunewell.features.diagnose import ranking, similarity
from tunewell.features.diagnose.diagnose import diagnose_text
from tunewell.features.diagnose.findings import HEALTHY, LIKELY, UNKNOWN, Diagnosis
from tunewell.features.diagnose.knowledge import Signature, load_classes
from tunewell.features.diagnose.matcher import complete

Row = dict[str, Any]
_BINS = (0.0, 0.5, 0.7, 0.8, 0.9, 1.01)


def names_of(diagnosis: Diagnosis) -> list[str]:
    """Return the ids of the findings; a diagnosis without findings is `healthy`."""
    return [finding.id for finding in diagnosis.findings] or [HEALTHY]


def table(rows: Sequence[Row], *, is_detailed: bool) -> None:
    """Print the share of right first names per kind, per class and by confidence."""
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    by_class: dict[str, Counter[str]] = defaultdict(Counter)
    by_confidence: dict[float, Counter[bool]] = defaultdict(Counter)
    wrong: list[str] = []
    for row in rows:
        diagnosis = diagnose_text(row["evidence"])
        found, wanted = names_of(diagnosis), row["class"]
        is_flagged = wanted == HEALTHY and found[0] not in (HEALTHY, UNKNOWN)
        for counts in (by_kind[row["kind"]], by_class[wanted], by_kind["all"]):
            counts["rows"] += 1
            counts["first"] += found[0] == wanted
            counts["three"] += wanted in found[:3]
            counts["flagged"] += is_flagged
        if diagnosis.findings and found[0] != UNKNOWN:
            confidence = diagnosis.findings[0].confidence
            lower = max(edge for edge in _BINS if edge <= confidence)
            by_confidence[lower][found[0] == wanted] += 1
        if found[0] != wanted:
            wrong.append(f"  {row['id']:<16} {wanted} -> {', '.join(found[:3])}")
    print(f"{'kind':<16}{'rows':>6}{'first':>8}{'in 3':>8}")
    for kind, counts in sorted(by_kind.items()):
        print(f"{kind:<16}{counts['rows']:>6}{_share(counts, 'first'):>8}{_share(counts, 'three'):>8}")
    print(f"healthy rows flagged: {by_kind['all']['flagged']}")
    print()
    print_confidence(by_confidence)
    if is_detailed:
        print(f"\n{'class':<34}{'rows':>6}{'first':>8}{'in 3':>8}")
        for name, counts in sorted(by_class.items()):
            print(f"{name:<34}{counts['rows']:>6}{_share(counts, 'first'):>8}{_share(counts, 'three'):>8}")
    print("\nnot named first:", *wrong, sep="\n")


def _share(counts: Counter[str], key: str) -> str:
    return f"{counts[key] / max(1, counts['rows']):.0%}"


def leave_one_source_out(rows: Sequence[Row], plot: Path | None) -> None:
    """Print the share of right first names without the signatures that only a row's own source supports."""
    support: dict[int, set[str]] = defaultdict(set)
    original = complete

    def record(source: str) -> Callable[..., Any]:
        def completed(signature: Signature, *arguments: Any, **options: Any) -> Any:
            found = original(signature, *arguments, **options)
            if found is not None:
                support[id(signature)].add(source)
            return found

        return completed

    for row in rows:
        ranking.complete = record(_repository(row))
        diagnose_text(row["evidence"])

    def without(source: str) -> Callable[..., Any]:
        def completed(signature: Signature, *arguments: Any, **options: Any) -> Any:
            is_own = signature.printed_by is None and support[id(signature)] == {source}
            return None if is_own else original(signature, *arguments, **options)

        return completed

    counts: Counter[str] = Counter()
    by_confidence: dict[float, Counter[bool]] = defaultdict(Counter)
    for row in rows:
        ranking.complete = without(_repository(row))
        diagnosis = diagnose_text(row["evidence"])
        found = names_of(diagnosis)
        if diagnosis.findings and found[0] != UNKNOWN:
            lower = max(edge for edge in _BINS if edge <= diagnosis.findings[0].confidence)
            by_confidence[lower][found[0] == row["class"]] += 1
        counts["rows"] += 1
        counts["first"] += found[0] == row["class"]
        counts["three"] += row["class"] in found[:3]
    ranking.complete = original
    print(f"\nleave one source out: first {_share(counts, 'first')}, in three {_share(counts, 'three')}")
    print_confidence(by_confidence)
    if plot is not None:
        plot.write_text(calibration_plot(by_confidence), encoding="utf-8")
        print(f"wrote {plot}")


def leave_one_class_out(rows: Sequence[Row]) -> None:
    """Print how often a failure whose class does not exist gets a confident name of another one."""
    classes = load_classes()
    counts: Counter[str] = Counter()
    for row in rows:
        own = classes.get(row["class"])
        if own is None or own.id in (HEALTHY, UNKNOWN):
            continue
        others = {name: failure for name, failure in classes.items() if name != own.id}
        ranking.load_classes = similarity.load_classes = lambda others=others: others
        similarity._bags.cache_clear()
        findings = diagnose_text(row["evidence"]).findings
        counts["rows"] += 1
        if not findings or findings[0].id == UNKNOWN or findings[0].confidence < LIKELY:
            continue
        is_related = findings[0].id in own.explains or own.id in classes[findings[0].id].explains
        counts["related" if is_related else "wrong"] += 1
    ranking.load_classes = similarity.load_classes = load_classes
    similarity._bags.cache_clear()
    related = f"and {counts['related']} a more general one or a consequence"
    print(f"\nleave one class out: {counts['wrong']} of {counts['rows']} get a confident wrong name, {related}")


def print_confidence(by_confidence: dict[float, Counter[bool]]) -> None:
    """Print the share of right names for each range of confidence."""
    print("confidence     right     of")
    for lower, counts in sorted(by_confidence.items()):
        total = sum(counts.values())
        print(f"{lower:.2f} and more {counts[True] / total:>6.0%} {total:>6}")


def calibration_plot(by_confidence: dict[float, Counter[bool]]) -> str:
    """Return an SVG with one bar per range of confidence: the share of right names, and a mark for the stated one."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 460 260" font-family="sans-serif" font-size="11">']
    parts.append('<rect width="460" height="260" fill="white"/>')
    for share in (0, 25, 50, 75, 100):
        y = 220 - 2 * share
        parts.append(f'<line x1="40" x2="450" y1="{y}" y2="{y}" stroke="#ddd"/><text x="8" y="{y + 4}">{share}%</text>')
    for number, (lower, counts) in enumerate(sorted(by_confidence.items())):
        total, x = sum(counts.values()), 60 + 95 * number
        share = 100 * counts[True] / total
        parts.append(f'<rect x="{x}" y="{220 - 2 * share}" width="50" height="{2 * share}" fill="#4a7ebb"/>')
        parts.append(
            f'<line x1="{x - 8}" x2="{x + 58}" y1="{220 - 200 * lower}" y2="{220 - 200 * lower}" stroke="#c33"/>'
        )
        parts.append(f'<text x="{x - 6}" y="236">from {lower:.2f}</text><text x="{x - 2}" y="250">{total} rows</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _repository(row: Row) -> str:
    return str(row["source"]).partition("#")[0].partition(":")[0] if "seed:" not in row["source"] else row["source"]


def healthy_log(tool: str, num_lines: int, seed: int = 0) -> list[str]:
    """Return a healthy log in the format of a tool."""
    chance = random.Random(seed)
    lines = ["FutureWarning: `torch_dtype` is deprecated! Use `dtype` instead"]
    loss = 2.4
    for step in range(1, num_lines):
        loss = 1.1 + (loss - 1.1) * 0.9997 + chance.gauss(0, 0.002)
        norm, rate = 0.6 + chance.random() / 5, 2e-4 * (1 - step / num_lines)
        if tool == "trainer":
            lines.append(
                f"{{'loss': {loss:.4f}, 'grad_norm': {norm:.4f}, 'learning_rate': {rate:.3e}, 'epoch': {step / 9e3:.2f}"
                "}"
            )
        elif tool == "litgpt":
            lines.append(
                f"Epoch 1 | iter {step} step {step} | loss train: {loss:.3f}, val: n/a | iter time: {norm * 900:.2f} ms"
            )
        else:
            lines.append(
                f"1|{step}|Loss: {loss:.6f}:  12%|#2        | {step}/{num_lines} [10:{step % 60:02d}<20:00, 1.31it/s]"
            )
    return lines


_OTHER = {"trainer": "litgpt", "litgpt": "torchtune", "torchtune": "trainer"}


def needles(rows: Sequence[Row], *, num_lines: int, limit: int) -> None:
    """Print how often a message keeps its first name inside a long healthy log of another tool."""
    messages = [row for row in rows if row.get("evidence_origin") == "message" and row["class"] != HEALTHY]
    chosen = random.Random(1).sample(messages, min(limit, len(messages)))
    for tool in _OTHER:
        found = names_of(diagnose_text("\n".join(healthy_log(tool, num_lines))))
        print(f"healthy log of {tool}: {found[0]}")
    same: Counter[bool] = Counter()
    for number, row in enumerate(chosen):
        tool = list(_OTHER)[number % 3]
        lines = healthy_log(tool, num_lines, number)
        at = random.Random(number).randrange(num_lines // 4, num_lines - 100)
        lines[at:at] = [row["evidence"]]
        lines[at // 2 : at // 2] = ["Setting `pad_token_id` to `eos_token_id`:2 for open-end generation."]
        alone, inside = names_of(diagnose_text(row["evidence"]))[0], names_of(diagnose_text("\n".join(lines)))[0]
        same[alone == inside] += 1
        if alone != inside:
            print(f"  {row['id']}: {alone} -> {inside}")
    print(f"needles: same first name in {same[True]} of {sum(same.values())}")


def mutate(rows: Sequence[Row], number: int) -> None:
    """Diagnose changed inputs: cut, doubled, shuffled, with bytes replaced. An exception ends the benchmark."""
    chance = random.Random(2)
    started = time.perf_counter()
    for _ in range(number):
        data = bytearray(chance.choice(rows)["evidence"].encode())
        for _ in range(chance.randrange(1, 6)):
            kind, at = chance.randrange(6), chance.randrange(len(data) or 1)
            if kind == 0:
                del data[at : at + chance.randrange(1, 60)]
            elif kind == 1:
                data[at:at] = data[at : at + 200] * chance.randrange(1, 20)
            elif kind == 2:
                data[at:at] = chance.randbytes(chance.randrange(1, 40))
            elif kind == 3:
                data[at:at] = chance.choice((b"\r", b"\x1b[31m", b"\x00", b"\xff\xfe", b"{" * 300, b"\n\n", b"nan"))
            elif kind == 4:
                data = bytearray(data.decode("utf-8", "replace").encode("utf-16"))
            else:
                data += chance.choice(rows)["evidence"].encode()
        diagnose_text(bytes(data[:20_000]))
    print(f"{number} changed inputs without a crash, {1000 * (time.perf_counter() - started) / number:.1f} ms each")


def speed() -> None:
    """Print seconds and peak memory of the command on logs of 1, 50 and 100 MB: the median of several calls.

    Installed packages have bytecode, which an environment may forbid to write: it goes into a temporary folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        lines = [line + "\n" for line in healthy_log("trainer", 10_000)]
        error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.\n"
        for size, rounds in ((1, 8), (50, 2), (100, 2)):
            file = Path(folder) / f"{size}.log"
            with file.open("w") as out:
                for number in range(10**9):
                    out.write(lines[number % len(lines)])
                    if out.tell() >= size * 10**6 - len(error):
                        break
                out.write(error)
            taken = [_timed(file, environment) for _ in range(rounds)][1:]  # the first call writes bytecode
            print(f"{size:>4} MB: {median(seconds for seconds, _ in taken):.2f} s, peak {taken[-1][1] >> 10} MiB")


def _timed(file: Path, environment: dict[str, str]) -> tuple[float, int]:
    """Return the seconds of one call of the command, and the peak memory of all calls in KiB."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tunewell", "diagnose", file]
    subprocess.run(command, capture_output=True, check=False, env=environment)
    return time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--classes", action="store_true", help="also print the table per class")
    parser.add_argument("--plot", type=Path, help="write the calibration without a row's own source as SVG")
    parser.add_argument("--needles", action="store_true")
    parser.add_argument("--mutate", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    rows = [
        json.loads(line) for file in options.files for line in file.read_text(encoding="utf-8").splitlines() if line
    ]
    load_classes()
    if options.speed:
        speed()
    elif options.needles:
        needles(rows, num_lines=20_000, limit=60)
    elif options.mutate:
        mutate(rows, options.mutate)
    else:
        table(rows, is_detailed=options.classes)
        leave_one_source_out(rows, options.plot)
        leave_one_class_out(rows)


if __name__ == "__main__":
    main()
