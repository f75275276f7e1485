"""The single comparisons of a proof: each takes what was found and what was expected, and says whether it is well."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tunewell.core.files import sha256_file
from tunewell.core.units import count
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.data.tokenizers.sentencepiece import UNUSED
from tunewell.records.parity import Artefact, Check, ModelFacts, Probe, Proof, Question

# How far apart two models are on the same tokens: logits, the likeliest token, and the whole distribution.

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Drift:
    """The differences of one model to another over some positions."""

    positions: int
    largest: float
    """Of any two logits, each row shifted so that its mean is 0: a constant added to a row changes nothing."""
    mean: float
    same_top: float
    """Share of positions with the same likeliest token."""
    near_ties: int
    """Positions with another likeliest token, which the reference has almost as high as its own."""
    kl: float
    """Mean Kullback-Leibler divergence from the reference, in nats."""

    @property
    def wrong_tops(self) -> int:
        """Positions where a token lost that was clearly the likeliest."""
        return round(self.positions * (1 - self.same_top)) - self.near_ties


def drift(reference: Sequence[Logits], found: Sequence[Logits], *, tie: float) -> Drift:
    """Compare the logits of several texts, each [positions, vocabulary]; rows that pad a vocabulary are cut off.

    Two tokens are as good as equal where the reference has them closer than `tie` deviations of its logits there. What
    was found is not asked: the worse it is, the more it would call equal.
    """
    width = min(own.shape[1] for own in (*reference, *found))
    wanted, got = (np.concatenate([part[:, :width] for part in own]).astype(np.float64) for own in (reference, found))
    if not np.isfinite(got).all():
        return Drift(len(wanted), float("inf"), float("inf"), 0.0, 0, float("inf"))
    wanted -= wanted.mean(axis=1, keepdims=True)
    got -= got.mean(axis=1, keepdims=True)
    apart = np.abs(wanted - got)
    every, own, other = np.arange(len(wanted)), wanted.argmax(axis=1), got.argmax(axis=1)
    is_tie = wanted[every, own] - wanted[every, other] < tie * wanted.std(axis=1)
    same = own == other
    log_wanted, log_got = (own - _log_sum(own) for own in (wanted, got))
    kl = (np.exp(log_wanted) * (log_wanted - log_got)).sum(axis=1)
    return Drift(
        positions=len(wanted),
        largest=float(apart.max()),
        mean=float(apart.mean()),
        same_top=float(same.mean()),
        near_ties=int((is_tie & ~same).sum()),
        kl=float(kl.mean()),
    )


def _log_sum(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    top = logits.max(axis=1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


_SHOWN = 3


@cache
def bounds() -> dict[str, dict[str, Any]]:
    """Give what each format may differ by, and why."""
    return json.loads(files("tunewell.export.proof").joinpath("bounds.json").read_text(encoding="utf-8"))


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


# Hold the settings beside a folder's weights against the model's: its shape, where it stops, its special tokens.

# What a library writes about itself, or about the numbers of one file.
_PASSING = frozenset(
    {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "name_or_path", "architectures"}
    | {"_from_model_config", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash"}
)
_NAMED = ("bos", "eos", "unk", "sep", "pad", "mask", "cls")
_TOKENIZER, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Give settings as a JSON file has them, without what changes from one file to the next."""
    kept = {key: value for key, value in settings.items() if key not in _PASSING}
    return json.loads(json.dumps(kept, sort_keys=True, default=str))


def check_settings(path: Path, tokenizer: Any, facts: ModelFacts, *, config: Any, generation: Any) -> Check:
    """Compare what a folder says besides its weights, as transformers understands it; an adapter has no `config`."""
    wrong = _differences("generation_config.json", plain_settings(generation.to_dict()), facts.generation)
    if config is not None:
        wrong += _differences("config.json", plain_settings(config.to_dict()), facts.config)
    written = json.loads((path / _TOKENIZER).read_text(encoding="utf-8"))
    for name in (f"{own}_token" for own in _NAMED):
        # Where a model has none, the classes of some tokenizers bring one of their own.
        wanted = facts.special_tokens.get(name)
        found = written.get(name) if wanted is None else getattr(tokenizer, name, None)
        if found != wanted:
            wrong.append(f"the tokenizer's `{name}` is {found!r} and not {wanted!r}")
    if written.get("model_max_length") != facts.max_length:
        wrong.append(f"`model_max_length` is {written.get('model_max_length')} and not {facts.max_length}")
    if (path / _TEMPLATE).is_file() and "chat_template" in written:
        wrong.append(
            f"`{_TOKENIZER}` has a chat template besides `{_TEMPLATE}`, and programs differ in which they take"
        )
    words = "; ".join(wrong[:_SHOWN]) or "settings, stops and special tokens as the model has them"
    return Check(name="settings", is_ok=not wrong, words=words, figures={"wrong": len(wrong)})


def _differences(name: str, found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    keys = sorted({*found, *wanted})
    return [
        f"`{key}` in `{name}` is {_short_value(found.get(key))} and not {_short_value(wanted.get(key))}"
        for key in keys
        if found.get(key) != wanted.get(key)
    ]


def _short_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# Tell two vocabularies apart by a hash of their words, whichever kind of file they stand in.

_SPACE = "▁"


def digest_of(tokenizer: LoadedTokenizer) -> dict[str, str]:
    """Hash the words of a tokenizer with their ids, and its merges where it joins by them."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    merges = orjson.loads(tokenizer.backend.to_str())["model"].get("merges")
    found = {"words": _words((number, token) for token, number in vocabulary.items())}
    if merges:
        found["merges"] = _hash(merge if isinstance(merge, str) else " ".join(merge) for merge in merges)
    return found


def digest_of_gguf(fields: Mapping[str, Any]) -> dict[str, str]:
    """Hash the words of a GGUF file likewise, by the fields of its header; rows that no word has are passed over."""
    tokens, types = (fields.get(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    pairs = zip(tokens, types, strict=False)
    found = {"words": _words((number, token) for number, (token, kind) in enumerate(pairs) if kind != UNUSED)}
    if merges := fields.get("tokenizer.ggml.merges"):
        found["merges"] = _hash(merges)
    return found


def _words(pairs: Iterable[tuple[int, str]]) -> str:
    # Symbols that a tokenizer's author defined have plain spaces in a GGUF file.
    return _hash(f"{number} {token.replace(_SPACE, ' ')}" for number, token in sorted(pairs))


def _hash(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogatepass") + b"\x00")
    return digest.hexdigest()
