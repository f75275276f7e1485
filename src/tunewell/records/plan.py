"""`plan.json`: the settings of a run, each with its reason."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from tunewell.config.fields import MethodName
from tunewell.core.files import stable_json, write_atomic
from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.records.base import Record, read_record
from tunewell.records.prediction import Prediction

PLAN = "plan.json"

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Chosen(Generic[T_co]):
    """A value and the reason for it."""

    value: T_co
    because: str


class Start(Record):
    """The trained model from which a run goes on: a checkpoint of an earlier run, or an adapter."""

    path: str
    step: int | None = None
    """The step of the checkpoint; None for an adapter without a run."""
    sha256: str
    """Hash of its weight file."""


class EngineRecord(Record):
    """The program that took the steps of a run, if it was not tunewell's own engine."""

    name: str
    versions: dict[str, str]
    """The versions of its packages."""
    python: str


class QuantizedBase(Record):
    """The quantised base model of a run, and what the rounding costs."""

    kind: Literal["nf4", "int8"]
    keep: list[str] = []
    """Linear layers in 16 bits, besides the head: names as in transformers' `llm_int8_skip_modules`."""
    because: str = ""
    loss: float | None = None
    """Loss of the base model before quantisation; None if it was not measured."""
    quantized_loss: float | None = None
    """Loss of the quantised base model on the same documents."""
    is_saved: bool = False
    """Whether the model's files are quantised, so that the base model in 16 bits is unknown."""

    @property
    def cost(self) -> float | None:
        """The relative increase of the loss; None if it was not measured."""
        return None if not self.loss or self.quantized_loss is None else self.quantized_loss / self.loss - 1

    @property
    def price(self) -> str:
        """The losses of the base model without and with quantisation; empty if they were not measured."""
        if self.loss is None or self.quantized_loss is None:
            return ""
        cost = f" ({self.cost:+.1%})" if self.cost is not None else ""
        return f"loss {self.quantized_loss:.4f} instead of {self.loss:.4f}{cost}"

    @property
    def bnb_arguments(self) -> str:
        """The arguments of `BitsAndBytesConfig` that quantise the base model in the same way, as Python code.

        Empty for a model that was saved quantised, and for int8, which bitsandbytes computes in another way: the base
        model in 16 bits is nearer to it.
        """
        if self.is_saved or self.kind != "nf4":
            return ""
        skipped = f", llm_int8_skip_modules={[*self.keep, 'lm_head']!r}" if self.keep else ""
        return f'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True{skipped}'

    @property
    def loading_argument(self) -> str:
        """The argument of `from_pretrained` that quantises the base model in the same way, or nothing."""
        return f", quantization_config=BitsAndBytesConfig({self.bnb_arguments})" if self.bnb_arguments else ""


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
    packing: Chosen[str] | None = None
    """How documents are computed (`model_files/families.py`); None in plans of earlier versions."""
    threads: Chosen[int]

    method: Chosen[MethodName]
    quantized: QuantizedBase | None = None
    """None if the base model is not quantised."""
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
    replay: Chosen[float] | None = None
    """Share of the tokens of an epoch that are everyday prompts with answers of the base model."""
    answers: Chosen[int] | None = None
    """Questions of the selection slice that are answered at each evaluation; 0: checkpoints are compared by the loss.
    None without a slice."""
    prediction: Prediction | None = None
    """None before it is computed."""
    engine: EngineRecord | None = None
    """None if tunewell's own engine takes the steps."""
    plugins: list[str] = []
    """Extensions of other packages that were used, with package and version; left out if there are none."""

    @property
    def updates(self) -> str:
        """The number and the size of the updates: `312 updates of up to 64 rows`."""
        size = count(self.batch_documents.value or 0, "row")
        if self.batch_documents.value is None:
            size = f"{count(self.batch_tokens.value or 0)} tokens"
        return f"{count(self.num_steps.value, 'update')} of up to {size}"


def write_plan(folder: Path, plan: Plan) -> None:
    """Write the plan atomically, without secrets."""
    left_out = {name for name in ("plugins", "answers", "replay", "engine") if not getattr(plan, name)}
    write_atomic(folder / PLAN, stable_json(redact(plan.model_dump(mode="json", exclude=left_out))))


def read_plan(folder: Path) -> Plan:
    """Read the plan of a run; raise UserError if it is missing or cannot be read."""
    return read_record(folder / PLAN, Plan, missing=f"there is no plan in `{folder}`", fix="run `tunewell train`")
