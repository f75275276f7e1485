"""A stand-in for the worker of an engine: it sends what the variable STAND_IN says, and checks what it gets.

started step:1 saved:1 fault:2 print:WORDS fail:WORDS die
"""

import json
import os
import sys
from pathlib import Path

request = json.loads(sys.stdin.readline())
assert Path(request["rows"], "train.jsonl").is_file()


def send(kind: str, content: object) -> None:
    sys.stdout.write(json.dumps({kind: content}) + "\n")
    sys.stdout.flush()


def step(number: int) -> None:
    values = {"loss": 2.0 - number / 10, "grad_norm": 1.0, "learning_rate": 1e-3, "epoch": number / 10, "seconds": 0.1}
    counts = {"tokens": 40, "supervised_tokens": 20, "documents": 4, "memory_bytes": 1 << 20}
    send("step", {"step": number, **values, **counts})


def saved(number: int) -> None:
    folder = Path(request["arguments"]["output_dir"], f"checkpoint-{number}")
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}')
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    send("saved", str(folder))
    assert json.loads(sys.stdin.readline()) == "saved"


for word in os.environ["STAND_IN"].split():
    kind, _, value = word.partition(":")
    match kind:
        case "started":
            send("started", {"num_trainable": 10, "num_parameters": 100})
        case "step":
            step(int(value))
        case "evaluated":
            send("evaluated", {"step": int(value), "loss": 1.5, "tokens": 9, "documents": 3, "seconds": 0.1})
        case "saved":
            saved(int(value))
        case "fault":
            words = "the loss is not finite"
            finding = {"step": int(value), "name": "nan-gradients", "severity": "fault", "words": words}
            send("found", {**finding, "numbers": {}, "place": "weight `w`"})
        case "print":
            sys.stderr.write(f"{value}\n")
        case "fail":
            send("failed", value)
            sys.exit(1)
        case "die":
            os._exit(9)
