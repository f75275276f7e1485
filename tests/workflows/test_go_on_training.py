"""Go on training from an earlier run or an adapter: the same weights at the start, one adapter at the end."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import exported
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig

import tunewell
from corpora import write_rows
from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.evaluation import session
from tunewell.records.plan import read_plan
from tunewell.runs.result import TrainResult
from tunewell.workflows.init import init
from tunewell.workflows.validate import validate

_FAST: dict[str, Any] = {
    "device": "cpu",
    "train": {"max_steps": 4, "batch_documents": 4, "threads": 1, "learning_rate": 5e-3},
    "evaluate": {"every_steps": 4, "samples": 1, "sample_tokens": 2},
    "verdict": {"after_training": False, "questions": 2, "answer_tokens": 2},
}
_NO_RATE = {"train": {**_FAST["train"], "learning_rate": 1e-30, "max_steps": 1}}
_PLAIN = "{% for m in messages %}{{ '<|a|>' + m['role'] + m['content'] + '<|b|>' }}{% endfor %}"


def _rows(first: int, number: int = 30) -> list[dict[str, str]]:
    return [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}."} for n in range(first, first + number)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, two files of rows, and a finished LoRA run `first`."""
    folder = tmp_path_factory.mktemp("project")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    num_tokens = load_tokenizer(write_tiny_model(folder / "base")).vocab_size
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=num_tokens, **sizes)).save_pretrained(folder / "base")
    write_rows(folder / "rows.jsonl", _rows(0))
    write_rows(folder / "more.jsonl", _rows(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert _train("base", "first", method={"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}).exit_code == 0
    return folder


@pytest.fixture(autouse=True)
def _inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(session, "everyday_texts", lambda: ["The college opens its doors in September."] * 4)


def _train(model: str, out: str, rows: str = "rows.jsonl", **changes: Any) -> TrainResult:
    config = {**_FAST, "model": model, "corpus": f"corpus-{out}", "data": {"sources": rows, "held_out": 0.2}, **changes}
    return tunewell.train(config, out=out, progress=False)


def _adapter(run: str | Path) -> dict[str, torch.Tensor]:
    folder = max((Path(run) / "checkpoints").iterdir())
    return load_file(folder / "adapter_model.safetensors")


def _peft_loss(base: str, adapter: Path, corpus: str) -> float:
    """Return the held-out loss of an adapter that PEFT loaded to go on training it."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True).eval()
    total, number = 0.0, 0
    for document in open_corpus(corpus).held_out:
        ids, labels = torch.tensor([document.input_ids]), torch.tensor([document.labels])
        with torch.no_grad():
            found = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], labels[0, 1:], reduction="sum")
        total, number = total + float(found), number + int((labels[0, 1:] != -100).sum())
    return total / number


def test_a_run_without_a_rate_ends_where_the_first_ended() -> None:
    """The second run must start from the adapter's weights, not from a new adapter on the base model."""
    first = read_plan(Path("first"))
    before = json.loads(Path("first/outcome.json").read_text())["held_out"]
    second = _train("first", "still", **_NO_RATE)
    assert second.held_out_first == pytest.approx(before["last"], abs=1e-6)
    assert second.held_out_last == pytest.approx(before["last"], abs=1e-6) and before["last"] < before["first"] - 0.01
    assert all(torch.equal(tensor, _adapter("still")[name]) for name, tensor in _adapter("first").items())
    plan = read_plan(Path("still"))
    assert plan.start is not None and plan.start.step == 4 and plan.model == first.model == "base"
    assert plan.config["method"]["rank"] == 4 and plan.tokenizer_sha256 == first.tokenizer_sha256


def test_the_second_run_starts_like_peft_and_its_one_adapter_is_proven() -> None:
    start = Path("first/checkpoints/step-000004")
    second = _train("first", "second", "more.jsonl")
    assert second.held_out_first == pytest.approx(_peft_loss("base", start, "corpus-second"), abs=1e-5)
    assert second.held_out_last is not None and second.held_out_last < second.held_out_first - 0.01
    newest = Path("second/checkpoints/step-000004")
    assert second.held_out_last == pytest.approx(_peft_loss("base", newest, "corpus-second"), abs=1e-5)
    found = exported(Path("second"), Path("export"), to=("adapter", "merged"))
    assert found.parity.is_ok
    third = _train("export/adapter", "third", "more.jsonl", **_NO_RATE)  # an adapter without a run
    assert third.held_out_first == pytest.approx(second.held_out_last, abs=1e-5)


def test_the_verdict_compares_with_the_start_of_the_run() -> None:
    """Compared with the base model, a second run that learned nothing would pass by the gain of the first."""
    _train("first", "idle", **_NO_RATE)
    report = validate("idle").report
    assert report.held_out is not None and report.held_out.base == pytest.approx(report.held_out.tuned, abs=1e-6)
    assert report.verdict == "FAIL" and report.subject.base_role == "where this run started"
    assert "step-000004" in str(report.subject.base) and "start" in report.hashes
    assert validate("first").report.verdict != "FAIL"


def test_a_resumed_run_goes_on_and_notices_another_start(tmp_path: Path) -> None:
    shutil.copytree("first", "again")
    _train("again", "resumed", train={**_FAST["train"], "max_steps": 2})
    config = {**_FAST, "model": "again", "corpus": "corpus-resumed", "data": {"sources": "rows.jsonl", "held_out": 0.2}}
    resumed = tunewell.train(
        config, out="resumed", resume=True, allow_changes=["num_steps", "warmup_steps"], progress=False
    )
    assert resumed.steps == 4
    assert tunewell.train(out="resumed", resume=True, progress=False).steps == 4  # by the config in its folder
    _train("base", "other", method={"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}, seed=1)
    with pytest.raises(UserError, match=r"adapter: .* in the checkpoint"):
        tunewell.train({**config, "model": "other"}, out="resumed", resume=True, progress=False)


def test_a_fully_fine_tuned_run_is_the_base_of_the_next() -> None:
    first = _train("base", "full", method={"kind": "full"})
    second = _train("full", "after-full", **_NO_RATE)
    assert second.held_out_first == pytest.approx(first.held_out_last, abs=1e-6)
    plan = read_plan(Path("after-full"))
    assert plan.start is not None and plan.model == plan.start.path == "full/checkpoints/step-000004"
    assert validate("after-full").report.subject.base_role == "where this run started"


def test_added_tokens_and_the_template_are_kept() -> None:
    """The base model has no rows for tokens that the first run added, and its tokenizer does not know them."""
    Path("plain.jinja").write_text(_PLAIN)
    template = {"name": "plain.jinja", "add_missing_tokens": True}
    first = _train("base", "tokens", template=template, method={"rank": 4, "alpha": 8})
    second = _train("tokens", "tokens-2", corpus="corpus-tokens", **_NO_RATE)  # its corpus is prepared again
    assert second.held_out_first == pytest.approx(first.held_out_last, abs=1e-5)
    assert open_corpus("corpus-tokens").manifest.tokenizer.added_by_us == ["<|a|>", "<|b|>"]
    for run in ("tokens", "tokens-2"):
        assert validate(run).report.held_out is not None
    with pytest.raises(UserError, match="new tokens, `<\\|c\\|>`"):
        Path("other.jinja").write_text(_PLAIN.replace("|a|", "|c|"))
        _train("tokens", "tokens-3", template={"name": "other.jinja", "add_missing_tokens": True})


def test_an_adapter_of_peft_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(1)
    settings = LoraConfig(r=3, lora_alpha=6, target_modules=".*(gate|up)_proj", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained("base"), settings).save_pretrained(tmp_path / "foreign")
    result = _train(str(tmp_path / "foreign"), "from-peft")
    assert result.held_out_first == pytest.approx(
        _peft_loss("base", tmp_path / "foreign", "corpus-from-peft"), abs=1e-5
    )
    assert {tensor.shape[0] for name, tensor in _adapter("from-peft").items() if "lora_A" in name} == {3}
    config = json.loads((tmp_path / "foreign" / "adapter_config.json").read_text())
    (tmp_path / "foreign" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(UserError, match="does not name its base model") as error:
        _train(str(tmp_path / "foreign"), "refused")
    assert "method.adapter" in (error.value.fix or "")
    result = _train("base", "from-peft-2", method={"adapter": str(tmp_path / "foreign")}, **_NO_RATE)
    assert result.held_out_first == pytest.approx(
        _peft_loss("base", tmp_path / "foreign", "corpus-from-peft-2"), abs=1e-5
    )


@pytest.mark.parametrize(
    ("method", "message", "fix"),
    [
        ({"rank": 8}, "the adapter `first` was trained with 4", "remove `method.rank`"),
        ({"kind": "full"}, "the config has `method.kind: full`", "--to merged"),
        ({"targets": ["k_proj"]}, "selects other layers than the adapter", "remove `method.targets`"),
        ({"targets": "all-linear"}, "selects other layers than the adapter", "remove `method.targets`"),
    ],
)
def test_settings_that_do_not_fit_the_adapter_are_refused(method: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        _train("first", "refused", method=method)
    assert fix in (error.value.fix or "") and not Path("refused").exists()


@pytest.mark.slow
def test_the_method_of_an_adapter_is_its_own() -> None:
    """`model: RUN` of a DoRA run was refused, because the default `method.kind` is `lora`."""
    _train("base", "dora", method={"kind": "dora", "rank": 4})
    _train(str(Path("dora").absolute()), "dora-2")
    assert any("magnitude" in name for name in _adapter("dora-2"))


def test_a_start_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    unfinished = Path(shutil.copytree("first", "unfinished"))
    outcome = json.loads((unfinished / "outcome.json").read_text()) | {"status": "interrupted", "reason": "SIGINT"}
    (unfinished / "outcome.json").write_text(json.dumps(outcome))
    with pytest.raises(UserError, match="did not finish") as error:
        _train("unfinished", "refused")
    assert "--resume --out unfinished" in (error.value.fix or "")
    assert _train("unfinished/checkpoints/step-000004", "from-checkpoint", **_NO_RATE).exit_code == 0
    shutil.move("base", "moved")
    try:
        with pytest.raises(UserError, match=r"the base model `.*base` of `first, step 4` is missing") as error:
            _train("first", "refused")
        assert "method.adapter" in (error.value.fix or "")
        found = _train("moved", "with-moved", method={"adapter": "first"}, **_NO_RATE)
        assert found.held_out_first == pytest.approx(found.held_out_last)
        shutil.copytree("moved", "base")
        changed = {name: tensor * 1.5 for name, tensor in load_file("moved/model.safetensors").items()}
        save_file(changed, "base/model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match="has changed since"):
            _train("first", "refused")
    finally:
        shutil.rmtree("base", ignore_errors=True)
        shutil.move("moved", "base")
    shutil.move("corpus-first", "elsewhere")
    try:
        with pytest.raises(UserError, match="the tokenizer of `first, step 4` is missing"):
            _train("first", "refused")
    finally:
        shutil.move("elsewhere", "corpus-first")
    with pytest.raises(UserError, match="is a complete model, not an adapter"):
        _train("base", "refused", method={"adapter": "base"})


def test_init_reads_a_run(tmp_path: Path) -> None:
    result = init("more.jsonl", model="first", out=tmp_path / "tunewell.yaml")
    assert "/first   #" in result.text and "rank: 4 " in result.text and "alpha: 8 " in result.text
    assert result.facts.name == "base" and result.template == "auto"
