"""The table of features: what each folder in `features/` adds, by import path.

The spine reaches a feature only through this table. A feature is removed by deleting its folder and its entry here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.registry import Entry, Registry, load_path


@dataclass(frozen=True)
class Feature(Entry):
    """A feature. `path` is its package; the paths of its parts are relative to it."""

    commands: Mapping[str, str] = field(default_factory=dict[str, str])
    """The module of each command."""
    functions: Mapping[str, str] = field(default_factory=dict[str, str])
    """The module of each public name of `import tunewell`."""
    hooks: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the spine calls if the feature is there: `module:name`."""
    extensions: Mapping[str, Sequence[tuple[str, ...]]] = field(default_factory=dict[str, Sequence[tuple[str, ...]]])
    """Entries of registries, by the kind of extension: name, doc, `module:name`, and what else such an entry has."""


def _feature(name: str, doc: str, **parts: Any) -> Feature:
    return Feature(name, doc, f"tunewell.features.{name}", **parts)


FEATURES: Registry[Feature] = Registry(
    "feature",
    [
        _feature(
            "sweep",
            "Train with every combination of some settings, and name the best run.",
            commands={"sweep": "command"},
            functions={"sweep": "api"},
        ),
        _feature(
            "compare",
            "Compare runs and models, with and without documents.",
            commands={"compare": "command"},
            functions={"compare": "api"},
        ),
        _feature(
            "track",
            "Send the metrics of a run to TensorBoard, W&B or MLflow.",
            commands={"track": "command"},
            hooks={"require": "sender:require_trackers", "start": "live:start_trackers"},
            extensions={
                "tracker": [
                    (
                        "tensorboard",
                        "event files in `RUN/track/tensorboard`",
                        "tensorboard:TensorBoardTracker",
                        "tensorboard",
                        "tensorboard",
                    ),
                    ("wandb", "Weights & Biases, or offline", "wandb:WandbTracker", "wandb", "wandb"),
                    ("mlflow", "an MLflow server", "mlflow:MlflowTracker", "mlflow-skinny", "mlflow"),
                ]
            },
        ),
        _feature(
            "profile",
            "Show where the time of a training step goes.",
            commands={"profile": "command"},
        ),
        _feature(
            "remote",
            "Read rows from object storage, the web and the hub; upload exports.",
            commands={"push": "command"},
            hooks={"pull": "push:pull_folder"},
            extensions={
                "data source": [
                    ("s3", "Amazon S3 and compatible storage: an object, a prefix or a glob.", "source:RemoteFile"),
                    ("r2", "Cloudflare R2: an object, a prefix or a glob.", "source:RemoteFile"),
                    ("https", "A file on a web server.", "source:RemoteFile"),
                    ("http", "A file on a web server, without encryption.", "source:RemoteFile"),
                    (
                        "hf",
                        "A data set of the Hugging Face hub: `hf://datasets/ORG/NAME@REVISION`.",
                        "hub_source:HubFile",
                    ),
                    ("gs", "Google Cloud Storage (untested).", "source:RemoteFile"),
                    ("az", "Azure Blob Storage (untested).", "source:RemoteFile"),
                ]
            },
        ),
        _feature("notebook", "Write a Colab notebook that trains a config on a GPU.", commands={"notebook": "command"}),
        _feature("serve", "Serve a model over OpenAI's chat API.", commands={"serve": "command"}),
        _feature(
            "retrieval",
            "Make documents searchable, and answer from them.",
            commands={"index": "index_command", "ask": "ask_command"},
            functions={"index": "api", "ask": "api"},
            hooks={
                "open_chat": "answer:open_chat",
                "open_finder": "answer:open_finder",
                "open_index": "shown:SearchableIndex",
                "is_index": "shown:is_index",
                "held_out_documents": "open_book_config:held_out_documents",
                "open_book": "open_book_config:with_open_book",
            },
        ),
        _feature(
            "diagnose",
            "Name the failure in the log of any trainer.",
            commands={"diagnose": "command"},
            functions={"diagnose": "diagnose"},
            hooks={"known_failure": "known_failure:known_failure"},
        ),
        _feature(
            "doctor",
            "Find what is broken in an environment, and how to fix it.",
            commands={"doctor": "command"},
            functions={"doctor": "api"},
            hooks={"require_environment": "workflow:require_environment", "fallback": "fallback:run"},
        ),
        _feature(
            "hf_callback",
            "Health checks for the trainers of transformers, TRL and Unsloth.",
            functions={"HealthCallback": "callback"},
        ),
    ],
)


def find_hook(feature: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a feature, or None if this installation does not have the feature."""
    if feature not in FEATURES.names():
        return None
    found = FEATURES.entry(feature)
    return load_path(f"{found.path}.{found.hooks[name]}")


def require_hook(feature: str, name: str, *, needed_by: str) -> Callable[..., Any]:
    """Return a function of a feature; raise UserError if this installation does not have the feature."""
    found = find_hook(feature, name)
    if found is None:
        what = f"{needed_by} needs the feature `{feature}`, which this installation does not have"
        raise UserError(what, fix="install tunewell with all its features")
    return found


def command_modules() -> dict[str, str]:
    """Return the module of each command of a feature."""
    return {command: f"{one.path}.{module}" for one in FEATURES.entries() for command, module in one.commands.items()}


def function_modules() -> dict[str, str]:
    """Return the module of each public name of a feature."""
    return {name: f"{one.path}.{module}" for one in FEATURES.entries() for name, module in one.functions.items()}


def extension_entries(kind: str) -> list[tuple[str, ...]]:
    """Return the entries that features add to the registry of a kind: name, doc, import path, and the rest."""
    return [
        (name, doc, f"{one.path}.{path}", *rest)
        for one in FEATURES.entries()
        for name, doc, path, *rest in one.extensions.get(kind, ())
    ]
