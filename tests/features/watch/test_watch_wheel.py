"""The page from a wheel with `[watch]` alone: everything that is read is shown without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from uv import find_uv_bin
from watching import Client

from corpora import write_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


def call(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_works_from_a_wheel_without_torch(tmp_path, tiny_model):
    """Guards against a static file or a TOML file left out of the wheel, and against an import of torch."""
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("tunewell-*.whl")
    python = tmp_path / "venv" / "bin" / "python"
    call(find_uv_bin(), "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    constraints = ["--constraint", ROOT / "constraints.txt"]
    call(find_uv_bin(), "pip", "install", "--quiet", "--python", python, *constraints, f"{wheel}[watch]")
    folder = tmp_path / "project"
    folder.mkdir()
    write_rows(folder / "rows.jsonl", [{"instruction": f"What is {n}?", "output": f"It is {n}."} for n in range(60)])
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=512, max_position_embeddings=512))
    model.save_pretrained(folder / "small")
    for file in tiny_model.iterdir():
        if not (folder / "small" / file.name).exists():
            (folder / "small" / file.name).write_bytes(file.read_bytes())
    old = ROOT / "tests" / "compat" / "written_by_0_1_0" / "run_finished"
    call("cp", "-r", old, folder / "run")
    words = [python, "-m", "tunewell", "watch", folder, "--port", "0", "--json", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url, _, token = json.loads(server.stdout.readline())["url"].partition("#token=")
            page = Client(url.rstrip("/"), folder, token)
            assert page.request("GET", "/")[0] == 200
            assert page.request("GET", "/main.js")[0] == 200
            for name in ("session", "runs", "files"):
                assert page.get(name)
            for name in ("run", "curve", "samples", "log", "export", "chat"):
                assert page.get(name, id="run"), name
            request = {"data": "rows.jsonl", "answers": []}
            assert page.work("new/read", **request)[1]["number"] == 60
            assert page.work("new/models", **request)[0] == "result"
            kind, draft = page.work("new/draft", **request, model="small", name="mine")
            assert kind == "result", draft
            assert any(token["is_supervised"] for token in draft["sees"][0]["tokens"])
            assert draft["plan"]
            kind, started = page.work("new/start", **request, model="small", name="mine")
            assert kind == "result", started
            with page.stream(run="mine/run") as stream:
                failed = next(
                    data["job"] for kind, data in stream.events() if kind == "run" and data["job"]["status"] == "failed"
                )
            assert "torch" in failed["error"]["what"], failed
        finally:
            server.kill()
    assert not list((tmp_path / "venv").rglob("torch/__init__.py"))
