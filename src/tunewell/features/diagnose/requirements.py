"""Check the versions that a text states against the version shield of `doctor`: requirements, `pip freeze`, `pip list`.

    trl==0.8.6            SFTTrainer cannot be created: this trl passes `tokenizer` to Trainer ...
    transformers>=5       fix: `pip install 'trl>=0.29'`

A requirement without an upper bound is checked as the newest release, because that is what pip installs.
"""

import re
import shlex

from tunewell.features.diagnose.findings import Evidence
from tunewell.features.diagnose.reading import Reading
from tunewell.machine.shield import matching_conflicts, read_shield

_NEWEST = "9999"
_MAX_CHARS = 200_000
_REQUIREMENT = re.compile(
    r"[ \t]*[-\"'`]*[ \t]*[A-Za-z][\w.-]*(?:\[[\w, -]*\])?[ \t]*(?:[=<>~!^]{1,3}[^#;]*|\d[\w.+!-]*|@.*|)(?:[;#,\"'].*)?"
)
"""Matches a line of a list of requirements, or of `pip list`."""
_LEAST_SHARE = 0.5


def version_conflicts(text: str, reading: Reading) -> str:
    """Add a fact for versions in a text that do not work together. Return the fix, or an empty text."""
    shield = read_shield()
    names = sorted({re.split(r"[<>=]", wanted)[0] for entry in shield.conflicts for wanted in entry.when})
    text = re.sub(r"(?m)^Name: (\S+)\nVersion: (\S+)", r"\1==\2\n", text[:_MAX_CHARS])  # `pip show`
    lines = text.split("\n")
    filled = [line for line in lines if line.strip()]
    is_list = sum(1 for line in filled if _REQUIREMENT.fullmatch(line)) >= _LEAST_SHARE * len(filled)
    found: dict[str, set[tuple[str, str, int]]] = {}
    for at, line in enumerate(lines):
        for name, version, shown in _stated(line, names, is_list=is_list):
            found.setdefault(name, set()).add((version, shown, at))
    one = {name: next(iter(stated)) for name, stated in found.items() if len({version for version, *_ in stated}) == 1}
    fixes: list[str] = []
    for entry in matching_conflicts({name: version for name, (version, *_) in one.items()}, shield):
        stated = [one[re.split(r"[<>=]", wanted)[0]] for wanted in entry.when]
        note = f"{' with '.join(shown for _, shown, _ in stated)}: {entry.what}; {entry.why}"
        is_certain = (
            is_list
            and entry.level == "broken"
            and all(version != _NEWEST or ">" in shown for version, shown, _ in stated)
        )
        fact = f"versions:{'conflict' if is_certain else 'possible-conflict'}"
        fixes.append(f"`{shlex.join(['pip', 'install', *entry.install])}`" + (f"; {entry.note}" if entry.note else ""))
        reading.facts.setdefault(fact, []).extend(
            Evidence(at + 1, " ".join(lines[at].split())[:300], reading.name, note if at == stated[0][2] else "")
            for _, _, at in stated
        )
    if is_list and not fixes and any(version != _NEWEST for version, *_ in one.values()):
        reading.config = reading.config or sorted(one)
    return "; ".join(dict.fromkeys(fixes))


def _stated(line: str, names: list[str], *, is_list: bool) -> list[tuple[str, str, str]]:
    """Return the name, the version to check and the text of each requirement in a line."""
    pattern = (
        rf"(?i)(?<![\w./-])[`'\"]?({'|'.join(names)})[`'\"]?(?:\[[\w, -]*\])?(?![\w./-]*[/:]\w)"
        r"(?:[ \t]*(==?=?|~=|>=|<=|[<>^~:])?[ \t]*(?:version:?[ \t]*)?[`'\"]?[v^~]?(\d+(?:\.\d+)*)([ \t]*,[ \t]*<)?)?"
    )
    found: list[tuple[str, str, str]] = []
    for name, sign, version, bound in re.findall(pattern, line.partition("#")[0]):
        is_open = not version or (sign in (">=", ">") and not bound)
        if sign in ("<", "<=") or (not version and not (is_list and _REQUIREMENT.fullmatch(line))):
            continue
        shown = f"{name} {sign if is_open else ''}{version}".strip() if version else f"the newest {name}"
        found.append((name.lower(), _NEWEST if is_open else version, shown))
    return found
