"""The child process of an engine: load the model, train with `SFTTrainer` on prepared rows, and report to the parent.

It runs with the Python program of the engine. Messages are lines of JSON: `{"step": {...}}` to the parent; the request,
`"saved"` and `"stop"` from it. If the parent ends, this process ends at once.
"""

import inspect
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OTHER_NAMES = {"processing_class": "tokenizer", "max_length": "max_seq_length"}
"""Names that arguments have in other versions."""
_BEAT_SECONDS = 2.0


class Parent:
    """The messages to and from the parent process. What libraries print to stdout goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._guard = threading.Lock()
        self._was_saved = threading.Event()
        self.is_stopping = False
        self.request: dict[str, Any] = json.loads(sys.stdin.readline())
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def send(self, kind: str, content: Any) -> None:
        """Send a message."""
        with self._guard:
            self._out.write(json.dumps({kind: content}) + "\n")
            self._out.flush()

    def save(self, folder: str) -> None:
        """Wait until the parent has copied a checkpoint."""
        self._was_saved.clear()
        self.send("saved", folder)
        self._was_saved.wait()

    def _listen(self) -> None:
        for line in sys.stdin:
            if json.loads(line) == "stop":
                self.is_stopping = True
            else:
                self._was_saved.set()
        os._exit(1)  # the parent has ended: nobody would keep what is trained from here on

    def _beat(self) -> None:
        """Send a sign of life while this process uses CPU time."""
        used = 0.0
        while True:
            time.sleep(_BEAT_SECONDS)
            if (now := time.process_time()) > used + 0.01:
                self.send("alive", used := now)


def arguments(function: Callable[..., Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return arguments under the names that a function of the installed version has; raise TypeError if it has none."""
    known = inspect.signature(function).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())

    def own(name: str) -> str:
        other = _OTHER_NAMES.get(name, name)
        if name not in known and other not in known and not takes_all:
            raise TypeError(f"`{getattr(function, '__name__', function)}` of this version has no argument `{name}`")
        return other if other in known and name not in known else name

    return {own(name): value for name, value in wanted.items()}


def load_trl(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model, and the further arguments of the trainer."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype, adapter = getattr(torch, request["dtype"]), request["adapter"]
    options: dict[str, Any] = {"dtype": dtype}
    if request["is_quantized"]:
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(request["model"], **options)
    if adapter is None:
        return model, {}
    from peft import LoraConfig

    return model, {"peft_config": LoraConfig(**arguments(LoraConfig, {**adapter, "task_type": "CAUSAL_LM"}))}


def load_unsloth(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model with its adapter. Unsloth selects all linear layers if none are named."""
    import torch
    from unsloth import FastLanguageModel  # pyright: ignore

    adapter = request["adapter"]
    recompute = {"off": False, "on": True, "offload": "unsloth"}[request["recompute"]]
    common = {"max_seq_length": request["max_length"], "use_gradient_checkpointing": recompute}
    common["random_state"] = request["arguments"]["seed"]
    wanted = {
        "model_name": request["model"],
        "dtype": getattr(torch, request["dtype"]),
        "load_in_4bit": request["is_quantized"],
        "full_finetuning": adapter is None,
        "use_exact_model_name": True,  # otherwise a name may stand for a quantised copy
        **common,
    }
    load = FastLanguageModel.from_pretrained
    model, _ = load(**arguments(load, wanted))
    if adapter is not None:
        chosen = {name: value for name, value in adapter.items() if value != "all-linear"}
        add = FastLanguageModel.get_peft_model
        model = add(model, **arguments(add, {**chosen, **common}))
    return model, {}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Pad rows to the longest one. Padding is neither read nor supervised."""
    import torch

    def padded(name: str) -> torch.Tensor:
        values = [torch.tensor(row[name]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=-100)

    ids = padded("input_ids")
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": padded("labels")}


def train(parent: Parent) -> None:
    """Train as the request says."""
    request = parent.request
    import torch

    torch.set_num_threads(request["threads"])
    torch.manual_seed(request["arguments"]["seed"])
    model, further = (load_unsloth if request["engine"] == "unsloth" else load_trl)(request)  # Unsloth comes first
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # pyright: ignore  lazy names

    from tunewell.features.engines.observer import Observer

    def read(name: str) -> Any:
        with Path(request["rows"], name).open() as file:
            return Dataset.from_list([json.loads(line) for line in file])

    settings = request["arguments"]
    settings["max_grad_norm"] = settings["max_grad_norm"] or 1e30  # the norm is measured where gradients are clipped
    wanted = {
        "model": model,
        "args": SFTConfig(**arguments(SFTConfig, settings)),
        "data_collator": collate,
        "processing_class": AutoTokenizer.from_pretrained(request["tokenizer"]),
        "train_dataset": read("train.jsonl"),
        "eval_dataset": read("evaluated.jsonl") if settings["eval_strategy"] != "no" else None,
        **further,
    }
    trainer = SFTTrainer(**arguments(SFTTrainer, wanted))
    trainer.add_callback(Observer(trainer, parent, request["context"]))
    trainer.train(resume_from_checkpoint=request["resume"])


def main() -> None:
    """Train, and report an error with its type. The parent handles signals."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = Parent()
    try:
        train(parent)
    except Exception as error:  # noqa: BLE001  whatever it is, the parent reports it
        traceback.print_exc()
        parent.send("failed", f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
