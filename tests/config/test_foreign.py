"""Settings of other trainers: each is converted, or refused with tunewell's equivalent; none gets a wrong hint."""

import importlib
import json

import pytest

from tunewell.cli.main import main
from tunewell.config import foreign
from tunewell.config.keys import all_keys
from tunewell.config.load import LoadedConfig, load_config
from tunewell.core.errors import UserError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(values: dict, *sets: str) -> LoadedConfig:
    return load_config(values, sets)


def refusal(values: dict, *sets: str) -> str:
    with pytest.raises(UserError) as caught:
        load(values, *sets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("foreign", "key", "value"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, "batch_documents", 32),
        ({"train": {"per_device_train_batch_size": 4}}, "batch_documents", 4),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 3}, "batch_documents", 6),
        ({"bf16": True}, "precision", "bf16"),
        ({"train": {"fp16": True, "bf16": False}}, "precision", "fp16"),
        ({"bf16": False, "fp16": False}, "precision", "fp32"),
        ({"bf16": "auto"}, "precision", "auto"),
        ({"optim": "adamw_torch_fused"}, "optimizer", "adamw"),
        ({"optim": "paged_adamw_32bit"}, "optimizer", "adamw"),
        ({"optim": "adamw_8bit"}, "optimizer", "adamw8bit"),
        ({"optim": "adamw_bnb_8bit"}, "optimizer", "adamw8bit"),
        ({"optim": "paged_adamw_8bit"}, "optimizer", "adamw8bit"),
        ({"optim": "galore_adamw"}, "optimizer", "galore"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["attn", "mlp"]}, "optimizer", "galore"),
        ({"optim": "galore_adamw_8bit"}, "galore_8bit", True),
        ({"optim": "galore_adamw_8bit_layerwise", "optim_args": "rank=64"}, "galore_rank", 64),
        ({"optim": "galore_adamw", "optim_args": "rank=64, update_proj_gap=50, scale=0.5"}, "galore_every", 50),
        ({"optim": "galore_adamw", "optim_args": "rank=64, update_proj_gap=50, scale=0.5"}, "galore_scale", 0.5),
        ({"learning_rate": 1e-5}, "learning_rate", 1e-5),
        ({"weight_decay": 0.1}, "weight_decay", 0.1),
        ({"max_steps": 7}, "max_steps", 7),
        ({"attn_implementation": "sdpa"}, "attention", "sdpa"),
        ({"torch_compile": False}, "compile", "off"),
        ({"eval_strategy": "steps", "eval_steps": 5}, "epochs", "auto"),
        ({"load_in_4bit": False, "group_by_length": False, "report_to": "none"}, "epochs", "auto"),
    ],
)
def test_a_name_with_the_same_meaning_is_converted(foreign, key, value):
    """Someone who brings a working config gets the run that it describes."""
    assert getattr(load(foreign).config.train, key) == value


@pytest.mark.parametrize(
    ("foreign", "method"),
    [
        ({"load_in_4bit": True}, {"quantize": "nf4"}),
        ({"load_in_8bit": True}, {"quantize": "int8"}),
        ({"adapter": "qlora"}, {"kind": "lora", "quantize": "nf4"}),
        ({"quantization_bit": 8}, {"quantize": "int8"}),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"quantize": "nf4"}),
        ({"use_dora": True}, {"kind": "dora"}),
        ({"adapter": "lora", "peft_use_dora": True}, {"kind": "dora"}),
    ],
)
def test_methods_of_other_trainers_are_converted(foreign, method):
    found = load(foreign).config.method
    assert {name: getattr(found, name) for name in method} == method


@pytest.mark.parametrize(
    ("foreign", "instead"),
    [
        ({"gradient_accumulation_steps": 8}, "`train.batch_documents`"),
        ({"bf16": True, "fp16": True}, "`train.precision`"),
        ({"optim": "lion_8bit"}, "`train.optimizer` with one of `adamw`, `adamw8bit`, `galore`"),
        ({"optim": "galore_adafactor"}, "`train.optimizer` with one of"),
        ({"optim_args": "rank=8, proj_type=full", "optim": "galore_adamw"}, "`train.galore_rank`"),
        ({"eval_strategy": "no"}, "`data.held_out: 0`"),
        ({"quantization_config": {"load_in_4bit": True}}, "`method.quantize: nf4`"),
        ({"load_in_4bit": "yes"}, "`method.quantize: nf4`"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "`method.quantize: nf4` or `int8`"),
        ({"load_in_8bit": True, "adapter": "qlora"}, "`method.quantize: nf4` or `int8`"),
        ({"optim": ["adamw_8bit"]}, "`train.optimizer` with one of"),
        ({"dataset_text_field": "body"}, "columns: {text: YOUR_COLUMN}"),
        ({"packing": True}, "documents are always packed"),
    ],
)
def test_a_name_without_the_same_meaning_is_refused_with_the_reason(foreign, instead):
    """`did you mean verdict.batch_size?` sent people to a setting that has nothing to do with it."""
    message = refusal(foreign)
    assert instead in message
    assert "did you mean" not in message
    assert next(iter(foreign)) in message


@pytest.mark.parametrize(
    "foreign",
    [
        {"eval_strategy": "epoch"},
        {"save_strategy": "epoch"},
        {"num_proc": 4},
        {"group_by_length": True},
        {"per_device_eval_batch_size": 4},
        {"logging_steps": 1, "fsdp": None, "pad_to_sequence_len": True},
        {"sample_packing": True, "liger_rope": True, "trust_remote_code": True},
        {"evals_per_epoch": 4, "saves_per_epoch": 1, "resume_from_checkpoint": None},
    ],
)
def test_a_harmless_name_is_accepted_with_a_note(foreign):
    """People had to delete `logging_steps` and `fsdp:` without a value before anything ran."""
    [note] = load(foreign).notes
    assert note.startswith("ignored, because they change nothing in tunewell: ")
    assert all(f"`{name}`" in note for name in foreign)


def test_a_batch_of_packed_sequences_is_counted_in_tokens():
    """`micro_batch_size 2 x accumulation 4` with `sample_packing` became 8 documents: 17 times as many updates."""
    given = {"sample_packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "sequence_len": 512}
    loaded = load(given)
    assert loaded.config.train.batch_tokens == 8 * 512 and loaded.config.train.batch_documents == "auto"
    assert any("8 packed sequences of 512 tokens" in note for note in loaded.notes)
    assert "`train.batch_tokens`" in refusal({**given, "sequence_len": None})
    assert load({**given, "sample_packing": False}).config.train.batch_documents == 8


def test_a_key_of_a_known_config_is_named_with_its_owner():
    """`beta` and `max_target_length` got guesses; they are keys of a config that the table of releases knows."""
    assert "DPOConfig (trl)" in refusal({"max_target_length": 5})


def test_every_problem_is_listed_for_programs(capsys, tmp_path):
    """Only the text held the problems, which a program had to take apart."""
    file = tmp_path / "a.yaml"
    file.write_text("fsdp: full_shard\nnum_gpus: 4\nrl: dpo\n" + "".join(f"x{i}: 1\n" for i in range(9)))
    assert main(["plan", "--config", str(file), "--json"]) == 2
    problems = json.loads(capsys.readouterr().out)["error"]["problems"]
    assert [problem["where"].rpartition(" ")[2] for problem in problems] == [str(i) for i in range(1, 13)]
    assert all(problem["what"] for problem in problems)


def test_a_difference_to_the_other_trainer_is_noted():
    """Paged states and chosen modules have no equivalent here; the run goes on without them."""
    [paged] = load({"optim": "paged_adamw_8bit"}).notes
    assert "nothing is paged" in paged
    [modules] = load({"optim": "galore_adamw", "optim_target_modules": "all-linear"}).notes
    assert "optim_target_modules" in modules
    assert load({"optim": "adamw_8bit"}).notes == ()


def test_the_origin_is_the_line_of_the_foreign_name(tmp_path):
    """The reason in the plan must lead back to the line."""
    file = tmp_path / "tunewell.yaml"
    file.write_text("model: m\nbf16: true\n", encoding="utf-8")
    assert load_config(file).origin("train.precision") == f"{file} line 2"


def test_our_key_and_the_foreign_one_are_the_same_setting():
    """The command line wins over the file; two values in one file are a mistake."""
    both = {"bf16": True, "train": {"precision": "fp32"}}
    assert "are the same setting" in refusal(both)
    ours = {"train": {"precision": "fp32"}}
    assert load(ours, "bf16=true").config.train.precision == "bf16"
    assert load({"bf16": True}, "train.precision=fp32").config.train.precision == "fp32"


def test_names_that_nobody_knows_are_still_unknown():
    """Only the names of the table are taken."""
    assert "unknown key `bf17`" in refusal({"bf17": True})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qlora", {"kind": "lora", "quantize": "nf4"}),
        ("QLoRA", {"kind": "lora", "quantize": "nf4"}),
        ("lora-8bit", {"kind": "lora", "quantize": "int8"}),
        ("dora8", {"kind": "dora", "quantize": "int8"}),
        ("qdora", {"kind": "dora", "quantize": "nf4"}),
        ("rsLoRA", {"kind": "lora", "rslora": True}),
        ("galore", {"kind": "full"}),
        ("full_finetuning", {"kind": "full"}),
    ],
)
def test_a_method_that_is_a_method_with_settings_is_understood(name, expected):
    """`init --method qlora` worked, and `method.kind: qlora` did not. What it means is noted on the screen."""
    for loaded in (load({"method": {"kind": name}}), load({"method": {"kind": "lora"}}, f"method.kind={name}")):
        assert {key: getattr(loaded.config.method, key) for key in expected} == expected
        assert loaded.config.train.optimizer == ("galore" if name == "galore" else "adamw")
        assert any(f"`method.kind: {name}` is `method.kind: {expected['kind']}`" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("lora+", "`train.learning_rate`"), ("unsloth", "a library and not a method"), ("DPO", "preferences")],
)
def test_a_method_that_does_not_exist_here_is_refused_with_the_nearest_one(name, instead):
    """The list of the three methods did not say what to do."""
    message = refusal({"method": {"kind": name}})
    assert (
        f"`method.kind: {name}` is not a tunewell setting" in message
        and instead in message
        and "method.kind: lora" in message
    )


def test_settings_that_contradict_the_name_of_a_method_are_a_mistake():
    """The command line wins, equal settings are none, and two values in one file are refused."""
    file = {"method": {"kind": "galore"}, "train": {"optimizer": "adamw"}}
    assert "remove `train.optimizer`" in refusal(file)
    assert load({"method": {"kind": "qlora", "quantize": "nf4"}}).config.method.quantize == "nf4"
    both = load({}, "method.kind=dora8", "method.quantize=nf4").config.method
    assert (both.kind, both.quantize) == ("dora", "nf4")


def test_every_name_of_a_method_gives_a_valid_config():
    """A mistake in the table would be a crash for users of that name."""
    names = foreign.methods()
    for name, own in names.items():
        if isinstance(own, str):
            assert own in refusal({"method": {"kind": name}})
        elif own.get("method.kind") != name:
            assert load({"method": {"kind": name}}).notes


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"method": "dora", "rank": 8, "learning_rate": 1e-4}, "method.kind", "dora"),
        ({"method": "lora", "rank": 8}, "method.rank", 8),
        ({"packing": 1024}, "packing.context_length", 1024),
        ({"template": "llama3"}, "template.name", "llama3"),
        ({"healing": False}, "healing.on", False),
        ({"verdict": False}, "verdict.after_training", False),
        ({"export": ["gguf"]}, "export.to", ("gguf",)),
        ({"train": 2.5}, "train.epochs", 2.5),
        ({"epochs": 2, "optimizer": "adamw"}, "train.epochs", 2),
        ({"optimizer": "paged_adamw_8bit"}, "train.optimizer", "adamw8bit"),
        ({"batch_size": 2, "gradient_accumulation_steps": 4}, "train.batch_documents", 8),
        ({"val_set_size": 0.1}, "data.held_out", 0.1),
        ({"max_steps": -1, "save_total_limit": None, "eval_steps": None}, "train.max_steps", None),
    ],
)
def test_a_value_with_one_meaning_is_taken(given, key, value):
    """In flat configs of other tools, `method: lora` means `method.kind`."""
    section, name = key.split(".")
    assert getattr(getattr(load(given).config, section), name) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("packing: false\nmax_seq_length: 128\n", "`packing` is a section, not false\n  where: tunewell.yaml line 1"),
        ("packing: false\nmax_seq_length: 128\n", "documents are always packed, and never attend to each other"),
        (
            "learning_rate: 1e-4\ntrain: 3\n",
            "not 3\n  where: tunewell.yaml line 2\n  fix:   write `train: {epochs: 3}` or",
        ),
        ("evaluate: false\neval_steps: 5\n", "`data.held_out: 0`, there are none"),
        ("checkpoints: 100\n", "`checkpoints: {every_steps: 100}` or `checkpoints: {keep: 100}`"),
        ("storage: mine\n", "its keys are profile, endpoint"),
        ("data: {sources: a, clean: yes}\n", "`data.clean` is a section, not 'yes'"),
    ],
)
def test_a_value_in_place_of_a_section_is_the_problem(text, said, tmp_path):
    """`packing: false` with `max_seq_length` was "`packing` has no key `context_length`", without a line."""
    (tmp_path / "tunewell.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config()
    assert said in str(caught.value)
    assert "problems" not in str(caught.value)


def test_every_section_names_a_value_in_its_place():
    """Every section has an answer, also those that a later version adds."""
    sections = [key for key in all_keys().values() if key.is_section]
    for key in sections:
        for value in (3, True, "x", ["x"]):
            outer: dict = {}
            inner = outer
            *parents, last = key.name.split(".")
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = value
            try:
                load(outer)
            except UserError as error:
                assert f"`{key.name}" in str(error) and "no key" not in str(error)


def test_a_section_on_the_command_line_is_named_with_its_option():
    assert "where: --set packing=false" in refusal({}, "packing=false")
    assert load({"packing": {"long_documents": "drop"}}, "packing=256").config.packing.long_documents == "drop"


@pytest.mark.slow
def test_a_dump_of_sft_config_needs_two_changes():
    """Its 120 keys are TRL's defaults; only what would differ here is refused, and the rest is counted."""
    trl = importlib.import_module("trl")
    dump = trl.SFTConfig(output_dir="out", max_length=128, packing=True, bf16=False, learning_rate=1e-4).to_dict()
    with pytest.raises(UserError) as caught:
        load(dump)
    told = [line.split("`")[1] for line in str(caught.value).splitlines()[1:-1]]
    assert sorted(told) == ["eval_strategy", "packing"]
    loaded = load({name: value for name, value in dump.items() if name not in told})
    assert (loaded.config.packing.context_length, loaded.config.train.learning_rate) == (128, 1e-4)
    [note] = loaded.notes
    assert note.startswith("ignored, because they change nothing in tunewell: ") and " more" in note


@pytest.mark.parametrize("name", ["rll", "num_gpu_cards", "model_kind", "training_params", "strictness", "batch_sizes"])
def test_a_guess_is_offered_only_for_a_typo(name):
    """`rl` was answered with `method.rank`, and `num_gpus` with `train.epochs`."""
    assert "did you mean" not in refusal({name: 1})


@pytest.mark.parametrize(
    ("name", "meant"), [("learn_rate", "train.learning_rate"), ("modle", "model"), ("sed", "seed")]
)
def test_a_typo_is_answered_with_the_key(name, meant):
    assert f"did you mean `{meant}`?" in refusal({name: 1})


def test_a_foreign_section_is_moved_not_renamed():
    """`training_params` was answered with `train.learning_rate`."""
    assert "move its keys to the top level" in refusal({"training_params": {"learning_rate": 8e-5}})
    assert "move its keys to the top level" in refusal({"dataset_config": {"packing": True}})


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"method": "galore", "optim": "adamw_8bit"}, ("`method.kind: galore`", "`optim`")),
        ({"method": {"kind": "qlora"}, "load_in_8bit": True}, ("`method.kind: qlora`", "`load_in_8bit`")),
        ({"finetuning_type": "lora", "method": "full"}, ("`finetuning_type`", "`method.kind`")),
        ({"peft_type": "LORA", "method": "full"}, ("`peft_type`", "`method.kind`")),
        ({"lora_target": "all", "target_modules": ["q_proj"]}, ("`lora_target`", "`method.targets`")),
        ({"adapter": "lora", "use_lora": False}, ("`adapter`", "`use_lora`")),
        ({"torch_dtype": "float16", "bf16": True}, ("`torch_dtype`", "`bf16`")),
        ({"random_state": 1, "seed": 2}, ("`random_state`", "`seed`")),
        ({"batch_size": 8, "per_device_train_batch_size": 2}, ("`batch_size`", "`per_device_train_batch_size`")),
    ],
)
def test_two_names_with_different_values_are_refused_with_both(given, names):
    """The last of them was taken, with a note that claimed the other."""
    message = refusal(given)
    assert all(name in message for name in names) and "verdict" not in message
    assert "same setting" in message or "both set" in message


@pytest.mark.parametrize(
    ("given", "sets", "key", "value"),
    [
        ({}, ["train.optimizer=adamw", "optim=galore_adamw", "method=full"], "train.optimizer", "galore"),
        ({}, ["optim=adamw_8bit", "train.optimizer=adamw"], "train.optimizer", "adamw"),
        ({"load_in_4bit": True}, ["load_in_8bit=true"], "method.quantize", "int8"),
        ({"bf16": True}, ["fp16=true"], "train.precision", "fp16"),
        ({}, ["method.kind=qlora", "load_in_8bit=true"], "method.quantize", "int8"),
        ({}, ["load_in_8bit=true", "method.kind=qlora"], "method.quantize", "nf4"),
        ({"packing": False}, ["packing=256"], "packing.context_length", 256),
        ({"seed": 1}, ["random_state=2"], "seed", 2),
    ],
)
def test_the_last_setting_of_the_command_line_wins_under_any_name(given, sets, key, value):
    """`--set optim=...` lost against an earlier `--set train.optimizer=...`."""
    found = load(given, *sets).config
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_notes_state_only_what_is_in_force():
    """The note of `method: galore` claimed an optimizer that `--set` had replaced."""
    assert load({"method": "galore"}, "train.optimizer=adamw").notes == (
        "`method.kind: galore` is `method.kind: full`",
    )
    assert load({"optim": "paged_adamw_8bit"}, "train.optimizer=adamw").notes == ()


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"finetuning_type": "full"}, "method.kind", "full"),
        ({"peft_type": "LORA"}, "method.kind", "lora"),
        ({"lora_target": "q_proj,v_proj"}, "method.targets", ("q_proj", "v_proj")),
        ({"lora_target": "all"}, "method.targets", "all-linear"),
        ({"additional_target": "embed_tokens,lm_head"}, "method.modules_to_save", ("embed_tokens", "lm_head")),
        ({"use_lora": True}, "method.kind", "lora"),
        ({"use_lora": False}, "method.kind", "full"),
        ({"use_qlora": True}, "method.quantize", "nf4"),
        ({"use_dora": False, "use_peft": False, "dtype": None}, "method.kind", "lora"),
        ({"dtype": "torch.bfloat16"}, "train.precision", "bf16"),
        ({"random_state": 3407}, "seed", 3407),
        ({"flash_attn": "fa2"}, "train.attention", "flash"),
        ({"mask_history": True}, "template.learn_from", "last_response"),
        ({"train_on_prompt": True}, "template.learn_from", "everything"),
        ({"roles_to_train": ["assistant", "tool"]}, "template.learn_roles", ("assistant", "tool")),
        ({"use_galore": True, "galore_rank": 64, "finetuning_type": "full"}, "train.galore_rank", 64),
        ({"quantization_method": "bnb", "neat_packing": True, "resize_vocab": False}, "method.quantize", "none"),
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, "train.warmup", 0.1),
        ({"warmup_ratio": 0.0, "warmup_steps": 10}, "train.warmup", 10),
        ({"warmup_ratio": 0.0, "warmup_steps": 0}, "train.warmup", 0),
        ({"packing": "auto"}, "packing.context_length", "auto"),
        ({"do_train": False, "do_eval": False, "do_predict": False}, "train.epochs", "auto"),
    ],
)
def test_names_of_other_trainers_set_our_keys(given, key, value):
    """Many got a guess that means something else, like `method.rslora` for `use_lora`."""
    found = load(given).config
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"do_train": False}, "`tunewell train` always trains"),
        ({"do_eval": False}, "`data.held_out: 0`"),
        ({"loraplus_lr_ratio": 16}, "LoRA+"),
        ({"new_special_tokens": "<a>"}, "`template.add_missing_tokens: true`"),
        ({"adapter": "vera"}, "this adapter is not supported"),
        ({"finetuning_type": "freeze"}, "`method.layers: [30, 31]`"),
        ({"train_on_eos": "last"}, "end token"),
        ({"train": -1}, "`train.max_steps` to a whole number (at least 1)"),
        ({"train": "3"}, "remove the quotes"),
        ({"packing": "1024"}, "remove the quotes"),
        ({"packing": "yes"}, "documents are always packed"),
        ({"evaluate": "no"}, "`data.held_out: 0`, there are none"),
        pytest.param({"report_to": "all"}, "`track` must be a list of `tensorboard`", marks=pytest.mark.uses("track")),
        pytest.param({"track": ["all"]}, "`track[0]` must be `tensorboard`", marks=pytest.mark.uses("track")),
    ],
)
def test_what_cannot_be_meant_is_answered_with_what_can(given, said):
    """`do_train: false` was "without effect", `train: -1` was answered with `train: {epochs: -1}`."""
    message = refusal(given)
    assert said in message and "did you mean" not in message and "{epochs" not in message


def test_every_row_of_the_table_gives_a_valid_config_or_the_reason():
    """A mistake in the table would be a crash, or a setting that does not exist."""
    for name, row in foreign.table().items():
        for own in row.get("to", {}).values():
            assert own.keys() <= all_keys().keys(), name
        assert row.get("key", "seed") in all_keys(), name
        for value in (*row.get("same", []), None):
            loaded = load({name: value})
            assert any(f"`{name}`" in note for note in loaded.notes), name
