"""Export target `ollama`: a GGUF file with a Modelfile whose template, stops and context come from the model."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress
from tunewell.export.ollama.modelfile import derive_modelfile, derive_template
from tunewell.export.options import ExportOptions
from tunewell.export.proof.context import ProofContext
from tunewell.export.proof.modelfile import check_modelfile
from tunewell.export.targets.base import DiskUse, ExportContext, ExportTarget, NextStep, PreflightFacts, Requirements
from tunewell.export.targets.gguf import GgufTarget, adds_bos, gguf_bytes
from tunewell.export.targets.merged import num_weights
from tunewell.records.parity import Artefact, Check


class OllamaTarget(ExportTarget):
    """Writes a Modelfile beside the last GGUF file."""

    name: ClassVar = "ollama"
    requires: ClassVar = Requirements(targets=(GgufTarget.name,), merged_weights=True)

    def preflight(self, facts: PreflightFacts) -> None:
        """Require a chat template that can be written in Go's syntax."""
        template = facts.template
        derive_template(template.source, tokenizer=facts.tokenizer, adds_bos=adds_bos(facts), date=template.date)

    def disk_use(self, context: ExportContext) -> DiskUse:
        """Return the size of the GGUF file, unless it can be a hard link."""
        if _has_hard_links(context.staging_dir):
            return DiskUse({})
        format_name = GgufTarget().formats(context.options)[-1]
        return DiskUse({self.name: gguf_bytes(num_weights(context), format_name)})

    def write(self, context: ExportContext) -> list[Artefact]:
        """Link the GGUF file and write the Modelfile."""
        context.progress(Progress("deriving the template for Ollama"))
        folder = context.staging_dir / self.name
        folder.mkdir()
        source = context.staging_dir / [own.path for own in context.artefacts if own.kind == GgufTarget.name][-1]
        gguf = folder / source.name
        _link_or_copy(source, gguf)
        derived = derive_modelfile(
            gguf,
            template=context.template.source,
            tokenizer=context.text.tokenizer,
            date=context.template.date,
            config=context.model.model.config.to_dict(),
            license=context.card.license,
        )
        (folder / "Modelfile").write_text(derived.text, encoding="utf-8", newline="\n")
        context.notes += [f"Ollama: {note}" for note in derived.template.go.notes]
        return [context.artefact(self.name, "", folder)]

    def prove(self, artefact: Artefact, context: ProofContext) -> list[Check]:
        """Derive the Modelfile again from the GGUF file it names."""
        try:
            return [check_modelfile(context.folder, artefact, context.proof)]
        except (UserError, UnicodeDecodeError) as error:
            message = f"the Modelfile and its GGUF file cannot be read: {getattr(error, 'what', error)}"
            return [Check(name="template", is_ok=False, words=message)]

    def is_exact(self, precision: str) -> bool:
        """Return True: the weights are those of a GGUF file that is proven itself."""
        return True

    def next_step(self, folder: Path, artefacts: Sequence[Artefact], options: ExportOptions) -> NextStep:
        """Call `ollama create` if the program is installed, else suggest it."""
        name = str(options.name)
        create = ["ollama", "create", name, "-f", "Modelfile"]
        command = f"cd {shlex.quote(str(folder / self.name))} && {shlex.join(create)} && ollama run {name}"
        if not (options.creates and shutil.which("ollama")):
            return NextStep(command)
        done = subprocess.run(create, cwd=folder / self.name, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return NextStep(f"ollama run {name}", installed_as=name)
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return NextStep(command, notes=(f"`ollama create` failed: {message}",))


def _has_hard_links(folder: Path) -> bool:
    """Return True if the file system has hard links: the GGUF file then needs no space of its own."""
    one, other = folder / ".one", folder / ".other"
    try:
        one.touch()
        os.link(one, other)
    except OSError:
        return False
    finally:
        one.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
    return True


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
