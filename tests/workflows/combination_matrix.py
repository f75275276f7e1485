"""The matrix of methods, precisions, tokens, saved modules, models and exports: from rows to a proven export.

    write_models(folder)                    tiny models, with and without the tokens of ChatML
    run(COMBINATIONS[0], folder)            train, evaluate, validate, answer, export, reload in transformers
    run_commands(COMBINATIONS[0], folder)   the same with the command line
    refuse(REFUSED[0][0], folder)           what the product must refuse

`tests/workflows/test_combinations.py` runs it on a CPU, `benchmarks/combinations.py` on any device.
"""

import itertools
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf_tiny import tiny
from peft import PeftModel
from tiny import write_jsonl, write_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import tunewell
from tunewell.config.load import as_sets
from tunewell.core.errors import UserError
from tunewell.records.parity import Parity
from tunewell.records.plan import read_plan
from tunewell.workflows.export import ExportResult, export
from tunewell.workflows.verify import verify

METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora-nf4": {"method.quantize": "nf4"},
    "lora-int8": {"method.quantize": "int8"},
    "dora": {"method.kind": "dora"},
    "dora-nf4": {"method.kind": "dora", "method.quantize": "nf4"},
    "dora-int8": {"method.kind": "dora", "method.quantize": "int8"},
    "full": {"method.kind": "full"},
    "galore": {"method.kind": "full", "train.optimizer": "galore", "train.galore_rank": 4},
}
PRECISIONS = ("fp32", "bf16", "fp16")
MODELS = ("llama", "llama-tied", "gemma3")
TOKENS: dict[str, dict[str, Any]] = {
    "own": {},
    "added": {"template.name": "chatml", "template.add_missing_tokens": True},
}
SAVED: dict[str, list[str]] = {"none": [], "tables": ["embed_tokens", "lm_head"]}
EXPORTS = ("adapter", "merged", "gguf")
_TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2, "fp16": 5e-3}
"""Largest relative difference between our held-out loss in a precision and that of transformers in fp32."""
_NUM_TOKENS = 500
_COMMON = {
    "method.rank": 4,
    "train.max_steps": 2,
    "train.batch_documents": 4,
    "train.learning_rate": 5e-3,
    "train.compile": "off",
    "train.threads": 1,
    "data.held_out": 0.3,
    "packing.context_length": 128,
    "evaluate.samples": 1,
    "evaluate.sample_tokens": 4,
    "verdict.after_training": False,
    "verdict.answer_tokens": 4,
}


@dataclass(frozen=True)
class Combination:
    """One cell of the matrix."""

    method: str
    precision: str
    model: str
    tokens: str
    saved: str
    export: str
    more: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return "-".join([self.method, self.precision, self.model, self.tokens, self.saved, self.export])

    @property
    def is_adapter(self) -> bool:
        return self.method.startswith(("lora", "dora"))

    @property
    def is_quantized(self) -> bool:
        return "method.quantize" in METHODS[self.method]

    def settings(self) -> dict[str, Any]:
        saved = {"method.modules_to_save": SAVED[self.saved]} if self.saved != "none" else {}
        return _COMMON | METHODS[self.method] | TOKENS[self.tokens] | saved | {"train.precision": self.precision}


def _matrix() -> list[Combination]:
    """Return a third of the product. With an adapter, every triple of method, precision and model occurs."""
    chosen: list[Combination] = []
    cells = itertools.product(*map(enumerate, (METHODS, PRECISIONS, MODELS, TOKENS, SAVED)))
    for cell in cells:
        numbers, values = zip(*cell, strict=True)
        if (sum(numbers[:3]) + numbers[3] + 2 * numbers[4]) % 3:
            continue
        method, precision, model, tokens, saved = values
        is_adapter = method.startswith(("lora", "dora"))
        if saved != "none" and not is_adapter:
            continue  # refused, see REFUSED
        kinds = EXPORTS if is_adapter else EXPORTS[1:]
        chosen.append(Combination(method, precision, model, tokens, saved, kinds[len(chosen) % len(kinds)]))
    return chosen


COMBINATIONS = _matrix()
_SAMPLE = """
lora-fp32-gemma3-added-none-adapter    lora-bf16-llama-tied-added-none-gguf     lora-bf16-gemma3-added-tables-merged
lora-fp16-llama-tied-own-none-adapter  lora-nf4-fp16-llama-added-tables-adapter lora-int8-bf16-llama-own-none-merged
dora-bf16-llama-own-tables-merged      dora-fp16-llama-tied-added-tables-merged dora-int8-fp16-gemma3-own-none-merged
dora-nf4-fp32-llama-tied-added-none-merged  full-fp32-llama-own-none-merged  galore-bf16-llama-added-none-merged
"""
SAMPLE = [combination for combination in COMBINATIONS if str(combination) in _SAMPLE.split()]
# Settings, and a part of the error that they end with before the first step.
_NO_16_BITS = "cannot be fully fine-tuned in a 16-bit model"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *((METHODS["full"] | METHODS[name], "its weights cannot change") for name in ("lora-nf4", "lora-int8")),
    *((METHODS["galore"] | METHODS[name], "cannot be used with `method.kind") for name in ("dora", "dora-nf4")),
    *(
        (METHODS[name] | {"method.modules_to_save": ["norm"], "train.precision": precision}, _NO_16_BITS)
        for name in ("lora", "dora-nf4")
        for precision in ("bf16", "fp16")
    ),
    *(
        (METHODS[name] | {"method.modules_to_save": [module]}, f"{module}` is quantised, so its weights cannot be")
        for name in ("lora-nf4", "dora-int8")
        for module in ("q_proj", "mlp")
    ),
    ({"template.name": "chatml"}, "as single tokens, which this tokenizer does not have"),
    ({"method.targets": ["lm_head"]}, "no linear layer `lm_head`"),
    ({"method.modules_to_save": ["embed"]}, "no module `embed`"),
]


def write_models(folder: Path) -> Path:
    """Write the tiny models into `folder / "with-TOKENS"`, and rows."""
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}."} for n in range(20)]
    write_jsonl(folder / "rows.jsonl", rows)
    for tokens, case in itertools.product(TOKENS, MODELS):
        place = write_tiny_model(folder / f"with-{tokens}" / case)
        num_tokens = _without_chatml(place) if tokens == "added" else _NUM_TOKENS
        layers = {"layer_types": ["sliding_attention", "full_attention"]} if case == "gemma3" else {}
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": num_tokens}
        tiny(case, **sizes, **layers, max_position_embeddings=512).save_pretrained(place)
    return folder


def _without_chatml(folder: Path) -> int:
    """Remove the markers and the chat template from a tokenizer folder. Return the number of tokens that are left."""
    path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer, config = json.loads(path.read_text()), json.loads(config_path.read_text())
    kept = [token for token in tokenizer["added_tokens"] if not token["content"].startswith("<|im_")]
    for number, token in enumerate(kept, start=len(tokenizer["model"]["vocab"])):
        token["id"] = number
    del config["chat_template"]
    path.write_text(json.dumps(tokenizer | {"added_tokens": kept}))
    config_path.write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    return len(tokenizer["model"]["vocab"]) + len(kept)


def run(combination: Combination, folder: Path, *, device: str = "cpu") -> None:
    """Train for two steps, evaluate, validate, answer and export. Raise AssertionError for what is wrong."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        own = Path(place)
        result = tunewell.train(
            model=folder / f"with-{combination.tokens}" / combination.model,
            data=folder / "rows.jsonl",
            out=own / "run",
            sets=[*_sets(combination.settings() | {"device": device}), *_corpus(folder, combination)],
            progress=False,
        )
        assert result.steps == 2 and [step for step, _ in result.held_out][:1] == [0]
        assert all(math.isfinite(loss) for _, loss in [*result.losses, *result.held_out])
        assert read_plan(result.run).precision.value == combination.precision
        report = tunewell.validate(result.run, device=device, progress=False).report
        assert report.held_out is not None and len(report.exchanges) == report.held_out.documents
        assert math.isclose(report.held_out.tuned, min(loss for _, loss in result.held_out), rel_tol=5e-3)
        model = tunewell.load(result.run, device=device)
        for temperature in (0.0, 1.0):  # decoded in a batch, and streamed as in `chat`
            assert isinstance(model.generate("What is 1?", max_new_tokens=4, temperature=temperature), str)
        done = _exported(combination, result.run, own / "export")
        wrong = [check for link in done.parity.links for check in link.checks if not check.is_ok]
        assert done.exit_code == 0 and not wrong, wrong
        # PEFT would load the adapter onto the base in 16 bits. The proof has loaded it onto the quantised one.
        if combination.export == "merged" or (combination.export == "adapter" and not combination.is_quantized):
            loss = _loss_in_transformers(combination, own / "export", folder, result.run)
            assert math.isclose(loss, report.held_out.tuned, rel_tol=_TOLERANCE[combination.precision])


def run_commands(combination: Combination, folder: Path, *, device: str = "cpu") -> None:
    """Train, validate, ask and export with the command line. Raise AssertionError with the output of what failed."""
    model = str(folder / f"with-{combination.tokens}" / combination.model)
    sets = [*_sets(combination.settings() | {"device": device}), *_corpus(folder, combination)]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        run = str(Path(place, "run"))
        train = ["train", "--model", model, "--data", str(folder / "rows.jsonl"), "--out", run]
        _command([*train, *(part for one in sets for part in ("--set", one))], place)
        _command(["validate", run, "--device", device], place, codes=(0, 3, 4))  # two steps teach nothing
        _command(["chat", run, "--device", device], place, question="What is 1 plus 1?")
        _command(["export", run, "--to", combination.export], place)


def _command(arguments: list[str], folder: str, *, codes: tuple[int, ...] = (0,), question: str = "") -> None:
    command = [sys.executable, "-m", "tunewell", *arguments]
    done = subprocess.run(command, cwd=folder, input=question, capture_output=True, text=True)
    assert done.returncode in codes, f"{arguments[0]}: exit code {done.returncode}\n{done.stdout}{done.stderr}"[-2000:]


def _exported(combination: Combination, run: Path, out: Path) -> ExportResult:
    options: dict[str, Any] = {"gguf": ["f16"]} if combination.export == "gguf" else {}
    return export(run, out=out, to=combination.export, prove=_prove_here, answer_tokens=4, **options)


def _prove_here(folder: Path, *, allow_pickle: bool, **_: Any) -> Parity:
    """A new process takes seconds to start."""
    return verify(folder, allow_pickle=allow_pickle)


def _loss_in_transformers(combination: Combination, export: Path, folder: Path, run: Path) -> float:
    """Return the held-out loss that transformers computes on the exported files, in fp32 on the CPU."""
    model = _in_transformers(combination, export, folder)
    corpus = tunewell.open_corpus(read_plan(run).config["corpus"])
    assert corpus.held_out is not None
    total, number = 0.0, 0
    with torch.no_grad():
        for document in corpus.held_out:
            logits_TV = model(input_ids=torch.tensor([document.input_ids])).logits[0, :-1].double()
            labels_T = torch.tensor(document.labels[1:])
            total += torch.nn.functional.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=-100).item()
            number += int((labels_T != -100).sum())
    return total / number


def _in_transformers(combination: Combination, export: Path, folder: Path) -> PreTrainedModel:
    if combination.export == "merged":
        return AutoModelForCausalLM.from_pretrained(export / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(
        folder / f"with-{combination.tokens}" / combination.model, dtype=torch.float32
    )
    if combination.tokens == "added":
        base.resize_token_embeddings(base.config.vocab_size + 2, mean_resizing=False)
    return PeftModel.from_pretrained(base, export / "adapter")  # type: ignore[return-value]


def _corpus(folder: Path, combination: Combination) -> list[str]:
    """One corpus serves all combinations of a tokenizer."""
    return as_sets(corpus=folder / f"corpus-{combination.model}-{combination.tokens}")


def _sets(settings: dict[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


def refuse(settings: dict[str, Any], folder: Path, *, device: str = "cpu") -> UserError:
    """Return the error that the settings end with. Raise AssertionError if a step was taken."""
    tokens = "added" if "template.name" in settings else "own"
    with tempfile.TemporaryDirectory(dir=folder) as place:
        sets = _sets(_COMMON | settings | {"device": device})
        try:
            tunewell.train(
                model=folder / f"with-{tokens}" / "llama",
                data=folder / "rows.jsonl",
                out=Path(place, "run"),
                sets=[*sets, *_corpus(folder, COMBINATIONS[0])] if tokens == "own" else sets,
                progress=False,
            )
        except UserError as error:
            assert not list(Path(place).rglob("step-*"))
            return error
    raise AssertionError(f"not refused: {settings}")
