"""Export target `gguf`: files for llama.cpp and the programs built on it, one for each GGUF type."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from tunewell.core.progress import Progress, with_stage
from tunewell.export.gguf.architecture import read_settings
from tunewell.export.gguf.tokenizer import read_vocabulary
from tunewell.export.gguf.write import GgufSource, write_gguf
from tunewell.export.options import ExportOptions
from tunewell.export.proof.gguf import prove_gguf, quantized_sketches
from tunewell.export.proof.reference import ProofContext
from tunewell.export.targets.base import DiskUse, ExportContext, ExportTarget, NextStep, PreflightFacts, Requirements
from tunewell.export.targets.merged import num_weights, unique_tensors
from tunewell.records.parity import Artefact, Check

_BITS_PER_WEIGHT = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    # The mixtures store some tensors in more bits than their name says; in small models these are many. Measured on
    # SmolLM2-135M: 8.2, 6.7 and 6.3 bits per weight.
    "q6_k": 8.3,
    "q5_k_m": 6.7,
    "q4_k_m": 6.3,
}


class GgufTarget(ExportTarget):
    """The export target for GGUF files, one for each format."""

    name: ClassVar = "gguf"
    requires: ClassVar = Requirements(packages=("gguf",), llama_cpp=True, merged_weights=True)

    def formats(self, options: ExportOptions) -> tuple[str, ...]:
        """Return the GGUF types of `--gguf`."""
        return tuple(options.gguf or ())

    def preflight(self, facts: PreflightFacts) -> None:
        """Raise UserError if llama.cpp does not support the architecture or the tokenizer."""
        read_settings(dict(facts.read_config()))
        adds_bos(facts)

    def disk_use(self, context: ExportContext) -> DiskUse:
        """Return the size of each file."""
        weights = num_weights(context)
        return DiskUse({f"{self.name} {name}": gguf_bytes(weights, name) for name in self.formats(context.options)})

    def write(self, context: ExportContext) -> list[Artefact]:
        """Convert the merged fp32 weights, so that they are rounded only once."""
        folder = context.staging_dir / self.name
        folder.mkdir(exist_ok=True)
        model, card, artefacts = context.model.model, context.card, []
        tokenizer = replace(context.model.tokenizer, chat_template=context.template.source)
        source = GgufSource(unique_tensors(model), model.config.to_dict(), tokenizer, card.name, card.license)
        for name in self.formats(context.options):
            path = folder / f"{_file_name(card.name)}-{name}.gguf"
            stage = f"writing {path.name}"
            context.progress(Progress(stage))
            written = write_gguf(source, path, kind=name, progress=with_stage(context.progress, stage))
            context.notes += [note for note in written.notes if note not in context.notes]
            artefacts.append(context.artefact(self.name, name, path))
        stage = "rounding the trained tensors for the verification"
        context.progress(Progress(stage))
        files = [own.path for own in (*context.artefacts, *artefacts) if own.kind == self.name]
        rounded = quantized_sketches(
            [context.staging_dir / path for path in files],
            model,
            read_settings(model.config.to_dict()),
            context.reference.sketches,
            progress=with_stage(context.progress, stage),
        )
        context.reference = replace(context.reference, rounded=rounded)
        return artefacts

    def prove(self, artefact: Artefact, context: ProofContext) -> list[Check]:
        """Compare a file with the trained model: its metadata, every tensor, and what llama.cpp computes with it."""
        return prove_gguf(artefact, context)

    def next_step(self, folder: Path, artefacts: Sequence[Artefact], options: ExportOptions) -> NextStep:
        """Return the command that starts a chat with the first file."""
        return NextStep(shlex.join(["tunewell", "chat", str(folder / artefacts[0].path)]))


def gguf_bytes(weights: int, name: str) -> int:
    """Estimate the size of a GGUF file from the number of weights."""
    return int(weights * _BITS_PER_WEIGHT[name] / 8)


@lru_cache(maxsize=1)
def adds_bos(facts: PreflightFacts) -> bool:
    """Return True if llama.cpp must add the BOS token; raise UserError if llama.cpp would tokenize differently."""
    config = dict(facts.read_config())
    # Loading the model adds embedding rows for tokens that only the template uses.
    num_rows = max(config.get("vocab_size") or 0, facts.tokenizer.vocab_size)
    tokenizer = replace(facts.tokenizer, chat_template=facts.template.source)
    return read_vocabulary(tokenizer, num_rows=num_rows, config=config).adds_bos


def _file_name(name: str) -> str:
    """Convert a model name to a file name that every file system and Ollama accept."""
    text = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    return "-".join(part for part in text.split("-") if part)[:60] or "model"
