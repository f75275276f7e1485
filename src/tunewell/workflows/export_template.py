"""Prove a Modelfile: its template is derived anew from the model's own, and must be the one in the file."""

import re
from pathlib import Path

from tunewell.data.templates import ChatTemplate
from tunewell.data.tokenizer import load_tokenizer
from tunewell.export.go_template import derive_go_template
from tunewell.export.stops import stop_texts
from tunewell.records.parity import Check, Proof
from tunewell.workflows.export_files import adds_bos

_TEMPLATE = re.compile(r'^TEMPLATE """(.*?)"""$', re.MULTILINE | re.DOTALL)
_STOP = re.compile(r"^PARAMETER stop (.*)$", re.MULTILINE)


def check_template(folder: Path, proof: Proof) -> Check:
    """Say whether Ollama will render every probe as training did, and stop where training ends a reply."""
    text = (folder / "Modelfile").read_text(encoding="utf-8")
    file = next(folder.glob("*.gguf"), None)
    if file is None:
        return Check(name="template", is_ok=False, words="there is no GGUF beside the Modelfile")
    tokenizer = load_tokenizer(file)
    if tokenizer.chat_template is None:
        return Check(name="template", is_ok=False, words="the GGUF has no chat template")
    template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens, name="the model's own")
    for probe in proof.probes:
        if template.render(probe.messages, None, add_generation_prompt=True) != probe.text:
            words = f"the GGUF's own template renders another text than training did: {probe.text[:60]!r}"
            return Check(name="template", is_ok=False, words=words)
    derived = derive_go_template(
        lambda messages, asks: template.render(messages, None, add_generation_prompt=asks),
        bos=tokenizer.special_tokens.get("bos_token"),
        adds_bos=adds_bos(file),
        source=tokenizer.chat_template,
    )
    written = _TEMPLATE.search(text)
    if written is None or written.group(1) != derived.text:
        return Check(name="template", is_ok=False, words="the template in the Modelfile is not the model's own")
    stops = stop_texts(derived, control_tokens=tokenizer.added)
    missing = [stop for stop in stops if not any(stop in line for line in _STOP.findall(text))]
    if missing or not stops:
        return Check(name="template", is_ok=False, words=f"the Modelfile does not stop at {missing or 'anything'}")
    words = f"renders {derived.num_checked} conversations byte for byte as the model's own; stops at {', '.join(stops)}"
    return Check(name="template", is_ok=True, words=words)
