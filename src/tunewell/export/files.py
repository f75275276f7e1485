"""Make the files of an export, one kind at a time, into a folder that has no name yet."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tunewell.core.files import sha256_file
from tunewell.core.progress import Progress, ProgressListener, with_stage
from tunewell.core.units import count, size_bytes
from tunewell.data.text_pipeline import TextPipeline
from tunewell.export.card import CardFacts, model_card
from tunewell.export.gguf.quantize import quantize
from tunewell.export.gguf.write import write_gguf
from tunewell.export.ollama.chat_template import saved_template
from tunewell.export.ollama.modelfile import derive_for_ollama, modelfile
from tunewell.inference.chat_model import ChatModel
from tunewell.models.quiet import quiet
from tunewell.records.parity import Artefact, ExportKind

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OURS = frozenset({"f32", "f16", "bf16", "q8_0"})
_SHARD = "5GB"
_LONGEST_CONTEXT = 131_072
OLLAMA_PARAMETERS: Mapping[str, float] = MappingProxyType({"temperature": 0.0})
"""What a Modelfile sets besides context and stops: the likeliest token, as everything is proven."""


class ArtefactWriter:
    """Writes the artefacts of one export; the model is merged between the adapter and the rest."""

    def __init__(
        self,
        voice: ChatModel,
        text: TextPipeline,
        folder: Path,
        stop_ids: Sequence[int],
        facts: CardFacts,
        precision: str,
        tell: ProgressListener,
    ) -> None:
        self.voice, self.text, self.folder, self.facts = voice, text, folder, facts
        self.stop_ids, self.precision, self.tell = list(stop_ids), precision, tell
        assert voice.masker is not None
        self.template = saved_template(
            voice.masker.template,
            arguments=voice.ref.loaded.config.template.arguments,
            special_tokens=voice.tokenizer.special_tokens,
        )
        self.notes: list[str] = [*voice.notes, *self.template.notes]
        self._ggufs: dict[str, Path] = {}

    def adapter(self) -> Artefact:
        """Write the adapter as PEFT is to load it, with the tokenizer, the template and a card beside it."""
        own, target = self.voice.adapter, self.folder / "adapter"
        assert own is not None
        self.tell(Progress("writing the adapter"))
        target.mkdir()
        # Not copied: earlier versions, and PEFT itself, name layers so that PEFT does not always find them again.
        base = self.voice.ref.base
        # From anywhere: PEFT looks from where it is called.
        place = str(Path(base).resolve()) if base and Path(base).exists() else base
        own.files(place).write(target)
        self.text.tokenizer.save(target, self.template.source)
        self._stops().save_pretrained(target)
        return self._finished("adapter", "fp32", target)

    def merged(self) -> Artefact:
        """Write the whole model with the adapter in its weights."""
        self.tell(Progress(f"writing the merged model in {self.precision}"))
        target = self.folder / "merged"
        self._write_model(target, self.precision)
        return self._finished("merged", self.precision, target)

    def ggufs(self, kinds: Sequence[str]) -> list[Artefact]:
        """Write GGUF files from the weights in fp32: one rounding, not two."""
        target = self.folder / "gguf"
        target.mkdir(exist_ok=True)
        name = _file_name(self.facts.name)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".whole-") as work:
            whole = Path(work) / "model"
            self._write_model(whole, "fp32")
            for kind in kinds:
                path = target / f"{name}-{kind}.gguf"
                self.tell(Progress(f"writing {path.name}"))
                if kind in _OURS:
                    card = {"name": self.facts.name, "license": self.facts.license}
                    written = write_gguf(
                        whole,
                        path,
                        kind=kind,  # type: ignore[arg-type]
                        card={key: value for key, value in card.items() if value},
                        progress=with_stage(self.tell, f"writing {path.name}"),
                    )
                    self.notes += [note for note in written.notes if note not in self.notes]
                else:
                    self._quantized(whole, path, kind, Path(work))
                self._ggufs[kind] = path
        return [self._finished("gguf", kind, path) for kind, path in self._ggufs.items()]

    def _quantized(self, whole: Path, path: Path, kind: str, work: Path) -> None:
        source = work / "f32.gguf"
        if not source.is_file():
            write_gguf(whole, source, kind="f32", card={"name": self.facts.name})
        made = quantize(source, path, kind)
        if made.num_odd:
            self.notes.append(
                f"{kind}: {count(made.num_odd)} tensors are stored in more bits, since their rows fill no block"
            )

    def ollama(self) -> Artefact:
        """Write a Modelfile beside a GGUF, with the template in Go's syntax."""
        self.tell(Progress("deriving the template for Ollama"))
        target = self.folder / "ollama"
        target.mkdir()
        source = list(self._ggufs.values())[-1]
        _link(source, target / source.name)
        template = derive_for_ollama(
            self.template.source,
            tokenizer=self.text.tokenizer,
            adds_bos=adds_bos(source),
            date=self.template.date,
        )
        text = modelfile(
            source.name,
            template.go,
            stops=template.stops,
            context_length=ollama_context(self.voice.model.config.to_dict()),
            parameters=OLLAMA_PARAMETERS,
            license=self.facts.license,
        )
        (target / "Modelfile").write_text(text, encoding="utf-8", newline="\n")
        self.notes += [f"Ollama: {note}" for note in template.go.notes]
        return self._finished("ollama", "", target)

    def _stops(self) -> Any:
        """Say where replies end, in the file that transformers reads it from."""
        settings = self.voice.model.generation_config
        settings.eos_token_id = self.stop_ids or None
        settings.pad_token_id = None
        return settings

    def _write_model(self, target: Path, precision: str) -> None:
        model: Any = self.voice.model
        self._stops()
        dtype = _DTYPES[precision]
        tensors = {name: tensor.to(dtype) for name, tensor in _once(model.state_dict()).items()}
        before = model.config.dtype
        model.config.dtype = dtype
        try:
            with quiet():
                model.save_pretrained(target, state_dict=tensors, max_shard_size=_SHARD)
        finally:
            model.config.dtype = before
        self.text.tokenizer.save(target, self.template.source)

    def _finished(self, kind: ExportKind, precision: str, path: Path) -> Artefact:
        if path.is_dir() and kind != "ollama":
            (path / "README.md").write_text(model_card(self.facts, kind=kind), encoding="utf-8")
        files = sorted(own for own in path.rglob("*") if own.is_file()) if path.is_dir() else [path]
        num_bytes = sum(own.stat().st_size for own in files)
        self.tell(Progress(f"wrote {path.name}, {size_bytes(num_bytes)}"))
        return Artefact(
            kind=kind,
            precision=precision,
            path=path.relative_to(self.folder).as_posix(),
            num_bytes=num_bytes,
            sha256s={own.relative_to(self.folder).as_posix(): sha256_file(own) for own in files},
        )


def _once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the second name of a tensor: a head that is one with the embedding is tied again when it is loaded."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in seen:
            seen.add(key)
            kept[name] = tensor
    return kept


def ollama_context(config: Mapping[str, Any]) -> int:
    """Give the context that a Modelfile names: the model's own, up to what people have memory for."""
    own = {**(config.get("text_config") or {}), **config}.get("max_position_embeddings")
    return min(own or _LONGEST_CONTEXT, _LONGEST_CONTEXT)


def adds_bos(path: Path) -> bool:
    """Whether llama.cpp puts the first token in front of a text by itself, by what a GGUF says."""
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.add_bos_token")
    return bool(field.contents()) if field is not None else False


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system knows none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _file_name(name: str) -> str:
    """Make a name that every file system and Ollama take."""
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    return "-".join(part for part in kept.split("-") if part)[:60] or "model"
