"""The single comparisons of a proof: each takes what was found and what was expected, and says whether it is well."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tunewell.core.files import sha256_file
from tunewell.core.units import count
from tunewell.data.templates import ChatTemplate, TemplateFailed
from tunewell.exporting.drift import Logits, drift
from tunewell.records.parity import Artefact, Check, Probe, Proof, Question

_SHOWN = 3


@cache
def bounds() -> dict[str, dict[str, Any]]:
    """Give what each format may differ by, and why."""
    return json.loads(files("tunewell.exporting").joinpath("bounds.json").read_text(encoding="utf-8"))


def check_files(folder: Path, artefact: Artefact) -> Check:
    """Say whether every file is there and is, to the byte, the one that was made, and nothing lies among them."""
    bad = [*spoiled_files(folder, artefact.sha256s), *_strange_files(folder, artefact)]
    words = "; ".join(bad[:_SHOWN]) or f"{count(len(artefact.sha256s), 'file')}, every byte as it was written"
    return Check(name="files", is_ok=not bad, words=words)


def spoiled_files(folder: Path, sha256s: Mapping[str, str]) -> list[str]:
    """Name the files that are missing or are no longer what was written."""
    gone = [name for name in sha256s if not (folder / name).is_file()]
    changed = [name for name, sha in sha256s.items() if name not in gone and sha256_file(folder / name) != sha]
    return [*(f"`{name}` is missing" for name in gone), *(f"`{name}` was changed" for name in changed)]


def _strange_files(folder: Path, artefact: Artefact) -> list[str]:
    """Name what lies in an artefact's folder and is none of its files: a loader may take it for one."""
    place = folder / artefact.path
    if not place.is_dir():
        return []
    names = (path.relative_to(folder).as_posix() for path in sorted(place.rglob("*")) if path.is_file())
    # Hidden files are those of the system or of a repository, and no loader reads them.
    kept = (name for name in names if not any(part.startswith(".") for part in Path(name).parts))
    return [f"`{name}` is none of its files" for name in kept if name not in artefact.sha256s]


def check_template(proof: Proof, source: str | None, special_tokens: Mapping[str, str]) -> Check:
    """Render a file's own template for every probe: it must write what training wrote, on the day that training saw."""
    if source is None:
        return Check(name="template", is_ok=False, words="it has no chat template")
    day: dict[str, Any] = {"date": proof.date} if proof.date else {}
    try:
        template = ChatTemplate(source, special_tokens=special_tokens, **day)
        texts = [template.render(probe.messages, None, add_generation_prompt=True) for probe in proof.probes]
    except TemplateFailed as failure:
        return Check(name="template", is_ok=False, words=f"its chat template cannot be used: {failure}")
    wrong = [(probe, text) for probe, text in zip(proof.probes, texts, strict=True) if text != probe.text]
    of = count(len(texts), "conversation")
    words = f"its chat template writes all of {of} as training did"
    if wrong:
        probe, text = wrong[0]
        at = next((i for i, (a, b) in enumerate(zip(probe.text, text, strict=False)) if a != b), 0)
        at = max(0, at - 10)
        words = (
            f"its chat template writes {_short(text[at:])} where training had {_short(probe.text[at:])}; "
            f"{len(wrong)} of {of}"
        )
    return Check(name="template", is_ok=not wrong, words=words)


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
    bound = bounds()[name]
    found_drift = drift(reference, found, tie=bound["tie"])
    allowed = [f"{key.replace('_', ' ')} {_sign(key)} {bound[key]:g}" for key in ("kl", "wrong_tops", "same_top")]
    is_ok = (
        math.isfinite(found_drift.kl)
        and len(reference) == len(found)
        and found_drift.kl <= bound["kl"]
        and found_drift.wrong_tops <= bound["wrong_tops"] * found_drift.positions
        and found_drift.same_top >= bound["same_top"]
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


def check_stop(
    proof: Proof, stops: Sequence[int], answers: Sequence[tuple[Question, bool]], *, is_list: bool = True
) -> Check:
    """Say whether the ids at which training ends a reply are those at which this one stops.

    Without `is_list` only the first is asked for: a GGUF file cannot name more than the ends of a turn and of a text.
    """
    missing = [number for number in proof.stop_ids[: None if is_list else 1] if number not in stops]
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
