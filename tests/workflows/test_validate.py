"""`validate` end to end on tiny models: the sick are found out, each by its own reason; the healthy are left alone."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sick_models import (
    END,
    WORDINGS,
    asked,
    chance_rows,
    colour_rows,
    everyday_rows,
    new_model,
    run_of,
    save_model,
    teach,
    write_base,
    write_jsonl,
    write_tokenizer,
)
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tunewell.cli.main import main
from tunewell.core.errors import UserError
from tunewell.records.report import Report, Validation, read_report
from tunewell.runs.result import TrainResult
from tunewell.workflows.prepare import prepare
from tunewell.workflows.validate import validate

TRAINED, HELD_OUT = colour_rows(WORDINGS[:9]), colour_rows(WORDINGS[9:])
QUESTIONS = [asked(row["question"]) for row in TRAINED]
FAST = {"train.max_steps": 40, "evaluate.every_steps": 20}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "base", tokenizer)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Doors to learn, the same doors asked about in other words, and everyday text so that nothing is forgotten."""
    folder = tmp_path_factory.mktemp("project")
    write_jsonl(folder / "rows.jsonl", TRAINED)
    write_jsonl(folder / "held.jsonl", HELD_OUT)
    write_jsonl(folder / "everyday.jsonl", everyday_rows()[:10])
    return folder


@pytest.fixture(scope="module")
def lora(project: Path, base: Path) -> TrainResult:
    """An adapter, judged at the end of its training."""
    wishes = {"train.learning_rate": 1e-2, "train.max_steps": 60, "verdict.after_training": True}
    return run_of(project, base, out="lora", sets=FAST | wishes)


@pytest.fixture(scope="module")
def full(project: Path, base: Path) -> TrainResult:
    wishes = {"train.learning_rate": 3e-3, "method.kind": "full", "seed": 1}
    return run_of(project, base, out="full", sets=FAST | wishes)


@pytest.fixture(scope="module")
def from_nothing(project: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    empty = save_model(new_model(tokenizer, seed=3), tmp_path_factory.mktemp("empty") / "empty", tokenizer)
    wishes = {"train.learning_rate": 5e-3, "method.kind": "full", "seed": 2, "train.max_steps": 60}
    return run_of(project, empty, out="nothing", sets=FAST | wishes)


def copy_of(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


def judged(place: Path, **more: Any) -> Validation:
    return validate(place, device="cpu", **more)


def ends_at_once(folder: Path, base: Path, project: Path) -> Report:
    model = copy_of(base)
    teach(model, base, [(question, END) for question in QUESTIONS], steps=15)
    sick = save_model(model, folder / "mute", base)
    return judged(sick, base=str(base), data=project / "held.jsonl", out=folder / "report").report


def goes_round(folder: Path, base: Path, project: Path) -> Report:
    model = copy_of(base)
    teach(model, base, [(question, "It is red. " * 15) for question in QUESTIONS], steps=20)
    sick = save_model(model, folder / "round", base)
    return judged(sick, base=str(base), data=project / "held.jsonl", out=folder / "report").report


def never_applied(folder: Path, base: Path, project: Path) -> Report:
    """PEFT begins with matrices that change nothing."""
    get_peft_model(copy_of(base), LoraConfig(r=4, target_modules="all-linear")).save_pretrained(str(folder / "adapter"))
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert all(not tensor.any() for name, tensor in saved.items() if "lora_B" in name)
    return judged(folder / "adapter", data=project / "held.jsonl", out=folder / "report").report


def with_nan(folder: Path, base: Path, project: Path) -> Report:
    sick = save_model(copy_of(base), folder / "nan", base)
    tensors = load_file(sick / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, sick / "model.safetensors", metadata={"format": "pt"})
    return judged(sick, base=str(base), data=project / "held.jsonl", out=folder / "report").report


def by_heart(folder: Path, base: Path, project: Path) -> Report:
    """A run of ours from nothing, on rows that have nothing in common."""
    write_jsonl(folder / "rows.jsonl", chance_rows(16))
    write_jsonl(folder / "held.jsonl", chance_rows(12, seed=5))
    wishes = {"train.max_steps": 60, "evaluate.every_steps": 12, "train.learning_rate": 5e-3, "method.kind": "full"}
    result = run_of(folder, save_model(new_model(base), folder / "empty", base), sets=wishes)
    assert result.last_loss is not None and result.last_loss < 0.1
    assert result.held_out_last is not None and result.held_out_best is not None
    assert result.held_out_last > 1.15 * result.held_out_best
    return judged(result.run).report


def forgetful(folder: Path, base: Path, project: Path) -> Report:
    """A run of ours that learns its rows well, at a rate that leaves nothing else."""
    write_jsonl(folder / "rows.jsonl", TRAINED)
    write_jsonl(folder / "held.jsonl", HELD_OUT)
    return judged(run_of(folder, base, sets=FAST | {"train.learning_rate": 1e-2, "method.kind": "full"}).run).report


SICK = {
    "answers_nothing": ends_at_once,
    "loops": goes_round,
    "nothing_changed": never_applied,
    "weights_not_finite": with_nan,
    "no_better_than_base": by_heart,
    "forgets": forgetful,
}


@pytest.mark.parametrize("code", SICK)
def test_a_sick_model_is_found_out_by_its_own_reason(code: str, tmp_path: Path, base: Path, project: Path) -> None:
    report = SICK[code](tmp_path, base, project)
    assert report.reasons[0].code == code, [(reason.code, reason.what) for reason in report.reasons]
    assert report.verdict == report.reasons[0].level
    assert report.reasons[0].next and any(letter.isdigit() for letter in report.reasons[0].what)


def test_healthy_runs_pass(lora: TrainResult, full: TrainResult, from_nothing: TrainResult) -> None:
    for result in (lora, full, from_nothing):
        report = judged(result.run).report
        assert report.verdict == "PASS", [(reason.code, reason.what) for reason in report.reasons]
        assert report.tuned_tally is not None and report.tuned_tally.right > 0.9 * report.tuned_tally.judged == 16.2
        assert report.next.startswith("`tunewell chat")


def test_training_ends_with_a_verdict(lora: TrainResult) -> None:
    told = lora.as_json()
    assert (told["verdict"], told["reasons"], lora.exit_code) == ("PASS", [], 0)
    assert told["stages"]["judge"] > 0 and str(lora.run / "report.html") in told["artefacts"]
    report = read_report(lora.run)
    assert (report.subject.step, lora.best_step) == (60, None) and "no rows were set aside" in report.subject.because
    assert report.data == "the held-out rows of the run"
    assert report.curve.train == lora.losses and report.curve.held_out == lora.held_out
    assert "PASS" in (lora.run / "report.md").read_text() and "PASS" in (lora.run / "report.html").read_text()


def test_without_being_asked_to_training_does_not_judge(full: TrainResult) -> None:
    assert full.as_json()["verdict"] is None and full.exit_code == 0 and full.validation is None


def test_held_out_losses_of_training_and_of_judging_agree(lora: TrainResult, full: TrainResult) -> None:
    """The engine's figures and the report's come from different code."""
    for result in (lora, full):
        report = judged(result.run, checkpoint="last").report
        assert report.held_out is not None and report.held_out.base is not None
        assert report.held_out.base == pytest.approx(result.held_out[0][1], abs=1e-4)
        assert report.held_out.tuned == pytest.approx(result.held_out[-1][1], abs=1e-4)


def test_the_same_run_gives_the_same_report(lora: TrainResult, tmp_path: Path) -> None:
    told = []
    for name in ("one", "two"):
        judged(lora.run, out=tmp_path / name)
        told.append(json.loads((tmp_path / name / "report.json").read_text()))
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["report.html", "report.json", "report.md"]
    for report in told:
        assert report.pop("seconds") and report.pop("made_at")
        assert report["machine"].pop("threads")  # as many as are fastest at the moment: a busy machine gives one
    assert told[0] == told[1]


@pytest.mark.slow
def test_a_checkpoint_is_chosen_by_its_name(lora: TrainResult) -> None:
    assert judged(lora.run, checkpoint="last").report.subject.step == 60
    assert judged(lora.run, checkpoint="40").report.subject.step == 40
    inside = judged(lora.run / "checkpoints" / "step-000040", out=lora.run).report
    assert (inside.subject.step, inside.subject.kind) == (40, "run")
    with pytest.raises(UserError, match="no checkpoint `nonsense`"):
        judged(lora.run, checkpoint="nonsense")


def test_an_adapter_of_peft_is_judged_against_its_base(lora: TrainResult, base: Path, tmp_path: Path) -> None:
    """What we trained, loaded and saved by PEFT, gets the verdict that the run got."""
    ours = lora.run / "checkpoints" / "step-000060"
    PeftModel.from_pretrained(copy_of(base), ours).save_pretrained(str(tmp_path / "adapter"))
    held_out = write_jsonl(tmp_path / "held.jsonl", HELD_OUT)
    found = judged(tmp_path / "adapter", data=held_out, out=tmp_path / "report").report
    of_run = judged(lora.run, checkpoint="last", out=tmp_path / "run").report
    assert (found.verdict, found.subject.kind, found.subject.base) == ("PASS", "adapter", str(base))
    assert found.held_out is not None and of_run.held_out is not None
    assert found.held_out.tuned == pytest.approx(of_run.held_out.tuned, abs=1e-5)
    assert [one.tuned.text for one in found.exchanges] == [one.tuned.text for one in of_run.exchanges]


@pytest.mark.slow
def test_a_model_is_judged_with_and_without_a_base(full: TrainResult, base: Path, tmp_path: Path) -> None:
    merged = save_model(copy_of(full.run / "checkpoints" / "step-000040"), tmp_path / "model", base)
    held_out = write_jsonl(tmp_path / "held.jsonl", HELD_OUT)
    alone = judged(merged, data=held_out, out=tmp_path / "alone").report
    assert alone.verdict == "PASS" and alone.subject.base is None and alone.base_tally is None
    assert alone.held_out is not None and alone.held_out.base is None
    beside = judged(merged, data=held_out, base=str(base), out=tmp_path / "beside").report
    assert beside.base_tally is not None and beside.held_out is not None and beside.held_out.base is not None
    assert beside.held_out.base > beside.held_out.tuned == alone.held_out.tuned
    same = judged(base, data=held_out, base=str(base), out=tmp_path / "same").report
    assert same.reasons[0].code == "nothing_changed"


def test_nan_in_an_adapter_and_in_its_base_are_told(lora: TrainResult, base: Path, tmp_path: Path) -> None:
    held_out = write_jsonl(tmp_path / "held.jsonl", HELD_OUT)
    PeftModel.from_pretrained(copy_of(base), lora.run / "checkpoints" / "step-000060").save_pretrained(
        str(tmp_path / "a")
    )
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    next(tensor for name, tensor in tensors.items() if "lora_B" in name)[0, :2] = torch.inf
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors", metadata={"format": "pt"})
    report = judged(tmp_path / "a", data=held_out, out=tmp_path / "report").report
    assert report.reasons[0].code == "weights_not_finite" and list(report.bad_weights.values()) == [2]
    assert "nothing else was measured" in " ".join(report.notes) and report.held_out is None


def test_a_threshold_changes_the_verdict(lora: TrainResult, tmp_path: Path) -> None:
    strict = judged(lora.run, sets=["verdict.min_right=1.0", "verdict.max_forgetting=0"], out=tmp_path)
    assert strict.report.verdict == "WEAK" and strict.exit_code == 3
    assert strict.report.thresholds["min_right"].value == 1.0
    assert strict.report.ledger is not None and strict.report.ledger.rows == len(TRAINED) + 10 + len(HELD_OUT)
    few = judged(lora.run, sets=["verdict.questions=3", "verdict.batch_size=1"], out=tmp_path).report
    assert few.tuned_tally is not None and few.tuned_tally.asked == 3
    none = judged(lora.run, sets=["verdict.questions=0"], out=tmp_path).report
    assert none.exchanges == [] and none.change is not None and none.verdict == "PASS"


def test_a_run_whose_corpus_is_gone_or_another_is_not_judged_on_it(lora: TrainResult, tmp_path: Path) -> None:
    import shutil

    corpus = Path(str(lora.run) + "-corpus")
    copy = shutil.copytree(lora.run, tmp_path / "run")
    held_out = write_jsonl(tmp_path / "held.jsonl", HELD_OUT)
    sets = [f"corpus={tmp_path / 'away'}"]
    with pytest.raises(UserError, match="no longer exists"):
        judged(copy, sets=sets)
    report = judged(copy, sets=sets, data=held_out).report
    assert report.verdict == "PASS" and any("is missing" in note for note in report.notes)
    other = write_jsonl(tmp_path / "rows.jsonl", HELD_OUT)
    prepare(model=str(corpus / "tokenizer"), data=[str(other)], out=tmp_path / "away", sets=["data.held_out=0.3"])
    with pytest.raises(UserError, match="has changed since the run"):
        judged(copy, sets=sets)


def test_a_run_without_held_out_rows_is_weak(base: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", TRAINED)
    run = run_of(tmp_path, base, sets=FAST | {"data.held_out": 0.0, "train.max_steps": 2}).run
    report = judged(run).report
    assert (report.verdict, report.reasons[0].code) == ("UNPROVEN", "not_enough_evidence")
    assert report.held_out is None and report.everyday is not None


@pytest.mark.slow
def test_rows_of_several_kinds_are_judged(base: Path, tmp_path: Path) -> None:
    """Plain text has no questions; a conversation is asked its first; two sources are told apart."""
    text = write_jsonl(tmp_path / "text.jsonl", everyday_rows())
    plain = judged(base, data=text, out=tmp_path / "plain").report
    assert plain.exchanges == [] and plain.held_out is not None and plain.held_out.documents == 40
    assert (plain.verdict, plain.reasons[0].code) == ("UNPROVEN", "not_enough_evidence")
    turns = [
        [
            {"role": "user", "content": f"Is it {colour}?"},
            {"role": "assistant", "content": f"It is {colour}."},
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": "Now it is late."},
        ]
        for colour in ("red", "blue", "green", "black", "white", "brown")
    ]
    talks = write_jsonl(tmp_path / "talks.jsonl", [{"messages": messages} for messages in turns])
    found = judged(base, data=talks, out=tmp_path / "talks").report
    assert [one.reference for one in found.exchanges][:2] == ["It is red.", "It is blue."]
    assert found.tuned_tally is not None and found.tuned_tally.asked == 6
    mixed = write_jsonl(tmp_path / "rows.jsonl", TRAINED), write_jsonl(tmp_path / "everyday.jsonl", everyday_rows())
    assert all(path.is_file() for path in mixed)
    run = run_of(tmp_path, base, sets=FAST | {"train.max_steps": 2}).run
    report = judged(run).report
    assert [pair.name for pair in report.by_source] == ["everyday.jsonl", "rows.jsonl"] and report.held_out is not None
    assert sum(pair.documents for pair in report.by_source) == report.held_out.documents
    weighed = sum(pair.tuned * pair.tokens for pair in report.by_source) / report.held_out.tokens
    assert weighed == pytest.approx(report.held_out.tuned, rel=1e-9)
    assert {one.source for one in report.exchanges} == {"rows.jsonl"}


def test_answers_are_judged_by_their_keys(lora: TrainResult, tmp_path: Path) -> None:
    """Guards the way of a key: from the column of a row, or from the references, to the report and its counts."""
    derived = judged(lora.run, out=tmp_path / "derived", sets=["verdict.task=facts"]).report
    assert derived.judge is not None and derived.judge.origins == {"derived": 18}
    assert derived.judge.clusters < 18 and derived.judge.difference is not None
    assert {each.key for each in derived.exchanges} == {row["answer"][6:-1] for row in HELD_OUT}
    assert derived.tuned_tally is not None and derived.tuned_tally.right_interval is not None
    accepted = [{**row, "value": row["answer"][6:-1]} for row in HELD_OUT]
    report = judged(lora.run, data=write_jsonl(tmp_path / "v.jsonl", accepted), out=tmp_path / "value").report
    assert report.judge is not None and report.judge.origins == {"value": 18}
    assert [each.tuned.right for each in report.exchanges] == [each.tuned.right for each in derived.exchanges]
    other = [{**row, "value": 0.25} for row in HELD_OUT]
    report = judged(lora.run, data=write_jsonl(tmp_path / "o.jsonl", other), out=tmp_path / "other").report
    assert report.tuned_tally is not None and report.tuned_tally.right == report.tuned_tally.exact
    assert any("18 of 18 rows with `value`" in note for note in report.notes), report.notes


def test_bad_rows_are_counted_and_no_rows_are_refused(base: Path, tmp_path: Path) -> None:
    good = "".join(json.dumps(row) + "\n" for row in HELD_OUT[:6])
    (tmp_path / "bad.jsonl").write_text(good + '{"question": "And?"}\nnot json\n' + json.dumps(HELD_OUT[0]) + "\n")
    report = judged(base, data=tmp_path / "bad.jsonl", out=tmp_path / "report").report
    assert report.held_out is not None and report.held_out.documents == 6
    assert any("3 of 9 rows" in note for note in report.notes), report.notes
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError) as error:
        judged(base, data=tmp_path / "empty.jsonl", out=tmp_path / "report")
    assert "empty.jsonl" in str(error.value) and error.value.fix
    with pytest.raises(UserError) as error:
        judged(base, data=tmp_path / "away.jsonl", out=tmp_path / "report")
    assert "away.jsonl" in str(error.value)


def test_a_model_without_a_template_is_judged_by_its_loss_or_told_what_it_lacks(base: Path, tmp_path: Path) -> None:
    model = save_model(copy_of(base), tmp_path / "bare", base)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    text = write_jsonl(tmp_path / "text.jsonl", everyday_rows())
    report = judged(model, data=text, out=tmp_path / "report").report
    assert report.held_out is not None and report.exchanges == []
    chats = write_jsonl(tmp_path / "held.jsonl", HELD_OUT)
    with pytest.raises(UserError, match="template"):
        judged(model, data=chats, out=tmp_path / "report")
    named = judged(model, data=chats, template="chatml", out=tmp_path / "report").report
    assert named.tuned_tally is not None and named.tuned_tally.asked == 18


def test_what_is_not_there_is_said(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        judged(tmp_path / "nowhere", data=write_jsonl(tmp_path / "held.jsonl", HELD_OUT))
    assert "nowhere" in str(error.value)
    with pytest.raises(UserError, match="needs questions with answers to test `base`"):
        judged(base)
    with pytest.raises(UserError, match="no run in this folder"):
        validate()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter_model"):
        judged(tmp_path / "half", data="held.jsonl")


@pytest.mark.slow
def test_a_base_with_fewer_tokens_or_none_of_ours_does_not_crash(full: TrainResult, base: Path, tmp_path: Path) -> None:
    """Another vocabulary is refused in words; a head with spare rows is compared on what both know."""
    held_out = write_jsonl(tmp_path / "held.jsonl", HELD_OUT)
    model = copy_of(base)
    model.resize_token_embeddings(704)
    padded = save_model(model, tmp_path / "padded", base)
    checkpoint = full.run / "checkpoints" / "step-000040"
    report = judged(checkpoint, base=str(padded), data=held_out, out=tmp_path / "report").report
    assert report.change is not None and report.change.largest > 0.1
    small = copy_of(base)
    small.resize_token_embeddings(300)
    with pytest.raises(UserError):
        other = save_model(small, tmp_path / "small", base)
        judged(checkpoint, base=str(other), data=held_out, out=tmp_path / "report")


def test_a_model_with_few_positions_reads_what_it_can(base: Path, tmp_path: Path) -> None:
    """Learned positions end where they end: everyday text longer than that broke the judgement."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=700, n_positions=64, n_embd=32, n_layer=1, n_head=2))
    short = save_model(model, tmp_path / "short", base)
    held_out = write_jsonl(tmp_path / "held.jsonl", HELD_OUT)
    report = judged(short, data=held_out, out=tmp_path / "report").report
    assert report.everyday is not None and report.everyday.documents == 40


def told_by(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["validate", "--device", "cpu", *arguments])
    return code, out.getvalue(), err.getvalue()


def test_the_command_tells_its_verdict_by_its_exit_code(
    lora: TrainResult, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told_by(str(lora.run), "--json", "--out", str(tmp_path / "out"))
    told = json.loads(out)
    assert (code, told["verdict"], told["exit_code"]) == (0, "PASS", 0) and told["page"].endswith("out/report.html")
    assert "testing the tuned model: 18 questions" in err and "importing torch" in err
    weak = ["--set", "verdict.task=chat", "--set", "verdict.min_gain=0.99"]
    code, out, err = told_by(str(lora.run), *weak, "--out", str(tmp_path / "out"))
    assert code == 3 and "little_gain" in out and "next: " in out and "testing" not in out
    held_out = write_jsonl(tmp_path / "held.jsonl", HELD_OUT)
    same = ("--base", str(base), "--data", str(held_out), "--out", str(tmp_path / "out"))
    code, out, _ = told_by(str(base), *same)
    assert code == 4 and "nothing_changed" in out
    code, out, err = told_by(str(tmp_path / "nowhere"), "--data", str(held_out))
    assert code == 2 and out == "" and err.count("error:") == 1


def test_numbers_that_are_none_are_words_in_json(base: Path, tmp_path: Path) -> None:
    """A head of infinite weight is found as such; one that overflows later gives losses that no JSON number is."""
    model = copy_of(base)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e38)
    big = save_model(model, tmp_path / "big", base)
    held_out = write_jsonl(tmp_path / "held.jsonl", HELD_OUT)
    code, out, _ = told_by(str(big), "--data", str(held_out), "--json", "--out", str(tmp_path / "out"))
    told = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 4 and told["reasons"][0]["code"] == "loss_not_finite" and told["held_out"]["tuned"] in ("nan", "inf")
    assert "not finite" in (tmp_path / "out" / "report.md").read_text()
    code, out, _ = told_by(str(big), "--data", str(held_out), "--out", str(tmp_path / "out"))
    assert code == 4 and "loss_not_finite" in out


def test_no_secret_of_the_config_is_in_the_report(project: Path, base: Path, tmp_path: Path) -> None:
    secret = "hf_" + "abcdefghijklmnopqrstuvwxyz12345678"
    write_jsonl(tmp_path / "rows.jsonl", [*TRAINED, {"question": "The key of the door?", "answer": f"It is {secret}."}])
    held = [{"question": "The key of the house?", "answer": f"It is {secret}."}, *HELD_OUT]
    write_jsonl(tmp_path / "held.jsonl", held)
    wishes = {"train.max_steps": 2, "template.arguments": {"token": secret}, "verdict.task": "facts"}
    run = run_of(tmp_path, base, sets=FAST | wishes).run
    judged(run)
    for name in ("report.json", "report.html", "report.md"):
        text = (run / name).read_text()
        assert secret not in text and "[redacted]" in text, name
    _, out, _ = told_by(str(run))
    assert secret not in out and "The key of the house?" in out


METRICS = """
def starts_right(question, answer, reference):
    return answer.startswith(reference[:5])


def picky(question, answer, reference):
    if "Boris" in question:
        raise KeyError("no rule for Boris")
    return len(answer) / len(reference)


def wordy(question, answer, reference):
    return "many"
"""


def test_metric_functions_of_the_user_are_in_the_report(lora: TrainResult, tmp_path: Path) -> None:
    """A metric that fails on some rows must name them, and must not cost the verdict."""
    (tmp_path / "metrics.py").write_text(METRICS)
    references = [f"{tmp_path / 'metrics.py'}:{name}" for name in ("starts_right", "picky", "wordy")]
    found = judged(
        lora.run,
        sets=[f"verdict.metrics={json.dumps(references)}"],
        metrics={"exact": lambda question, answer, reference: answer == reference},
        out=tmp_path / "out",
    )
    report = read_report(tmp_path / "out")
    assert report.verdict == found.report.verdict == "PASS" and report.tuned_tally is not None
    metrics = report.metrics
    assert sorted(metrics) == ["exact", "picky", "starts_right", "wordy"]
    assert metrics["exact"].tuned == pytest.approx(report.tuned_tally.exact / 18) and metrics["exact"].failed == 0
    assert metrics["exact"].base is not None and metrics["exact"].base < metrics["exact"].tuned
    assert metrics["picky"].failed == 6 and metrics["picky"].tuned is not None
    assert "held.jsonl row" in str(metrics["picky"].error) and "no rule for Boris" in str(metrics["picky"].error)
    assert (metrics["wordy"].tuned, metrics["wordy"].failed) == (None, 36) and "'many'" in str(metrics["wordy"].error)
    assert sum("the metric `picky` failed on held.jsonl row" in note for note in report.notes) == 1
    for page in ("report.html", "report.md"):
        text = (tmp_path / "out" / page).read_text()
        assert "exact" in text and "picky" in text
    _, out, _ = told_by(
        str(lora.run),
        "--set",
        f"verdict.metrics={references[0]}",
        "--out",
        str(tmp_path / "out"),
        "--set",
        "verdict.questions=2",
    )
    assert "starts_right" in out


def test_a_metric_that_cannot_be_loaded_is_told_before_anything_is_measured(lora: TrainResult, tmp_path: Path) -> None:
    """A typing error in a name must not cost minutes."""
    (tmp_path / "metrics.py").write_text(METRICS)
    with pytest.raises(UserError, match="no function `away`"):
        judged(lora.run, sets=[f"verdict.metrics={tmp_path / 'metrics.py'}:away"], out=tmp_path / "out")
    with pytest.raises(UserError, match=r"like `metrics.py:exact`"):
        judged(lora.run, sets=["verdict.metrics=exact"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
