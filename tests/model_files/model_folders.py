"""Folders of models exactly as Ollama, LM Studio and huggingface_hub write them."""

import hashlib
import json
import shutil
from pathlib import Path


def add_to_ollama(models: Path, name: str, gguf: Path, *, size: int | None = None) -> Path:
    """Add a GGUF file under `HOST/OWNER/MODEL/TAG`, as `ollama pull` does; return its blob.

    The keys, their order and the media types are those of Ollama's `manifest.WriteManifest`.
    """
    (models / "blobs").mkdir(parents=True, exist_ok=True)

    def layer(kind: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (models / "blobs" / f"sha256-{digest}").write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    settings = {"model_format": "gguf", "model_family": "llama", "architecture": "amd64", "os": "linux"}
    model = layer("application/vnd.ollama.image.model", gguf.read_bytes())
    blob = models / "blobs" / str(model["digest"]).replace(":", "-")
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": layer("application/vnd.docker.container.image.v1+json", json.dumps(settings).encode()),
        "layers": [
            model | ({"size": size} if size is not None else {}),
            layer("application/vnd.ollama.image.template", b"{{ .Prompt }}"),
            layer("application/vnd.ollama.image.license", b"Apache License 2.0"),
            layer("application/vnd.ollama.image.params", b'{"stop":["<|im_end|>"]}'),
        ],
    }
    path = models / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest, separators=(",", ":")) + "\n")
    return blob


def add_to_lm_studio(home: Path, publisher: str, repository: str, gguf: Path) -> Path:
    """Copy a GGUF file to `models/PUBLISHER/REPOSITORY`, as LM Studio's downloads lie; return its path."""
    folder = home / "models" / publisher / repository
    folder.mkdir(parents=True)
    return Path(shutil.copy(gguf, folder / gguf.name))


def add_to_hub_cache(cache: Path, name: str, folder: Path) -> Path:
    """Copy a model folder into a hub cache: blobs, and a snapshot of links to them; return the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    commit = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for path in sorted(folder.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, repository / "blobs" / digest)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    return snapshot
