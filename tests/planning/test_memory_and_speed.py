"""Computed memory and time, compared with the rows of `benchmarks/RESULTS.md` and with what must hold."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from workloads import workload

from tunewell.machine.facts import DeviceFacts
from tunewell.planning.forecast import MeasuredRun, _everyday_tokens, predict
from tunewell.planning.memory import CONTEXT_BYTES, compute_memory
from tunewell.planning.speed import MeasuredSpeed, compute_speed

GiB = 1 << 30
CPU = DeviceFacts("cpu", "cpu", "a CPU", 16 * GiB, 12 * GiB, has_bf16=False, has_flash=False)
ROWS = [("135m", "none", 6.5, 7.2, 321_645), ("1.1b", "none", 16.7, 19.2, 90_180), ("8b", "nf4", 54.4, 56.7, 16_812)]


@pytest.mark.parametrize(("name", "quantize", "allocated", "held", "rate"), ROWS)
def test_compiled_lora_on_an_h200_is_predicted_as_it_was_measured(name, quantize, allocated, held, rate):
    """A changed constant must not drift from the measured rows: memory within 20%, time within 35%."""
    work = workload(name, tokens=16_384, method={"rank": 16, "quantize": quantize}, evaluate={"samples": 0})
    memory = compute_memory(work, is_compiled=True)
    assert (memory.peak_bytes - CONTEXT_BYTES) / GiB == pytest.approx(held, rel=0.2)
    assert (memory.needed_bytes - CONTEXT_BYTES) / GiB == pytest.approx(allocated, rel=0.2)
    speed = compute_speed(work, 1e11)
    assert speed.tokens_per_second == pytest.approx(rate, rel=0.35)


def test_dequantised_weights_are_counted_while_answers_are_generated():
    """8B in NF4 held 19.7 GiB on an H200, of which the steps needed 10.8. A smaller card never keeps the copies."""
    settings = {"method": {"rank": 16, "quantize": "nf4"}, "train": {"recompute": "on"}}
    work = workload("8b", tokens=8_192, compiling="off", **settings)
    work = replace(work, held_out_lengths=np.full(16, 185))
    steps = MeasuredRun(int(10.8 * GiB), int(10.2 * GiB), work.largest_micro_batch, False, MeasuredSpeed(), "")
    for measured in (None, steps):
        memory = predict(work, measured=measured).prediction.memory
        assert memory.peak_bytes / GiB == pytest.approx(19.7, rel=0.05)
        assert memory.needed_bytes < memory.uncached_bytes < 12 * GiB
    small = replace(work.device, memory_bytes=24 * GiB, free_bytes=24 * GiB)
    silent = work.config.model_copy(
        update={
            "evaluate": work.config.evaluate.model_copy(update={"samples": 0}),
            "verdict": work.config.verdict.model_copy(update={"after_training": False}),
        }
    )
    others = [{"device": small}, {"config": silent}, {"supervised_share": 1.0}, {"held_out_lengths": np.zeros(0)}]
    for other in others:
        assert predict(replace(work, **other), measured=steps).prediction.memory.peak_bytes == steps.peak_bytes


def test_uncompiled_layers_need_more_memory_and_time_than_compiled_ones():
    """1.1B took 35 GiB uncompiled and 19 GiB compiled; a plan that ignores this is wrong by 16 GiB."""
    work = workload("1.1b", method={"rank": 16}, evaluate={"samples": 0})
    eager, compiled = (compute_memory(work, is_compiled=flag).peak_bytes / GiB for flag in (False, True))
    assert eager == pytest.approx(35, rel=0.2)
    assert eager > 1.2 * compiled
    slow = compute_speed(workload("1.1b", compiling="off"), 1e11)
    assert slow.step_seconds == pytest.approx(0.28, rel=0.35)


def test_each_setting_that_saves_memory_saves_memory():
    """The ladder is built on these differences."""

    def peak(**settings):
        return compute_memory(workload("1.1b", compiling="off", **settings), is_compiled=False).peak_bytes

    plain = peak()
    assert peak(train={"recompute": "on"}) < 0.4 * plain
    assert peak(train={"recompute": "offload"}) < peak(train={"recompute": "on"})
    assert peak(method={"quantize": "int8"}) < plain
    assert peak(method={"rank": 8}) < peak(method={"rank": 64})
    full = peak(method={"kind": "full"})
    assert full > plain
    assert peak(method={"kind": "full"}, train={"optimizer": "adamw8bit"}) < full
    assert peak(method={"kind": "full"}, train={"masters": "bf16"}) < full


def test_offloading_on_a_cpu_is_recomputing():
    """A CPU has no second memory, but the activations are recomputed; the plan counted them all."""
    sizes = {
        mode: compute_memory(
            workload("135m", device=CPU, precision="fp32", compiling="off", train={"recompute": mode}),
            is_compiled=False,
        ).parts["activations"]
        for mode in ("off", "on", "offload")
    }
    assert sizes["offload"] == sizes["on"] < sizes["off"]


def test_names_of_layers_are_compared_with_the_weight_files():
    """`plan --no-measure` said that a run fits whose `method.targets` has a typo."""
    work = workload("135m", method={"targets": ["q_porj", "v_proj", "layers.0.k_proj"]})
    assert work.unknown_layers == []  # the names that a config implies may differ from those of the model
    counted = replace(work, shape=replace(work.shape, is_exact=True))
    assert counted.unknown_layers == ["q_porj"]


def test_full_fine_tuning_holds_sixteen_bytes_for_each_weight():
    """fp32 weights, gradients and two moments; forgetting one is a quarter of a large run."""
    work = workload("1.1b", compiling="off", method={"kind": "full"})
    parts = compute_memory(work, is_compiled=False).parts
    number = work.shape.num_weights
    assert [parts[name] // number for name in ("weights", "gradients", "optimizer")] == [4, 4, 8]


def test_eight_billion_weights_do_not_fit_on_a_t4():
    """The case that was planned without a word."""
    from tunewell.machine.cards import find_card

    work = workload("8b", device=find_card("t4").facts(), precision="fp32", compiling="off", method={"kind": "full"})
    prediction = predict(work).prediction
    assert not prediction.fits
    assert prediction.memory.peak_bytes > 8 * 15 * GiB


def test_real_steps_correct_the_arithmetic():
    """What a child process held replaces what was computed, and the computed difference is added for other sizes."""
    work = workload("23m", device=CPU, precision="fp32", compiling="off", tokens=2048)
    speed = MeasuredSpeed(start=1, load=2, check=3, eager_step=0.5, forward_token=1e-4, because="measured")
    measured = MeasuredRun(3 * GiB, 3 * GiB, work.largest_micro_batch, False, speed, "real steps")
    prediction = predict(work, measured=measured).prediction
    assert prediction.is_measured
    assert prediction.memory.peak_bytes == 3 * GiB
    assert prediction.seconds.phases["steps"] == pytest.approx(50)
    smaller = predict(work.with_micro_tokens(1024), measured=measured).prediction
    assert smaller.memory.peak_bytes < 3 * GiB
    larger = predict(workload("23m", device=CPU, precision="fp32", compiling="off", tokens=8192), measured=measured)
    assert larger.prediction.memory.peak_bytes > 3 * GiB


def test_a_run_that_ends_before_its_layers_are_compiled_uses_half_the_micro_batch() -> None:
    """Guards small models on a GPU: half the micro-batch takes as long, so early steps take twice as long."""
    work = workload("135m", compiling="auto", num_steps=110)
    speed = MeasuredSpeed(eager_step=0.15, because="measured")
    measured = MeasuredRun(12 * GiB, 12 * GiB, work.largest_micro_batch, False, speed, "real steps")
    prediction = predict(work, measured=measured).prediction
    assert not prediction.is_compiled
    assert prediction.seconds.phases["steps"] == pytest.approx(30.3, rel=0.15)  # measured on an H200
    assert prediction.memory.peak_bytes < 12 * GiB


def test_no_answer_of_a_verdict_is_predicted_to_be_longer_than_its_limit() -> None:
    """The tuned model was predicted to write answers of 8,000 tokens, but a verdict stops at 512."""
    known = MeasuredSpeed(eager_step=0.1, forward_token=1e-9, answer_token=0.1, num_answers=8)
    phases = []
    for length, answer_tokens in ((512, 512), (8_000, 512), (8_000, "auto")):
        rules = {"questions": 8, "answer_tokens": answer_tokens}
        work = workload("1.1b", verdict=rules)
        work = replace(work, held_out_lengths=np.full(64, length), supervised_share=1.0)
        phases.append(compute_speed(work, 1e11, measured=known).phases["verdict"])
    assert phases == pytest.approx([phases[0]] * 3, rel=0.01)


def test_more_answers_at_once_take_less_than_as_many_alone() -> None:
    """Eight answers took 1.65 times as long as two. The prediction must not depend on how many were measured."""
    work = workload("1.1b", verdict={"questions": 32, "answer_tokens": 64})
    work = replace(work, held_out_lengths=np.full(64, 100))
    seconds = []
    for number, token in ((2, 0.109), (8, 0.180)):
        known = MeasuredSpeed(eager_step=0.1, forward_token=1e-9, answer_token=token, num_answers=number)
        seconds.append(compute_speed(work, 1e11, measured=known).phases["verdict"])
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)


@pytest.mark.parametrize(("vocab_size", "expected"), [(49_152, 3_300), (260, 11_829)])
def test_compressed_rows_do_not_make_the_everyday_text_longer(vocab_size: int, expected: int) -> None:
    """A `.gz` file has about as many bytes as tokens, which is true of plain text only with one token per byte."""
    manifest = SimpleNamespace(
        tokenizer=SimpleNamespace(vocab_size=vocab_size),
        sources=[SimpleNamespace(bytes=25_000)],
        splits={"train": SimpleNamespace(tokens=25_000)},
    )
    assert _everyday_tokens(SimpleNamespace(manifest=manifest)) == expected
