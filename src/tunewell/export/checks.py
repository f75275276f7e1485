"""The single comparisons of a proof: each takes what was found and what was expected, and says whether it is well."""

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tunewell.core.files import sha256_file
from tunewell.core.units import count
from tunewell.export.drift import Logits, drift
from tunewell.records.parity import Artefact, Check, Probe, Proof, Question

_SHOWN = 3


@cache
def bounds() -> dict[str, dict[str, Any]]:
    """Give what each format may differ by, and why."""
    return json.loads(files("tunewell.export").joinpath("bounds.json").read_text(encoding="utf-8"))


def check_files(folder: Path, artefact: Artefact) -> Check:
    """Say whether every file is there and is, to the byte, the one that was made."""
    gone = [name for name in artefact.sha256s if not (folder / name).is_file()]
    changed = [n for n, sha in artefact.sha256s.items() if n not in gone and sha256_file(folder / n) != sha]
    bad = [*(f"`{name}` is missing" for name in gone), *(f"`{name}` was changed" for name in changed)]
    words = "; ".join(bad[:_SHOWN]) or f"{count(len(artefact.sha256s), 'file')}, every byte as it was written"
    return Check(name="files", is_ok=not bad, words=words)


def check_ids(proof: Proof, tokenize: Callable[[Probe], Sequence[int]], *, who: str) -> Check:
    """Say whether a tokenizer gives the ids of training for every probe."""
    wrong = []
    for probe in proof.probes:
        found = list(tokenize(probe))
        if found != probe.ids:
            at = next((i for i, (a, b) in enumerate(zip(found, probe.ids, strict=False)) if a != b), len(probe.ids))
            at = min(at, len(found), len(probe.ids))
            ours, theirs = probe.ids[at : at + 3], found[at : at + 3]
            wrong.append(f"at token {at} of {_short(probe.text)} training has {ours}, {who} {theirs}")
    of = count(len(proof.probes), "conversation")
    words = f"{who} gives the ids of training for all of {of}" if not wrong else f"{wrong[0]}; {len(wrong)} of {of}"
    return Check(name="token ids", is_ok=not wrong, words=words, figures={"wrong": len(wrong)})


def check_logits(name: str, reference: Sequence[Logits], found: Sequence[Logits]) -> Check:
    """Hold logits against those of the trained model, within the bound of the format."""
    found_drift = drift(reference, found)
    bound = bounds()[name]
    allowed = [
        f"{key.replace('_', ' ')} {_sign(key)} {bound[key]:g}"
        for key in ("kl", "wrong_tops", "same_top")
        if key in bound
    ]
    is_ok = (
        math.isfinite(found_drift.kl)
        and found_drift.kl <= bound["kl"]
        and found_drift.wrong_tops <= bound.get("wrong_tops", found_drift.positions)
        and found_drift.same_top >= bound.get("same_top", 0.0)
    )
    ties = f", {found_drift.near_ties} near ties" if found_drift.near_ties else ""
    words = (
        f"KL {found_drift.kl:.1e}, largest difference {found_drift.largest:.1e}, same likeliest token at "
        f"{found_drift.same_top:.1%} of {count(found_drift.positions)} positions{ties}"
    )
    figures = {**found_drift.__dict__, "wrong_tops": found_drift.wrong_tops}
    check = Check(
        name="logits", is_ok=is_ok, words=words, figures=figures, bound=f"{', '.join(allowed)}: {bound['because']}"
    )
    return check


def check_answers(proof: Proof, answers: Sequence[Sequence[int]], *, is_exact: bool) -> Check:
    """Compare answers token for token; a near tie may fall the other way, so half of them must be the same.

    Where weights are rounded the answers are only told of.
    """
    pairs = list(zip(proof.questions, answers, strict=True))
    same = [list(answer) == question.answer for question, answer in pairs]
    words = f"{sum(same)} of {count(len(same), 'answer')} word for word as trained"
    return Check(
        name="answers",
        is_ok=2 * sum(same) >= len(same) if is_exact else True,
        words=words if same else "no questions",
        figures={"same": sum(same), "of": len(same)},
        bound="half at least: nothing is rounded" if is_exact else "told only: weights are rounded",
    )


def check_stop(proof: Proof, stops: Sequence[int], answers: Sequence[tuple[Question, bool]]) -> Check:
    """Say whether the ids at which training ends a reply are those at which this one stops."""
    missing = [number for number in proof.stop_ids[:1] if number not in stops] if proof.stop_ids else []
    ended = [ended for question, ended in answers if question.ended]
    is_ok = not missing and (not ended or any(ended))
    if missing:
        words = f"it does not stop at id {missing[0]}, with which training ends a reply"
    elif ended and not any(ended):
        words = f"none of {count(len(ended), 'answer')} ends by itself, as they did when trained"
    else:
        words = (
            f"stops at id {proof.stop_ids[0] if proof.stop_ids else 'none'}; {sum(ended)} of {len(ended)} answers end"
        )
    return Check(name="stop", is_ok=is_ok, words=words)


def _sign(key: str) -> str:
    return "at least" if key == "same_top" else "at most"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
