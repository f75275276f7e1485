"""Keys of configs are checked for the release that will read them."""

import json
from pathlib import Path

import pytest

from tunewell.cli.main import main
from tunewell.config.releases import load_tables, stated_versions
from tunewell.features.diagnose.diagnose import diagnose_paths, diagnose_text

CALL = (
    "args = SFTConfig(\n    output_dir='x',  # evaluation_strategy=\n    max_seq_length=512,\n    packing=f(a=1),\n)\n"
)
FACTORY = (
    "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\ncutoff_len: 512\nlora_target: all\n"
)
AXOLOTL = "base_model: m\nmodel_type: LlamaForCausalLM\nmicro_batch_size: 1\nsequence_len: 512\nadapter: lora\n"


def found(text: str) -> list[tuple[str, int, str]]:
    findings = diagnose_text(text).findings
    return [(finding.id, shown.line, shown.note) for finding in findings for shown in finding.evidence]


def test_a_key_that_the_stated_release_lost_is_named_with_its_successor() -> None:
    [(name, line, note)] = found(f"{CALL}# trl==0.24.0\n")
    assert (name, line) == ("renamed-argument", 3)
    assert note == "trl knows `max_seq_length` up to 0.19 only, not 0.24; use `max_length`"


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL}# trl==0.12.0\n",
        f"{CALL}# trl==0.12.0 and trl==0.24.0\n",
        FACTORY + "plugin_option: 3\n",
        AXOLOTL + "debug: true\n",
        "SFTConfig(**options, max_length=3)",
    ],
)
def test_nothing_is_said_about_keys_that_may_be_right(text: str) -> None:
    """The right release, two contradicting releases, keys of plug-ins, arguments that are not written down."""
    assert found(text) == []


def test_without_a_release_the_key_is_only_mentioned() -> None:
    diagnosis = diagnose_text(CALL)
    assert diagnosis.status == "healthy" and "`--with trl==VERSION`" in diagnosis.notes[0]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("SFTConfig(num_train_epoch=3, learning_rate=1e-4)", "did you mean `num_train_epochs`?"),
        ("LoraConfig(r=8, anything=1)", "no release of peft knows `anything`"),
    ],
)
def test_a_key_that_no_release_knows_is_a_warning(text: str, note: str) -> None:
    diagnosis = diagnose_text(text)
    assert [finding.id for finding in diagnosis.findings] == ["config-unknown-key"] and diagnosis.exit_code == 3
    assert note in diagnosis.findings[0].evidence[0].note


def test_a_key_that_moved_to_the_parent_class_is_still_known() -> None:
    """`SFTConfig` has had `neftune_noise_alpha` of its own up to TRL 0.11, and inherits it since."""
    assert not diagnose_text("SFTConfig(neftune_noise_alpha=5)").notes
    assert found("SFTConfig(neftune_noise_alpha=5)\n# trl==1.16.0\n") == []


def test_an_adapter_of_a_newer_peft_is_named() -> None:
    config = {"peft_type": "LORA", "r": 8, "use_dora": True, "lora_alpha": 16, "target_modules": ["q_proj"]}
    assert found(json.dumps(config, indent=2) + "\npeft==0.8.2\n")[0][0] == "adapter-newer-peft"
    assert found(json.dumps(config, indent=2) + "\npeft==0.12.0\n") == []


def test_releases_are_read_from_what_people_paste() -> None:
    text = "- `transformers` version: 4.37.2\ntrl                 0.12.1\npeft==0.10.0\nfile axolotl/0.9.2/x\n"
    assert stated_versions(text) == {"transformers": (4, 37), "trl": (0, 12), "peft": (0, 10)}


def test_a_release_may_be_in_another_file_or_in_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, freeze = tmp_path / "train.py", tmp_path / "freeze.txt"
    script.write_text(CALL)
    freeze.write_text("torch==2.9.0\ntrl==0.24.0\n")
    assert diagnose_paths([script, freeze]).findings[0].id == "renamed-argument"
    assert main(["diagnose", str(script), "--with", "trl==0.24"]) == 4
    assert main(["diagnose", str(script), "--with", "trl==0.12"]) == 0
    assert main(["diagnose", str(script), "--with", "numpy==2.0"]) == 2
    assert "is not a release of a known library" in capsys.readouterr().err


def test_the_tables_hold_the_libraries_and_no_private_names() -> None:
    tables = load_tables()
    assert {table.library for table in tables.values()} == {"transformers", "trl", "peft"}
    for table in tables.values():
        assert len(table.keys) > 10 and table.first <= table.last
        assert all(not key.startswith("_") and first <= last for key, (first, last) in table.keys.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "LoraConfig"])
def test_the_tables_agree_with_the_installed_libraries(name: str) -> None:
    """A key that the library accepts must not be called unknown."""
    import dataclasses
    from importlib import import_module
    from importlib.metadata import version

    tables = load_tables()
    table = tables[name]
    config = getattr(import_module(table.library), name)
    major, minor, *_ = version(table.library).split(".")
    parents = tables["TrainingArguments"].keys if name.endswith("Config") and name != "LoraConfig" else {}
    accepted = {field.name for field in dataclasses.fields(config) if field.init and not field.name.startswith("_")}
    known = {*table.known((int(major), int(minor))), *parents}
    assert accepted - known == set()
