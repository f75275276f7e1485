"""Every family trains as transformers computes it. `families.py` is the same as a script, and writes the table."""

import re

import family_configs
import pytest
from families import PAGE, examine

from tunewell.model_files import families

SAMPLE = ("bloom", "gpt2", "gpt_oss", "lfm2", "qwen3_5_text", "stablelm")
KNOWN = {
    ("xlstm", "probe bf16"): "transformers cannot compute it in bf16",
    ("zamba", "merge"): "rounding of 2e-5 in a model that amplifies it",
}


def _require_no_fault(kind: str) -> None:
    faults = {name: why for name, why in examine(kind).checks.items() if why and (kind, name) not in KNOWN}
    assert not faults


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_family_of_each_kind_trains_answers_resumes_and_merges(kind: str) -> None:
    _require_no_fault(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(family_configs.kinds()) - set(SAMPLE)))
def test_a_family_trains_answers_resumes_and_merges(kind: str) -> None:
    _require_no_fault(kind)


def test_the_page_of_families_has_the_levels_of_the_table() -> None:
    """Else run `families.py --write` again."""
    text = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\S+)` \| ([a-z ]+)", text, re.MULTILINE))
    assert sorted(rows) == family_configs.kinds()
    for kind, level in rows.items():
        config = family_configs.config_of(kind).to_dict()
        assert families.packing_of(config, longest=40).level == level.strip(), kind
