"""A TRL script and its migrated config are the same training: the same tokens in every step, the same losses."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import write_jsonl, write_tiny_model
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tunewell
from tunewell.data.batches import DataOrder
from tunewell.features.migrate.workflow import migrate

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HEAD = """
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

MODEL = "model"
LENGTH = 64
model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
dataset = load_dataset("json", data_files="rows.jsonl", split="train")
"""
PAIRS = {
    "completions with LoRA": """
args = SFTConfig(output_dir="out", max_length=LENGTH * 4, per_device_train_batch_size=4, learning_rate=1e-3,
                 num_train_epochs=2, logging_steps=1, bf16=False, report_to="none", seed=7,
                 lr_scheduler_type="linear", gradient_checkpointing=False)
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer, peft_config=lora)
trainer.train()
""",
    "conversations with accumulation": """
STEPS = 2
args = SFTConfig(output_dir="out", max_length=256, per_device_train_batch_size=2, gradient_accumulation_steps=2 * STEPS,
                 learning_rate=5e-4, num_train_epochs=3, logging_steps=1, bf16=False, report_to="none",
                 lr_scheduler_type="cosine", weight_decay=0.1, gradient_checkpointing=False)
lora = LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer, peft_config=lora)
trainer.train()
""",
    "texts, all weights": """
args = SFTConfig(output_dir="out", max_length=256, per_device_train_batch_size=3, learning_rate=2e-4, max_steps=12,
                 logging_steps=1, bf16=False, report_to="none", lr_scheduler_type="constant", adam_beta2=0.99,
                 max_grad_norm=0.5, gradient_checkpointing=False)
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
""",
    "packed sequences": """
args = SFTConfig(output_dir="out", max_length=LENGTH, packing=True, per_device_train_batch_size=2, learning_rate=1e-3,
                 num_train_epochs=2, logging_steps=1, bf16=False, report_to="none", gradient_checkpointing=False)
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer, peft_config=lora)
trainer.train()
""",
}


def rows_of(name: str) -> list[dict[str, Any]]:
    """Rows of several lengths; for packing, of one length, half a sequence each, so that packing keeps their order."""
    words = ["a" * (3 + number % 5) for number in range(23)]
    if name.startswith("completions"):
        asked = [[{"role": "user", "content": f"What is {word} {n}?"}] for n, word in enumerate(words)]
        told = [[{"role": "assistant", "content": f"It is {word * 2} {n}."}] for n, word in enumerate(words)]
        return [{"prompt": prompt, "completion": completion} for prompt, completion in zip(asked, told, strict=True)]
    if name.startswith("conversations"):
        turns = [(f"Tell me {n} {word}", f"Told {word} {n}") for n, word in enumerate(words)]
        return [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in turns]
    if name.startswith("texts"):
        return [{"text": f"The number {n} is {word} and no other."} for n, word in enumerate(words)]
    letters = ["".join(chr(65 + (n * 7 + k * k) % 26) for k in range(60)) for n in range(24)]
    tokenizer = PreTrainedTokenizerFast.from_pretrained("model")
    texts = [
        next(text[:end] for end in range(60, 0, -1) if len(tokenizer(text[:end])["input_ids"]) == 31)
        for text in letters
    ]
    return [{"text": text} for text in texts]


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n\n{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
"""Like Llama 3's, it ends with the end token. TRL also trains on a newline after it; here the end token is the last."""


def write_model(folder: Path) -> None:
    """Write a model of 50 thousand weights with a tokenizer of 512 bytes and pairs."""
    write_tiny_model(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    size = len(PreTrainedTokenizerFast.from_pretrained(folder))
    config = LlamaConfig(vocab_size=size, num_key_value_heads=2, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def run_script(script: str, *, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run the script as it is, with a sequential sampler if wanted, and keep its first adapter. Return its log."""
    from trl import SFTTrainer

    kept: list[dict[str, Any]] = []
    train: Callable[..., Any] = SFTTrainer.train

    def keep(self: Any, *args: Any, **words: Any) -> Any:
        if hasattr(self.model, "peft_config"):
            self.model.save_pretrained("first-adapter")
        result = train(self, *args, **words)
        kept.extend(line for line in self.state.log_history if "loss" in line)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "train", keep)
        if in_order:
            patch.setattr(SFTTrainer, "_get_train_sampler", lambda self, *_: SequentialSampler(self.train_dataset))
        exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})  # noqa: S102  a script of this test
    return kept


def run_ours(config: Path, *, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Train the migrated config from the same first adapter. Return the steps."""
    with monkeypatch.context() as patch:
        if in_order:
            patch.setattr(DataOrder, "permutation", lambda self, epoch: np.arange(self.num_rows))
        settings: dict[str, Any] = {"device": "cpu", "run": f"run-{in_order}"}
        if Path("first-adapter").exists():
            settings["method.adapter"] = "first-adapter"
        tunewell.train(config, settings=settings)
    lines = (Path(f"run-{in_order}") / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "step"]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    write_jsonl(tmp_path / "rows.jsonl", rows_of(request.param))
    Path("train.py").write_text(HEAD + PAIRS[request.param])
    found = migrate([Path("train.py")])
    assert not found.of("lost")
    return HEAD + PAIRS[request.param]


def num_tokens(log: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of each step in TRL's log, which counts them up."""
    counts = [0, *(round(line["num_tokens"]) for line in log)]
    return [after - before for before, after in pairwise(counts)]


def test_in_one_order_every_step_has_the_same_tokens_and_the_same_loss(
    pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A different batch, mask, template, schedule or number of steps shows within ten losses."""
    theirs = run_script(pair, in_order=True, monkeypatch=monkeypatch)
    ours = run_ours(Path("tunewell.yaml"), in_order=True, monkeypatch=monkeypatch)
    assert len(ours) == len(theirs)
    assert [step["tokens"] for step in ours] == num_tokens(theirs)
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(ours[:10], theirs[:10], strict=True)]
    assert max(differences) < 1e-4, differences


def test_in_their_own_orders_both_take_as_many_updates_over_as_many_tokens(
    pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of packed sequences that becomes as many documents would be twice the updates."""
    theirs = run_script(pair, in_order=False, monkeypatch=monkeypatch)
    ours = run_ours(Path("tunewell.yaml"), in_order=False, monkeypatch=monkeypatch)
    assert len(ours) == len(theirs)
    if "max_steps" not in pair:
        assert sum(step["tokens"] for step in ours) == sum(num_tokens(theirs))
        assert math.isclose(theirs[-1]["epoch"], round(theirs[-1]["epoch"]))
