"""`plan.json`: the settings of a run, each with its reason."""

from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from tunewell.config.fields import MethodName
from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.core.redact import redact
from tunewell.records.base import Record, read_record

PLAN = "plan.json"

T = TypeVar("T")


class Chosen(Record, Generic[T]):
    """A value and the reason for it."""

    value: T
    because: str


class Start(Record):
    """The trained model from which a run goes on: a checkpoint of an earlier run, or an adapter."""

    path: str
    step: int | None = None
    """The step of the checkpoint; None for an adapter without a run."""
    sha256: str
    """Hash of its weight file."""


class Plan(Record):
    """The plan of a run. Secrets are redacted, so a path that contains a secret cannot be used after reading."""

    format: str = "tunewell-plan"
    format_version: int = 1
    made_by: str
    model: str
    corpus: str
    corpus_sha256: str
    tokenizer_sha256: str
    template_sha256s: list[str]
    seed: int
    config: dict[str, Any]
    """The whole config as it was read."""
    start: Start | None = None
    """None if the run starts from a model that is no run and no adapter."""

    device: Chosen[str]
    precision: Chosen[Literal["fp32", "bf16", "fp16"]]
    attention: Chosen[Literal["sdpa", "flash"]]
    threads: Chosen[int]

    method: Chosen[MethodName]
    learning_rate: Chosen[float]
    schedule: Chosen[Literal["cosine", "linear", "constant"]]
    warmup_steps: Chosen[int]
    num_steps: Chosen[int]
    epochs: Chosen[float]
    """The number of epochs that `num_steps` corresponds to."""
    batch_tokens: Chosen[int | None]
    batch_documents: Chosen[int | None]
    """One of these two values limits a step; the other is None."""
    micro_batch_tokens: Chosen[int]
    compile: Chosen[Literal["auto", "on", "off"]]
    evaluate_every: Chosen[int]
    save_every: Chosen[int]


def write_plan(folder: Path, plan: Plan) -> None:
    """Write the plan atomically, without secrets."""
    write_atomic(folder / PLAN, stable_json(redact(plan.model_dump(mode="json"))))


def read_plan(folder: Path) -> Plan:
    """Read the plan of a run; raise UserError if it is missing or cannot be read."""
    path = folder / PLAN
    if not path.is_file():
        raise UserError(f"there is no plan in `{folder}`", where=f"expected `{path}`", fix="run `tunewell train`")
    return read_record(path, Plan)
