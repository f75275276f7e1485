"""The plan of a run: what is chosen, what is refused, and what is said about it."""

from dataclasses import replace

import pytest
from workloads import recommended

from tunewell.config.load import load_config
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.machine.facts import DeviceFacts
from tunewell.planning.compute import PlanInputs
from tunewell.planning.plan import choose_batch, launcher_precision, plan_training
from tunewell.records.manifest import LengthRecord, Manifest, SplitRecord, TemplateRecord, TokenizerRecord
from tunewell.records.plan import Chosen, Plan, read_plan, write_plan

CPU = DeviceFacts("cpu", "cpu", "Some CPU", 2**34, 2**33, has_bf16=False, has_flash=False)
BF16_CPU = DeviceFacts("cpu", "cpu", "Some Xeon", 2**34, 2**33, has_bf16=True, has_flash=False)
MPS = DeviceFacts("mps", "mps", "Apple GPU", 2**34, 2**33, has_bf16=False, has_flash=False)
T4 = DeviceFacts("cuda", "cuda:0", "Tesla T4", 2**34, 2**33, has_bf16=False, has_flash=False)
H200 = DeviceFacts("cuda", "cuda:0", "NVIDIA H200", 2**37, 2**37, has_bf16=True, has_flash=True)


def _manifest(*, tokens=8_929, documents=150, longest=70, held_out=40):
    """A manifest with what a plan is made from."""
    split = SplitRecord(documents=documents, sequences=9, tokens=tokens, supervised=tokens // 4, shards=[])
    lengths = LengthRecord(mean=60, median=60, p95=66, p99=69, max=longest, padding_waste=0.9, histogram=[])
    tokenizer = TokenizerRecord(
        source="x", kind="bpe", sha256="t" * 64, vocab_size=9, special_tokens={}, added_by_us=[]
    )
    template = TemplateRecord(name="auto", sha256="c" * 64, learn_from="responses", learn_roles=["assistant"])
    return Manifest.model_construct(
        corpus_sha256="d" * 64,
        lengths=lengths,
        tokenizer=tokenizer,
        templates=[template],
        splits={"train": split, "held_out": split.model_copy(update={"documents": held_out})},
    )


def _inputs(device=CPU, *, manifest=None, num_parameters=134_515_008, threads=None, **groups):
    config = Config.model_validate({"model": "some/model"} | groups)
    return PlanInputs(recommended(config, num_parameters), manifest or _manifest(), device, num_parameters, threads)


def _plan(order, num_steps=95, epochs=5.0) -> Plan:
    return plan_training(order, batch=choose_batch(order), num_steps=num_steps, epochs=epochs)


def test_a_small_corpus_on_a_cpu():
    """Guards the plan of the example, value by value."""
    plan = _plan(_inputs(threads=Chosen[int](value=2, because="measured"), train={"epochs": 5}))
    values = {name: chosen.value for name, chosen in plan if isinstance(chosen, Chosen)}
    assert values == {
        "device": "cpu",
        "precision": "fp32",
        "attention": "sdpa",
        "threads": 2,
        "method": "lora",
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup_steps": 3,
        "num_steps": 95,
        "epochs": 5.0,
        "batch_tokens": None,
        "batch_documents": 4,
        "micro_batch_tokens": 280,
        "compile": "off",
        "evaluate_every": 10,
        "save_every": 10,
    }
    assert (plan.corpus_sha256, plan.tokenizer_sha256, plan.template_sha256s) == ("d" * 64, "t" * 64, ["c" * 64])
    assert (plan.model, plan.corpus, plan.seed) == ("some/model", "corpus", 0)


@pytest.mark.parametrize("device", [CPU, BF16_CPU, MPS, T4, H200], ids=lambda device: device.label)
def test_every_value_says_why_and_survives_the_disk(device, tmp_path):
    """Guards the promise that no number comes without a reason, in the file too."""
    plan = _plan(_inputs(device))
    reasons = [chosen.because for _, chosen in plan if isinstance(chosen, Chosen)]
    assert len(reasons) == 16
    assert all(len(because) > 8 for because in reasons)
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan


@pytest.mark.parametrize(
    ("device", "precision", "attention", "compiled"),
    [
        (CPU, "fp32", "sdpa", "off"),
        (BF16_CPU, "fp32", "sdpa", "off"),
        (MPS, "fp32", "sdpa", "off"),
        (T4, "fp16", "sdpa", "off"),
        (H200, "bf16", "flash", "auto"),
    ],
    ids=["cpu", "bf16 cpu", "mps", "T4", "H200"],
)
def test_each_device_computes_in_what_it_really_has(device, precision, attention, compiled):
    """Guards against emulated bf16 and kernels that are not there."""
    plan = _plan(_inputs(device))
    assert (plan.precision.value, plan.attention.value, plan.compile.value) == (precision, attention, compiled)


@pytest.mark.parametrize(
    ("device", "train", "named"),
    [
        (CPU, {"precision": "bf16"}, "50 times slower"),
        (T4, {"precision": "bf16"}, "Ampere"),
        (MPS, {"precision": "bf16"}, "Apple"),
        (MPS, {"precision": "fp16"}, "Apple"),
        (CPU, {"attention": "flash"}, "CUDA only"),
        (MPS, {"attention": "flash"}, "CUDA only"),
        (T4, {"attention": "flash", "precision": "fp16"}, "Ampere"),
        (H200, {"attention": "flash", "precision": "fp32"}, "not in fp32"),
        (CPU, {"compile": "on"}, "CUDA only"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(device, train, named):
    """Guards against settings that are ignored, or obeyed at a fiftieth of the speed."""
    with pytest.raises(UserError, match=named) as caught:
        _plan(_inputs(device, train=train))
    assert "auto" in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("device", "train"),
    [
        (CPU, {"precision": "fp16"}),
        (BF16_CPU, {"precision": "bf16"}),
        (T4, {"precision": "fp16"}),
        (T4, {"attention": "sdpa"}),
        (H200, {"attention": "sdpa", "precision": "fp32"}),
        (H200, {"attention": "flash", "precision": "fp16"}),
        (H200, {"compile": "on"}),
        (CPU, {"compile": "off", "threads": 1}),
    ],
)
def test_what_is_set_and_can_work_is_done(device, train):
    """Guards people who know better."""
    plan = _plan(_inputs(device, train=train))
    for name, value in train.items():
        chosen = getattr(plan, name)
        assert chosen.value == value
        assert chosen.because.startswith("set in the config")
    if train.get("precision") == "fp16":
        assert "scaler" in plan.precision.because


@pytest.mark.parametrize(
    ("device", "kind", "precision", "named"),
    [
        (H200, "lora", "bf16", "the method is `lora`"),
        (H200, "full", "fp32", "computes in fp32"),
        (H200, "full", "fp16", "computes in fp16"),
        (BF16_CPU, "full", "auto", "computes in fp32"),
    ],
)
def test_bf16_masters_are_refused_where_they_have_no_meaning(device, kind, precision, named):
    """Guards a setting that would be ignored, or weights that are stored narrower than they are computed."""
    train = {"masters": "bf16", "precision": precision}
    with pytest.raises(UserError, match=named) as caught:
        _plan(_inputs(device, train=train, method={"kind": kind}))
    assert "train.masters: fp32" in (caught.value.fix or "")
    fine = _inputs(device, train={"masters": "bf16", "precision": "bf16"}, method={"kind": "full"})
    assert _plan(fine).config["train"]["masters"] == "bf16"


@pytest.mark.parametrize(
    ("device", "optimizer", "kind", "named", "fix"),
    [
        (MPS, "adamw8bit", "lora", "an Apple GPU", "train.optimizer: adamw"),
        (MPS, "galore", "full", "an Apple GPU", "device: cpu"),
        (H200, "galore", "lora", "`method.kind: lora`", "method.kind: full"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused_before_loading(device, optimizer, kind, named, fix):
    """The fix names what works instead."""
    with pytest.raises(UserError) as caught:
        _plan(_inputs(device, train={"optimizer": optimizer}, method={"kind": kind}))
    assert named in caught.value.what and fix in (caught.value.fix or "")


@pytest.mark.parametrize("name", ["gptq", "awq", "mxfp4", "fp8", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_model_saved_in_a_format_that_cannot_be_trained_is_refused_before_loading(name, kind):
    """Guards against minutes of loading, and a layer that has no gradient."""
    inputs = replace(_inputs(H200, method={"kind": kind}), saved_quantization={"quant_method": name, "bits": 4})
    with pytest.raises(UserError, match=f"saved quantised with {name}, which cannot be trained") as caught:
        _plan(inputs)
    assert "use the unquantised model" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("saved", "kind"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}, "int8"),
        ({"load_in_4bit": True}, "nf4"),
    ],
)
def test_a_model_saved_by_bitsandbytes_is_used_as_it_is(saved, kind):
    found = _plan(replace(_inputs(H200), saved_quantization=saved)).quantized
    assert found is not None and (found.kind, found.is_saved) == (kind, True)
    assert found.keep == saved.get("llm_int8_skip_modules", [])
    with pytest.raises(UserError, match="cannot be trained by full fine-tuning"):
        _plan(replace(_inputs(H200, method={"kind": "full"}), saved_quantization=saved))
    with pytest.raises(UserError, match=r"`method\.keep` has no effect"):
        _plan(replace(_inputs(H200, method={"keep": "auto"}), saved_quantization=saved))


def test_a_model_saved_by_bitsandbytes_without_the_package_is_not_sent_to_int8(monkeypatch):
    """`method.quantize: int8`, the way out for other models, is refused for a model that was saved in nf4."""
    monkeypatch.setattr("tunewell.planning.compute.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs `bitsandbytes`") as caught:
        _plan(replace(_inputs(H200), saved_quantization={"load_in_4bit": True}))
    assert "[qlora]" in str(caught.value) and "int8" not in str(caught.value)


def test_nf4_on_an_apple_gpu_names_what_works():
    with pytest.raises(UserError, match="nf4 is not tested on Apple GPUs") as caught:
        _plan(_inputs(MPS, method={"quantize": "nf4"}))
    assert "int8" in str(caught.value.fix) and "tunewell notebook" in str(caught.value.fix)
    assert _plan(_inputs(MPS, method={"quantize": "int8"})).quantized is not None


def test_settings_of_an_optimizer_that_is_not_used_are_refused():
    """A rank that changes nothing would be searched for in the results."""
    with pytest.raises(UserError, match=r"`train\.galore_rank` has no effect: the optimizer is `adamw8bit`"):
        _plan(_inputs(train={"optimizer": "adamw8bit", "galore_rank": 64}))


@pytest.mark.parametrize(
    ("optimizer", "kind", "rate"),
    [("adamw8bit", "lora", 1e-3), ("adamw8bit", "full", 1e-4), ("galore", "full", 1e-3)],
)
def test_the_default_rate_depends_on_the_optimizer(optimizer, kind, rate):
    """GaLore's updates are a tenth as large, and the reason says so."""
    chosen = _plan(_inputs(train={"optimizer": optimizer}, method={"kind": kind})).learning_rate
    assert chosen.value == rate
    assert ("times 10" in chosen.because) == (optimizer == "galore")


def test_flash_is_not_chosen_for_fp32():
    """Guards `precision: fp32` on a GPU, for which the kernel has no code."""
    assert _plan(_inputs(H200, train={"precision": "fp32"})).attention.value == "sdpa"


def test_documents_can_bound_a_step_in_place_of_tokens():
    """Guards people who count in documents."""
    plan = _plan(_inputs(train={"batch_documents": 8}))
    assert (plan.batch_tokens.value, plan.batch_documents.value) == (None, 8)
    assert plan.micro_batch_tokens.value == 8 * 70
    assert "at most 8 documents per step" in plan.num_steps.because


def test_two_bounds_of_a_step_are_refused():
    """Guards against one of two settings being ignored in silence."""
    with pytest.raises(UserError, match="both set"):
        choose_batch(_inputs(train={"batch_documents": 8, "batch_tokens": 512}))


def test_a_bound_below_the_longest_document_is_kept_and_said():
    """Guards a set limit: the document that breaks it is named, not hidden."""
    plan = _plan(_inputs(train={"batch_tokens": 64, "micro_batch_tokens": 32}))
    assert (plan.batch_tokens.value, plan.micro_batch_tokens.value) == (64, 32)
    assert "70 tokens" in plan.batch_tokens.because and "70 tokens" in plan.micro_batch_tokens.because


@pytest.mark.parametrize(
    ("device", "num_parameters", "longest", "batch_tokens", "micro_batch"),
    [
        (CPU, 134_515_008, 70, 512, 512),
        (CPU, 134_515_008, 70, 8_192, 2_048),
        (CPU, 134_515_008, 5_000, 8_192, 5_000),
        (MPS, 134_515_008, 70, 8_192, 2_048),
        (H200, 134_515_008, 70, 65_536, 16_384),
        (H200, 8_000_000_000, 70, 65_536, 8_192),
        (H200, None, 70, 65_536, 8_192),
        (H200, 134_515_008, 70, 4_096, 4_096),
        (H200, 8_000_000_000, 9_000, 65_536, 9_000),
    ],
)
def test_a_micro_batch_fills_the_device_and_no_more_than_a_step(
    device, num_parameters, longest, batch_tokens, micro_batch
):
    """Guards memory, and documents that must be computed whole."""
    manifest = _manifest(tokens=10_000_000, longest=longest)
    order = _inputs(device, manifest=manifest, num_parameters=num_parameters, train={"batch_tokens": batch_tokens})
    assert _plan(order).micro_batch_tokens.value == micro_batch


@pytest.mark.parametrize(
    ("warmup", "num_steps", "steps"),
    [
        (0.03, 95, 3),
        (0.03, 10, 1),
        (0.03, 9, 0),
        (0.5, 8, 4),
        (0.07, 100, 7),
        (0.0, 100, 0),
        (1, 100, 1),
        (20, 100, 20),
        (20, 5, 20),
    ],
)
def test_a_warm_up_is_a_share_of_the_steps_or_a_number_of_them(warmup, num_steps, steps):
    """Guards the meaning of `train.warmup` on both sides of 1, and against 0.07 * 100 being a little over 7."""
    chosen = _plan(_inputs(train={"warmup": float(warmup)}), num_steps=num_steps).warmup_steps
    assert chosen.value == steps
    assert ("never reaches" in chosen.because) is (steps >= num_steps)


@pytest.mark.parametrize(
    ("num_steps", "evaluate_every", "save_every"),
    [(1, 1, 1), (9, 1, 9), (15, 2, 10), (30, 3, 12), (95, 10, 10), (1_000, 100, 100), (1_001, 101, 101)],
)
def test_a_run_is_looked_at_ten_times_and_saved_where_it_is_looked_at(num_steps, evaluate_every, save_every):
    """Guards short runs against a checkpoint at every step, and every checkpoint's held-out loss."""
    plan = _plan(_inputs(), num_steps=num_steps)
    assert (plan.evaluate_every.value, plan.save_every.value) == (evaluate_every, save_every)
    assert -(-num_steps // evaluate_every) <= 10
    assert save_every % evaluate_every == 0 or save_every == num_steps


def test_without_held_out_rows_the_plan_says_so():
    """Guards against waiting for a held-out loss that never comes."""
    plan = _plan(_inputs(manifest=_manifest(held_out=0)))
    assert "no rows are held out" in plan.evaluate_every.because


def test_a_limit_on_steps_takes_the_place_of_epochs():
    """Guards the two ways of saying how long, and that both are told apart."""
    plan = _plan(_inputs(train={"max_steps": 7, "epochs": 3}), num_steps=7, epochs=0.37)
    assert (plan.num_steps.value, plan.epochs.value) == (7, 0.37)
    assert "`train.max_steps`" in plan.num_steps.because and "`train.epochs`" in plan.num_steps.because
    assert plan.epochs.because == "the length of 7 steps"


def test_reasons_name_the_line_and_only_for_what_is_written_there(tmp_path):
    """Guards the origin: a key that stands in no file is not set by the line of its group."""
    file = tmp_path / "tunewell.yaml"
    file.write_text("model: some/model\ntrain:\n  epochs: 5\n  batch_tokens: 1024\n", encoding="utf-8")
    order = PlanInputs(recommended(load_config(file, ["train.learning_rate=1e-3"])), _manifest(), CPU, None)
    plan = _plan(order)
    assert plan.epochs.because == f"set in {file} line 3"
    assert plan.batch_tokens.because == f"set in {file} line 4"
    assert plan.learning_rate.because == "set by `--set train.learning_rate=1e-3`"
    assert plan.schedule.because == "the learning rate falls to zero"
    assert plan.corpus == str(tmp_path / "corpus")


def test_a_refusal_names_the_line(tmp_path):
    """Guards the way back to the mistake."""
    file = tmp_path / "tunewell.yaml"
    file.write_text("model: some/model\ntrain:\n  precision: bf16\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        _plan(PlanInputs(recommended(load_config(file)), _manifest(), CPU, None))
    assert caught.value.where == f"{file} line 3"


def test_an_empty_corpus_is_refused():
    """Guards against a division by nothing deep inside a run."""
    with pytest.raises(UserError, match="no training documents"):
        _plan(_inputs(manifest=_manifest(documents=0), train={"batch_documents": 2}))


def test_a_plan_without_a_model_is_refused():
    """Guards `train` on a config that names none."""
    with pytest.raises(UserError, match="no model"):
        _plan(_inputs(model=None))


def test_the_config_in_the_plan_is_whole_and_the_model_is_named_as_it_can_be_found(monkeypatch):
    """Guards a run in a folder that is called like somebody's password; secrets are taken out where it is written."""
    monkeypatch.setenv("DB_PASSWORD", "s3cr3t-b0x")
    plan = _plan(_inputs(model="/srv/s3cr3t-b0x/llama", train={"epochs": 2}))
    assert plan.config["train"]["epochs"] == 2 and set(plan.config) == set(Config.model_fields)
    assert plan.model == "/srv/s3cr3t-b0x/llama"


def test_full_fine_tuning_has_its_own_learning_rate():
    """LoRA's rate is ten times too high if every weight of a trained model changes."""
    plan = _plan(_inputs(method={"kind": "full"}))
    assert plan.learning_rate.value == 1e-4
    assert "every weight" in plan.learning_rate.because
    assert _plan(_inputs()).learning_rate.value == 1e-3
    new = _plan(_inputs(model="preset:tiny-23m", method={"kind": "full"}))
    assert (new.learning_rate.value, new.learning_rate.because) == (2e-4, "the model starts from random weights")
    high = _plan(_inputs(method={"kind": "full"}, train={"learning_rate": 1e-3}))
    assert high.learning_rate.value == 1e-3
    assert "high for full fine-tuning" in high.learning_rate.because


def test_the_precision_of_accelerate_launch_is_used_or_refused():
    """`accelerate launch --mixed_precision bf16` was ignored."""
    launched = replace(_inputs(BF16_CPU), launcher_precision="bf16")
    chosen = _plan(launched).precision
    assert (chosen.value, chosen.because) == ("bf16", "set by `accelerate launch --mixed_precision bf16`")
    refused = {
        "bf16 cannot be used": replace(_inputs(CPU), launcher_precision="bf16"),
        "contradicts `train.precision: fp32`": replace(
            _inputs(BF16_CPU, train={"precision": "fp32"}), launcher_precision="bf16"
        ),
        "fp8 is not supported": replace(_inputs(H200), launcher_precision="fp8"),
    }
    for message, inputs in refused.items():
        with pytest.raises(UserError, match=message):
            _plan(inputs)


@pytest.mark.parametrize(("value", "expected"), [("no", None), ("bf16", "bf16"), ("PrecisionType.FP16", "fp16")])
def test_the_launcher_tells_its_precision_in_the_environment(monkeypatch, value, expected):
    """Without the option, accelerate writes `no`, which requests nothing."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)
    assert launcher_precision() == expected
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert launcher_precision() is None
