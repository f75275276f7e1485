"""Tiny models with adapters, and exports of them, that tests of the proof share and spoil."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_tiny import save, tiny
from transformers import AutoModelForCausalLM

from tunewell.config.schema import MethodSettings
from tunewell.core.files import sha256_file
from tunewell.core.progress import ProgressListener, silent
from tunewell.export import proof_process
from tunewell.export.options import ExportOptions
from tunewell.methods.base import trainable_parameters
from tunewell.methods.lora import Lora
from tunewell.records.parity import PROOF, Parity
from tunewell.workflows import export as workflow
from tunewell.workflows.export import ExportResult, export
from tunewell.workflows.verify import verify

# Models this small gain nothing from a second thread, and wait for it on a busy machine.
torch.set_num_threads(1)


def write_adapter(folder: Path, base: Path, *, seed: int = 0, **method: Any) -> Path:
    """An adapter on a model folder that changes what it says, with the tokenizer of the base left to the base."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapter = Lora.apply(model, MethodSettings(**{"rank": 4, "alpha": 8, **method}), seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            size = 0.1 if "lora" in name else 0.02
            parameter.add_(torch.randn(parameter.shape, generator=draw) * size)
    folder.mkdir(parents=True)

    adapter.files(str(base)).write(folder)
    return folder


def rehash(folder: Path, *, only: str) -> None:
    """Write down the hashes of files as they are now: whoever plants a defect is not found out by that.

    The other artefacts are left out of the proof, which is quicker; a Modelfile needs the GGUF it names.
    """
    proof = json.loads((folder / PROOF).read_text())
    named = [own for own in proof["artefacts"] if f"{own['kind']} {own['precision']}".strip() == only]
    assert named
    for artefact in named:
        artefact["sha256s"] = {
            name: sha256_file(folder / name) for name in artefact["sha256s"] if (folder / name).is_file()
        }
    proof["artefacts"] = [*(own for own in proof["artefacts"] if own["kind"] == "gguf" and only == "ollama"), *named]
    (folder / PROOF).write_text(json.dumps(proof))


def prove_here(folder: Path, *, allow_pickle: bool, progress: ProgressListener = silent) -> Parity:
    """Prove in this process: a new one takes seconds to start."""
    return verify(folder, allow_pickle=allow_pickle, progress=progress)


class _ProvesHere:
    """Stands in for `ProofProcess`."""

    prove = staticmethod(prove_here)

    def __enter__(self) -> "_ProvesHere":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def prove_exports_here(patched: pytest.MonkeyPatch) -> None:
    """Have `tunewell export` prove in this process."""
    for module in (proof_process, workflow):
        patched.setattr(module, "ProofProcess", _ProvesHere)


def exported(place: Path, out: Path, **options: Any) -> ExportResult:
    """Export with a proof in this process, and short answers: random weights never end one."""
    return export(place, order=ExportOptions(out=out, **options), prove=prove_here, answer_tokens=6)


def write_base(folder: Path, case: str = "llama", *, seed: int = 0, **more: Any) -> Path:
    """A tiny model folder of an architecture, with room for every probe."""
    model = tiny(case, seed=seed, **{"max_position_embeddings": 1024} | more)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.4)  # as they are drawn, rounding to 8 bits would change every other answer
    return save(model, folder)
