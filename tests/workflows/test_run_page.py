"""What the page in a run's folder says can be done there, as a person would paste it."""

import contextlib
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3Config, LlamaConfig, LlamaForCausalLM

import tunewell
from corpora import write_rows
from tunewell.cli.main import main
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.workflows.export import ExportOptions, ExportResult, export
from tunewell.workflows.verify import verify

SETS = [
    "method.rank=4",
    "train.max_steps=2",
    "train.batch_documents=2",
    "train.threads=1",
    "train.learning_rate=5e-3",
    "evaluate.samples=0",
    "verdict.after_training=false",
    "device=cpu",
]
TEMPLATE = "{% for m in messages %}{{ '<|say|>' + m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows and a model here, a config in a folder of its own: no path is the same from two of them."""
    rows = [{"instruction": f"What is {n} plus {n}?", "output": f"It is {2 * n}."} for n in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "tunewell.yaml").write_text(f"tokenizer: {tiny_model}\n")
    (tmp_path / "settings" / "say.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_model(folder: Path, tokenizer: Path, *, num_rows: int = 500, is_tied: bool = False) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=num_rows, num_attention_heads=2, tie_word_embeddings=is_tied, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)


def _exported(run: Path, **options: Any) -> ExportResult:
    """Export with a proof in this process: a new one takes seconds to start."""
    return export(run, order=ExportOptions(**options), prove=lambda folder, **flags: verify(folder, **flags))


def _train(*sets: str, model: str, allow_pickle: bool = False) -> Path:
    loaded = load_config(Path("settings/tunewell.yaml"), [*SETS, "run=my run", *sets], model=model, data="rows.jsonl")
    return tunewell.train(loaded, allow_pickle=allow_pickle).run


def _said(run: Path, title: str, kind: str = "") -> str:
    """Give the block of a section."""
    section = (run / "README.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)
    assert found and "In this folder:" in section, section
    return found[1]


def _done(run: Path) -> dict[str, Any]:
    """Do what the page says, where it says; give what it made."""
    names: dict[str, Any] = {}
    with contextlib.chdir(run):
        exec(_said(Path(), "Use the model", "python"), names)  # noqa: S102  as whoever reads the page does
    return names


@pytest.mark.parametrize(("num_rows", "is_tied"), [(500, False), (500, True), (512, False)])
@pytest.mark.parametrize("adds", [False, True])
def test_the_code_of_an_adapter_loads_it_whole(
    project: Path, tiny_model: Path, num_rows: int, is_tied: bool, adds: bool
) -> None:
    """With a token that was added the base has too few rows, or some to spare; paths from elsewhere lead nowhere."""
    _write_model(project / "base", tiny_model, num_rows=num_rows, is_tied=is_tied)
    sets = ("template.name=settings/say.jinja", "template.add_missing_tokens=true") if adds else ()
    run = _train(*sets, model="base")
    names = _done(run)
    own = {
        re.sub(r"\.modules_to_save|\.default", "", name): value for name, value in names["model"].state_dict().items()
    }
    saved = load_file(project / "my run" / "checkpoints" / "step-000002" / "adapter_model.safetensors")
    assert saved and all(torch.equal(own[name], tensor) for name, tensor in saved.items())
    assert len(names["tokenizer"]) == 500 + adds
    assert len(names["model"].get_input_embeddings().weight) == max(num_rows, 500 + adds)


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_adapter_with_tokens_of_its_own_is_exported_and_proven(
    project: Path, tiny_model: Path, is_tied: bool
) -> None:
    """Its base knows too few tokens until its tables are lengthened."""
    _write_model(project / "base", tiny_model, is_tied=is_tied)
    run = _train("template.name=settings/say.jinja", "template.add_missing_tokens=true", model="base")
    done = _exported(run, to="adapter,merged")
    assert done.parity.is_ok, [check for link in done.parity.links for check in link.checks if not check.is_ok]
    # It is all that is needed beside its base: what was exported could not be exported again, nor spoken to.
    again = _exported(done.folder / "adapter", to="merged", out="again")
    assert again.parity.is_ok
    tables = [load_file(folder / "merged" / "model.safetensors") for folder in (done.folder, again.folder)]
    assert torch.equal(*(table["model.embed_tokens.weight"] for table in tables))


def test_the_code_of_an_adapter_of_a_text_part_loads_it_on_the_whole(project: Path, tiny_model: Path) -> None:
    """The layers have other names in the whole, and PEFT only warns where it finds none of them."""
    size: dict[str, Any] = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    size |= {"hidden_size": 16, "intermediate_size": 24}
    sight = size | {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=size | {"vocab_size": 512, "head_dim": 8}, vision_config=sight)
    AutoModelForCausalLM.from_config(config).save_pretrained(project / "sees")
    shutil.copytree(tiny_model, project / "sees", dirs_exist_ok=True)
    names = _done(_train(model="sees"))
    own = {name.replace(".default", ""): value for name, value in names["model"].state_dict().items()}
    saved = load_file(project / "my run" / "checkpoints" / "step-000002" / "adapter_model.safetensors")
    assert any(".language_model." in name for name in own)
    assert saved and all(torch.equal(own[name], tensor) for name, tensor in saved.items())


def test_the_code_of_a_whole_model_loads_it(project: Path) -> None:
    names = _done(_train("method.kind=full", model="preset:tiny-1m"))
    saved = load_file(project / "my run" / "checkpoints" / "step-000002" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in names["model"].named_parameters())


@pytest.mark.slow
def test_what_no_other_program_loads_is_used_and_repeated_by_commands_that_work(
    project: Path, tiny_model: Path
) -> None:
    """`from_pretrained("model.pt")` cannot work, and a command without `--allow-pickle` is refused."""
    _write_model(project / "base", tiny_model)
    torch.save(load_file(project / "base" / "model.safetensors"), project / "base" / "model.pt")
    run = _train(model="base/model.pt", allow_pickle=True).resolve()
    chat, export = _said(run, "Use the model").splitlines()
    assert chat == "tunewell chat . --allow-pickle"
    for line in (export, _said(run, "Repeat the run").strip()):
        with contextlib.chdir(run):
            assert main(shlex.split(line)[1:]) == 0, line
    LlamaForCausalLM.from_pretrained(run / "export" / "merged")
    assert (run.parent / "another-run" / "outcome.json").is_file()


def test_a_preset_is_not_said_to_be_a_folder(project: Path) -> None:
    page = (_train(model="preset:tiny-1m") / "README.md").read_text()
    assert "from_pretrained" not in page and "tunewell export . --to merged" in page


def test_an_adapter_on_nothing_is_exported_as_a_whole_model(project: Path) -> None:
    """The proof drew the weights below it by another seed, and said that what was made was not what was trained."""
    run = _train("seed=5", model="preset:tiny-1m")
    with pytest.raises(UserError, match="random weights") as refused:
        _exported(run, to="adapter")
    assert "merged" in str(refused.value.fix) and not (run / "export").exists()
    done = _exported(run)
    assert [own.kind for own in done.artefacts] == ["merged"] and done.parity.is_ok


@pytest.mark.slow
def test_an_adapter_on_pickled_weights_is_exported_where_these_may_be_read(project: Path, tiny_model: Path) -> None:
    """Its proof, in a process of its own, might not read them."""
    _write_model(project / "base", tiny_model)
    torch.save(load_file(project / "base" / "model.safetensors"), project / "base" / "pytorch_model.bin")
    (project / "base" / "model.safetensors").unlink()
    run = _train(model="base", allow_pickle=True)
    done = tunewell.export(run, to="adapter", allow_pickle=True)
    assert done.parity.is_ok
    with pytest.raises(UserError, match="can contain code") as refused:
        verify(done.folder)
    assert "--allow-pickle" in str(refused.value.fix)
