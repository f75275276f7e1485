"""Export target `merged`: the whole model in transformers format, with the adapter merged into its weights."""

from pathlib import Path
from typing import Any, ClassVar

import torch

from tunewell.core.progress import Progress
from tunewell.export.multimodal import MultimodalFolder, find_multimodal_folder, missing_names, write_multimodal
from tunewell.export.proof.reference import ProofContext
from tunewell.export.proof.transformers import prove_merged
from tunewell.export.targets.base import DiskUse, ExportContext, ExportTarget, Requirements
from tunewell.models.load import DTYPES
from tunewell.models.pretrained import first_names, has_causal_class
from tunewell.models.support import quiet
from tunewell.records.parity import Artefact, Check

_MAX_SHARD_SIZE = "5GB"
_EXAMPLE = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("merged", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("merged")"""


class MergedTarget(ExportTarget):
    """The export target for a folder that `AutoModelForCausalLM.from_pretrained` loads."""

    name: ClassVar = "merged"
    requires: ClassVar = Requirements(merged_weights=True)

    def disk_use(self, context: ExportContext) -> DiskUse:
        """Return the size of the weights in the chosen precision."""
        precision = str(context.options.precision)
        return DiskUse({f"{self.name} {precision}": num_weights(context) * DTYPES[precision].itemsize})

    def write(self, context: ExportContext) -> list[Artefact]:
        """Write weights, config, tokenizer and chat template."""
        precision, folder = str(context.options.precision), context.staging_dir / self.name
        context.progress(Progress(f"writing the merged model in {precision}"))
        example = _EXAMPLE
        if (base := _multimodal_base(context)) is None:
            write_model(context, folder, precision)
        else:
            write_multimodal(base, unique_tensors(context.model.model), folder, DTYPES[precision])
            context.generation_config().save_pretrained(folder)
            context.model.tokenizer.save(folder, context.template.source)
            context.notes.append("merged: the whole multimodal model; only the weights of its text part have changed")
            example = _EXAMPLE if has_causal_class(base.config) else _EXAMPLE.replace("CausalLM", "ImageTextToText")
        context.write_card(folder, library="transformers", example=example)
        return [context.artefact(self.name, precision, folder)]

    def prove(self, artefact: Artefact, context: ProofContext) -> list[Check]:
        """Load the folder with transformers, and compare it with the trained model."""
        return prove_merged(artefact, context)


def _multimodal_base(context: ExportContext) -> MultimodalFolder | None:
    """Return the multimodal folder into which the merged weights fit, or None."""
    base = find_multimodal_folder(context.model.ref.base)
    if base is None:
        return None
    if missing := missing_names(base, unique_tensors(context.model.model)):
        context.notes.append(
            f"merged: only the text part of `{base.config['model_type']}`, because its files do not have "
            f"{first_names(missing)}"
        )
        return None
    return base


def num_weights(context: ExportContext) -> int:
    """Return the number of parameters, including those of the adapter."""
    return sum(parameter.numel() for parameter in context.model.model.parameters())


def write_model(context: ExportContext, folder: Path, precision: str) -> None:
    """Write the merged model and its tokenizer in transformers format."""
    context.generation_config()
    save_plain(context.model.model, folder, DTYPES[precision])
    context.model.tokenizer.save(folder, context.template.source)


def save_plain(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write a model without an adapter as `from_pretrained` loads it, however it was loaded."""
    tensors = {name: tensor.to(dtype) for name, tensor in unique_tensors(model).items()}
    before = model.config.dtype
    model.config.dtype = dtype
    try:
        with quiet():
            model.save_pretrained(folder, state_dict=tensors, max_shard_size=_MAX_SHARD_SIZE)
    finally:
        model.config.dtype = before


def unique_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's tensors without the second names of tied tensors, which are tied again on loading."""
    seen: set[tuple[int, torch.Size]] = set()
    unique = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in seen:
            seen.add(key)
            unique[name] = tensor
    return unique
