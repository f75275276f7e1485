"""Open a model for chat, evaluation or export: its weights, tokenizer, chat template and stop tokens."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.options import SAFE_WEIGHTS, WeightsOptions
from tunewell.data.encoding.encoder import Encoder
from tunewell.data.masking.masker import Masker
from tunewell.data.text_pipeline import TextPipeline
from tunewell.data.tokenizers.load import LoadedTokenizer, corpus_stop_ids, stop_token_ids
from tunewell.inference.decoder import why_not_decoded
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.inference.llama_cpp.runtime import LlamaRuntime
from tunewell.inference.model_ref import ModelRef
from tunewell.inference.runtime import BATCH_TOKENS_MEASURED, Runtime, TorchRuntime, fastest_threads
from tunewell.machine.device import probe_device
from tunewell.machine.facts import DeviceFacts
from tunewell.methods.base import AdapterMethod, load_adapter
from tunewell.model_files.families import DOCUMENTS
from tunewell.model_files.files import locate
from tunewell.model_files.ollama import PREFIX as OLLAMA
from tunewell.models.attention import SDPA
from tunewell.models.load import DTYPES, LoadedModel, LoadOptions, load_dequantized, load_model
from tunewell.records.manifest import read_manifest

Backend = Literal["packed", "plain", "llama_cpp"]
"""`packed`: torch, several documents per forward pass. `plain`: torch, one text at a time, for any architecture, with
the threads of a batch in streams too. `llama_cpp`: as `packed`, but llama.cpp runs a `.gguf` file if the device is a
CPU and a library is found."""

_DEQUANTISED = "the weights were dequantised, and transformers runs the model"


@dataclass
class ChatModel:
    """A loaded model in eval mode, with its adapter, tokenizer, chat template and stop tokens."""

    ref: ModelRef
    tokenizer: LoadedTokenizer
    masker: Masker | None
    """Renders the chat template; None if the model has no chat template and can only continue text."""
    encoder: Encoder
    device: DeviceFacts
    precision: str
    stop_ids: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    adapter: AdapterMethod | None = None
    computed_by: str = ""
    """The program that runs the model, if it is not torch."""
    num_threads: int | None = None
    """Number of CPU threads for one token at a time; None on a GPU."""
    batch_threads: int | None = None
    """Number of CPU threads for many tokens at a time; None on a GPU."""
    _runtime: Runtime | None = None
    _base: Runtime | None = None
    """The base model, if it was loaded separately."""

    @property
    def runtime(self) -> Runtime:
        """The runtime of the model. Raises RuntimeError after `unload`."""
        if self._runtime is None:
            raise RuntimeError(f"the weights of `{self.ref.name}` are not loaded")
        return self._runtime

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model, for code that reads or changes weights. Raises RuntimeError with llama.cpp."""
        if not isinstance(self.runtime, TorchRuntime):
            raise RuntimeError(f"`{self.ref.name}` is not loaded in torch")
        return self.runtime.model

    @property
    def can_disable_adapter(self) -> bool:
        """Whether disabling the adapter gives the model where training started."""
        return self.adapter is not None and self.adapter.has_base and self.ref.start is None

    @property
    def has_base(self) -> bool:
        """Whether `base_runtime` can be used."""
        return self.can_disable_adapter or self._base is not None

    @contextmanager
    def base_runtime(self) -> Iterator[Runtime]:
        """Yield the runtime of the base model. Requires `has_base`."""
        if self._base is not None:
            yield self._base
            return
        assert self.adapter is not None
        with self.adapter.disabled():
            yield self.runtime

    def unload(self) -> None:
        """Free the memory of the weights. Everything else stays usable."""
        self.runtime.close()
        self._runtime = None

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return self.tokenizer.backend.decode(ids, skip_special_tokens=False)


def open_chat_model(
    ref: ModelRef,
    *,
    device: str = "auto",
    precision: str | None = None,
    with_base: bool = False,
    weights: WeightsOptions = SAFE_WEIGHTS,
    backend: Backend = "packed",
) -> ChatModel:
    """Load a model with its tokenizer and chat template. Raise UserError if it cannot be loaded.

    The default `precision` is that of the training run. `with_base` also loads the base model, unless disabling the
    adapter gives the base model.
    """
    text = TextPipeline.load(ref.loaded)
    llama, notes = open_in_llama_cpp(ref, text, device=device) if backend == "llama_cpp" else (None, [])
    chat_model = _describe(ref, text, device="cpu" if llama else device, precision=precision)
    chat_model.notes += notes
    with _weights_loader(chat_model, text, weights, is_packed=backend != "plain") as load:
        if llama is not None:
            _add_llama_cpp(chat_model, llama, text, load=load if with_base else None)
        else:
            _add_torch(chat_model, load, with_base=with_base, is_streamed=backend != "plain")
    return chat_model


def open_without_weights(ref: ModelRef, *, device: str = "auto") -> ChatModel:
    """Return a chat model without weights, for a model with weights that cannot be loaded."""
    return _describe(ref, TextPipeline.load(ref.loaded), device=device, precision=None)


def _describe(ref: ModelRef, text: TextPipeline, *, device: str, precision: str | None) -> ChatModel:
    facts = probe_device(device)
    masker = text.chat_masker(ref.loaded.config.data.sources)
    return ChatModel(
        ref=ref,
        tokenizer=text.tokenizer,
        masker=masker,
        encoder=text.encoder(masker),
        device=facts,
        precision=precision or _default_precision(ref, facts),
        stop_ids=_stop_ids(ref, text.tokenizer, masker),
        notes=list(ref.notes),
    )


_Load = Callable[[str], LoadedModel]


@contextmanager
def _weights_loader(
    chat_model: ChatModel, text: TextPipeline, weights: WeightsOptions, *, is_packed: bool
) -> Iterator[_Load]:
    """Yield a function that loads a model by name, in the precision and on the device of the chat model.

    The base of a run is quantised as in training; in another precision, it is then dequantised.
    """
    ref, dtype = chat_model.ref, DTYPES[chat_model.precision]
    with tempfile.TemporaryDirectory(prefix="tunewell-tokenizer-") as folder:
        text.save(Path(folder))

        def load(model: str) -> LoadedModel:
            options = LoadOptions(
                model,
                Path(folder),
                torch.device(chat_model.device.name),
                dtype,
                added_tokens=ref.added_tokens or text.tokenizer.added_by_us,
                seed=ref.loaded.config.seed,
                allow_pickle=weights.allow_pickle,
                attention=SDPA if is_packed and not _is_unpacked(ref) else None,
                is_packed=is_packed,
            )
            plan = ref.plan if model == ref.base else None
            if plan is None or plan.quantized is None:
                return load_model(options)
            options, trained = replace(options, quantized=plan.quantized), DTYPES[plan.precision.value]
            is_same = dtype == trained and is_packed  # otherwise the weights are read one by one
            return load_model(options) if is_same else load_dequantized(options, trained)

        yield load


def _is_unpacked(ref: ModelRef) -> bool:
    """Return whether the documents of a run were computed one by one."""
    packing = ref.plan.packing if ref.plan is not None else None
    return packing is not None and packing.value == DOCUMENTS


def _add_torch(chat_model: ChatModel, load: _Load, *, with_base: bool, is_streamed: bool) -> None:
    """Load the weights in torch."""
    ref = chat_model.ref
    found, chat_model.adapter = _load_with_adapter(ref, load)
    model = found.model.eval()
    if model.device.type == "cpu":
        shapes = [tuple(weight.shape) for weight in model.parameters()]
        chat_model.batch_threads = fastest_threads(shapes, num_tokens=BATCH_TOKENS_MEASURED)
        chat_model.num_threads = fastest_threads(shapes) if is_streamed else chat_model.batch_threads
    chat_model.notes += found.notes
    if (reason := why_not_decoded(model, 1)) is not None:
        chat_model.notes.append(f"answers are generated by transformers, which is slower: {reason}")
    # Those of `generation_config.json`: none, one or several.
    ids = getattr(model.generation_config, "eos_token_id", None)
    more = ids if isinstance(ids, list) else [] if ids is None else [ids]
    chat_model.stop_ids = sorted({*chat_model.stop_ids, *more})
    run_in_torch = partial(
        TorchRuntime,
        precision=chat_model.precision,
        num_threads=chat_model.num_threads,
        batch_threads=chat_model.batch_threads,
    )
    chat_model._runtime = run_in_torch(model)
    if with_base and ref.base is not None and not chat_model.can_disable_adapter:
        chat_model._base = run_in_torch(_load_with_adapter(ref.base_ref(), load)[0].model)


def _load_with_adapter(ref: ModelRef, load: _Load) -> tuple[LoadedModel, AdapterMethod | None]:
    found = load(ref.model)
    ref.require_base()  # its files may have been downloaded just now
    adapter = None
    if ref.adapter is not None:
        adapter = load_adapter(found.model, ref.adapter, text_prefix=found.text_prefix)
    found.model.requires_grad_(False)
    return found, adapter


def _add_llama_cpp(chat_model: ChatModel, llama: LlamaRuntime, text: TextPipeline, *, load: _Load | None) -> None:
    """Use llama.cpp as the runtime. `load` loads a base model that llama.cpp cannot run."""
    ref = chat_model.ref
    if load is not None and ref.base is not None:
        base, _ = open_in_llama_cpp(ref.base_ref(), text, device="cpu")
        chat_model._base = base or TorchRuntime(load(ref.base).model, chat_model.precision)
    chat_model.precision, chat_model.computed_by = llama.stored_as, llama.computed_by
    chat_model.num_threads = chat_model.batch_threads = llama.num_threads
    chat_model._runtime = llama


def open_in_llama_cpp(ref: ModelRef, text: TextPipeline, *, device: str) -> tuple[LlamaRuntime | None, list[str]]:
    """Open a `.gguf` file in llama.cpp. Return None, with notes that give the reason, if torch must run it.

    Raises UserError if llama.cpp rejects the file, because every program based on llama.cpp would reject it too.
    """
    path = _gguf_file(ref)
    if path is None or device not in ("auto", "cpu"):
        return None, []
    if added := [*ref.added_tokens, *text.tokenizer.added_by_us]:
        return None, [f"the chat template needs the token `{added[0]}`, which is not in the file; {_DEQUANTISED}"]
    try:
        library = find_llama()
    except UserError as error:
        return None, [f"{error.what}; {_DEQUANTISED}" + (f" (to use llama.cpp: {error.fix})" if error.fix else "")]
    runtime = LlamaRuntime(library, path)
    if text.tokenizer.vocab_size > runtime.vocab_size:
        num_rows = runtime.vocab_size
        runtime.close()
        raise UserError(
            f"`{path.name}` has {num_rows:,} tokens, but the tuned model's tokenizer has {text.tokenizer.vocab_size:,}",
            where=str(path),
            fix="name the model that was fine-tuned with `--base MODEL`",
        )
    best = probe_device(device)
    if best.kind == "cpu":
        return runtime, []
    return runtime, [f"llama.cpp runs on the CPU; `--device {best.kind}` runs the dequantised weights on the GPU"]


def _gguf_file(ref: ModelRef) -> Path | None:
    """Return the file that llama.cpp can open: a `.gguf` file, or the one of a model in Ollama's folder."""
    if ref.kind != "model":
        return None
    if ref.model.startswith(OLLAMA):
        return locate(ref.model).gguf
    path = Path(ref.model).expanduser()
    return path if _is_gguf(path) and _is_gguf(ref.path) else None


def _is_gguf(path: Path | None) -> bool:
    return path is not None and path.suffix == ".gguf" and path.is_file()


def _default_precision(ref: ModelRef, facts: DeviceFacts) -> str:
    """Return the precision of the run if it used this kind of device, otherwise that of the GPU, or fp32 on others."""
    if ref.plan is not None and ref.plan.device.value.partition(":")[0] == facts.kind:
        return ref.plan.precision.value
    return "fp32" if facts.kind != "cuda" else "bf16" if facts.has_bf16 else "fp16"


def _stop_ids(ref: ModelRef, tokenizer: LoadedTokenizer, masker: Masker | None) -> list[int]:
    """Return the stop tokens of the tokenizer, the chat template and the corpus."""
    ends = masker.frame.stops if masker is not None else ()
    # A source may have its own template, with a different end-of-turn token.
    others = corpus_stop_ids(tokenizer, read_manifest(ref.corpus)) if ref.corpus is not None else ()
    return sorted({*stop_token_ids(tokenizer, ends), *others})
