"""What `export` and `verify` do to people's files, and how they speak of what goes wrong."""

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from exports import exported, write_adapter, write_base
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig

import tunewell
from corpora import write_rows
from tunewell.cli.main import main
from tunewell.core import child
from tunewell.core.errors import UserError
from tunewell.core.progress import silent
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export import proof_process as process
from tunewell.export import prove, staging
from tunewell.export.options import ExportOptions, is_ollama_name, ollama_name
from tunewell.export.preflight import require_tools
from tunewell.export.staging import ExistingExport, find_existing
from tunewell.export.targets.base import load_targets
from tunewell.records.parity import PARITY, read_proof
from tunewell.workflows import export as workflow
from tunewell.workflows.verify import verify


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, an adapter on it, and another adapter on it."""
    folder = tmp_path_factory.mktemp("model")
    base = write_base(folder / "base")
    write_adapter(folder / "adapter", base)
    write_adapter(folder / "other", base, seed=3)
    return folder


@pytest.fixture
def out(model: Path, tmp_path: Path) -> Path:
    """An export of the adapter."""
    assert exported(model / "adapter", tmp_path / "out", to=("adapter",)).parity.is_ok
    return tmp_path / "out"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def kinds(folder: Path) -> list[str]:
    return [own.name for own in read_proof(folder).artefacts]


@pytest.mark.slow
def test_a_second_export_adds_to_the_first_and_leaves_what_is_not_its_own(model: Path, out: Path) -> None:
    """The adapter of the first was gone without a word, and so were people's notes; so was a folder `out.staged`."""
    (out / "notes.txt").write_text("mine")
    (out / "adapter" / ".DS_Store").write_text("mine too")
    out.with_name("out.staged").mkdir()
    (out.with_name("out.staged") / "thesis.txt").touch()
    done = exported(model / "adapter", out, to=("merged",), precision="fp32")
    assert done.parity.is_ok and kinds(out) == ["adapter fp32", "merged fp32"]
    assert [link.artefact for link in done.parity.links] == kinds(out)
    assert any("adapter fp32" in note and "kept" in note for note in done.notes)
    assert (out / "notes.txt").read_text() == "mine" and (out / "adapter" / ".DS_Store").read_text() == "mine too"
    assert (out.with_name("out.staged") / "thesis.txt").exists()
    before = (out / "merged" / "model.safetensors").stat().st_ino
    done = exported(model / "adapter", out, to=("merged",), precision="bf16")
    assert kinds(out) == ["adapter fp32", "merged bf16"] and verify(out).is_ok
    assert (out / "merged" / "model.safetensors").stat().st_ino != before
    assert any("merged fp32" in note and "replaced" in note for note in done.notes)
    beside = {"parity.json", "proof.json", "proof.safetensors", "README.md"}
    assert names(out) == {"adapter", "merged", "notes.txt", *beside} and names(out.parent) == {"out", "out.staged"}


def test_an_export_of_another_model_is_not_mixed_in(model: Path, out: Path) -> None:
    """Beside an adapter of one checkpoint, merged weights of another would both look proven."""
    with pytest.raises(UserError, match="of a different model") as caught:
        exported(model / "other", out, to=("merged",))
    assert "--to adapter" in str(caught.value) and kinds(out) == ["adapter fp32"] and verify(out).is_ok
    assert exported(model / "other", out, to=("adapter",)).parity.is_ok


def _find(out: Path, *targets: str, gguf: str = "") -> ExistingExport | None:
    return find_existing(out, load_targets(targets), ExportOptions(gguf=gguf.split()))


def test_what_would_be_lost_is_refused_before_anything_is_loaded(out: Path) -> None:
    (out / "merged").mkdir()
    (out / "merged" / "mine.txt").touch()
    with pytest.raises(UserError, match=r"mine\.txt.* is in the way"):
        _find(out, "merged")
    (out / "adapter" / "mine.txt").touch()
    with pytest.raises(UserError, match=r"mine\.txt"):
        _find(out, "adapter")
    (out / "adapter" / "mine.txt").unlink()
    (out / "adapter" / "README.md").write_text("# My own words\n")
    with pytest.raises(UserError, match=r"README\.md.* was changed"):
        _find(out, "adapter")
    with pytest.raises(UserError, match="changed after it was exported"):
        _find(out, "gguf", gguf="f16")
    (out / "proof.json").unlink()
    with pytest.raises(UserError, match="is not an export"):
        _find(out, "adapter")
    assert _find(out.parent / "new", "adapter") is None


def test_a_publish_that_fails_in_between_leaves_what_was_there(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced file by file, an export must not end as half of each."""
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "parity.json"}
    move, moved = staging._move, []

    def failing(source: Path, target: Path, moves: Any) -> None:
        moved.append(target)
        if target == out / "adapter" / "adapter_model.safetensors":
            raise KeyboardInterrupt
        move(source, target, moves)

    monkeypatch.setattr(staging, "_move", failing)
    with pytest.raises(KeyboardInterrupt):
        exported(model / "adapter", out, to=("adapter",))
    assert len(moved) > 5
    assert {path: path.read_bytes() for path in before} == before and verify(out).is_ok
    assert {path.name for path in out.iterdir()} == {path.relative_to(out).parts[0] for path in before} | {
        "parity.json"
    }


def test_two_exports_to_one_place_do_not_meet_and_a_dead_one_is_cleared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    dead = tmp_path / ".out.tunewell-dead"
    (dead / "export").mkdir(parents=True)
    (dead / "tunewell-export.lock").touch()
    (tmp_path / ".out.tunewell-mine").mkdir()
    with staging.open_staging(out) as first:
        assert not dead.exists() and first.folder.is_dir()
        with pytest.raises(UserError, match="another process is exporting"), staging.open_staging(out):
            raise AssertionError("both would work there")
        assert first.folder.is_dir()
    assert names(tmp_path) == {".out.tunewell-mine"}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_request_to_end_cleans_up(tmp_path: Path) -> None:
    """What was left behind looked finished, and was proven when asked."""
    code = (
        "import sys, time; from pathlib import Path; from tunewell.export.staging import open_staging\n"
        "from tunewell.cli.startup import clean_up_when_terminated; clean_up_when_terminated()\n"
        "with open_staging(Path(sys.argv[1])) as staging:\n"
        "    (staging.folder / 'weights').touch(); print('there', flush=True); time.sleep(60)\n"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        assert len(names(tmp_path)) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert names(tmp_path) == set()


def test_everyone_may_read_what_the_person_lets_others_read(model: Path, out: Path) -> None:
    """Some libraries write files for their owner alone, which a web server or a colleague then cannot read."""
    exported(model / "adapter", out, to=("merged",))
    out.with_name("plain").touch()
    wanted = stat.S_IMODE(out.with_name("plain").stat().st_mode)
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "proof.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {wanted}
    assert stat.S_IMODE((out / "proof.json").stat().st_mode) == 0o600  # it has questions and answers
    out.with_name("folder").mkdir()
    assert out.stat().st_mode == out.with_name("folder").stat().st_mode


@pytest.mark.slow
def test_figures_of_a_failure_go_away_with_the_next_success(model: Path, tmp_path: Path) -> None:
    failed = tmp_path / "out-failed.json"
    failed.write_text('{"format": "tunewell-parity"}')
    exported(model / "adapter", tmp_path / "out", to=("adapter",))
    assert not failed.exists()
    failed.write_text('{"mine": true}')
    exported(model / "adapter", tmp_path / "out", to=("adapter",))
    assert failed.exists()


@pytest.mark.parametrize(("module", "kind"), [("peft", "adapter"), ("gguf", "gguf")])
def test_what_is_not_installed_is_said_before_anything_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, kind: str
) -> None:
    """It was called `not the model that was trained`, after all the work."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(workflow, "open_for_export", None)
    with pytest.raises(UserError, match=module) as caught:
        exported(model / "adapter", tmp_path / "out", to=(kind,))
    assert "pip install" in str(caught.value.fix) and names(tmp_path) == set()


def test_what_cannot_be_tried_is_no_verdict(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    config = out / "adapter" / "adapter_config.json"
    gone = str(model / "base")
    moved = model.with_name(f"{model.name}-moved")
    model.rename(moved)
    try:
        assert main(["verify", str(out)]) == 2
        said = capsys.readouterr().err
        assert gone in said and "--base" in said and "not the trained model" not in said
        assert main(["verify", str(out), "--base", str(moved / "base")]) == 0
    finally:
        moved.rename(model)
    assert gone in config.read_text()
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(["verify", str(out)]) == 2
    assert "pip install" in capsys.readouterr().err


def test_without_llama_cpp_a_gguf_cannot_be_tried(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    done = exported(model / "adapter", tmp_path / "out", gguf=("f16",))
    assert kinds(tmp_path / "out") == ["gguf f16"], "kinds of GGUF files and nothing else: that is what was meant"
    assert "chat" in done.next_command
    monkeypatch.setenv("TUNEWELL_LLAMA_CPP", str(tmp_path / "none.so"))
    assert main(["verify", str(tmp_path / "out")]) == 2
    assert "llama.cpp" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"llama\.cpp"):
        require_tools(load_targets(["ollama"]))


class FakeProcess:
    """A process that has written to its stdout, and ends with this code when it is waited for."""

    def __init__(self, exit_code: int, message: Any = None) -> None:
        self.stdin, self.stdout, self._exit_code = (
            io.StringIO(),
            io.StringIO(f"noise\n{json.dumps(message)}\n"),
            exit_code,
        )
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._code

    def wait(self) -> int:
        if self._code is None:
            self._code = self._exit_code
        return self._code

    def kill(self) -> None:
        self._code = -9


def test_the_error_of_the_proving_process_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as raised:
        prove._prove_request({"folder": str(tmp_path), "allow_pickle": False}, silent)
    error = {"what": raised.value.what, "where": raised.value.where, "fix": raised.value.fix}
    monkeypatch.setattr(child.subprocess, "Popen", lambda *_, **__: FakeProcess(2, {"error": error}))
    with pytest.raises(UserError, match=r"could not be verified: .* is not an export") as caught:
        process.ProofProcess().prove(tmp_path)
    assert "tunewell export" in str(caught.value.fix) and "exited with code 2" in str(caught.value.where)


def test_a_proving_process_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child.subprocess, "Popen", lambda *_, **__: FakeProcess(-9))
    with pytest.raises(UserError, match="could not be verified") as caught:
        process.ProofProcess().prove(tmp_path)
    assert "exited with code -9" in str(caught.value.where)


def test_a_proving_process_without_work_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a process that waits for ever after an export that failed before its proof."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    prove.main()
    with process.ProofProcess() as started:
        assert started._process.poll() is None
    assert started._process.poll() is not None


@pytest.mark.parametrize(("verdict", "is_said"), [("FAIL", True), ("WEAK", True), ("PASS", False)])
def test_a_bad_verdict_of_the_run_is_said_beside_the_proof(verdict: Any, is_said: bool) -> None:
    """A run that was judged FAIL was exported as PROVEN without a word."""
    report: Any = types.SimpleNamespace(verdict=verdict, summary="it learned nothing")
    notes = workflow._verdict_notes(report)
    assert bool(notes) == is_said and all(verdict in note and "it learned nothing" in note for note in notes)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder in which nobody can make one")
def test_a_place_that_cannot_be_written_is_no_bug(model: Path) -> None:
    with pytest.raises(UserError, match="cannot be written") as caught:
        exported(model / "adapter", Path("/proc/foo/x"), to=("adapter",))
    assert "--out" in str(caught.value.fix)


def test_a_verdict_is_given_where_it_cannot_be_kept(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """An export on a disk that is only read is verified as any other; the proof that lies there stays."""

    def full(path: Path, record: Any) -> None:
        raise PermissionError(13, "read-only", str(path))

    monkeypatch.setattr("tunewell.workflows.verify.write_record", full)
    assert main(["verify", str(out)]) == 0
    said = capsys.readouterr()
    whole = "".join(said.out.split())  # where a line is folded depends on the length of the temporary path
    assert "PROVEN" in said.out and "parity.json`couldnotbe" in whole
    assert main(["verify", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_ok"]


def test_a_damaged_reference_is_no_bug(out: Path, capsys: Any) -> None:
    path = out / "proof.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert main(["verify", str(out)]) == 2
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--to", ""], ["--to", " , "], ["--gguf", ""], ["--to", "gguf", "--gguf", ","]])
def test_an_empty_list_is_an_error(flags: list[str], capsys: Any) -> None:
    assert main(["export", *flags]) == 2
    assert "is empty" in capsys.readouterr().err


def test_the_library_takes_what_the_command_takes(model: Path, tmp_path: Path) -> None:
    adapter, out = model / "adapter", tmp_path / "out"
    with pytest.raises(UserError, match="`onnx` is not a value of `--to`"):
        tunewell.export(adapter, to=["onnx"], out=out)
    with pytest.raises(UserError, match="`int8` is not a value of `--precision`"):
        tunewell.export(adapter, to="merged", precision="int8", out=out)
    assert not out.exists()
    done = exported(adapter, to="merged, gguf", gguf="F16", out=str(out))
    assert [(own.kind, own.precision) for own in done.artefacts] == [("merged", "bf16"), ("gguf", "f16")]
    assert done.parity.is_ok


@pytest.mark.slow
def test_the_package_of_the_same_name_does_not_replace_the_function() -> None:
    """After `tunewell.train`, which imports `tunewell.export.preflight`, `tunewell.export` was a module."""
    code = "import tunewell.export.options, tunewell; assert callable(tunewell.export), tunewell.export"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_order_may_be_written_in_the_ways_of_python() -> None:
    """A step as a number, a path as a path and None for nothing were tracebacks."""
    given = ExportOptions(to=None, gguf=None, checkpoint=3, base=Path("base"), sets="seed=1")
    assert given.checked() == ExportOptions(to=[], gguf=[], checkpoint="3", base="base", sets=["seed=1"])


def test_what_will_be_written_is_said_first_and_held_against_the_disk(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    options = {"to": ("adapter", "merged", "ollama"), "out": tmp_path / "out", "gguf": ("q8_0", "q4_k_m")}
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda place: _Usage(1 << 20))
    with pytest.raises(UserError, match="not enough disk space") as caught:
        workflow.export(model / "adapter", announce=told.append, **options)
    said = str(caught.value)
    assert all(name in said for name in ("adapter ", "merged bf16 ", "gguf q8_0 ", "gguf q4_k_m "))
    assert "temporarily" not in said, "GGUF files are written from memory"
    assert names(tmp_path) == set() and told == []
    monkeypatch.setattr(workflow, "make_reference", _stop)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda place: _Usage(1 << 40))
    with pytest.raises(KeyboardInterrupt):
        workflow.export(model / "adapter", announce=told.append, **options)
    assert told[0].startswith("will write about adapter ") and told[0].endswith(" free")


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def _stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_expected_sizes_are_those_of_the_files(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's files are half tokenizer; its tensors are what is counted."""
    seen: list[Any] = []
    estimate = staging.estimate_disk_space
    monkeypatch.setattr(workflow, "estimate_disk_space", lambda *given: seen.append(estimate(*given)) or seen[0])
    exported(model / "adapter", tmp_path / "out", to=("merged",), precision="fp32")
    size = (tmp_path / "out" / "merged" / "model.safetensors").stat().st_size
    assert 0.95 < seen[0].written["merged fp32"] / size < 1.1


def test_the_next_command_can_be_pasted(model: Path, tmp_path: Path) -> None:
    """A folder `Mein Lauf ü#1` was neither quoted nor a name that Ollama takes."""
    order = {"to": ("ollama",), "gguf": ("f16",), "creates": False}
    adapter = tmp_path / "Mein Lauf ü#1"
    (model / "adapter").rename(adapter)
    try:
        done = exported(adapter, tmp_path / "mit Abstand", **order)
    finally:
        adapter.rename(model / "adapter")
    where = f"'{tmp_path / 'mit Abstand' / 'ollama'}'"
    run = "ollama create mein-lauf-u-1 -f Modelfile && ollama run mein-lauf-u-1"
    assert done.next_command == f"cd {where} && {run}"
    assert any("Ollama is not installed here" in note for note in done.notes) != bool(shutil.which("ollama"))
    with pytest.raises(UserError, match="not a valid Ollama model name"):
        exported(model / "adapter", tmp_path / "other", name="a b; rm", **order)


@pytest.mark.parametrize("text", ["Mein Lauf ü#1", "...", "", "模型", "Run-1.5", "a" * 200])
def test_any_text_gives_a_name_that_ollama_takes(text: str) -> None:
    assert is_ollama_name(ollama_name(text)) and len(ollama_name(text)) <= 60


def test_the_share_of_rows_that_llama_cpp_tokenizes_differently_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards an export that is proven, although llama.cpp reads some training rows as other ids."""
    monkeypatch.chdir(tmp_path)
    vocab_size = load_tokenizer(write_tiny_model(tmp_path / "base")).vocab_size
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, **sizes)).save_pretrained(tmp_path / "base")
    rows = [{"question": f"What is {n}?", "answer": "Yes." if n else "Say <|im_end|> now."} for n in range(20)]
    write_rows(tmp_path / "rows.jsonl", rows)
    config = {
        "model": "base",
        "device": "cpu",
        "data": {"sources": "rows.jsonl", "held_out": 0.1},
        "train": {"max_steps": 1, "threads": 1},
        "verdict": {"after_training": False},
        "evaluate": {"samples": 0},
    }
    assert tunewell.train(config, out="run", progress=False).exit_code == 0
    done = exported(Path("run"), tmp_path / "out", to=("adapter",))
    assert done.parity.is_ok
    assert json.loads((tmp_path / "out" / PARITY).read_text())["other_ids_share"] == 1 / 20
    assert any("llama.cpp and Ollama tokenize 5.0% of the training conversations differently" in n for n in done.notes)
