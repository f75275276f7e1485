"""The ladder: what makes a run fit that does not fit, for every card, and what `plan` and `train` say about it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tunewell.config.load import LoadedConfig, load_config
from tunewell.config.schema import Train
from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.machine.cards import find_card, known_cards
from tunewell.machine.facts import DeviceFacts
from tunewell.planning.fit import _LEVERS, Planner, Rung
from tunewell.planning.forecast import shape_of
from tunewell.planning.recommendation import with_recommended
from tunewell.records.plan import Chosen
from tunewell.workflows.prepare import prepare

LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False}
MODELS = {
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262_144,
        "tie_word_embeddings": True,
    },
    "8b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
METHODS = {"lora": ["method.rank=16"], "qlora": [], "galore": ["train.galore_rank=64"], "full": []}
WORKERS = Chosen[int](value=2, because="a test")
Load = Callable[..., tuple[LoadedConfig, Corpus]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with rows of up to about 1,300 tokens, and the configs of three models without their weights."""
    folder = tmp_path_factory.mktemp("cards")
    for name, config in MODELS.items():
        shutil.copytree(tiny_model, folder / name)
        (folder / name / "config.json").write_text(json.dumps(config))
    rows = [{"instruction": f"Question {n}?", "output": f"{n} is the answer. " * (1 + n % 70)} for n in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def load(project: Path) -> Load:
    """Load a config and its corpus, which is prepared once for each model and context length."""
    corpora: dict[tuple[str, str], Corpus] = {}

    def loaded(model: str, *sets: str) -> tuple[LoadedConfig, Corpus]:
        key = (model, str(sorted(one for one in sets if one.startswith("packing."))))
        folder = project / f"corpus-{list(corpora).index(key) if key in corpora else len(corpora)}"
        own = load_config({"model": str(project / model)}, sets, data=str(project / "rows.jsonl"), out=folder)
        if key not in corpora:
            prepare(own)
            corpora[key] = open_corpus(folder)
        return own, corpora[key]

    return loaded


def planner(load: Load, model: str, *sets: str) -> Planner:
    own, corpus = load(model, *sets)
    own = with_recommended(own, corpus.manifest)
    device = find_card("h200").facts()
    return Planner(own, corpus, device, shape_of(own, corpus), lambda shapes: WORKERS)


def require_honest_ladder(load: Load, card: str, model: str, sets: list[str]) -> list[Rung]:
    """Check every rung of the ladder by planning again with exactly its changes. Return the ladder."""
    there = planner(load, model, *sets).on_card(known_cards()[card])
    if there.outlook.prediction.fits:
        return []
    ladder = there.ladder
    assert ladder, "a run that does not fit lists what was tried"
    fitting = [rung for rung in ladder if rung.fits]
    # Without a change that fits, the last rung is all of them together.
    for rung in fitting or ladder[-1:]:
        again = planner(load, model, *sets, *rung.sets).on_card(known_cards()[card])
        assert again.outlook.prediction.fits is rung.fits, (rung.name, rung.sets)
    return ladder


@pytest.mark.parametrize(
    ("card", "model", "method"),
    [("t4", "gemma-3-1b", "full"), ("2080ti", "gemma-3-1b", "galore"), ("3080", "8b", "qlora"), ("t4", "70b", "lora")],
)
def test_a_card_on_which_a_run_does_not_fit_lists_what_does(load: Load, card: str, model: str, method: str) -> None:
    """`plan --gpu t4` said "no" for GaLore and listed nothing, although recomputing activations fits."""
    ladder = require_honest_ladder(load, card, model, [f"method.kind={method}", *METHODS[method]])
    assert any(rung.fits for rung in ladder) is (model != "70b")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_every_card_lists_a_change_that_fits_or_none_does(load: Load, model: str, method: str) -> None:
    """A change that is listed must fit when it is made, and "none" must be true of all changes together."""
    ladders = [
        require_honest_ladder(load, card, model, [f"method.kind={method}", *METHODS[method]]) for card in known_cards()
    ]
    assert len(ladders) == len(known_cards())


def test_no_listed_change_is_larger_than_it_must_be(load: Load) -> None:
    """Advice to change three settings where two are enough loses accuracy for nothing."""
    there = planner(load, "gemma-3-1b", "method.kind=full").on_card(find_card("3080"))
    names = [rung.name for rung in there.ladder]
    assert all(rung.fits for rung in there.ladder) and names == list(dict.fromkeys(names))
    assert {"recompute activations", "8-bit optimizer", "weights stored in bf16"}.isdisjoint(names)
    assert "recompute activations, weights stored in bf16" in names, "neither is enough alone, and both together are"
    assert "recompute activations, 8-bit optimizer, weights stored in bf16" not in names


def test_a_setting_that_the_card_refuses_is_part_of_every_way_out(load: Load) -> None:
    """Configs of other trainers say `bf16: true`; on a T4 that was "cannot run this config" without a way."""
    there = planner(load, "8b", "train.precision=bf16", "train.attention=flash").on_card(find_card("t4"))
    with pytest.raises(UserError, match="bf16 cannot be used"):
        _ = there.outlook
    ladder = there.with_supported_settings().ladder
    assert ladder and all(rung.changes["train.precision"] == "auto" for rung in ladder)
    assert any(rung.fits for rung in ladder)
    first = next(rung for rung in ladder if rung.fits)
    again = planner(load, "8b", "train.precision=bf16", "train.attention=flash", *first.sets)
    assert again.on_card(find_card("t4")).outlook.prediction.fits


def test_main_memory_that_cannot_load_the_model_is_no_fit(load: Load) -> None:
    """8 billion weights are loaded in 16 bits before they are quantised: 8 GB of main memory are not enough."""
    own = planner(load, "8b", "method.quantize=nf4")
    assert own.on_card(find_card("4090")).outlook.prediction.fits
    small = own.on_card(find_card("4090"), host_bytes=8 << 30)
    assert not small.outlook.prediction.fits
    for rung in small.ladder:
        host = rung.prediction.memory.host_bytes
        assert not rung.fits or (host is not None and host <= 8 << 30)


def test_lora_replaces_galore_with_all_its_settings(load: Load) -> None:
    """`train.galore_rank` has no effect with LoRA and is refused, so the ladder lacked LoRA."""
    sets = ["method.kind=galore", "train.galore_rank=64", "train.learning_rate=1e-5"]
    there = planner(load, "8b", *sets).on_card(find_card("t4"))
    lora = [rung for rung in there.ladder if rung.changes.get("method.kind") == "lora"]
    assert lora and lora[0].changes["train.galore_rank"] == 128
    assert lora[0].changes["train.learning_rate"] == "auto", "the rate of full fine-tuning is too low for LoRA"


def test_a_cpu_is_offered_quantised_weights(load: Load) -> None:
    """With `--ram 8`, NF4 fits and was not listed: it was taken for a method of GPUs."""
    own, corpus = load("8b", "device=cpu")
    own = with_recommended(own, corpus.manifest)
    cpu = DeviceFacts("cpu", "cpu", "a CPU", 40 << 30, 36 << 30, has_bf16=False, has_flash=False)
    there = Planner(own, corpus, cpu, shape_of(own, corpus), lambda shapes: WORKERS)
    assert not there.outlook.prediction.fits
    assert "base model in 4 bits (NF4)" in [rung.name for rung in there.ladder if rung.fits]


def test_the_error_of_train_names_what_fits(load: Load) -> None:
    """The error for 70 billion weights omitted NF4, which fits."""
    there = planner(load, "70b", "method.kind=full").on_card(find_card("h200"))
    with pytest.raises(UserError, match="does not fit") as caught:
        there.require_fit()
    assert "method.quantize=nf4" in (caught.value.fix or "") and "--set" in (caught.value.fix or "")
    with pytest.raises(UserError, match="does not fit") as caught:
        planner(load, "70b").on_card(find_card("t4")).require_fit()
    assert "no change of settings is enough" in (caught.value.fix or "")


def test_settings_that_lora_resets_are_the_defaults() -> None:
    """`changes.json` repeats defaults of the schema, and must follow them."""
    resets = _LEVERS[-1][0].settings
    own = {key.removeprefix("train."): value for key, value in resets.items() if key.startswith("train.")}
    assert own == {key: Train.model_fields[key].default for key in own}


@pytest.mark.parametrize("name", ["8xh100-80", "8x h100", "4 x A100"])
def test_a_number_of_cards_is_answered(name: str) -> None:
    """`8xh100-80` was answered with "did you mean `a100-80`?", and `4 x A100` was planned as one card in silence."""
    with pytest.raises(UserError, match="a model must fit on one of them"):
        find_card(name)
