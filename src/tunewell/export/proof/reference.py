"""The reference of a verification: token ids, logits and answers of the trained model, and a sketch of every tensor."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedConfig

from tunewell.core.errors import UserError
from tunewell.core.files import read_data, sha256_file, sha256_text
from tunewell.core.options import WeightsOptions
from tunewell.core.progress import Progress, ProgressListener, silent, with_stage
from tunewell.core.units import percent
from tunewell.core.version import made_by
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.templates.chat_template import TemplateFailed
from tunewell.export.proof.checks import Logits, check_logits, plain_settings, tokenizer_digest, vocabulary_digest
from tunewell.export.proof.tensors import (
    Rows,
    Sketch,
    as_arrays,
    check_tensors,
    compare_weights,
    from_arrays,
    sketch_model,
)
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.generate import generate
from tunewell.inference.prompt import prompt_ids
from tunewell.inference.runtime import last_logits
from tunewell.models.base_content import read_content
from tunewell.records.manifest import read_manifest
from tunewell.records.parity import PROOF_FILES, Artefact, PlainText, Proof, ProofProbe, ProofQuestion, TrainedFacts
from tunewell.scoring.questions import questions_of

ANSWER_TOKENS = 48
_MAX_QUESTIONS = 8
_MAX_OTHER_IDS_SHARE = 0.01
_MAX_LOGIT_BYTES = 64 * 2**20
_MAX_POSITIONS = 8
_MERGE_POSITIONS = 48
"""Positions at which the logits of merged weights are compared. One near tie in 48 is within the bound."""
_PROBE, _ROUNDED = "probe-", "rounded/"
# Every artefact computes the long probe in fp32. With 2,560 tokens, a 4B model takes minutes on a CPU.
_LONG_TOKENS, _MAX_LONG_TOKENS, _TOKENS_BEYOND = 512, 2_560, 64


@dataclass(frozen=True)
class Reference:
    """The arrays with which an export is compared; the contents of `proof.safetensors`."""

    logits: list[Logits]
    """Logits of each probe's last positions."""
    sketches: dict[str, Sketch]
    """Sketch of each tensor after the merge."""
    rounded: dict[str, Rows] = field(default_factory=dict)
    """Sketch rows of trained tensors rounded to a GGUF type, by `type/tensor`."""

    def save(self, path: Path) -> None:
        """Write all arrays to one safetensors file."""
        logits = {f"{_PROBE}{index:02d}": np.ascontiguousarray(rows) for index, rows in enumerate(self.logits)}
        rounded = {_ROUNDED + name: rows.astype(np.float32) for name, rows in self.rounded.items()}
        save_file(logits | as_arrays(self.sketches) | rounded, path)

    @classmethod
    def load(cls, path: Path, facts: TrainedFacts) -> "Reference":
        """Read a reference; raise UserError if the file is missing or damaged."""
        try:
            arrays = load_file(path)
            logits = [arrays[name] for name in sorted(arrays) if name.startswith(_PROBE)]
            rounded = {name: rows for name, rows in arrays.items() if name.startswith(_ROUNDED)}
            return cls(
                logits,
                from_arrays(arrays, facts.shapes),
                {name.removeprefix(_ROUNDED): rows.astype(np.float64) for name, rows in rounded.items()},
            )
        except FileNotFoundError:
            raise UserError(f"`{path}` is missing, so the export cannot be compared with the trained model") from None
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(
                f"`{path}` is damaged", where=str(error).splitlines()[0], fix="export again with `tunewell export`"
            ) from error


def make_reference(model: ChatModel, *, answer_tokens: int, progress: ProgressListener) -> tuple[Proof, Reference]:
    """Record the trained model before it is merged or exported; `complete_proof` adds the artefacts later."""
    probes, notes = _make_probes(model, answer_tokens)
    num_positions = _num_positions(len(probes), model.model.config.get_text_config().vocab_size)
    logits = last_logits(
        model.model,
        [probe.ids for probe in probes],
        number=num_positions,
        progress=with_stage(progress, "computing logits of the trained model"),
    )
    stage = "answering questions with the trained model"
    progress(Progress(stage))
    prompts = _held_out_prompts(model) or [probe.ids for probe in probes[:4]]
    stop_ids = find_stop_ids(model)
    answers = generate(
        model.model, prompts, max_new_tokens=answer_tokens, stop_ids=stop_ids, progress=with_stage(progress, stage)
    )
    questions = [
        ProofQuestion(ids=list(ids), answer=answer.ids, ended=answer.ended, text=model.decode(answer.ids))
        for ids, answer in zip(prompts, answers, strict=True)
    ]
    stage = "sketching the trained tensors"
    progress(Progress(stage))
    sketches, tied = sketch_model(model.model, progress=with_stage(progress, stage))
    template = model.masker.template if model.masker else None
    share = read_manifest(model.ref.corpus).other_ids_share if model.ref.corpus is not None else None
    if share is not None and share > _MAX_OTHER_IDS_SHARE:
        notes.append(
            f"llama.cpp and Ollama tokenize {percent(share)} of the training conversations differently: they tokenize "
            "the whole text at once, so a reply and its header can share a token; see "
            "`tunewell glossary 'other ids as a whole'`"
        )
    proof = Proof(
        made_by=made_by(),
        subject=model.ref.name,
        base=model.ref.base,
        is_lora=model.adapter is not None,
        trained_on=read_content(model.ref.base) if model.adapter and model.ref.base else None,
        quantized=model.ref.plan.quantized if model.ref.plan else None,
        trained_precision=model.ref.plan.precision.value if model.ref.plan else "fp32",
        stop_ids=stop_ids,
        added_tokens=list(model.ref.added_tokens or model.tokenizer.added_by_us),
        date=template.date if template and template.uses_clock else None,
        probes=probes,
        num_positions=num_positions,
        questions=questions,
        other_ids_share=share,
        model=_model_facts(model, stop_ids, sketches, tied),
        artefacts=[],
        notes=notes,
    )
    return proof, Reference(logits, sketches)


def check_merge(model: ChatModel, proof: Proof, reference: Reference, *, progress: ProgressListener = silent) -> None:
    """Raise UserError if the merged weights differ from the trained model; later, rounding would hide a difference."""
    # Every tensor is compared, so logits only have to detect that the layers do not compute what their weights say.
    # The shortest texts are enough for that: their logits must be equal in fp32.
    pairs = sorted(zip(proof.probes, reference.logits, strict=True), key=lambda pair: len(pair[0].ids))
    pairs = pairs[: -(-_MERGE_POSITIONS // proof.num_positions)]
    logits = last_logits(
        model.model,
        [probe.ids for probe, _ in pairs],
        number=proof.num_positions,
        progress=with_stage(progress, "checking the merged weights"),
    )
    weights = dict(model.model.named_parameters())
    for check in (
        check_logits("merged fp32", [rows for _, rows in pairs], logits),
        check_tensors(compare_weights(weights, reference.sketches, "F32"), missing=(), unknown=()),
    ):
        if not check.is_ok:
            raise UserError(
                f"the merged weights differ from the trained model: {check.words}",
                where=f"allowed: {check.bound}",
                fix="this is a bug in tunewell; the adapter itself can be exported",
            )


def complete_proof(
    proof: Proof,
    folder: Path,
    artefacts: Sequence[Artefact],
    *,
    notes: Sequence[str],
    license: str | None,
    template: str,
) -> Proof:
    """Return a copy of the proof record with the artefacts, notes, licence and file hashes of an export."""
    return proof.model_copy(
        update={
            "artefacts": list(artefacts),
            "notes": [*proof.notes, *notes],
            "model": proof.model.model_copy(update={"license": license, "template_sha256": sha256_text(template)}),
            "sha256s": {name: sha256_file(folder / name) for name in PROOF_FILES},
        }
    )


def find_stop_ids(model: ChatModel) -> list[int]:
    """Return the token ids that end a reply, the template's end-of-turn token first."""
    assert model.masker is not None
    marker = model.masker.frame.end_marker
    end_of_turn = model.tokenizer.backend.token_to_id(marker) if marker else None
    return [number for number in dict.fromkeys([end_of_turn, *model.stop_ids]) if number is not None]


def probe_messages() -> list[list[dict[str, str]]]:
    """Return the test conversations of every export: system prompts, several turns, scripts, spaces and digits."""
    return [row["messages"] for row in read_data(__file__, "probes.jsonl")]


def long_probe_length(config: PreTrainedConfig, answer_tokens: int = ANSWER_TOKENS) -> tuple[int, str | None]:
    """Return the length of the long probe in tokens, and a note if it is too short for this model.

    Models compute differently beyond a sliding window, and beyond the original context length with RoPE scaling.
    """
    text: Any = config.get_text_config()
    max_length = getattr(text, "max_position_embeddings", None) or _MAX_LONG_TOKENS
    layer_types, rope = getattr(text, "layer_types", None), getattr(text, "rope_parameters", None) or {}
    has_window = layer_types is None or "sliding_attention" in layer_types
    limits = [getattr(text, "sliding_window", None) if has_window else None]
    limits += [own.get("original_max_position_embeddings") for own in (rope, *rope.values()) if isinstance(own, dict)]
    limits.append(getattr(text, "original_max_position_embeddings", None))
    last = max((limit for limit in limits if limit and limit < max_length), default=0)
    enough = max(_LONG_TOKENS, last + _TOKENS_BEYOND if last else 0)
    length = min(enough, _MAX_LONG_TOKENS, max_length - answer_tokens)
    note = f"not tested beyond {length:,} tokens, but this model computes differently beyond {last:,} tokens"
    return length, note if length <= last else None


def _make_probes(model: ChatModel, answer_tokens: int) -> tuple[list[ProofProbe], list[str]]:
    """Return the probes, rendered as in training, with notes; conversations that the template rejects are left out."""
    probes = [probe for messages in probe_messages() if (probe := _make_probe(model, messages)) is not None]
    if not probes:
        raise UserError(
            "the chat template rejects every test conversation",
            fix="choose another template with `--set template.name=NAME`",
        )
    length, note = long_probe_length(model.model.config, answer_tokens)
    if (long := _make_long_probe(model, probes, length)) is not None:
        return [*probes, long], [note] if note else []
    longest = max(len(probe.ids) for probe in probes)
    return probes, [f"not tested beyond {longest} tokens: the model's context length is not much longer"]


def _make_probe(model: ChatModel, messages: list[dict[str, str]]) -> ProofProbe | None:
    assert model.masker is not None
    try:
        text = model.masker.template.render(messages, None, add_generation_prompt=True)
        ids = prompt_ids(model.masker, model.encoder, messages)
        whole = model.tokenizer.backend.encode(text, add_special_tokens=False).ids
        return ProofProbe(messages=messages, text=text, ids=ids, whole_ids=None if whole == ids else whole)
    except (TemplateFailed, UserError):
        return None


def _make_long_probe(model: ChatModel, probes: Sequence[ProofProbe], length: int) -> ProofProbe | None:
    """Return a probe that repeats all questions up to `length` tokens, or None if it is not the longest probe."""
    texts = [message["content"] for probe in probes for message in probe.messages if message["role"] == "user"]
    longest = None
    for num_lines in range(1, length):
        lines = [f"{index}. {texts[index % len(texts)].strip()}" for index in range(num_lines)]
        probe = _make_probe(model, [{"role": "user", "content": "\n".join(lines)}])
        if probe is None or len(probe.ids) > length:
            break
        longest = probe
    if longest is None or len(longest.ids) <= max(len(probe.ids) for probe in probes):
        return None
    return longest.model_copy(update={"is_long": True})


def _num_positions(num_probes: int, vocab_size: int) -> int:
    """Return the number of positions to store for each probe, so that the logits take 64 MiB at most in total."""
    return int(min(_MAX_POSITIONS, max(1, _MAX_LOGIT_BYTES // max(1, num_probes * vocab_size * 4))))


def _held_out_prompts(model: ChatModel) -> list[list[int]]:
    """Return held-out questions of the run as token ids, or an empty list if its corpus is unknown."""
    if model.ref.corpus is None:
        return []
    held_out = open_corpus(model.ref.corpus, verify=True).held_out
    return [question.ids for question in questions_of(held_out, number=_MAX_QUESTIONS, spell=model.decode)]


def _model_facts(
    model: ChatModel, stop_ids: list[int], sketches: dict[str, Sketch], tied: dict[str, str]
) -> TrainedFacts:
    assert model.model.generation_config is not None
    # Replies end as in training, whatever the base model's settings are. There is no padding.
    ends = {"eos_token_id": stop_ids or None, "pad_token_id": None}
    backend, special = model.tokenizer.backend, model.tokenizer.special_tokens
    special_ids = {name: backend.token_to_id(text) for name, text in special.items() if text}
    texts = dict.fromkeys(message["content"] for messages in probe_messages() for message in messages)
    return TrainedFacts(
        config=plain_settings(model.model.config.to_dict()),
        generation=plain_settings(model.model.generation_config.to_dict() | ends),
        special_tokens=dict(special),
        special_ids={name.removesuffix("_token"): own for name, own in special_ids.items() if own is not None},
        max_length=model.tokenizer.max_length,
        vocabulary=vocabulary_digest(model.tokenizer),
        tokenizer=tokenizer_digest(backend),
        plain_texts=[PlainText(text=text, ids=backend.encode(text).ids) for text in texts],
        shapes={name: list(own.shape) for name, own in sketches.items()},
        twins=tied,
    )


class ProofUnavailable(UserError):
    """Raised if the verification cannot run because something outside of the export is missing; not a failed check."""


@dataclass(frozen=True)
class ProofContext(WeightsOptions):
    """An export on disk, with its reference and the options of the verification."""

    folder: Path
    proof: Proof
    reference: Reference
    progress: ProgressListener
    base: str | None = None
    """New location of the adapter's base model, if it has moved since the export."""

    @property
    def answer_tokens(self) -> int:
        """The limit on generated tokens per question.

        An answer that did not end has exactly as many tokens as the limit in the reference. If all answers ended, one
        token more than the longest is enough to repeat them.
        """
        return max((len(question.answer) + question.ended for question in self.proof.questions), default=1)
