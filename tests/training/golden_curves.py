"""Train two tiny models (LoRA and full fine-tuning, 70,000 parameters, CPU, fp32, one thread) and return their curves.

The files in `golden/` were recorded with the code of 0.1.0. Record them again only when a change is meant to change
the numbers of training, and say so in the commit:

    python tests/training/golden_curves.py --update                                  with this code
    PYTHONPATH=OTHER/src python tests/training/golden_curves.py --update             with the code of another checkout
"""

import contextlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
RATES = {"lora": 1e-3, "full": 5e-3}
"""A higher rate makes the LoRA run unstable, and rounding errors grow a hundredfold in it."""
_SETTINGS = [
    "model=preset:tiny-1m",
    "tokenizer=tokenizer",
    "data.sources=[rows.jsonl]",
    "data.held_out=0.2",
    "device=cpu",
    "seed=7",
    "method.rank=4",
    "method.alpha=32",
    "method.dropout=0.1",
    "train.max_steps=40",
    "train.batch_documents=4",
    "train.micro_batch_tokens=96",  # several micro-batches in a step
    "train.threads=1",
    "train.precision=fp32",
    "train.max_grad_norm=1.0",
    "evaluate.every_steps=10",
    "evaluate.samples=0",
    "verdict.after_training=false",
]


def record_curve(folder: Path, kind: str) -> dict[str, Any]:
    """Train 40 steps in a folder and return losses, gradient norms and held-out losses."""
    import torch

    import tunewell

    folder.mkdir(parents=True, exist_ok=True)
    _write_inputs(folder)
    with contextlib.chdir(folder):
        result = tunewell.train(sets=[*_SETTINGS, f"method.kind={kind}", f"train.learning_rate={RATES[kind]}"])
    assert result.status == "finished" and not result.healing
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    return {
        "made_by": f"tunewell {tunewell.__version__}, torch {torch.__version__}",
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "held_out": [event["loss"] for event in events if event["kind"] == "held_out"],
    }


def _write_inputs(folder: Path) -> None:
    from tiny import write_jsonl, write_tiny_model

    write_tiny_model(folder / "tokenizer")
    rows = [
        {"messages": [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]}
        for a in range(3, 11)
        for b in range(2, 8)
    ]
    write_jsonl(folder / "rows.jsonl", rows)


def main() -> None:
    """Record both curves; write them with `--update`; print the first and the last loss."""
    sys.path.append(str(Path(__file__).parents[1] / "data"))
    for kind in RATES:
        with TemporaryDirectory() as folder:
            curve = record_curve(Path(folder), kind)
        if "--update" in sys.argv:
            GOLDEN.mkdir(exist_ok=True)
            (GOLDEN / f"{kind}.json").write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
        first, last = curve["losses"][0], curve["losses"][-1]
        sys.stdout.write(f"{kind}: {curve['made_by']}, loss {first:.6f} -> {last:.6f}\n")


if __name__ == "__main__":
    main()
