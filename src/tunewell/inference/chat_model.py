"""A loaded model that can be spoken to: with its tokenizer, the template it was trained with, and where answers end."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.data.encoding.encoder import Encoder
from tunewell.data.masking.masker import Masker
from tunewell.data.text_pipeline import TextPipeline
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.hardware.facts import DeviceFacts
from tunewell.hardware.probe import probe_device
from tunewell.hardware.threads import measure_threads
from tunewell.inference.generate import stop_ids_of
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.inference.llama_cpp.runtime import LlamaRuntime
from tunewell.inference.model_ref import ModelRef
from tunewell.inference.runtime import Runtime, TorchRuntime
from tunewell.methods.base import AdapterMethod, load_adapter
from tunewell.models.attention import SDPA
from tunewell.models.load import LoadedModel, LoadOptions, load_model
from tunewell.records.manifest import read_manifest

# Whether llama.cpp computes a GGUF file that is spoken to or judged, and which.

_INSTEAD = "the weights were dequantised, and transformers computes"


def open_in_llama_cpp(subject: ModelRef, text: TextPipeline, *, device: str) -> tuple[LlamaRuntime | None, list[str]]:
    """Open a `.gguf` file in llama.cpp; None where another way is asked for or the only one, with notes that say why.

    Raises UserError for a file that llama.cpp does not take: whoever it is made for would meet that too.
    """
    path = Path(subject.model).expanduser()
    if subject.kind != "model" or not (is_gguf(path) and is_gguf(subject.place)) or device not in ("auto", "cpu"):
        return None, []
    if added := [*subject.added_tokens, *text.tokenizer.added_by_us]:
        return None, [f"the template needs `{added[0]}`, which the file does not have, so {_INSTEAD}"]
    try:
        library = find_llama()
    except UserError as error:
        return None, [f"{error.what}, so {_INSTEAD}" + (f"; {error.fix}" if error.fix else "")]
    runtime = LlamaRuntime(library, path)
    if text.tokenizer.vocab_size > runtime.vocab_size:
        num_rows = runtime.vocab_size
        runtime.close()
        raise UserError(
            f"`{path.name}` knows {num_rows:,} tokens, but what it is compared with has {text.tokenizer.vocab_size:,}",
            where=str(path),
            fix="name the model it was made from",
        )
    best = probe_device(device)
    if best.kind == "cpu":
        return runtime, []
    return runtime, [f"llama.cpp computes on the processor; `--device {best.kind}` takes the dequantised weights there"]


def is_gguf(path: Path | None) -> bool:
    """Tell whether this is a GGUF file, and not a folder or a package with one inside."""
    return path is not None and path.suffix == ".gguf" and path.is_file()


_MEASURING_SECONDS, _MOST_MEASURED = 0.3, 64_000_000
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class ChatModel:
    """A model in eval mode, adapter on, and everything it takes to ask it something."""

    subject: ModelRef
    runtime: Runtime
    tokenizer: LoadedTokenizer
    masker: Masker | None
    """None where there is no chat template: plain text is continued then."""
    encoder: Encoder
    stop_ids: list[int]
    pad_id: int
    device: DeviceFacts
    precision: str
    notes: list[str] = field(default_factory=list)
    adapter: AdapterMethod | None = None
    computed_by: str = ""
    """What computes it, where that is not torch."""
    num_threads: int | None = None
    """Of what computes it, where that is not torch."""
    _base: Runtime | None = None

    @property
    def model(self) -> PreTrainedModel:
        """Give the weights themselves, for what changes or writes them; None where torch does not have them."""
        return getattr(self.runtime, "model", None)  # type: ignore[return-value]

    @property
    def can_switch(self) -> bool:
        """Whether the model itself answers as its base when its matrices are switched off."""
        return self.adapter is not None and self.adapter.has_base

    @property
    def has_base(self) -> bool:
        """Whether what this was made from is at hand."""
        return self.can_switch or self._base is not None

    @contextmanager
    def as_base(self) -> Iterator[Runtime]:
        """Give the model this one was made from; needs `has_base`."""
        if self._base is not None:
            yield self._base
            return
        assert self.adapter is not None
        with self.adapter.disabled():
            yield self.runtime

    def release(self) -> None:
        """Let go of the model, so that another one has room; what is known of it stays."""
        self.runtime.close()
        self.runtime = None  # type: ignore[assignment]

    def spell(self, ids: list[int]) -> str:
        """Turn ids into text, markers included."""
        return self.tokenizer.backend.decode(ids, skip_special_tokens=False)


def open_chat_model(
    subject: ModelRef,
    *,
    device: str = "auto",
    with_base: bool = False,
    allow_pickle: bool = False,
    precision: str | None = None,
    in_llama_cpp: bool = False,
    is_packed: bool = True,
) -> ChatModel:
    """Load a subject; `with_base` also loads what it was made from where its matrices cannot just be switched off.

    `in_llama_cpp` lets llama.cpp compute a `.gguf` file as it is, where the device allows it and a library is found.
    Without `is_packed` it reads one text at a time only, which any model can.
    """
    text = TextPipeline.load(subject.loaded)
    opened, notes = open_in_llama_cpp(subject, text, device=device) if in_llama_cpp else (None, [])
    voice = _voice(subject, text, device if opened is None else "cpu")
    voice.precision = torch_precision = precision or voice.precision
    voice.notes += notes
    with tempfile.TemporaryDirectory(prefix="tunewell-tokenizer-") as folder:
        text.save(Path(folder))
        added = subject.added_tokens or text.tokenizer.added_by_us

        def load(model: str) -> LoadedModel:
            order = LoadOptions(
                model,
                Path(folder),
                torch.device(voice.device.name),
                _DTYPES[torch_precision],
                added_tokens=added,
                seed=subject.loaded.config.seed,
                allow_pickle=allow_pickle,
                attention=SDPA if is_packed else "sdpa",
                is_packed=is_packed,
            )
            return load_model(order)

        if opened is not None:
            voice.runtime, voice.precision = opened, opened.stored_as
            voice.computed_by, voice.num_threads = opened.computed_by, opened.num_threads
            voice.stop_ids = _stop_ids(text.tokenizer, voice.masker, None)
        else:
            found = load(subject.model)
            model = found.model
            if subject.adapter is not None:
                voice.adapter = load_adapter(model, subject.adapter, text_prefix=found.text_prefix)
            model.requires_grad_(False)
            voice.runtime = TorchRuntime(model.eval(), voice.precision)
            _use_fastest_threads(model)
            voice.stop_ids = _stop_ids(text.tokenizer, voice.masker, model)
            voice.notes += found.notes
        if subject.corpus is not None:
            # Sources may have templates of their own, which end turns otherwise.
            known = stop_ids_of(text.tokenizer, read_manifest(subject.corpus))
            voice.stop_ids = sorted({*voice.stop_ids, *known})
        voice.pad_id = min(voice.stop_ids, default=0)
        if with_base and subject.base is not None and not voice.can_switch:
            other = open_in_llama_cpp(subject.as_base(), text, device=device)[0] if opened is not None else None
            voice._base = other or TorchRuntime(load(subject.base).model, torch_precision)
    return voice


def open_without_model(subject: ModelRef, *, device: str = "auto") -> ChatModel:
    """Give all that can be told of a subject whose weights cannot be loaded; its `model` is None."""
    return _voice(subject, TextPipeline.load(subject.loaded), device)


def _voice(subject: ModelRef, text: TextPipeline, device: str) -> ChatModel:
    facts = probe_device(device)
    masker = text.chat_masker(subject.loaded.config.data.sources)
    return ChatModel(
        subject,
        None,  # type: ignore[arg-type]
        text.tokenizer,
        masker,
        text.encoder(masker),
        [],
        0,
        facts,
        _precision(subject, facts),
        list(subject.notes),
    )


def _use_fastest_threads(model: PreTrainedModel) -> None:
    """On a CPU, let torch use as many threads as are fastest here and now, one token at a time.

    Beside other work two threads that wait for each other were ten times slower than one (two cores, load 5).
    """
    if model.device.type == "cpu":
        shapes = {
            tuple(parameter.shape)
            for parameter in model.parameters()
            if parameter.dim() == 2 and parameter.numel() < _MOST_MEASURED
        }
        products = [(1, inner, columns) for columns, inner in sorted(shapes)]
        torch.set_num_threads(measure_threads(products, seconds=_MEASURING_SECONDS).value)


def _precision(subject: ModelRef, facts: DeviceFacts) -> str:
    """Compute as in training where that can be done here, else as `train` would choose."""
    if subject.plan is not None and subject.plan.device.value.partition(":")[0] == facts.kind:
        return subject.plan.precision.value
    return "bf16" if facts.kind == "cuda" and facts.has_bf16 else "fp32"


def _stop_ids(tokenizer: LoadedTokenizer, masker: Masker | None, model: PreTrainedModel | None) -> list[int]:
    """List the ids at which an answer ends: the template's ends of a turn, the end of a text, the makers' own.

    Of a GGUF file, which has no settings of its makers', the tokenizer knows them all: None for its model.
    """
    texts = {tokenizer.special_tokens.get("eos_token", "")}
    if masker is not None:
        texts |= {masker.end_marker, *masker.frame.ends}
    found = {tokenizer.backend.token_to_id(text) for text in texts if text}
    own = None if model is None else getattr(model.generation_config, "eos_token_id", None)
    found |= set(own if isinstance(own, list) else [own])
    return sorted(number for number in found if number is not None)
