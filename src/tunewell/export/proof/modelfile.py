"""Prove a Modelfile: all it says is derived anew from the GGUF it names, and must be what stands in it."""

from itertools import zip_longest
from pathlib import Path

from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export.files import OLLAMA_PARAMETERS, adds_bos, ollama_context
from tunewell.export.ollama.modelfile import derive_for_ollama, modelfile
from tunewell.export.proof.checks import check_template
from tunewell.records.parity import Artefact, Check, Proof

_FROM = "FROM ./"


def check_modelfile(folder: Path, artefact: Artefact, proof: Proof) -> Check:
    """Say whether Ollama gets a GGUF that was proven, renders every probe as training did, and stops where it does."""
    path = folder / artefact.path / "Modelfile"
    text = path.read_text(encoding="utf-8")
    named = [line.removeprefix(_FROM) for line in text.splitlines() if line.startswith(_FROM)]
    file = f"{artefact.path}/{named[0]}" if len(named) == 1 else ""
    if file not in artefact.sha256s:
        return _broken("the Modelfile names no GGUF of this export")
    if artefact.sha256s[file] not in _proven(proof):
        return _broken(f"`{file}` is none of the GGUF files that were proven")
    tokenizer = load_tokenizer(folder / file)
    rendered = check_template(proof, tokenizer.chat_template, tokenizer.special_tokens)
    if not rendered.is_ok or tokenizer.chat_template is None:
        return rendered
    derived = derive_for_ollama(
        tokenizer.chat_template, tokenizer=tokenizer, adds_bos=adds_bos(folder / file), date=proof.date
    )
    if proof.model is not None:
        wanted = modelfile(
            named[0],
            derived.go,
            stops=derived.stops,
            context_length=ollama_context(proof.model.config),
            parameters=OLLAMA_PARAMETERS,
            license=proof.model.license,
        )
        if strange := _difference(text, wanted):
            return _broken(f"the Modelfile is not what follows from the model's own template: {strange}")
    elif f'TEMPLATE """{derived.go.text}"""\n' not in text:
        return _broken("the template in the Modelfile is not the model's own")
    words = f"renders {derived.go.num_checked} conversations byte for byte as the model's own"
    return Check(name="template", is_ok=True, words=f"{words}; stops at {', '.join(derived.stops)}")


def _broken(words: str) -> Check:
    return Check(name="template", is_ok=False, words=words)


def _proven(proof: Proof) -> set[str]:
    return {sha for artefact in proof.artefacts if artefact.kind == "gguf" for sha in artefact.sha256s.values()}


def _difference(text: str, wanted: str) -> str | None:
    """Say where two Modelfiles differ; what stands before the first command is for people, and may."""
    found, own = (one.partition("\nFROM ")[2].splitlines() for one in (text, wanted))
    for line, other in zip_longest(found, own):
        if line != other:
            return f"{line!r} and not {other!r}"
    return None
