"""Export target `ollama`: a GGUF file and a Modelfile with the model's template, stop texts and context length."""

import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from tunewell.core.child import run
from tunewell.core.errors import UserError
from tunewell.core.files import link_or_copy, read_text
from tunewell.core.progress import Progress
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export.ollama.modelfile import derive_modelfile, derive_template
from tunewell.export.options import ExportOptions
from tunewell.export.proof.checks import check_template
from tunewell.export.proof.reference import ProofContext
from tunewell.export.targets.base import DiskUse, ExportContext, ExportTarget, NextStep, PreflightFacts, Requirements
from tunewell.export.targets.gguf import GgufTarget, adds_bos, gguf_bytes
from tunewell.export.targets.merged import num_weights
from tunewell.records.parity import Artefact, Check, Proof


class OllamaTarget(ExportTarget):
    """The export target for a Modelfile with the last of the exported GGUF files."""

    name: ClassVar = "ollama"
    requires: ClassVar = Requirements(targets=(GgufTarget.name,), merged_weights=True)

    def preflight(self, facts: PreflightFacts) -> None:
        """Raise UserError if the chat template cannot be converted to a Go template."""
        template = facts.template
        derive_template(template.source, tokenizer=facts.tokenizer, adds_bos=adds_bos(facts), date=template.date)

    def disk_use(self, context: ExportContext) -> DiskUse:
        """Return the size of the GGUF file, or nothing if it can be a hard link."""
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
        link_or_copy(source, gguf)
        text, template = derive_modelfile(
            gguf,
            template=context.template.source,
            tokenizer=context.model.tokenizer,
            date=context.template.date,
            config=context.model.model.config.to_dict(),
            license=context.card.license,
        )
        (folder / "Modelfile").write_text(text, encoding="utf-8", newline="\n")
        context.notes += [f"Ollama: {note}" for note in template.notes]
        return [context.artefact(self.name, "", folder)]

    def prove(self, artefact: Artefact, context: ProofContext) -> list[Check]:
        """Derive the Modelfile again from its GGUF file, and compare the two."""
        try:
            return [check_modelfile(context.folder, artefact, context.proof)]
        except (UserError, UnicodeDecodeError) as error:
            message = f"the Modelfile and its GGUF file cannot be read: {getattr(error, 'what', error)}"
            return [Check(name="template", is_ok=False, words=message)]

    def next_step(self, folder: Path, artefacts: Sequence[Artefact], options: ExportOptions) -> NextStep:
        """Run `ollama create` if Ollama is installed; otherwise return it as the next command."""
        name = str(options.name)
        create = ["ollama", "create", name, "-f", "Modelfile"]
        command = f"cd {shlex.quote(str(folder / self.name))} && {shlex.join(create)} && ollama run {name}"
        if not shutil.which("ollama"):
            missing = "Ollama is not installed here: install it, or copy the folder to where it is"
            return NextStep(command, notes=(missing,))
        if not options.creates:
            return NextStep(command)
        done = run(create, folder=folder / self.name)
        if done.code == 0:
            return NextStep(f"ollama run {name}", installed_as=name)
        return NextStep(command, notes=(f"`ollama create` failed: {done.last_error or 'no message'}",))


def _has_hard_links(folder: Path) -> bool:
    """Return True if the file system supports hard links; the GGUF file then needs no additional space."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        one = Path(place, "one")
        one.touch()
        try:
            os.link(one, one.with_name("other"))
        except OSError:
            return False
    return True


# The verification: derive the Modelfile again from its GGUF file, and compare every line.

_FROM = "FROM ./"


def check_modelfile(folder: Path, artefact: Artefact, proof: Proof) -> Check:
    """Check that a Modelfile names a verified GGUF file, renders every probe as in training, and has the stop texts."""
    text = read_text(folder / artefact.path / "Modelfile")
    named = [line.removeprefix(_FROM) for line in text.splitlines() if line.startswith(_FROM)]
    file = f"{artefact.path}/{named[0]}" if len(named) == 1 else ""
    if file not in artefact.sha256s:
        return _failed("the Modelfile does not name a GGUF file of this export")
    others = (own for own in proof.artefacts if own.kind != artefact.kind)
    if artefact.sha256s[file] not in {sha for own in others for sha in own.sha256s.values()}:
        return _failed(f"`{file}` is not one of the verified GGUF files")
    tokenizer = load_tokenizer(folder / file)
    rendered = check_template(proof, tokenizer.chat_template, tokenizer.special_tokens)
    if not rendered.is_ok or tokenizer.chat_template is None:
        return rendered
    expected, template = derive_modelfile(
        folder / file,
        template=tokenizer.chat_template,
        tokenizer=tokenizer,
        date=proof.date,
        config=proof.model.config,
        license=proof.model.license,
    )
    if difference := _first_difference(text, expected):
        return _failed(f"the Modelfile differs from the one derived from the model: {difference}")
    message = f"renders {template.num_checked} conversations exactly as the model's own template"
    return Check(name="template", is_ok=True, words=f"{message}; stops at {', '.join(template.stops)}")


def _failed(message: str) -> Check:
    return Check(name="template", is_ok=False, words=message)


def _first_difference(text: str, expected: str) -> str | None:
    """Return the first line that differs, or None; comments before the first command are ignored."""
    found, own = (one.partition("\nFROM ")[2].splitlines() for one in (text, expected))
    for line, other in zip_longest(found, own):
        if line != other:
            return f"found {line!r}, expected {other!r}"
    return None
