"""Train every causal text decoder of transformers on a CPU, and compare each with transformers, document by document.

    PYTHONPATH=tests/training .venv/bin/python tests/models/families.py [FAMILY ...] [--write]

`--write` writes the table `docs/families.md`. One process; each family is tiny and takes about a second.
"""

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import family_configs
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from lessons import RandomDocuments
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from tunewell.config.extensions import METHODS
from tunewell.config.schema import MethodSettings, Train
from tunewell.data.batches import make_batch
from tunewell.export.gguf.architecture import llama_cpp_facts
from tunewell.inference.generate import generate
from tunewell.inference.stream import stream_tokens
from tunewell.inference.transformers_generate import can_cache
from tunewell.methods.base import Method
from tunewell.model_files.families import DOCUMENTS
from tunewell.models import attention
from tunewell.models.states import prepare_packing
from tunewell.models.support import fit_packing, head_shape, stock_mode
from tunewell.training.leak_probe import probe_leaks
from tunewell.training.step import TrainableModel

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
_TOLERANCE = 1e-5
_LEARNING_RATE = 3e-3
_NEW_TOKENS = 6
DOCUMENTS_TO_LEARN = RandomDocuments(7, longest=24)
STEPS = (np.array([0, 1, 2]), np.array([3, 4, 5]), np.array([6, 0, 4]))


@dataclass
class Result:
    """What was found for a family. Each check is empty if it passed, or the reason."""

    family: str
    level: str = ""
    because: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def trains(self) -> bool:
        return not self.checks["LoRA"] and not self.checks["full"]


def place(model: PreTrainedModel) -> PreTrainedModel:
    """Prepare a model as `load_model` does."""
    attention.register()
    if fit_packing(model.config, longest=40).level == DOCUMENTS:
        attention.unpack(model)
    else:
        model.set_attn_implementation(attention.SDPA)
        prepare_packing(model)
    return model


def make_learner(kind: str, method_name: str) -> tuple[TrainableModel, Method]:
    """Build a tiny model of a family with a method, whose adapter is not zero."""
    model = place(family_configs.build(kind))
    model.requires_grad_(False)
    head = head_shape(model)
    method = METHODS.load(method_name).apply(model, MethodSettings(rank=4, alpha=8), seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return TrainableModel(model, "fp32", 40, settings=Train(), head=head), method


def loss_of_transformers(model: PreTrainedModel, documents: np.ndarray) -> float:
    """Return the loss that transformers gives, one document at a time, in training mode (Gemma 3n has another one)."""
    total, number = 0.0, 0
    with torch.no_grad(), attention.stock_attention(model.train()):
        for document in documents:
            ids, labels = (torch.tensor(row).long() for row in DOCUMENTS_TO_LEARN.arrays(int(document)))
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
            total += float(F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum"))
            number += int((labels[1:] != -100).sum())
    return total / number


def take_step(learner: TrainableModel, number: int) -> float:
    """Take a step in one micro-batch and return its loss."""
    chosen = sorted(STEPS[number].tolist(), key=lambda at: -DOCUMENTS_TO_LEARN.index["length"][at])
    batch = make_batch(DOCUMENTS_TO_LEARN, chosen)
    return learner.take_step([batch], number=number, rate=_LEARNING_RATE).read()[0]


def check_steps(learner: TrainableModel, number: int) -> str:
    """Train some steps. Return how a loss differs from transformers', or nothing."""
    for step in range(number):
        expected, found = loss_of_transformers(learner.model, STEPS[step]), take_step(learner, step)
        if not abs(found - expected) <= _TOLERANCE * max(1.0, abs(expected)):
            return f"step {step}: loss {found:.7f} instead of {expected:.7f}"
    return ""


def check_packed(learner: TrainableModel) -> str:
    """Compare the losses of packed documents with those of each alone."""
    chosen = np.arange(len(DOCUMENTS_TO_LEARN))
    packed = learner.token_losses(make_batch(DOCUMENTS_TO_LEARN, chosen))
    alone = np.concatenate([learner.token_losses(make_batch(DOCUMENTS_TO_LEARN, [at])) for at in chosen])
    # Relative to the loss of all, as in training; rounding of one token's loss may be a little larger.
    difference = abs(packed.mean() - alone.mean()) / max(1.0, abs(alone.mean()))
    return "" if difference <= _TOLERANCE else f"packed differs from alone by {difference:.1e}"


def check_answers(model: PreTrainedModel) -> str:
    """Compare greedy answers with those of transformers, one prompt at a time."""
    prompts = [DOCUMENTS_TO_LEARN.arrays(at)[0][:size].tolist() for at, size in ((0, 7), (3, 3), (4, 7), (5, 5))]
    found = [answer.ids for answer in generate(model, prompts, max_new_tokens=_NEW_TOKENS, stop_ids=[])]
    streamed = list(stream_tokens(model, prompts[0], max_new_tokens=_NEW_TOKENS, stop_ids=[]))
    if streamed != found[0]:
        return f"streamed {streamed} instead of {found[0]}"
    settings = GenerationConfig(do_sample=False, max_new_tokens=_NEW_TOKENS, pad_token_id=0, use_cache=can_cache(model))
    model.generation_config = GenerationConfig()
    for prompt, ids in zip(prompts, found, strict=True):
        inputs: Any = torch.tensor([prompt])
        with stock_mode(model), torch.no_grad():
            written: Any = model.generate(inputs=inputs, generation_config=settings)
        if written[0, len(prompt) :].tolist() != ids:
            return f"{ids} instead of {written[0, len(prompt) :].tolist()}"
    return ""


def check_resume(kind: str) -> str:
    """Save after two steps, go on in another model, and compare the third step to the bit."""
    through, method = make_learner(kind, "lora")
    for step in range(2):
        take_step(through, step)
    tensors = {file: {n: t.clone() for n, t in own.items()} for file, own in method.files("tiny").tensors.items()}
    state = {name: tensor.clone() for name, tensor in through.optimizer.state_tensors().items()}
    expected = take_step(through, 2)
    resumed, again = make_learner(kind, "lora")
    again.restore(tensors)
    resumed.optimizer.load_state(state)
    if take_step(resumed, 2) != expected:
        return "the loss after resuming differs"
    same = all(torch.equal(p, resumed.parameters[name]) for name, p in through.parameters.items())
    return "" if same else "the parameters after resuming differ"


def check_merge(learner: TrainableModel, method: Any) -> str:
    """Merge the adapter, and compare the logits."""
    ids = torch.from_numpy(DOCUMENTS_TO_LEARN.arrays(0)[0]).long()[None]
    with torch.no_grad(), stock_mode(learner.model):
        before = learner.model(input_ids=ids, use_cache=False).logits
        method.merge()
        after = learner.model(input_ids=ids, use_cache=False).logits
    difference = float((after - before).norm() / before.norm())
    return "" if difference <= _TOLERANCE else f"merging changes logits by {difference:.1e}"


def check_probe(kind: str, precision: str) -> str:
    """Run the check before step 1, which must not refuse."""
    model = place(family_configs.build(kind))
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    probe_leaks(TrainableModel(model, precision, 40, settings=Train()), DOCUMENTS_TO_LEARN)
    return ""


def examine(kind: str) -> Result:
    """Run all checks of a family."""
    began = time.perf_counter()
    packing = fit_packing(family_configs.config_of(kind), longest=40)
    result = Result(kind, packing.level, packing.because)

    def check(name: str, function: Callable[[], str]) -> None:
        try:
            result.checks[name] = function()
        except Exception as error:  # noqa: BLE001  the reason is the result
            lines = str(error).splitlines() or [""]
            result.checks[name] = f"{type(error).__name__}: {lines[0][:160]}"

    check("probe fp32", lambda: check_probe(kind, "fp32"))
    check("probe bf16", lambda: check_probe(kind, "bf16"))
    trained: list[Any] = []

    def train_lora() -> str:
        trained.extend(make_learner(kind, "lora"))
        return check_steps(trained[0], 3)

    check("LoRA", train_lora)
    check("full", lambda: check_steps(make_learner(kind, "full")[0], 2))
    if trained:
        learner, method = trained
        check("packed", lambda: check_packed(learner))
        check("answers", lambda: check_answers(learner.model))
        check("resume", lambda: check_resume(kind))
        check("merge", lambda: check_merge(learner, method))
    result.seconds = time.perf_counter() - began
    return result


def page(results: Sequence[Result]) -> str:
    """Return the page with the table of families."""
    in_gguf = llama_cpp_facts()
    known = {*in_gguf["architectures"], *in_gguf["text_parts"]}
    rows = [
        "| family | level | LoRA | full | answers | resume | merge | GGUF |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for own in results:
        names = ("LoRA", "full", "answers", "resume", "merge")
        marks = [" | ".join("no" if own.checks.get(name, "not run") else "yes" for name in names)]
        gguf = "yes" if own.family in known else "no"
        because = f": {own.because}" if own.because else ""
        rows.append(f"| `{own.family}` | {own.level}{because} | {marks[0]} | {gguf} |")
    levels = Counter(own.level for own in results)
    counts = ", ".join(f"{number} {level}" for level, number in levels.most_common())
    faults = [f"- `{own.family}`, {name}: {why}" for own in results for name, why in sorted(own.checks.items()) if why]
    excluded = Counter(family_configs.excluded().values())
    return "\n".join(
        [
            "# Families",
            "",
            "<!-- Generated by `tests/models/families.py --write`. -->",
            "",
            f"Every causal text decoder of transformers {transformers.__version__}, tiny and with random weights, on a",
            f"CPU in fp32: {sum(own.trains for own in results)} of {len(results)} train ({counts}).",
            "[Training](guides/train.md) explains the levels.",
            "",
            "*LoRA* and *full*: 3 and 2 steps, with the losses of transformers, document by document, to 1e-5.",
            "*Answers*: greedy tokens equal to those of transformers. *Resume*: the step after a restart is equal",
            "to the bit. *Merge*: logits equal to 1e-5. *GGUF*: `export --to gguf` writes the family. The check",
            "before step 1 passes in fp32 and bf16. With transformers 5.17.0, all of its 127 families train.",
            "Exceptions:",
            "",
            *faults,
            "",
            *rows,
            "",
            "Not tested, because they are no causal text decoders:",
            "",
            *(f"- {number} classes: {reason}" for reason, number in excluded.items()),
            "",
        ]
    )


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    arguments = [name for name in sys.argv[1:] if not name.startswith("--")]
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    attention.register()
    torch.set_num_threads(1)
    results = []
    for kind in arguments or family_configs.kinds():
        results.append(result := examine(kind))
        faults = {name: why for name, why in result.checks.items() if why}
        say(f"{kind:22} {result.level:21} {result.seconds:5.1f} s  {json.dumps(faults) if faults else 'ok'}")
    say(f"{sum(result.trains for result in results)} of {len(results)} train")
    if "--write" in sys.argv:
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
