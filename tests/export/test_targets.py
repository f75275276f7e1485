"""A new export target is one class and one registry entry: options, preflight, proof and screen follow."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
from exports import exported, write_adapter, write_base

from tunewell.cli.screens.export import parity_screen
from tunewell.config.extensions import EXPORT_TARGETS
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.core.registry import Entry
from tunewell.export.card import read_license
from tunewell.export.proof.checks import check_ids
from tunewell.export.proof.reference import ProofContext
from tunewell.export.targets.base import DiskUse, ExportContext, ExportTarget, Requirements, load_targets
from tunewell.model_files.gguf import read_metadata
from tunewell.records.parity import Artefact, Check, Link, Parity, Proof, ProofProbe, TrainedFacts, read_proof
from tunewell.workflows.verify import verify


class SizesTarget(ExportTarget):
    """Writes the shape of every tensor."""

    name: ClassVar = "sizes"
    requires: ClassVar = Requirements(merged_weights=True)

    def disk_use(self, context: ExportContext) -> DiskUse:
        return DiskUse({self.name: 1000})

    def write(self, context: ExportContext) -> list[Artefact]:
        path = context.staging_dir / "sizes.json"
        shapes = {name: list(tensor.shape) for name, tensor in context.model.model.named_parameters()}
        path.write_text(json.dumps(shapes))
        return [context.artefact(self.name, "", path)]

    def prove(self, artefact: Artefact, context: ProofContext) -> list[Check]:
        assert context.proof.model is not None
        is_same = json.loads((context.folder / artefact.path).read_text()) == context.proof.model.shapes
        return [Check(name="tensors", is_ok=is_same, words="shapes")]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXPORT_TARGETS, "_entries", dict(EXPORT_TARGETS._entries))
    EXPORT_TARGETS.add(Entry("sizes", "shapes of tensors", f"{__name__}:SizesTarget"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    base = write_base(folder / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A base\n")
    return write_adapter(folder / "adapter", base)


def test_a_toy_target_is_written_proven_and_shown(toy: None, adapter: Path, tmp_path: Path) -> None:
    assert load_config(None, ["export.to=[sizes]"], model="x", has_file=False).config.export.to == ("sizes",)
    done = exported(adapter, tmp_path / "out", to="sizes")
    assert done.parity.is_ok and [link.artefact for link in done.parity.links] == ["sizes"]
    assert "trained = sizes" in parity_screen(done.parity)
    (tmp_path / "out" / "sizes.json").write_text("{}")
    assert not verify(tmp_path / "out").is_ok


def test_every_target_has_its_name_and_a_required_target_comes_first() -> None:
    assert [target.name for target in load_targets(EXPORT_TARGETS.names())] == list(EXPORT_TARGETS.names())
    assert [target.name for target in load_targets(["ollama"])] == ["gguf", "ollama"]
    with pytest.raises(UserError, match="unknown export target `onnx`"):
        load_targets(["onnx"])


def test_the_licence_of_the_base_is_in_card_gguf_and_modelfile(adapter: Path, tmp_path: Path) -> None:
    """It was never read: `ModelFiles` has no `path`."""
    out = tmp_path / "out"
    done = exported(adapter, out, to="merged,ollama", gguf="f16,q4_k_m", creates=False)
    assert done.parity.is_ok, done.parity
    assert 'license: "apache-2.0"' in (out / "README.md").read_text()
    assert 'license: "apache-2.0"' in (out / "merged" / "README.md").read_text()
    for path in (out / "gguf").glob("*.gguf"):
        assert read_metadata(path)["general.license"] == "apache-2.0", path
        assert read_license(str(path)) == "apache-2.0"
    assert 'LICENSE """apache-2.0"""' in (out / "ollama" / "Modelfile").read_text()
    facts = read_proof(out).model
    assert facts is not None and facts.license == "apache-2.0"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"README.md": "---\nlicense: mit\ntags: [a]\n---\nhello"}, "mit"),
        ({"README.md": "---\nlicense: [gemma]\n---\n"}, "gemma"),
        ({"README.md": "---\nlicense: other\nlicense_name: tongyi\n---\n"}, "tongyi"),
        ({"README.md": "---\n: [\n---\n"}, None),
        ({"README.md": "license: mit"}, None),
        ({"config.json": '{"license": "bsd-3-clause"}'}, "bsd-3-clause"),
        ({"LICENSE": "   Apache License\n   Version 2.0, January 2004\n"}, "apache-2.0"),
        ({"LICENSE.txt": "MIT License\n\nCopyright"}, "mit"),
        ({"LICENSE": "You may not."}, "other"),
        ({}, None),
    ],
)
def test_a_licence_is_read_where_models_state_it(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert read_license(str(tmp_path)) == expected
    assert read_license(str(tmp_path / "nowhere")) is None


def test_a_program_that_encodes_the_whole_text_is_compared_with_the_ids_of_the_whole_text() -> None:
    """A reply in the history starts with a new token in training; that is counted, and is no defect of the export."""
    probe = ProofProbe(messages=[], text="x", ids=[1, 2, 3], whole_ids=[1, 4])
    model = TrainedFacts(
        config={}, generation={}, special_tokens={}, special_ids={}, max_length=None, vocabulary={}, shapes={}, twins={}
    )
    proof = Proof(
        made_by="t", subject="t", base=None, is_lora=False, stop_ids=[], probes=[probe], num_positions=1, questions=[],
        artefacts=[], model=model,
    )  # fmt: skip
    assert check_ids(proof, lambda _: [1, 4], library="t").is_ok
    assert not check_ids(proof, lambda _: [1, 2, 3], library="t").is_ok


def _parity(**figures: int) -> Parity:
    checks = [
        Check(name="token ids", is_ok=True, words=""),
        Check(name="logits", is_ok=True, words="", figures={"same_top": 0.9, "kl": 0.1}),
        Check(name="answers", is_ok=True, words="", figures={"same": 0, "of": 6}),
        Check(name="stop", is_ok=True, words="", figures=figures),
    ]
    link = Link(artefact="gguf q4_k_m", path="gguf/x.gguf", checks=checks)
    return Parity(made_by="t", made_at="now", subject="run", links=[link], is_ok=True)


def test_the_screen_explains_what_was_not_required() -> None:
    """`answers 0 of 6` stood beside PROVEN, and `stops yes` for 0 answers of 0."""
    text = " ".join(parity_screen(_parity(ended=0, of=0)).split())
    assert "0 of 6 - " in text and "they may differ" in text
    assert "trained ~ gguf q4_k_m" in text and "= identical, ~ equal within rounding" in text
    assert "0 of 6 yes" in " ".join(parity_screen(_parity(ended=2, of=2)).split())
