"""Embed texts with a sentence-transformers folder, through plain transformers: encoder, pooling, normalisation."""

import importlib.metadata
from base64 import urlsafe_b64encode
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_text, sha256_file
from tunewell.core.optional import import_optional
from tunewell.features.retrieval.embedders.base import OnBatch

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
_REVISION = "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_MINILM_UNRELATED = 0.35
"""Between questions about other things (660 questions: 95% below 0.27) and those that documents answer (160: 95% above
0.52), measured with the pages of colleges and with Cranfield."""
_BATCH_TOKENS = 4096
"""Number of padded tokens that are computed together; larger batches are not faster on a CPU."""
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")


def open_minilm(name: str) -> "SentenceTransformer":
    """Open all-MiniLM-L6-v2: from an installed package with the pinned weights, or from the hub."""
    return SentenceTransformer(_in_package() or _on_hub(MINILM, _REVISION), name=name, sha256=_SHA256)


def open_folder(name: str) -> "SentenceTransformer":
    """Open a sentence-transformers folder."""
    return SentenceTransformer(Path(name).expanduser(), name=name)


def open_hub(name: str) -> "SentenceTransformer":
    """Open a sentence-transformers model from the hub cache, or download it."""
    return SentenceTransformer(_on_hub(name), name=name)


def _in_package() -> Path | None:
    """Return the folder of the pinned weights if an installed package, whichever it is, lists them by their hash."""
    recorded = urlsafe_b64encode(bytes.fromhex(_SHA256)).decode().rstrip("=")
    for package in importlib.metadata.distributions():
        if recorded in (package.read_text("RECORD") or ""):
            weights = next(file for file in package.files or () if file.hash and file.hash.value == recorded)
            return Path(str(weights.locate())).parent
    return None


def _on_hub(repository: str, revision: str | None = None) -> Path:
    from tunewell.model_files.files import hub_is_out_of_reach

    hub: Any = import_optional("huggingface_hub", extra="train", purpose="downloading the embedder")
    patterns = ["*.json", "vocab.txt", "model.safetensors", "1_Pooling/*"]
    download = partial(hub.snapshot_download, repository, revision=revision, allow_patterns=patterns)
    try:
        return Path(download(local_files_only=True))
    except (OSError, ValueError):
        problem = hub_is_out_of_reach()
    if problem is None:
        try:
            return Path(download())
        except (OSError, ValueError) as error:
            problem = str(error).splitlines()[0]
    raise UserError(
        f"the embedder `{repository}` cannot be downloaded: {problem}",
        fix="connect to the hub once, or use a sentence-transformers folder: `--embedder FOLDER`",
    )


class SentenceTransformer:
    """An encoder from a sentence-transformers folder, on the CPU or the GPU."""

    def __init__(self, folder: Path, *, name: str, sha256: str | None = None) -> None:
        """Read the folder's settings and hash its weights. The weights are loaded when the first text is embedded."""
        self.name = name
        self.unrelated_cosine = _MINILM_UNRELATED if sha256 == _SHA256 else None
        self._folder = folder
        weights = folder / "model.safetensors"
        if not weights.is_file():
            raise UserError(
                f"`{name}` has no `model.safetensors`", where=str(folder), fix="use a sentence-transformers folder"
            )
        self.sha256 = sha256_file(weights)
        if sha256 is not None and self.sha256 != sha256:
            raise UserError(
                f"the weights of `{name}` are not the expected ones",
                where=f"SHA-256 {self.sha256[:12]}, expected {sha256[:12]}",
                fix="delete the folder and download the model again",
            )
        modules = [str(module.get("type", "")).rpartition(".")[2] for module in _read(folder / "modules.json", [])]
        if unknown := [module for module in modules if module not in _MODULES]:
            raise UserError(
                f"`{name}` uses a `{unknown[0]}` layer, which is not supported",
                where=str(folder),
                fix="use a model with an encoder, pooling and normalisation only",
            )
        pooling = _read(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
        used = [
            _POOLINGS.get(key) for key, value in pooling.items() if key.startswith("pooling_mode") and value is True
        ]
        if len(used) != 1 or used[0] is None:
            raise UserError(
                f"the pooling of `{name}` is not supported",
                where=str(folder),
                fix="use a model with mean or CLS pooling",
            )
        self._pooling = used[0]
        self._prompts: dict[str, str] = _read(folder / "config_sentence_transformers.json", {}).get("prompts") or {}
        config = _read(folder / "config.json", {})
        self.dimension = int(config.get("hidden_size", 0))
        limit = _read(folder / "sentence_bert_config.json", {}).get("max_seq_length")
        self.max_tokens = int(limit or config.get("max_position_embeddings", 512)) - 2  # [CLS] and [SEP]
        tokenizers = import_optional("tokenizers", extra="retrieval", purpose="embedding texts")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._model: Any = None

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each text, without special tokens."""
        return [len(one) for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def embed(self, texts: list[str], *, is_query: bool = False, on_batch: OnBatch | None = None) -> np.ndarray:
        """Return one vector of length one per text. Texts of similar length are computed together."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        prompt = self._prompts.get("query" if is_query else "document", "")
        self._tokenizer.enable_truncation(self.max_tokens + 2)
        try:
            ids = [one.ids for one in self._tokenizer.encode_batch_fast([prompt + text for text in texts])]
        finally:
            self._tokenizer.no_truncation()
        model = self._load()
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        order = sorted(range(len(texts)), key=lambda index: -len(ids[index]))
        start = 0
        while start < len(order):
            longest = len(ids[order[start]])
            batch = order[start : start + max(1, _BATCH_TOKENS // longest)]
            start += len(batch)
            rows = [torch.tensor(ids[index]) for index in batch]
            tokens, mask = (
                pad_sequence(values, batch_first=True) for values in (rows, [torch.ones_like(row) for row in rows])
            )
            with torch.inference_mode():
                tokens, mask = tokens.to(model.device), mask.to(model.device)
                hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
                if self._pooling == "cls":
                    pooled = hidden[:, 0]
                else:
                    weights = mask.unsqueeze(-1).to(hidden.dtype)
                    pooled = (hidden * weights).sum(1) / weights.sum(1)
                computed = torch.nn.functional.normalize(pooled, dim=1).float().cpu().numpy()
            vectors[batch] = computed
            if on_batch is not None:
                on_batch(batch, computed)
        return vectors

    def _load(self) -> Any:
        if self._model is None:
            import_optional("torch", extra="train", purpose="embedding texts")
            transformers = import_optional("transformers", extra="train", purpose="embedding texts")
            transformers.utils.logging.set_verbosity_error()
            transformers.utils.logging.disable_progress_bar()
            model = transformers.AutoModel.from_pretrained(self._folder, local_files_only=True, add_pooling_layer=False)
            self._model = model.eval()
        return self._model


def _read(path: Path, default: Any) -> Any:
    try:
        return parse_json(read_text(path))
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as error:
        raise UserError(
            f"`{path.name}` cannot be read", where=str(path), fix="download the embedder again, or use another one"
        ) from error
