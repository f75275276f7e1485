"""The checks of a verification: files, token ids, logits, answers, stop ids, chat template, settings and vocabulary."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch
from tokenizers import Tokenizer

from tunewell.core.files import read_data, read_text, sha256_file, sha256_text
from tunewell.core.text import shorten
from tunewell.core.units import count
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.data.tokenizers.sentencepiece import UNUSED
from tunewell.inference.generate import shared_prefix_length
from tunewell.records.parity import Artefact, Check, Proof, ProofProbe, TrainedFacts

Logits = npt.NDArray[np.float32]
_MAX_SHOWN = 3
_MAX_CHARS = 40
# Keys in which a library records its own version, or the number format of one file.
_IGNORED_KEYS = frozenset(
    {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "name_or_path", "architectures"}
    | {"_from_model_config", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash"}
)
_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "mask", "cls")
_TOKENIZER_CONFIG, _TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
_TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens", "truncation", "padding")
_SPACE_SYMBOL = "▁"


@cache
def bounds() -> dict[str, dict[str, Any]]:
    """Return the allowed differences of logits by artefact and of tensors by number format, with the reasons."""
    return read_data(__file__, "bounds.json")


# Files.


def check_files(folder: Path, artefact: Artefact) -> Check:
    """Check that every file of an artefact is unchanged, and that its folder contains no files that a loader reads."""
    others = [name for name in visible_files(folder, folder / artefact.path) if name not in artefact.sha256s]
    problems = damaged_files(folder, artefact.sha256s)
    problems += [f"`{name}` does not belong to the artefact" for name in others]
    return check_problems("files", problems, otherwise=f"{count(len(artefact.sha256s), 'file')} unchanged")


def check_problems(name: Any, problems: Sequence[str], *, otherwise: str, **figures: int) -> Check:
    """Return a check that has failed with the first of these problems, or the message `otherwise`."""
    message = "; ".join(problems[:_MAX_SHOWN]) or otherwise
    return Check(name=name, is_ok=not problems, words=message, figures=figures)


def damaged_files(folder: Path, sha256s: Mapping[str, str]) -> list[str]:
    """Return a message for each file that is missing or was changed."""
    missing = [name for name in sha256s if not (folder / name).is_file()]
    changed = [name for name, sha in sha256s.items() if name not in missing and sha256_file(folder / name) != sha]
    return [*(f"`{name}` is missing" for name in missing), *(f"`{name}` was changed" for name in changed)]


def visible_files(folder: Path, place: Path) -> list[str]:
    """Return the names, relative to `folder`, of a file or of the files in a folder.

    Hidden files are left out: no loader reads them, and operating systems and git create them.
    """
    paths = [path.relative_to(folder) for path in sorted((place, *place.rglob("*"))) if path.is_file()]
    return [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)]


# Text.


def check_template(proof: Proof, source: str | None, special_tokens: Mapping[str, str]) -> Check:
    """Check that a chat template, on the date of training, renders every probe as in training."""
    if source is None:
        return Check(name="template", is_ok=False, words="the artefact has no chat template")
    date: dict[str, Any] = {"date": proof.date} if proof.date else {}
    try:
        template = ChatTemplate(source, special_tokens=special_tokens, **date)
        texts = [template.render(probe.messages, None, add_generation_prompt=True) for probe in proof.probes]
    except TemplateFailed as failure:
        return Check(name="template", is_ok=False, words=f"the chat template cannot be rendered: {failure}")
    wrong = [(probe, text) for probe, text in zip(proof.probes, texts, strict=True) if text != probe.text]
    total = count(len(texts), "conversation")
    message = f"the chat template renders {total} as in training"
    if wrong:
        probe, text = wrong[0]
        start = max(0, shared_prefix_length(probe.text, text) - 10)
        message = (
            f"the chat template renders {short_repr(text[start:])}; training rendered "
            f"{short_repr(probe.text[start:])}; {len(wrong)} of {total} differ"
        )
    elif proof.model.template_sha256 not in (None, sha256_text(source)):
        wrong = [(proof.probes[0], source)]
        message = "the chat template renders the test conversations as in training, but its text differs from the run's"
    return Check(name="template", is_ok=not wrong, words=message)


def check_ids(proof: Proof, tokenize: Callable[[ProofProbe], Sequence[int]], *, library: str, why: str = "") -> Check:
    """Check that a library's tokenizer produces the same token ids as in training for every probe.

    `why` explains ids that differ.
    """
    wrong = []
    for probe in proof.probes:
        ids, whole_ids = list(tokenize(probe)), probe.whole_ids or probe.ids
        if ids != whole_ids:
            at = shared_prefix_length(ids, whole_ids)
            expected, found = whole_ids[at : at + 3], ids[at : at + 3]
            wrong.append(f"at token {at} of {short_repr(probe.text)}, {library} has {found}; training had {expected}")
    total = count(len(proof.probes), "conversation")
    message = (
        f"{wrong[0]}; {len(wrong)} of {total} differ{why}" if wrong else f"{library} tokenizes {total} as in training"
    )
    return Check(name="token ids", is_ok=not wrong, words=message, figures={"wrong": len(wrong)})


def check_answers(proof: Proof, answers: Sequence[Sequence[int]], *, is_exact: bool) -> Check:
    """Compare greedy answers token by token. If the weights are rounded, the result is only reported.

    With exact weights, half of the answers must be identical. Not all must be: near ties can still be decided
    differently.
    """
    pairs = zip(proof.questions, answers, strict=True)
    same = [list(answer) == question.answer for question, answer in pairs]
    message = f"{sum(same)} of {count(len(same), 'answer')} identical to the trained model's"
    return Check(
        name="answers",
        is_ok=2 * sum(same) >= len(same) if is_exact else True,
        words=message if same else "no questions",
        figures={"same": sum(same), "of": len(same)},
        bound="at least half: weights are not rounded" if is_exact else "reported only: weights are rounded",
    )


def check_stop(proof: Proof, stop_ids: Sequence[int], ended: Sequence[bool], *, is_list: bool = True) -> Check:
    """Check that an artefact stops at the token ids that end a reply in training.

    Without `is_list`, only the first id is required: a GGUF file has no list, only an end of turn and an end of text.
    """
    missing = [number for number in proof.stop_ids[: None if is_list else 1] if number not in stop_ids]
    should_end = [own for question, own in zip(proof.questions, ended, strict=True) if question.ended]
    if missing:
        message = f"the artefact does not stop at token id {missing[0]}, which ends a reply in training"
    elif should_end and not any(should_end):
        message = f"none of {count(len(should_end), 'answer')} ends, but all ended with the trained model"
    else:
        stop = proof.stop_ids[0] if proof.stop_ids else "none"
        tested = f"{sum(should_end)} of {len(should_end)} answers end" if should_end else "not tested: no answer ended"
        message = f"stops at id {stop}; {tested}"
    figures = {"ended": sum(should_end), "of": len(should_end)}
    is_ok = not missing and (not should_end or any(should_end))
    return Check(name="stop", is_ok=is_ok, words=message, figures=figures)


# Logits.


@dataclass(frozen=True)
class LogitDifference:
    """The difference between the logits of two models on the same tokens."""

    positions: int
    largest: float
    """Largest difference of two logits. Each row is shifted to mean 0, because a constant does not change
    probabilities."""
    mean: float
    same_top: float
    """Share of positions at which both models have the same most likely token."""
    near_ties: int
    """Number of positions at which the most likely tokens differ but are almost equally likely in the reference."""
    kl: float
    """Mean Kullback-Leibler divergence from the reference, in nats."""

    @property
    def wrong_tops(self) -> int:
        """Number of positions at which the most likely tokens differ and are not a near tie."""
        return round(self.positions * (1 - self.same_top)) - self.near_ties


def compare_logits(reference: Sequence[Logits], found: Sequence[Logits], *, tie: float) -> LogitDifference:
    """Compare logits [positions, vocabulary] of several texts; columns that pad a vocabulary are ignored.

    Two tokens are a near tie if their reference logits differ by less than `tie` standard deviations of the logits at
    that position. The found logits are not used for this: the worse they are, the more ties they would have.
    """
    width = min(rows.shape[1] for rows in (*reference, *found))
    positions = sum(map(len, reference))
    if not all(np.isfinite(rows[:, :width]).all() for rows in found):
        return LogitDifference(positions, float("inf"), float("inf"), 0.0, 0, float("inf"))
    # Text by text: the logits of one text fit into the processor's cache, those of all texts do not.
    parts = [_compare_rows(one[:, :width], other[:, :width], tie) for one, other in zip(reference, found, strict=True)]
    largest, sums, is_same, is_tie, kl = torch.cat(parts, dim=1)
    return LogitDifference(
        positions=positions,
        largest=float(largest.max()),
        mean=float(sums.sum() / (positions * width)),
        same_top=float(is_same.mean()),
        near_ties=int((is_tie * (1 - is_same)).sum()),
        kl=float(kl.mean()),
    )


def _compare_rows(reference: Logits, found: Logits, tie: float) -> torch.Tensor:
    """Return, for each row: largest and summed difference, is the top token the same, is it a near tie, and the KL."""
    expected, got = (torch.from_numpy(rows).double() for rows in (reference, found))
    expected, got = (rows - rows.mean(dim=1, keepdim=True) for rows in (expected, got))
    difference = (expected - got).abs()
    top, found_top = (rows.argmax(dim=1, keepdim=True) for rows in (expected, got))
    lead = (expected.gather(1, top) - expected.gather(1, found_top))[:, 0]
    is_tie = lead < tie * expected.std(dim=1, correction=0)
    log_expected, log_got = (rows.log_softmax(dim=1) for rows in (expected, got))
    kl = (log_expected.exp() * (log_expected - log_got)).sum(dim=1)
    return torch.stack([difference.amax(dim=1), difference.sum(dim=1), (top == found_top)[:, 0], is_tie, kl])


def check_logits(name: str, reference: Sequence[Logits], found: Sequence[Logits]) -> Check:
    """Check that logits are within the bound of the artefact `name`, e.g. `gguf q8_0`, of the trained model's."""
    bound = bounds()["logits"][name]
    difference = compare_logits(reference, found, tie=bound["tie"])
    is_ok = (
        math.isfinite(difference.kl)
        and len(reference) == len(found)
        and difference.kl <= bound["kl"]
        and difference.wrong_tops <= bound["wrong_tops"] * difference.positions
        and difference.same_top >= bound["same_top"]
    )
    ties = f", {difference.near_ties} near ties" if difference.near_ties else ""
    message = (
        f"KL {difference.kl:.1e}, largest difference {difference.largest:.1e}, same most likely token at "
        f"{difference.same_top:.1%} of {count(difference.positions)} positions{ties}"
    )
    allowed = (
        f"KL at most {bound['kl']:g}, wrong top tokens at most {bound['wrong_tops']:g}, "
        f"same top token at least {bound['same_top']:g}: {bound['because']}"
    )
    figures = {**difference.__dict__, "wrong_tops": difference.wrong_tops}
    return Check(name="logits", is_ok=is_ok, words=message, figures=figures, bound=allowed)


# Settings stored beside the weights.


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as stored in a JSON file, without keys that differ between files of the same model."""
    relevant = {key: value for key, value in settings.items() if key not in _IGNORED_KEYS}
    return json.loads(json.dumps(relevant, sort_keys=True, default=str))


def check_settings(path: Path, tokenizer: Any, facts: TrainedFacts, *, config: Any, generation: Any) -> Check:
    """Compare a folder's settings, as read by transformers, with the model's; `config` is None for an adapter."""
    problems = _differences("generation_config.json", plain_settings(generation.to_dict()), facts.generation)
    if config is not None:
        problems += _differences("config.json", plain_settings(config.to_dict()), facts.config)
    written = json.loads(read_text(path / _TOKENIZER_CONFIG))
    for name in (f"{own}_token" for own in _SPECIAL_TOKENS):
        # If a model has no such token, some tokenizer classes add their own.
        expected = facts.special_tokens.get(name)
        found = written.get(name) if expected is None else getattr(tokenizer, name, None)
        if found != expected:
            problems.append(f"the tokenizer's `{name}` is {found!r}; expected {expected!r}")
    if written.get("model_max_length") != facts.max_length:
        problems.append(f"`model_max_length` is {written.get('model_max_length')}; expected {facts.max_length}")
    if (path / _TEMPLATE_FILE).is_file() and "chat_template" in written:
        problems.append(
            f"both `{_TOKENIZER_CONFIG}` and `{_TEMPLATE_FILE}` have a chat template; programs differ in which they use"
        )
    problems += _tokenizer_problems(path, tokenizer, facts)
    message = "settings, tokenizer, stop ids and special tokens match the model's"
    return check_problems("settings", problems, otherwise=message, wrong=len(problems))


def _tokenizer_problems(path: Path, tokenizer: Any, facts: TrainedFacts) -> list[str]:
    """Compare every part of `tokenizer.json`, the text of the template, and the ids of plain texts with the run's."""
    found = tokenizer_digest(Tokenizer.from_file(str(path / "tokenizer.json")))
    problems = [
        f"the {part} of `tokenizer.json` differ from those of the trained model's tokenizer"
        for part in sorted({*found, *facts.tokenizer})
        if found.get(part) != facts.tokenizer.get(part)
    ]
    template = tokenizer.chat_template or ""
    if facts.template_sha256 is not None and sha256_text(template) != facts.template_sha256:
        problems.append("the text of the chat template differs from the run's")
    wrong = [plain for plain in facts.plain_texts if list(tokenizer(plain.text)["input_ids"]) != plain.ids]
    if wrong:
        total = count(len(facts.plain_texts), "plain text")
        problems.append(f"{len(wrong)} of {total} get other token ids, the first is {short_repr(wrong[0].text)}")
    return problems


def _differences(file_name: str, found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        f"`{key}` in `{file_name}` is {short_repr(found.get(key))}; expected {short_repr(expected.get(key))}"
        for key in sorted({*found, *expected})
        if found.get(key) != expected.get(key)
    ]


# Vocabulary: the same hash for the same tokens, in a tokenizer and in a GGUF file.


def vocabulary_digest(tokenizer: LoadedTokenizer) -> dict[str, str]:
    """Return hashes of a tokenizer's tokens with their ids, and of its merges if it has any."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    merges = orjson.loads(tokenizer.backend.to_str())["model"].get("merges")
    digest = {"words": _hash_tokens((number, token) for token, number in vocabulary.items())}
    if merges:
        digest["merges"] = _hash(map(" ".join, merges))
    return digest


def tokenizer_digest(backend: Tokenizer) -> dict[str, str]:
    """Return a hash of each part of a tokenizer that can change ids: merges, normalizer, post-processor and others."""
    content = orjson.loads(backend.to_str())
    parts = {f"{name.replace('_', ' ')} settings": content.get(name) for name in _TOKENIZER_PARTS}
    model = content["model"]
    parts |= {"merges": model.pop("merges", None), "tokens": model.pop("vocab", None), "model settings": model}
    return {name: _hash([orjson.dumps(part, option=orjson.OPT_SORT_KEYS).decode()]) for name, part in parts.items()}


def gguf_vocabulary_digest(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return hashes of the tokens and merges in the metadata of a GGUF file; unused tokens are skipped."""
    tokens, types = (fields.get(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    pairs = zip(tokens, types, strict=False)
    digest = {"words": _hash_tokens((number, token) for number, (token, kind) in enumerate(pairs) if kind != UNUSED)}
    if merges := fields.get("tokenizer.ggml.merges"):
        digest["merges"] = _hash(merges)
    return digest


def _hash_tokens(pairs: Iterable[tuple[int, str]]) -> str:
    # GGUF files store user-defined tokens with plain spaces.
    return _hash(f"{number} {token.replace(_SPACE_SYMBOL, ' ')}" for number, token in sorted(pairs))


def _hash(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogatepass") + b"\x00")
    return digest.hexdigest()


def short_repr(value: Any) -> str:
    """Return the repr of a value, truncated to 40 characters."""
    return shorten(repr(value), _MAX_CHARS)
