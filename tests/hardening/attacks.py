"""Run the attacks of `attacks.jsonl`, one line of JSON each, and report which of them held.

    python tests/hardening/attacks.py                    all of them
    python tests/hardening/attacks.py --only gguf        those whose id contains a text
    python tests/hardening/attacks.py --show             also print what each command said

An attack holds if the command ends in time with an expected exit code and message, and without a traceback, an escape
sequence for the terminal, a file outside its folder, or too much memory. Commands run in forked children, so that a
crash is the child's. `payloads.py` describes the bytes of a file, `scenes.py` what the attacks are aimed at.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
TESTS = Path(__file__).resolve().parents[1]
_HELPERS = ("data", "export", "faults", "features/retrieval", "features/serve", "hardening", "training")
sys.path[:0] = [str(TESTS), *(str(TESTS / name) for name in _HELPERS)]

from scenes import Outcome, Scenes  # noqa: E402

CASES = Path(__file__).with_name("attacks.jsonl")
MAX_SECONDS = 60
"""Time limit of a command without its own, for a busy machine. Most need a second."""
MAX_BYTES = 3 << 30
"""Memory limit. A forked child starts with the pages of this process, about 0.7 GiB."""
_FORBIDDEN = {
    "Traceback (most recent call last)": "a traceback",
    "bug in tunewell": "an error that is called a bug",
}
_ESCAPE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def judge(case: dict[str, Any], outcome: Outcome) -> list[str]:
    """Return why an attack did not hold; an empty list if it did."""
    problems = []
    exits = case.get("exit", [2])
    if outcome.code not in exits:
        problems.append(f"exit code {outcome.code}; expected {' or '.join(map(str, exits))}")
    says = case.get("says", "")
    if not re.search(says, outcome.text, re.IGNORECASE | re.DOTALL):
        problems.append(f"it does not say `{says}`")
    for hidden in case.get("hides", []):
        if hidden in outcome.text:
            problems.append(f"it shows `{hidden}`")
    problems += [f"it prints {what}" for text, what in _FORBIDDEN.items() if text in outcome.text]
    if found := _ESCAPE.search(outcome.text):
        problems.append(f"it prints the control character U+{ord(found[0]):04X}")
    if outcome.seconds > case.get("seconds", MAX_SECONDS):
        problems.append(f"it takes {outcome.seconds:.0f} s")
    if outcome.num_bytes > MAX_BYTES:
        problems.append(f"it takes {outcome.num_bytes / (1 << 30):.1f} GiB")
    return problems + outcome.problems


def attack(case: dict[str, Any], scenes: Scenes, *, is_shown: bool) -> dict[str, Any]:
    """Run one attack in a folder of its own, and return the result as a line."""
    base = Path(tempfile.mkdtemp(prefix="attack-", dir=scenes.folder))
    (base / "work").mkdir()
    try:
        outcome = scenes.run(case, base / "work")
        left = sorted(path.name for path in base.iterdir() if path.name not in ("work", *case.get("beside", {})))
        outcome.problems += [f"it writes `{name}` beside its folder" for name in left]
        if any(base.rglob("hacked")):
            outcome.problems.append("it ran a command of the attack")
        problems = judge(case, outcome)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    line = {"id": case["id"], "held": not problems, "seconds": round(outcome.seconds, 2)}
    if is_shown or problems:
        line |= {"problems": problems, "code": outcome.code, "text": outcome.text[-1500:]}
    return line


def main() -> int:
    """Run the attacks; return 1 if one of them did not hold."""
    parser = argparse.ArgumentParser(description="Run the attacks of attacks.jsonl.")
    parser.add_argument("--only", default="", help="a part of the ids")
    parser.add_argument("--show", action="store_true", help="print what each command said")
    options = parser.parse_args()
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len({case["id"] for case in cases}) == len(cases), "two attacks have the same id"
    cases = [case for case in cases if options.only in case["id"]]
    began, lines = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="tunewell-attacks-") as folder, Scenes(Path(folder)) as scenes:
        for case in cases:
            lines.append(attack(case, scenes, is_shown=options.show))
            print(json.dumps(lines[-1]), flush=True)
    held = Counter(case["id"].split("-")[0] for case, line in zip(cases, lines, strict=True) if line["held"])
    total = Counter(case["id"].split("-")[0] for case in cases)
    print("\n" + "  ".join(f"{area} {held[area]}/{number}" for area, number in total.items()))
    known = sum(case["from"] == "table" for case in cases)
    broken = [line["id"] for line in lines if not line["held"]]
    verdict = f"{len(broken)} did not hold: {', '.join(broken)}" if broken else "all held"
    seconds = time.monotonic() - began
    print(f"{len(cases)} attacks ({known} known, {len(cases) - known} new) in {seconds:.0f} s: {verdict}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
