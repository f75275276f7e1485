"""Prove an Ollama Modelfile: derive it again from the GGUF file it names, and compare every line."""

from itertools import zip_longest
from pathlib import Path

from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export.ollama.modelfile import adds_bos, derive_modelfile, derive_template
from tunewell.export.proof.checks import check_template
from tunewell.records.parity import Artefact, Check, Proof

_FROM = "FROM ./"


def check_modelfile(folder: Path, artefact: Artefact, proof: Proof) -> Check:
    """Check that Ollama gets a proven GGUF file, renders every probe as in training, and stops where training does."""
    text = (folder / artefact.path / "Modelfile").read_text(encoding="utf-8")
    named = [line.removeprefix(_FROM) for line in text.splitlines() if line.startswith(_FROM)]
    file = f"{artefact.path}/{named[0]}" if len(named) == 1 else ""
    if file not in artefact.sha256s:
        return _failed("the Modelfile does not name a GGUF file of this export")
    others = (own for own in proof.artefacts if own.kind != artefact.kind)
    if artefact.sha256s[file] not in {sha for own in others for sha in own.sha256s.values()}:
        return _failed(f"`{file}` is not one of the proven GGUF files")
    tokenizer = load_tokenizer(folder / file)
    rendered = check_template(proof, tokenizer.chat_template, tokenizer.special_tokens)
    if not rendered.is_ok or tokenizer.chat_template is None:
        return rendered
    source, date = tokenizer.chat_template, proof.date
    if proof.model is not None:
        derived = derive_modelfile(
            folder / file,
            template=source,
            tokenizer=tokenizer,
            date=date,
            config=proof.model.config,
            license=proof.model.license,
        )
        template = derived.template
        if difference := _first_difference(text, derived.text):
            return _failed(f"the Modelfile does not follow from the model's own template: {difference}")
    else:
        template = derive_template(source, tokenizer=tokenizer, adds_bos=adds_bos(folder / file), date=date)
        if f'TEMPLATE """{template.go.text}"""\n' not in text:
            return _failed("the template in the Modelfile is not the model's own")
    message = f"renders {template.go.num_checked} conversations exactly as the model's own template"
    return Check(name="template", is_ok=True, words=f"{message}; stops at {', '.join(template.stops)}")


def _failed(message: str) -> Check:
    return Check(name="template", is_ok=False, words=message)


def _first_difference(text: str, expected: str) -> str | None:
    """Return the first line that differs. Comments before the first command may."""
    found, own = (one.partition("\nFROM ")[2].splitlines() for one in (text, expected))
    for line, other in zip_longest(found, own):
        if line != other:
            return f"{line!r} instead of {other!r}"
    return None
