"""`plan.json`: what a run will do, each value with its reason."""

import json
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from tunewell.config.fields import MethodName
from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.core.redact import redact

FORMAT = "tunewell-plan"
FORMAT_VERSION = 1
PLAN = "plan.json"

T = TypeVar("T")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Chosen(_Record, Generic[T]):
    """A value and the reason for it."""

    value: T
    because: str


class Plan(_Record):
    """The plan of a run: everything `train` needs to know besides the corpus and the model files.

    A plan that was read contains no secrets: a path with a secret is redacted and no longer valid.
    """

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    made_by: str
    model: str
    corpus: str
    corpus_sha256: str
    tokenizer_sha256: str
    template_sha256s: list[str]
    seed: int
    config: dict[str, Any]
    """The whole config as it was read."""

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
    """The number of epochs that `num_steps` amounts to."""
    batch_tokens: Chosen[int | None]
    batch_documents: Chosen[int | None]
    """One of the two limits a step; the other is None."""
    micro_batch_tokens: Chosen[int]
    compile: Chosen[Literal["auto", "on", "off"]]
    evaluate_every: Chosen[int]
    save_every: Chosen[int]


def write_plan(folder: Path, plan: Plan) -> None:
    """Write the plan atomically, without secrets."""
    write_atomic(folder / PLAN, stable_json(redact(plan.model_dump(mode="json"))))


def read_plan(folder: Path) -> Plan:
    """Read a run's plan; raise UserError when there is none or it cannot be read."""
    path = folder / PLAN
    if not path.is_file():
        raise UserError(f"there is no plan in `{folder}`", where=f"looked for `{path}`", fix="run `tunewell train`")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("format_version", 0) > FORMAT_VERSION:
            raise UserError(f"`{path}` was made by a newer tunewell", fix="pip install --upgrade tunewell")
        return Plan.model_validate(raw)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"`{path}` is damaged", where=str(error).splitlines()[0]) from error
