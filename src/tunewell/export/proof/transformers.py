"""Verify a folder for transformers or PEFT: tokenizer, logits, answers, settings and every tensor."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_text
from tunewell.export.multimodal import changed_towers, find_multimodal_folder
from tunewell.export.proof.checks import check_answers, check_ids, check_logits, check_settings, check_stop, short_repr
from tunewell.export.proof.reference import ProofContext, ProofUnavailable
from tunewell.export.proof.tensors import check_tensors, compare_weights
from tunewell.inference.runtime import last_logits
from tunewell.inference.transformers_generate import generate_with_transformers
from tunewell.models.load import DTYPES, LoadOptions, load_dequantized, load_model, not_finite_names
from tunewell.models.pretrained import auto_class
from tunewell.models.support import quiet, text_weights
from tunewell.records.parity import Artefact, Check, ProofProbe

_TENSOR_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def prove_merged(artefact: Artefact, context: ProofContext) -> list[Check]:
    """Load a model folder with transformers, as users do, and compare it with the trained model."""
    from transformers import AutoConfig

    path = context.folder / artefact.path
    with quiet():
        loader = auto_class(AutoConfig.from_pretrained(path))
        model: Any = loader.from_pretrained(path, dtype="auto").float()
    is_multimodal = model.config.get_text_config() is not model.config
    checks = _prove_model(model, artefact, context, config=None if is_multimodal else model.config)
    tensors = _prove_tensors(model, artefact, context) if checks[0].is_ok else []
    return [*checks, *tensors, *_prove_towers(path, context)]


def _prove_towers(path: Path, context: ProofContext) -> list[Check]:
    """Compare the weights outside of the text part with those of the base, byte for byte, if it is multimodal."""
    base = find_multimodal_folder(context.proof.base)
    if base is None or parse_json(read_text(path / "config.json")).get("model_type") != base.config["model_type"]:
        return []
    changed = changed_towers(base, path, context.reference.sketches)
    words = f"{len(changed)} weights outside of the text part differ from the base: {changed[:3]}"
    return [Check(name="base", is_ok=not changed, words=words if changed else "the other towers are unchanged")]


def prove_adapter(artefact: Artefact, context: ProofContext) -> list[Check]:
    """Load an adapter with PEFT on its base model, as users do, and compare it with the trained model."""
    from peft import PeftModel

    path = context.folder / artefact.path
    base = _load_base(path, context)
    with quiet():
        peft: Any = PeftModel.from_pretrained(base, path)
    checks = _prove_model(peft.get_base_model(), artefact, context, config=None)
    # Last, because PEFT's merge removes the adapter.
    tensors = _prove_tensors(peft.merge_and_unload(), artefact, context) if checks[0].is_ok else []
    return [*checks, *tensors, *_check_base(path, context)]


def _prove_model(model: Any, artefact: Artefact, context: ProofContext, *, config: Any) -> list[Check]:
    """Compare token ids, logits, answers, stop ids and settings; `config` is None for an adapter."""
    from transformers import AutoTokenizer, GenerationConfig

    path, proof = context.folder / artefact.path, context.proof
    model.eval()
    if broken := not_finite_names(model):
        message = f"`{broken[0]}` contains NaN or infinity; {len(broken)} tensors in total"
        return [Check(name="finite", is_ok=False, words=message)]
    with quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def tokenize(probe: ProofProbe) -> list[int]:
        with clock_at(proof.date):
            encoded = tokenizer.apply_chat_template(
                probe.messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        return list(encoded["input_ids"])

    prompts = [probe.ids for probe in proof.probes]
    logits = last_logits(model, prompts, number=proof.num_positions, progress=context.progress)
    settings = GenerationConfig.from_pretrained(path)
    eos = tokenizer.eos_token_id if settings.eos_token_id is None else settings.eos_token_id
    stops = eos if isinstance(eos, list) else [eos]
    answers = generate_with_transformers(
        model, [question.ids for question in proof.questions], max_new_tokens=context.answer_tokens, stop_ids=stops
    )
    return [
        Check(name="finite", is_ok=True, words="all weights are finite"),
        check_ids(proof, tokenize, library="transformers", why=_why_other_ids(tokenizer, model.config.model_type)),
        check_logits(artefact.name, context.reference.logits, logits),
        check_answers(proof, [answer.ids for answer in answers], is_exact=artefact.precision == "fp32"),
        check_stop(proof, stops, [answer.ended for answer in answers]),
        check_settings(path, tokenizer, proof.model, config=config, generation=settings),
    ]


def _why_other_ids(tokenizer: Any, model_type: str) -> str:
    """Return why ids can differ: for some types of models, transformers takes one class for every tokenizer."""
    name = type(tokenizer).__name__
    if name in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        return ""
    return (
        f"; transformers loads every tokenizer of a `{model_type}` model as `{name}`, and that of the base splits text "
        "in another way: train a base with the tokenizer of its family"
    )


def _prove_tensors(model: Any, artefact: Artefact, context: ProofContext) -> list[Check]:
    """Compare every weight, including tied weights, with the sketches of the trained model."""
    weights, sketches = text_weights(model), context.reference.sketches
    expected = {**sketches, **{tied: sketches[name] for tied, name in context.proof.model.twins.items()}}
    return [
        check_tensors(
            compare_weights(weights, expected, _TENSOR_TYPES[artefact.precision]),
            missing=[name for name in expected if name not in weights],
            unknown=[name for name in weights if name not in expected],
        )
    ]


def _check_base(folder: Path, context: ProofContext) -> list[Check]:
    """Return a warning if the adapter does not name the base model that it was verified on."""
    named = str(json.loads(read_text(folder / "adapter_config.json")).get("base_model_name_or_path"))
    if context.base is None or Path(named).expanduser().resolve() == Path(context.base).expanduser().resolve():
        return []
    message = (
        f"verified on `{context.base}` (`--base`), but `adapter_config.json` names {short_repr(named)}, which other "
        "programs will load; correct `base_model_name_or_path` there if that is another model"
    )
    return [Check(name="base", is_ok=True, is_warning=True, words=message)]


def _load_base(folder: Path, context: ProofContext) -> Any:
    """Load the base model of an adapter in fp32, as users of PEFT do; a GGUF file is dequantised.

    If the base model was quantised in training, it is quantised and dequantised again: the adapter belongs to that.
    """
    written = json.loads(read_text(folder / "adapter_config.json"))
    named, known = written.get("base_model_name_or_path"), context.proof.base
    name = context.base or (known if (known or "").startswith("package:") else named or known)
    if name is None:
        raise ProofUnavailable("the adapter does not name its base model", fix="add `--base MODEL`")
    options = LoadOptions(
        name,
        folder,
        torch.device("cpu"),
        torch.float32,
        attention=None,
        added_tokens=tuple(context.proof.added_tokens),
        is_packed=False,
        is_whole=True,
        allow_pickle=context.allow_pickle,
        quantized=context.proof.quantized,
    )
    try:
        if context.proof.quantized is not None:
            return load_dequantized(options, DTYPES[context.proof.trained_precision]).model
        return load_model(options).model
    except (UserError, OSError, ValueError, ImportError) as error:
        # The first line of an error message from transformers may be empty.
        what, *rest = str(getattr(error, "what", error)).strip().splitlines() or [""]
        fixes = [error.fix] if isinstance(error, UserError) and error.fix else []
        raise ProofUnavailable(
            f"the adapter's base model cannot be loaded: {what}",
            where=getattr(error, "where", None) or " ".join(rest) or str(name),
            fix="; or ".join([*fixes, "name its current location with `--base MODEL`"]),
        ) from error


# The clock of chat templates. This is one of the patches of other libraries listed in CONTRIBUTING.md: transformers has
# no argument for the current date.


@contextmanager
def clock_at(date: str | None) -> Iterator[None]:
    """Set the clock of chat templates in transformers to midnight of a day; None keeps the system clock."""
    if date is None:
        yield
        return
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    before = module.datetime
    module.datetime = SimpleNamespace(now=lambda: datetime.fromisoformat(date))  # nothing else of it is called
    try:
        yield
    finally:
        module.datetime = before
