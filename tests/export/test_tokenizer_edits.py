"""An export whose `tokenizer.json` was edited anywhere, so that some text gets other ids, is not proven."""

import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from exports import exported, write_adapter, write_base
from tokenizer_references import random_texts
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from tunewell.export.proof.checks import check_settings
from tunewell.records.parity import read_proof

os.environ["RUST_BACKTRACE"] = "0"  # the library panics on some edits, and a stack takes it seconds
PLAIN = ["the", "answer", "is", "what", "it", "was", "when", "she", "asked", "him", "how", "many", "apples", "left"]


def edit(tree: dict[str, Any], draw: random.Random) -> str:
    """Change, remove or move one value of a tree, anywhere; each part of the file is as likely. Returns its path."""
    path, parent, key, value = [], None, None, tree
    while isinstance(value, dict | list) and value and (parent is None or len(path) < 2 or draw.random() < 0.9):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        parent, key = value, draw.choice(keys)
        value = parent[key]
        path.append(str(key))
    assert parent is not None
    if isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, int):
        parent[key] = value + draw.choice([-1, 1, 7])
    elif isinstance(value, str) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        parent[key] = value[:at] + draw.choice(["", "x", value[at].swapcase()]) + value[at + 1 :]
    elif isinstance(parent, list) and len(parent) > 1 and draw.random() < 0.5:
        other = draw.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif draw.random() < 0.5:
        del parent[key]
    else:
        parent[key] = None
    return ".".join(path)


def edits_that_matter(folder: Path, number: int, num_texts: int, seed: int) -> tuple[int, int, list[str]]:
    """Try edits until so many changed an encoding; return those, all that could be loaded, and those not caught."""
    draw = random.Random(seed)
    proof = read_proof(folder)
    assert proof.model is not None
    adapter, generation = folder / "adapter", GenerationConfig.from_pretrained(folder / "adapter")
    whole = json.loads((adapter / "tokenizer.json").read_text())
    texts = [*random_texts(num_texts // 2, seed=seed)]
    texts += [" ".join(draw.choices(PLAIN, k=draw.randint(1, 12))) for _ in range(num_texts - len(texts))]
    expected = [each.ids for each in Tokenizer.from_str(json.dumps(whole)).encode_batch(texts)]
    num_changed = num_loaded = 0
    missed: list[str] = []
    while num_changed < number:
        tree = copy.deepcopy(whole)
        where = edit(tree, draw)
        try:
            backend = Tokenizer.from_str(json.dumps(tree))
            found = [each.ids for each in backend.encode_batch(texts)]
        except BaseException as error:  # noqa: BLE001  the library panics on some
            assert not isinstance(error, KeyboardInterrupt)
            continue
        num_loaded += 1
        if found == expected:
            continue
        num_changed += 1
        (adapter / "tokenizer.json").write_text(json.dumps(tree))
        try:
            tokenizer = AutoTokenizer.from_pretrained(adapter)
            check = check_settings(adapter, tokenizer, proof.model, config=None, generation=generation)
        except Exception:  # noqa: BLE001  a proof that cannot load the artefact fails
            continue
        if check.is_ok:
            missed.append(where)
    return num_changed, num_loaded, missed


@pytest.fixture(scope="module")
def adapter_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edits")
    adapter = write_adapter(folder / "adapter", write_base(folder / "base"))
    assert exported(adapter, folder / "out", to=("adapter",)).parity.is_ok
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "num_texts"), [(10, 400), pytest.param(200, 3_000, marks=pytest.mark.slow)])
def test_edits_of_the_tokenizer_that_change_ids_are_caught(
    adapter_export: Path, tmp_path: Path, number: int, num_texts: int
) -> None:
    """Before, a removed merge or an added post-processor passed: the probes did not contain the texts that changed."""
    out = Path(shutil.copytree(adapter_export, tmp_path / "out"))
    num_changed, num_loaded, missed = edits_that_matter(out, number, num_texts, seed=27)
    assert num_changed == number <= num_loaded and not missed, missed
