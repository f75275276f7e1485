"""`validate` on a GGUF file: by llama.cpp, with the figures and the verdict that transformers gives."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_tiny import write_gguf
from sick_models import END, WORDINGS, asked, colour_rows, new_model, save_model, teach, write_jsonl, write_tokenizer

from tunewell.evaluation.forgetting import everyday_texts
from tunewell.records.report import Report
from tunewell.workflows.validate import validate

pytest.importorskip("xllamacpp")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a model that has learned colours, each as a folder and as a file."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("made")
    tokenizer = write_tokenizer(folder / "tokenizer")
    model = new_model(tokenizer)
    texts = [("", text[:200]) for text in everyday_texts()]
    teach(model, tokenizer, texts, steps=20)
    base = save_model(model, folder / "base", tokenizer)
    pairs = [(asked(row["question"]), row["answer"] + END) for row in colour_rows(WORDINGS[:9])]
    teach(model, tokenizer, [*pairs, *texts[:4]], steps=50)
    tuned = save_model(model, folder / "tuned", tokenizer)
    for source in (base, tuned):
        write_gguf(source, folder / f"{source.name}.gguf", kind="f32")
    write_jsonl(folder / "rows.jsonl", colour_rows(WORDINGS[9:]))
    return folder


def judged(made: Path, name: str, out: Path, **more) -> Report:
    return validate(made / name, data=made / "rows.jsonl", out=out, **more).report


@pytest.mark.slow
def test_a_file_gets_the_verdict_of_its_model(made: Path, tmp_path: Path) -> None:
    """Beside its base, which may be a file or a folder."""
    expected = judged(made, "tuned", tmp_path / "folder", base=str(made / "base"), device="cpu")
    assert expected.held_out is not None and expected.everyday is not None and expected.held_out.base is not None
    for base in ("base.gguf", "base"):
        found = judged(made, "tuned.gguf", tmp_path / base, base=str(made / base))
        assert found.machine["computed by"].startswith("llama.cpp")
        assert found.verdict == expected.verdict
        assert [reason.code for reason in found.reasons] == [reason.code for reason in expected.reasons]
        assert [one.tuned.text for one in found.exchanges] == [one.tuned.text for one in expected.exchanges]
        assert [one.base and one.base.text for one in found.exchanges] == [
            one.base and one.base.text for one in expected.exchanges
        ]
        for mine, theirs in ((found.held_out, expected.held_out), (found.everyday, expected.everyday)):
            assert mine is not None and theirs is not None and mine.tokens == theirs.tokens
            assert mine.tuned == pytest.approx(theirs.tuned, abs=1e-3)
            assert mine.base == pytest.approx(theirs.base, abs=1e-3)
        assert found.change is not None and expected.change is not None
        assert found.change.largest == pytest.approx(expected.change.largest, rel=1e-3)
    page = (tmp_path / "base.gguf" / "report.html").read_text(encoding="utf-8")
    assert "computed by" in page and "llama.cpp" in page


def test_a_file_alone_is_judged_alone(made: Path, tmp_path: Path) -> None:
    found = judged(made, "base.gguf", tmp_path)
    assert found.held_out is not None and found.held_out.base is None and found.verdict != "PASS"


def test_a_file_with_a_weight_that_is_no_number_fails(made: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes((made / "tuned.gguf").read_bytes())
    file = gguf.GGUFReader(broken, "r+")
    next(tensor for tensor in file.tensors if tensor.name == "blk.0.attn_v.weight").data.reshape(-1)[7] = np.inf
    file.data.flush()
    found = validate(broken, data=made / "rows.jsonl", out=tmp_path / "report").report
    assert found.verdict == "FAIL" and found.reasons[0].code == "weights_not_finite"
    assert found.bad_weights == {"blk.0.attn_v.weight": 1}
