"""Put a run together: the model with its method, the optimizer, the log, the checkpoints, the questions it is asked."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunewell.config.load import LoadedConfig
from tunewell.config.methods import METHODS
from tunewell.config.schema import Config, MethodSettings
from tunewell.core.errors import UserError
from tunewell.core.presets import is_preset
from tunewell.core.units import count
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.inference.generate import Decoding, corpus_stop_ids, generate
from tunewell.methods.base import Method
from tunewell.models import attention
from tunewell.models.facts import fingerprint_weights
from tunewell.models.load import LoadOptions, load_model
from tunewell.models.loss import HeadShape
from tunewell.models.placement import verify_placement
from tunewell.models.support import head_facts
from tunewell.records.events import EventLog
from tunewell.records.healing import HEALING, read_healing
from tunewell.records.plan import Plan
from tunewell.training.checkpoints import Checkpoints
from tunewell.training.distributed import World
from tunewell.training.engine import Run
from tunewell.training.events import Listener, Note, RunStarted, Sample, send_notes
from tunewell.training.faults import NoFaults
from tunewell.training.held_out import ask
from tunewell.training.leak_probe import probe_leaks
from tunewell.training.metrics import RunContext
from tunewell.training.remedies import Remedies
from tunewell.training.step import TrainableModel

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_IDENTITY = (
    *("precision", "attention", "method", "learning_rate", "schedule", "warmup_steps", "num_steps"),
    *("batch_tokens", "batch_documents", "micro_batch_tokens"),
)
"""What of a plan must be the same for a run to go on."""
_OPTIMIZER = (
    "optimizer",
    "min_rate_share",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
)
CHANGE_NAMES = frozenset(
    ("model", "weights", "data", "tokenizer", "template", "seed", *_IDENTITY, *_OPTIMIZER, *MethodSettings.model_fields)
) - {"kind"}
"""Every name that the identity of some run has."""


@dataclass(kw_only=True)
class RunInputs:
    """What a run is put together from."""

    loaded: LoadedConfig
    plan: Plan
    corpus: Corpus
    order: DataOrder
    folder: Path
    own_folder: Path
    """Where this process writes: of those that train together only the first writes into the run's folder."""
    world: World
    listener: Listener
    allow_pickle: bool = False
    faults: NoFaults = field(default_factory=NoFaults)
    """Planted by tests."""
    heartbeat: Callable[[], None] = lambda: None
    """Told whenever something is about to be computed."""

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def model(self) -> str:
        """Name the model as it can be found from here."""
        return self.loaded.seen(self.plan.model)


def build_run(parts: RunInputs) -> Run:
    """Load the model, put the method on it, verify where everything lies, and lay out the rest of a run."""
    attention.register()
    note = send_notes(parts.listener)
    config, plan, device = parts.config, parts.plan, torch.device(parts.plan.device.value)
    method_class: type[Method] = METHODS.load(plan.method.value)
    dtype = method_class.load_dtype(_DTYPES[plan.precision.value])
    held_out = parts.corpus.held_out
    longest = max(int(split.index["length"].max()) for split in (parts.corpus, held_out) if len(split))
    wanted = LoadOptions(
        parts.model,
        parts.corpus.path / "tokenizer",
        device,
        dtype,
        attention=attention.FLASH if plan.attention.value == "flash" else attention.SDPA,
        added_tokens=tuple(parts.corpus.manifest.tokenizer.added_by_us),
        longest_document=longest,
        seed=plan.seed,
        allow_pickle=parts.allow_pickle,
    )
    found = load_model(wanted)
    model = found.model
    method = method_class.apply(
        model,
        config.method,
        seed=plan.seed,
        text_prefix=found.text_prefix,
        has_new_tokens=bool(found.new_token_ids),
    )
    for message in (*found.notes, *method.notes):
        note(message)
    verify_placement(model, device=device, dtype=dtype)
    folder = parts.own_folder
    samples = EventLog(folder / "samples.jsonl", on_trouble=note)
    head = head_facts(model)
    learner = TrainableModel(
        model,
        plan.precision.value,
        longest,
        settings=config.train,
        seed=plan.seed,
        head=HeadShape(head.softcap, head.scale),
        world=parts.world,
        faults=parts.faults,
        heartbeat=parts.heartbeat,
    )
    if config.train.recompute:
        learner.recompute(True)
    remedies = Remedies(folder / HEALING, on_trouble=note)
    remedies.take_over(read_healing(parts.folder))
    return Run(
        plan=plan,
        config=config,
        learner=learner,
        order=parts.order,
        documents=parts.corpus,
        held_out=parts.corpus.held_out,
        checkpoints=Checkpoints(folder / "checkpoints", keep=config.checkpoints.keep, on_trouble=note),
        events=EventLog(folder / "events.jsonl", on_trouble=note),
        samples=samples,
        remedies=remedies,
        listener=parts.listener,
        method=method,
        load_weights=partial(_load_weights, wanted),
        name_of=partial(_name_of, parts.corpus),
        about=_about(parts, model),
        home=parts.folder / "checkpoints",
        ask=_asker(parts, learner, samples),
        identity=identity_of(plan, config, fingerprint_weights(parts.model)),
    )


def describe_start(parts: RunInputs, run: Run) -> RunStarted:
    """Say what is about to be trained."""
    own = sum(parameter.numel() for parameter in run.learner.parameters.values())
    everything = sum(parameter.numel() for parameter in run.learner.model.parameters())
    return RunStarted(parts.plan, own, everything, run.progress.step)


def check_packing(parts: RunInputs, run: Run) -> None:
    """Prove that documents do not see each other, and note by how much."""
    found = probe_leaks(run.learner, run.documents)
    message = (
        f"{count(found.num_documents, 'document')} packed and alone differ by {found.packed_from_alone:.0e}, "
        f"ours and transformers' attention by {found.alone_from_stock:.0e}"
    )
    parts.listener(Note(message))


def identity_of(plan: Plan, config: Config, weights: str | None) -> dict[str, Any]:
    """Name everything that must be the same for a run to go on as if it had never stopped.

    `weights` is the fingerprint of those the run began with.
    """
    chosen = {name: getattr(plan, name).value for name in _IDENTITY}
    method = METHODS.load(plan.method.value).identity(config.method)
    train = config.train.model_dump(
        mode="json",
        include=set(_OPTIMIZER),
    )
    return {
        "model": plan.model,
        "weights": weights,
        "data": plan.corpus_sha256,
        "tokenizer": plan.tokenizer_sha256,
        "template": ",".join(plan.template_sha256s),
        "seed": plan.seed,
        **chosen,
        **method,
        **train,
    }


def require_same_settings(parts: RunInputs, run: Run) -> None:
    """Refuse to begin where processes that train together would take other steps, or would not stop at the same ones.

    Raises UserError in all of them.
    """
    config, plan = parts.config, parts.plan
    # What a person sets comes first: it is what to mend where something that follows from it differs too.
    own: dict[str, Any] = {"seed": plan.seed}
    own |= {f"train.{name}": value for name, value in config.train.model_dump(exclude={"threads"}).items()}
    for section in ("evaluate", "checkpoints", "healing"):
        own |= {f"{section}.{name}": value for name, value in getattr(config, section).model_dump().items()}
    own |= {name: value for name, value in run.identity.items() if name not in ("model", "attention")}
    own |= {"compile": plan.compile.value, "evaluate_every": plan.evaluate_every.value}
    first = parts.world.from_first(own)
    with parts.world.as_one():
        for name, value in own.items():
            if value != first.get(name):
                raise UserError(
                    f"`{name}` is {value} here, and {first.get(name)} in the first process",
                    fix="start all processes with the same config and options, on the same data and model",
                )


def _load_weights(options: LoadOptions) -> dict[str, Tensor]:
    """Load the initial weights of the model again, on the CPU."""
    model = load_model(replace(options, device=torch.device("cpu"), attention=attention.SDPA)).model
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _name_of(corpus: Corpus, document: int) -> str:
    own = corpus[document]
    return f"{own.source} row {own.row}"


def _about(parts: RunInputs, model: Any) -> RunContext:
    """Say what is known of the run beside its numbers."""
    kind = parts.plan.device.value.partition(":")[0]
    return RunContext(
        vocab_size=model.config.get_text_config().vocab_size,
        precision=parts.plan.precision.value,
        device=kind,
        max_grad_norm=parts.config.train.max_grad_norm,
        device_bytes=torch.cuda.get_device_properties(parts.plan.device.value).total_memory if kind == "cuda" else None,
        spike_factor=parts.config.healing.spike_factor,
        is_from_scratch=is_preset(parts.plan.model),
    )


def _asker(parts: RunInputs, learner: TrainableModel, log: EventLog) -> Any:
    """Make the function that answers held-out questions and writes them down."""
    tokenizer = load_tokenizer(parts.corpus.path / "tokenizer")
    stops = corpus_stop_ids(tokenizer, parts.corpus.manifest)
    evaluate = parts.config.evaluate

    def answer(batch_tokens: int, prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
        longest = max(len(prompt) for prompt in prompts) + evaluate.sample_tokens
        learner.faults.before_answers(min(len(prompts), max(1, batch_tokens // longest)))
        done = generate(
            learner.model,
            prompts,
            max_new_tokens=evaluate.sample_tokens,
            stop_ids=stops,
            pad_id=min(stops, default=0),
            decoding=Decoding(batch_tokens=batch_tokens),
            before_token=lambda: learner.may_go_on(),  # set when the run begins
        )
        return [(one.ids, one.ended) for one in done]

    def asked(step: int, batch_tokens: int) -> list[Sample]:
        samples = ask(
            parts.corpus.held_out,
            number=evaluate.samples,
            step=step,
            answer=partial(answer, batch_tokens),
            spell=partial(tokenizer.backend.decode, skip_special_tokens=False),
        )
        for sample in samples:
            log.append(sample.__dict__)
        return samples

    return asked
