"""The ejected folder: its script has the losses of the run without tunewell, and what cannot be ejected is named."""

import ast
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

import tunewell
from corpora import rows_file
from parrots import write_random
from tunewell.cli.main import main
from tunewell.features.eject.workflow import eject

SETTINGS = {
    "train.max_steps": 24,
    "train.batch_documents": 5,
    "train.micro_batch_tokens": 150,
    "train.learning_rate": 3e-3,
    "train.warmup": 4,
    "verdict.after_training": False,
    "evaluate.samples": 0,
    "device": "cpu",
}
BLOCKED = """
import runpy, sys
sys.modules["tunewell"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(folder: Path, tokenizer: Path, **settings: object) -> Path:
    """Train a random model on rows of many lengths, and return the run."""
    model = folder / "model"
    if not model.exists():
        write_random(model, tokenizer)
        rows_file(folder / "rows.jsonl", 60)
    tunewell.train(
        model=model, data=folder / "rows.jsonl", out=folder / "run", settings=SETTINGS | settings, progress=False
    )
    return folder / "run"


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return train(tmp_path, tiny_model, **{"train.max_steps": 4})


def steps_of(folder: Path) -> list[list[int]]:
    return Dataset.from_file(str(folder / "data" / "steps.arrow"))["documents"][:]


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        pytest.param({}, 1e-3, id="lora"),
        pytest.param({"method.kind": "dora", "method.modules_to_save": ["embed_tokens"]}, 1e-3, id="dora"),
        pytest.param(
            {
                **{"method.kind": "full", "train.weight_decay": 0.1, "train.schedule": "linear"},
                **{"train.min_rate_share": 0.1, "train.batch_documents": None, "train.batch_tokens": 300},
                **{"train.max_grad_norm": 0.3, "train.adam_beta2": 0.95, "train.recompute": "on"},
            },
            1e-3,
            id="full",
        ),
        pytest.param({"method.quantize": "nf4"}, 1e-3, id="qlora"),
        pytest.param({"train.precision": "bf16"}, 2e-2, id="lora-bf16"),
        pytest.param({"train.precision": "bf16", "method.kind": "full"}, 2e-2, id="full-bf16"),
        pytest.param({"train.precision": "bf16", "method.quantize": "nf4"}, 2e-2, id="qlora-bf16"),
    ],
)
@pytest.mark.slow
def test_the_script_has_the_losses_of_the_run_without_tunewell(tmp_path, tiny_model, monkeypatch, settings, limit):
    """Another warm-up, mean of means, order, mask or first weight would each change the losses."""
    monkeypatch.chdir(tmp_path)
    done = eject(train(tmp_path, tiny_model, **settings), out="out")
    assert done.num_losses == 20
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED, "out/train.py", "--check"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    compared = [line for line in ended.stdout.splitlines() if line.startswith("step")]
    assert len(compared) == 20 and all(float(line.split()[-1]) <= limit for line in compared)
    first, last = (float(line.split()[3]) for line in (compared[0], compared[-1]))
    assert last < first - 0.1  # a script that trained nothing would also repeat the first loss


def test_the_folder_has_the_rows_in_the_order_of_the_run(run, capsys):
    """The documents of a step must be those that the run logged, each with its own mask."""
    assert main(["eject", str(run)]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "4 steps" in screen and "python ejected/train.py --check" in screen
    folder, corpus = Path("ejected"), tunewell.open_corpus("corpus")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    logged = [event for event in events if event["kind"] == "step"]
    documents = Dataset.from_file(str(folder / "data" / "train.arrow"))
    assert documents["input_ids"][:] == [one.input_ids for one in corpus]
    assert documents["labels"][:] == [one.labels for one in corpus]
    for step, event in zip(steps_of(folder), logged, strict=True):
        labels = [documents[index]["labels"] for index in step]
        assert sum(map(len, labels)) == event["tokens"]
        assert sum(label != -100 for one in labels for label in one) == event["supervised_tokens"]
    assert json.loads((folder / "first_losses.json").read_text()) == [event["loss"] for event in logged]
    assert "import tunewell" not in (folder / "train.py").read_text()
    pins = (folder / "requirements.txt").read_text().split()
    assert all("==" in pin and "+" not in pin for pin in pins) and "trl==1.16.0" in pins
    compile((folder / "train.py").read_text(), "train.py", "exec")
    assert main(["eject", str(run)]) == 2 and "`ejected` exists" in capsys.readouterr().err


def test_a_model_that_transformers_cannot_name_lies_in_the_folder(tmp_path, tiny_model, monkeypatch):
    """A preset has random weights of its own, which no other program can draw again."""
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "rows.jsonl", 40)
    settings = {**SETTINGS, "train.max_steps": 1, "tokenizer": str(tiny_model), "method.kind": "full"}
    tunewell.train(model="preset:tiny-1m", data="rows.jsonl", settings=settings, progress=False)
    done = eject("run", out="out")
    assert done.model == "model" and 'MODEL = str(HERE / "model")' in Path("out/train.py").read_text()
    from safetensors.torch import load_file

    weights = load_file("out/model/model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) > 50_000
    assert not Path("out/adapter").exists()


def test_a_run_without_a_finished_step_can_be_ejected(run, capsys):
    """A crashed run is the one that people want to take elsewhere."""
    for name in ("events.jsonl", "outcome.json"):
        (run / name).unlink()
    assert main(["eject", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_losses"] == 0


def test_what_cannot_be_ejected_is_named(run, tmp_path, capsys):
    """A folder that trains something else is worse than an error."""
    plan = json.loads((run / "plan.json").read_text())
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("train:", "train:\n  optimizer: galore", 1))
    assert main(["eject", str(run)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "`train.optimizer: galore` cannot be ejected" in shown and "adamw8bit" in shown
    (run / "config.yaml").write_text("engine: trl\n" + config)
    assert main(["eject", str(run)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "`engine: trl` cannot be ejected: TRL has chosen the order" in shown and "engine: native" in shown
    (run / "config.yaml").write_text(config)
    rows_file(tmp_path / "rows.jsonl", 50)
    tunewell.prepare(model=tmp_path / "model", data="rows.jsonl", progress=False)
    assert main(["eject", str(run)]) == 2 and "has other rows than the run" in capsys.readouterr().err
    Path("corpus").rename("gone")
    assert main(["eject", str(run)]) == 2 and "the corpus of the run is missing" in capsys.readouterr().err
    assert main(["eject", "nowhere"]) == 2 and "there is no plan in `nowhere`" in capsys.readouterr().err
    (run / "plan.json").write_text(json.dumps(plan)[:-20])
    assert main(["eject", str(run)]) == 2
    assert not Path("ejected").exists() and not list(tmp_path.glob(".tunewell-eject-*"))


def test_an_order_that_the_run_did_not_have_is_refused(run, capsys):
    """The seed of a copied plan may be another: the script would silently train in another order."""
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps(plan | {"seed": 7}))
    assert main(["eject", str(run)]) == 2
    assert "the order of the rows cannot be repeated: step 1" in " ".join(capsys.readouterr().err.split())


def test_a_path_in_any_script_is_found_by_the_script(tmp_path, tiny_model, monkeypatch, capsys):
    """A JSON text is not a Python text: it writes a smiley as two halves, and the script found no model."""
    folder = tmp_path / "my \U0001f600 'models'"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run = train(folder, tiny_model, **{"train.max_steps": 1})
    assert main(["eject", str(run), "--out", "my script"]) == 0
    assert "pip install -r 'my script'/requirements.txt" in " ".join(capsys.readouterr().out.split())
    line = next(line for line in Path("my script/train.py").read_text().splitlines() if line.startswith("MODEL = "))
    assert Path(ast.literal_eval(line.removeprefix("MODEL = "))) == (folder / "model").resolve()


def test_an_expert_is_not_a_layer(tmp_path, tiny_model, monkeypatch):
    """`layers.0.mlp.experts.1` was trained with `method.layers: [1]`."""
    monkeypatch.chdir(tmp_path)
    run = train(tmp_path, tiny_model, **{"train.max_steps": 1, "method.kind": "full", "method.layers": [1]})
    eject(run, out="out")
    script = Path("out/train.py").read_text()
    block = script[script.index("for name, weight in model") : script.index("model.get_input_embeddings")]
    names = ["model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.experts.1.w1.weight", "lm_head.weight"]
    weights = {name: SimpleNamespace() for name in names}
    exec(block, {"re": re, "model": SimpleNamespace(named_parameters=weights.items)})  # noqa: S102  our own script
    assert [weights[name].requires_grad for name in names] == [True, False, False] and "import re\n" in script


def test_names_and_losses_cannot_change_the_script(run, tmp_path):
    """The name of a folder is text in the script, whatever it contains."""
    odd = tmp_path / 'a"""); import os; os.abort(); ("""\\'
    run.rename(odd)
    events = (odd / "events.jsonl").read_text().splitlines()
    bad = [json.dumps(json.loads(line) | {"loss": "nan"}) if '"step": 3' in line else line for line in events]
    (odd / "events.jsonl").write_text("\n".join(bad) + "\n")
    done = eject(odd, out="out")
    assert done.num_losses == 2 and all(map(math.isfinite, json.loads(Path("out/first_losses.json").read_text())))
    compile(Path("out/train.py").read_text(), "train.py", "exec")
