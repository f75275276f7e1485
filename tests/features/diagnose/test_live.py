"""Failures provoked with the installed libraries, nothing pasted: each traceback is named."""

import json
import os
import socket
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunewell.features.diagnose.diagnose import diagnose_text

pytestmark = pytest.mark.slow
LIVE: list[tuple[str, Callable[[Path], Any]]] = []


def live(name: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """Register a function that fails. It raises, or returns the text that a process printed."""

    def register(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        LIVE.append((name, function))
        return function

    return register


def _model(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **changes))


def _tokenizer(**options: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", **options)


@live("renamed-argument")
def _(tmp: Path) -> None:
    from transformers import TrainingArguments

    TrainingArguments(output_dir=str(tmp), evaluation_strategy="no")  # pyright: ignore


@live("renamed-argument")
def _(tmp: Path) -> None:
    from trl import SFTConfig

    SFTConfig(output_dir=str(tmp), max_seq_length=128)  # pyright: ignore


@live("renamed-argument")
def _(tmp: Path) -> None:
    from transformers import Trainer

    Trainer(model=_model(), tokenizer=_tokenizer())  # pyright: ignore


@live("adapter-newer-peft")
def _(tmp: Path) -> None:
    from peft import LoraConfig

    LoraConfig(r=8, sideways_rank=3)  # pyright: ignore


@live("lora-target-modules-missing")
def _(tmp: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(_model(), LoraConfig(target_modules=["W_pack"]))


@live("vocab-resize-mismatch")
def _(tmp: Path) -> None:
    small, large = _model(), _model()
    large.resize_token_embeddings(70)
    small.load_state_dict(large.state_dict())


def _weights(tmp: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    file = tmp / "model.safetensors"
    save_file({"a": torch.zeros(100)}, file)
    return file


@live("checkpoint-truncated")
def _(tmp: Path) -> None:
    from safetensors.torch import load_file

    file = _weights(tmp)
    file.write_bytes(file.read_bytes()[:-40])
    load_file(file)


@live("weights-file-is-pointer")
def _(tmp: Path) -> str:
    """The exception alone does not decide between a pointer and damage; the head of the file does."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = tmp / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 134\n")
    try:
        load_file(file)
    except SafetensorError:
        return traceback.format_exc() + file.read_text()
    return ""


@live("safetensors-shared")
def _(tmp: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weight = torch.zeros(4, 4)
    save_file({"lm_head.weight": weight, "model.embed_tokens.weight": weight}, tmp / "x.safetensors")


@live("collator-ragged-or-nested")
def _(tmp: Path) -> None:
    from transformers import DataCollatorWithPadding

    tokenizer = _tokenizer(pad_token="a")
    DataCollatorWithPadding(tokenizer)([{"input_ids": [0], "text": "a"}, {"input_ids": [0, 1], "text": "b"}])


@live("tokenizer-no-pad-token")
def _(tmp: Path) -> None:
    _tokenizer()(["a", "a b"], padding=True)


@live("template-missing")
def _(tmp: Path) -> None:
    _tokenizer().apply_chat_template([{"role": "user", "content": "a"}])


@live("template-role-alternation")
def _(tmp: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.chat_template = (
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    )
    tokenizer.apply_chat_template([{"role": "assistant", "content": "a"}], tokenize=False)


def _load_json(tmp: Path, *texts: str) -> None:
    from datasets import load_dataset

    for number, text in enumerate(texts):
        (tmp / f"{number}.jsonl").write_text(text)
    load_dataset("json", data_files=[str(tmp / f"{n}.jsonl") for n in range(len(texts))], cache_dir=str(tmp / "cache"))


@live("dataset-schema-drift")
def _(tmp: Path) -> None:
    _load_json(tmp, '{"a": "x", "label": 1}\n', '{"a": "x", "other": 1}\n')


@live("dataset-json-shape")
def _(tmp: Path) -> None:
    _load_json(tmp, '{"a": "x", \n{"b": }\n')


@live("dataset-script-unsupported")
def _(tmp: Path) -> None:
    from datasets import load_dataset

    (tmp / "mine").mkdir()
    (tmp / "mine" / "mine.py").write_text("import datasets\n")
    load_dataset(str(tmp / "mine" / "mine.py"))


@live("dataset-empty-at-trainer")
def _(tmp: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"a": []})[0]


@live("dataset-map-worker-died")
def _(tmp: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"a": list(range(8))}).map(lambda row: os._exit(1), num_proc=2)


@live("embedding-index-out-of-range")
def _(tmp: Path) -> None:
    import torch

    _model()(input_ids=torch.tensor([[1, 99]]))


@live("labels-missing")
def _(tmp: Path) -> None:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]})
    arguments = TrainingArguments(output_dir=str(tmp), max_steps=1, report_to="none", use_cpu=True)
    Trainer(model=_model(), args=arguments, train_dataset=rows).train()


@live("overridden-method-signature")
def _(tmp: Path) -> None:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # pyright: ignore
            return model(**inputs).loss

    rows = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
    arguments = TrainingArguments(output_dir=str(tmp), max_steps=1, report_to="none", use_cpu=True)
    Mine(model=_model(), args=arguments, train_dataset=rows).train()


@live("gradient-checkpointing-no-grad")
def _(tmp: Path) -> None:
    import torch

    model = _model()
    model.requires_grad_(False)
    model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()


@live("resume-optimizer-mismatch")
def _(tmp: Path) -> None:
    import torch

    parameters = list(_model().parameters())
    saved = torch.optim.AdamW(parameters).state_dict()
    torch.optim.AdamW(parameters[:2]).load_state_dict(saved)


@live("resume-weights-only-unpickle")
def _(tmp: Path) -> None:
    import torch

    torch.save({"path": tmp}, tmp / "rng_state.pth")
    torch.load(tmp / "rng_state.pth")


@live("yaml-float-string")
def _(tmp: Path) -> None:
    import torch
    import yaml

    rate = yaml.safe_load("lr: 1e-4")["lr"]
    torch.optim.AdamW(_model().parameters(), lr=rate)


@live("sampling-nan-logits")
def _(tmp: Path) -> None:
    import torch

    model = _model()
    model.lm_head.weight.data.fill_(float("nan"))
    model.generate(torch.tensor([[1]]), do_sample=True, max_new_tokens=2)


@live("fp16-unscale-gradients")
def _(tmp: Path) -> None:
    import torch

    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * 2).sum()).backward()
    scaler.unscale_(optimizer)


@live("attention-dtype")
def _(tmp: Path) -> None:
    import torch

    tensor = torch.zeros(1, 1, 2, 8)
    torch.nn.functional.scaled_dot_product_attention(tensor, tensor.bfloat16(), tensor)


@live("attention-mask-dtype")
def _(tmp: Path) -> None:
    import torch

    tensor = torch.zeros(1, 1, 2, 8)
    mask = torch.zeros(2, 2, dtype=torch.int64)
    torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor, attn_mask=mask)


@live("formatting-func-conflict")
def _(tmp: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"prompt": ["a"], "completion": ["b"]})
    arguments = SFTConfig(output_dir=str(tmp), completion_only_loss=True, use_cpu=True, bf16=False, report_to="none")
    tokenizer = _tokenizer(pad_token="a", eos_token="b")
    SFTTrainer(_model(), arguments, train_dataset=rows, processing_class=tokenizer, formatting_func=lambda row: "a")


def _quantized(tmp: Path, **options: Any) -> Any:
    """Load a model in 8 bits with bitsandbytes on the CPU."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    _model().save_pretrained(tmp)
    bits = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(str(tmp), quantization_config=bits, **options)


@live("quantized-full-finetune")
def _(tmp: Path) -> None:
    from transformers import Trainer, TrainingArguments

    Trainer(_quantized(tmp), TrainingArguments(output_dir=str(tmp), report_to="none", use_cpu=True))


@live("quantized-model-moved")
def _(tmp: Path) -> None:
    _quantized(tmp).half()


@live("quantized-offload-refused")
def _(tmp: Path) -> None:
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    _quantized(tmp, device_map={**places, "model.rotary_emb": "cpu"}, offload_folder=str(tmp))


@live("accelerator-not-visible")
def _(tmp: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    _quantized(tmp, device_map={"": 0})


@live("adapter-config-missing")
def _(tmp: Path) -> None:
    from peft import PeftModel

    _model().save_pretrained(tmp)
    PeftModel.from_pretrained(_model(), str(tmp))


@live("inplace-on-leaf")
def _(tmp: Path) -> None:
    embeddings = _model().get_input_embeddings().weight
    embeddings += 1


@live("dataset-path-wrong")
def _(tmp: Path) -> None:
    from datasets import load_dataset

    load_dataset(str(tmp))


@live("unrecognized-architecture")
def _(tmp: Path) -> None:
    from transformers import AutoConfig

    (tmp / "config.json").write_text(json.dumps({"model_type": "qwen99"}))
    AutoConfig.from_pretrained(str(tmp))


@live("removed-import")
def _(tmp: Path) -> None:
    from transformers import top_k_top_p_filtering  # noqa: F401  # pyright: ignore


@live("flash-attn-unavailable")
def _(tmp: Path) -> None:
    from transformers import AutoModelForCausalLM

    _model().save_pretrained(tmp)
    AutoModelForCausalLM.from_pretrained(str(tmp), attn_implementation="flash_attention_2")


@live("rendezvous-port-in-use")
def _(tmp: Path) -> None:
    from torch.distributed import TCPStore

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True)


@live("oom-host-ram")
def _(tmp: Path) -> None:
    import torch

    torch.empty(1 << 50)


@live("disk-full-checkpoint")
def _(tmp: Path) -> None:
    import torch

    torch.save({"a": torch.zeros(1000)}, "/dev/full")


@live("dataset-encoding")
def _(tmp: Path) -> None:
    (tmp / "a.jsonl").write_text('{"a": "caf\u00e9 \u2014 \u4f60"}', encoding="utf-8")
    (tmp / "a.jsonl").read_text(encoding="gbk", errors="strict")
    (tmp / "a.jsonl").read_text(encoding="ascii")


def _python(code: str, **variables: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=False)
    return done.stdout + done.stderr


@live("hub-unreachable")
def _(tmp: Path) -> str:
    code = "from transformers import AutoConfig; AutoConfig.from_pretrained('some-org/some-model')"
    return _python(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp))


@live("embedding-index-out-of-range")
def _(tmp: Path) -> str:
    """The rank that fails is named, not the launcher's wrapper."""
    script = tmp / "train.py"
    script.write_text(
        "import torch, torch.distributed as d\n"
        "d.init_process_group('gloo')\n"
        "if d.get_rank() == 1: torch.nn.Embedding(4, 2)(torch.tensor([9]))\n"
        "d.barrier()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.stdout + done.stderr


def _wheel(folder: Path, name: str, version: str, needs: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        needed = f"Requires-Dist: {needs}\n" if needs else ""
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@live("pip-resolution-conflict")
def _(tmp: Path) -> str:
    _wheel(tmp, "torchlike", "1.0")
    _wheel(tmp, "torchlike", "2.0")
    _wheel(tmp, "left", "1.0", "torchlike==1.0")
    _wheel(tmp, "right", "1.0", "torchlike==2.0")
    flags = ["install", "--no-index", "--find-links", str(tmp), "--target", str(tmp / "out"), "left", "right"]
    done = subprocess.run([sys.executable, "-m", "pip", *flags], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@live("gguf-file-incomplete")
def _(tmp: Path) -> str:
    import numpy as np
    from gguf import GGUFWriter

    file = tmp / "model.gguf"
    writer = GGUFWriter(file, "llama")
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 32)
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.write_bytes(file.read_bytes()[:-4000])
    code = f"import xllamacpp as x; p = x.CommonParams(); p.model.path = {str(file)!r}; p.n_ctx = 16; x.Server(p)"
    return _python(code)


@pytest.mark.parametrize(("name", "fail"), LIVE, ids=[f"{number}-{name}" for number, (name, _) in enumerate(LIVE)])
def test_a_live_failure_is_named(name: str, fail: Callable[[Path], Any], tmp_path: Path) -> None:
    """The libraries change their words; what is installed here must be named."""
    try:
        text = fail(tmp_path)
    except BaseException as error:  # noqa: BLE001  whatever the library raises is the evidence
        text = "".join(traceback.format_exception(error))
    assert text, "nothing failed"
    found = [finding.id for finding in diagnose_text(text).findings] or ["healthy"]
    assert found[0] == name, text[-3000:]
