"""Pieces of the five post-mortems: each becomes a config that trains, and its traps are named."""

from pathlib import Path

import pytest
from tiny import write_jsonl

import tunewell
from tunewell.features.migrate.workflow import migrate

PIECES = {
    "000": {
        "train.py": """
import torch
from transformers import DataCollatorForSeq2Seq
from trl import SFTConfig, SFTTrainer
from unsloth.chat_templates import train_on_responses_only

max_seq_length = 128
def to_text(examples):
    texts = tokenizer.apply_chat_template(examples["conversations"], tokenize=False).removeprefix('<bos>')
    return {"text": texts}
dataset = dataset.map(to_text, batched=True, num_proc=4)
sft_config = SFTConfig(
    dataset_text_field="text",
    max_length=max_seq_length,
    optim="adamw_torch_fused",
    lr_scheduler_type="cosine",
    packing=True,
    max_steps=2,
)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=dataset, args=sft_config,
    data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer), formatting_func=to_text,
)
trainer = train_on_responses_only(trainer)
""",
        "config.yaml": "training:\\n  learning_rate: 2.0e-4\\n  optim: adamw_torch_fused\\ndataset:\\n  num_proc: 1\\n",
    },
    "001": {
        "train_qlora.py": """
# pip install trl==0.8.6
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer
torch.cuda.empty_cache()
BATCH_SIZE = 1
GRADIENT_ACCUMULATION_STEPS = 8
def format_instruction(sample):
    return [f"### Instruction: {text}" for text in sample["instruction"]]
args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=BATCH_SIZE, eval_strategy="no", evaluation_strategy="no",
    gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS, gradient_checkpointing=True, max_steps=2,
)
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
trainer = SFTTrainer(model=model, args=args, max_seq_length=128, formatting_func=format_instruction, train_dataset=data)
""",
    },
    "001 with GaLore": {
        "train_galore.py": """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
torch.cuda.empty_cache()
model = AutoModelForCausalLM.from_pretrained("google/gemma-3-1b-it")
args = TrainingArguments(optim="galore_adamw_8bit", optim_target_modules=["attn", "mlp"], max_steps=2,
                         per_device_train_batch_size=1, gradient_accumulation_steps=8, gradient_checkpointing=True)
""",
    },
    "002": {
        "run_ollama_finetuning_pipeline.sh": (
            "python3 unified_finetune.py \\\\\\n  --batch_size 4 \\\\  # was 2\\n"
            "  --max_seq_length 128 \\\\  # was 1024\\n"
            "  --use_local_data --device cpu --max_steps 2\\n"
        ),
        "unified_finetune.py": """
print("Training started...")
def tokenize_function(self, examples):
    limit = self.config.max_seq_length
    return self.tokenizer(examples['text'], truncation=True, max_length=limit, padding='max_length')
data_collator = DataCollatorForLanguageModeling(tokenizer=self.tokenizer, mlm=False)
args = TrainingArguments(logging_steps=10)
""",
    },
    "003": {
        "finetune_macos.py": """
from transformers import Trainer, TrainingArguments
device = "mps"
PROMPT = "### Instruction:\\\\n{}\\\\n### Response:\\\\n{}"
args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, learning_rate=2e-4, fp16=True, logging_steps=10, max_steps=2,
)
""",
    },
    "004": {
        "lora_optimal_tiny_23m.json": """// config/sft_training/lora_optimal_tiny_23m.json
{
  "training_params": {
    "per_device_train_batch_size": 8,  // Reduced from 32
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 0,
    "bf16": true,
    "group_by_length": true,
    "max_steps": 2,
    "learning_rate": 8e-5,
    "warmup_ratio": 0.03,
  },
  "dataset_config": {"packing": true}
}
""",
        "run.sh": (
            "accelerate launch --mixed_precision bf16 scripts/03_sft_industrial.py \\\n"
            "    --config lora_optimal_tiny_23m.json --load_in_memory --seed 42 \\\n"
            "    --data_dirs data/sft_processed/alpaca_chatml_32k_1024_v3 \\\n"
            "    --tokenizer_path data/models/tokenizers/spm_32k\n"
        ),
        "load.py": "model = load_pretrained_model(model_path, device='cpu')\n",
    },
}
TRAPS = {
    "000": ["excessive nesting", "`formatting_func` conflicts", "`num_proc`", "`<bos>`", "stay unused",
            "attend to each"],
    "001": ["`evaluation_strategy` was renamed", "`max_seq_length` moved", "an old TRL", "gets single rows or batches",
            "needs CUDA, and 4 bits", "`empty_cache` frees nothing", "there for memory"],
    "001 with GaLore": ["GaLore with 8 bits", "`empty_cache` frees nothing", "there for memory"],
    "002": ["97% of it", "looks like a hang", "asked for local rows", "`device` that the trainer ignores",
            "data collator"],
    "003": ["a loss of 0.0", "diverge", "empty answers", "`device` that the trainer ignores"],
    "004": ["`group_by_length` sorts", "under WSL", "`mixed_precision: no`", "packed shards (2.0, 3.0)",
            "slows a small model", "loaded on the CPU", "a tokenizer of your own"],
}  # fmt: skip


def write(seed: str) -> list[Path]:
    for name, text in PIECES[seed].items():
        Path(name).write_text(text.replace("\\n", "\n") if name.endswith((".sh", ".yaml")) else text, encoding="utf-8")
    return [Path(name) for name in PIECES[seed]]


@pytest.mark.parametrize("seed", PIECES)
def test_every_trap_of_a_post_mortem_is_named(seed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone who brings the broken pieces learns what went wrong there, and what is different here."""
    monkeypatch.chdir(tmp_path)
    found = migrate(write(seed))
    told = " ".join(found.traps)
    assert [trap for trap in TRAPS[seed] if trap not in told] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", PIECES)
def test_the_pieces_become_a_config_that_trains(seed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that only loads is no migration: two steps are taken with it, on other rows and a tiny model."""
    from test_pairs import write_model

    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    rows = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}."} for n in range(12)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    migrate([*write(seed), Path("rows.jsonl")], model="model")
    sets = {"device": "cpu", "tokenizer": None, "train.precision": "fp32", "method.quantize": "none", "run": "run"}
    tunewell.train(Path("tunewell.yaml"), settings={**sets, "train.max_steps": 2})
    assert (tmp_path / "run" / "outcome.json").is_file()
