"""Quality and speed of retrieval: Cranfield against Anserini, the college pages, PubMedQA, and large indexes.

    python benchmarks/retrieval.py cranfield --anserini anserini-fatjar.jar
    python benchmarks/retrieval.py college
    python benchmarks/retrieval.py pubmedqa
    python benchmarks/retrieval.py rate
    python benchmarks/retrieval.py speed --passages 100000

The jar is inside the wheel of PyPI `pyserini` 0.25.0 (Java 17). Data: `../shared/data` or TUNEWELL_SHARED.
"""

import argparse
import json
import math
import os
import re
import resource
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from tunewell.data.reading_prompt import Passage
from tunewell.scoring.answer_keys import ReferenceRow, answer_keys
from tunewell.evaluation.passages import key_finder
from tunewell.features.retrieval.embedders.base import Embedder, open_embedder
from tunewell.features.retrieval.indexing import build_index
from tunewell.features.retrieval.search import CANDIDATES, Retriever, fuse
from tunewell.features.retrieval.stores.base import open_store
from tunewell.features.retrieval.tuning import tune
from tunewell.features.retrieval.words import words

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("TUNEWELL_SHARED", ROOT.parent / "shared")) / "data"
COLLEGE = ROOT / "examples" / "college"


class WholeDocuments:
    """An embedder that cuts nothing, so that passages are documents, as for Anserini."""

    def __init__(self, embedder: Embedder) -> None:
        self.__dict__.update({name: getattr(embedder, name) for name in ("name", "sha256", "dimension", "embed")})
        self.count_tokens, self.max_tokens, self.unrelated_cosine = embedder.count_tokens, 1 << 20, None


def ndcg(ranked: list[str], relevant: set[str], depth: int = 10) -> float:
    gain = sum(1 / math.log2(place + 2) for place, name in enumerate(ranked[:depth]) if name in relevant)
    return gain / sum(1 / math.log2(place + 2) for place in range(min(depth, len(relevant))))


def read_cranfield() -> tuple[dict[str, tuple[str, str]], list[str], dict[int, set[str]]]:
    """Return the documents (title, text), the queries, and the relevant documents by the position of the query."""
    folder, documents, relevant = DATA / "cranfield", {}, defaultdict(set)
    for found in re.finditer(r"<doc>(.*?)</doc>", (folder / "cran.all.1400.xml").read_text(), re.DOTALL):
        fields = {tag: text.strip() for tag, text in re.findall(r"<(docno|title|text)>(.*?)</\1>", found[1], re.DOTALL)}
        title, text = " ".join(fields["title"].split()), fields["text"]
        documents[fields["docno"]] = (title or fields["docno"], text)
    queries = re.findall(r"<title>(.*?)</title>", (folder / "cran.qry.xml").read_text(), re.DOTALL)
    for line in (folder / "cranqrel.trec.txt").read_text().splitlines():
        query, _, document, grade = line.split()
        if int(grade) > 0:
            relevant[int(query)].add(document)
    return documents, [" ".join(query.split()) for query in queries], dict(relevant)


def anserini(jar: str, texts: dict[str, str], queries: list[str], k1: float, b: float) -> dict[int, list[str]]:
    """Return Anserini's ranking of each query."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        rows = [json.dumps({"id": number, "contents": text}) for number, text in texts.items()]
        (folder / "rows" / "rows.jsonl").write_text("\n".join(rows))
        (folder / "topics.tsv").write_text("\n".join(f"{number}\t{query}" for number, query in enumerate(queries, 1)))
        java = ["java", "-cp", jar]
        index = [*java, "io.anserini.index.IndexCollection", "-collection", "JsonCollection", "-generator"]
        index += ["DefaultLuceneDocumentGenerator", "-threads", "1", "-input", str(folder / "rows")]
        search = [*java, "io.anserini.search.SearchCollection", "-topicReader", "TsvInt", "-topics"]
        search += [str(folder / "topics.tsv"), "-output", str(folder / "run"), "-bm25", "-bm25.k1", str(k1)]
        search += ["-bm25.b", str(b), "-hits", "10", "-index", str(folder / "index")]
        for command in ([*index, "-index", str(folder / "index")], search):
            subprocess.run(command, check=True, capture_output=True)
        ranked = defaultdict(list)
        for line in (folder / "run").read_text().splitlines():
            query, _, document, *_ = line.split()
            ranked[int(query)].append(document)
        return ranked


def cranfield(args: argparse.Namespace) -> None:
    documents, queries, relevant = read_cranfield()
    embedder = open_embedder(args.embedder)
    vectors = embedder.embed(queries, is_query=True)
    with tempfile.TemporaryDirectory() as name:
        pages = Path(name) / "pages"
        pages.mkdir()
        for number, (title, text) in documents.items():
            (pages / f"{number}.md").write_text(f"# {title}\n\n{text or title}\n")

        def mean(retriever: Retriever, weight: float) -> float:
            scores = []
            for number, query in enumerate(queries, 1):
                found = retriever.search(query, 60, vector=vectors[number - 1], vector_weight=weight)
                ranked = list(dict.fromkeys(Path(one.passage.file).stem for one in found))
                scores.append(ndcg(ranked, relevant[number]))
            return float(np.mean(scores))

        opened = {}
        for kind, own in (("whole", WholeDocuments(embedder)), ("passages", embedder)):
            build_index([str(pages)], str(Path(name) / kind), own)
            opened[kind] = Retriever(open_store(Path(name) / kind), own)
        whole = opened["whole"].store
        texts = {Path(one.file).stem: one.searched for one in whole.passages(range(whole.manifest.counts.passages))}
        if args.anserini:
            for k1, b in ((0.9, 0.4), (1.2, 0.75)):
                ranked = anserini(args.anserini, texts, queries, k1, b)
                score = np.mean([ndcg(ranked[number], relevant[number]) for number in range(1, len(queries) + 1)])
                print(f"Anserini BM25, k1 {k1}, b {b}: nDCG@10 {score:.4f}")
        ranked = []
        for number, query in enumerate(queries, 1):
            hits = whole.search_words(words(query, "english"), 10)
            names = [Path(one.file).stem for one in whole.passages([hit for hit, _ in hits])]
            ranked.append(ndcg(names, relevant[number]))
        print(f"ours, whole documents, BM25 (1.2, 0.75): {np.mean(ranked):.4f}")
        for weight in (0.0, 0.5, 0.6, 0.7, 1.0):
            print(
                f"ours, passages, {args.embedder}, weight of vectors {weight}: {mean(opened['passages'], weight):.4f}"
            )


def college(args: argparse.Namespace) -> None:
    """The right passage, and refusals; the settings for each college are chosen on the questions about the others."""
    facts = [json.loads(line) for line in (COLLEGE / "facts.jsonl").read_text().splitlines()]
    by_answer = {fact["answer"]: fact for fact in facts}

    def rows(name: str) -> list[tuple[str, dict[str, str]]]:
        lines = map(json.loads, (COLLEGE / f"{name}.jsonl").read_text().splitlines())
        return [(row["instruction"], by_answer[row["output"]]) for row in lines]

    embedder = open_embedder(args.embedder)
    with tempfile.TemporaryDirectory() as name:
        build_index([str(COLLEGE / "pages")], name, embedder)
        retriever = Retriever(open_store(name), embedder)
        train, held_out = rows("train"), rows("held_out")
        first, five, kept, refused = [], [], [], []
        for school in sorted({fact["college"] for fact in facts}):
            others = [(question, fact) for question, fact in train if fact["college"] != school]
            keys = answer_keys([ReferenceRow(question, fact["answer"]) for question, fact in others])
            chosen = [question for question, _ in others]
            settings, _ = tune(retriever, chosen, key_finder(keys))
            retriever.store.manifest = retriever.store.manifest.model_copy(update={"settings": settings})
            page = next(one.file for one in _all(retriever) if school.lower() in one.title.lower())
            for question, fact in held_out:
                if fact["college"] != school:
                    continue
                found = retriever.search(question, 5)
                right = [one.passage.file == page and fact["value"] in one.passage.text for one in found]
                first.append(right[0])
                five.append(any(right))
                kept.append(retriever.find(question, settings.num_passages.value)[1])
                refused.append(not retriever.find(question, settings.num_passages.value, without=[page])[1])
    print(f"{len(first)} held-out questions, settings chosen without the college that is asked about:")
    print(f"right passage first {np.mean(first):.3f}, among five {np.mean(five):.3f}")
    print(f"answerable kept {np.mean(kept):.3f}, refused when the page is missing {np.mean(refused):.3f}")


def _all(retriever: Retriever) -> list[Passage]:
    return retriever.store.passages(range(retriever.store.manifest.counts.passages))


def pubmedqa(args: argparse.Namespace) -> None:
    rows = list(json.loads((DATA / "pubmedqa" / "ori_pqal.json").read_text()).items())[: args.limit]
    embedder = open_embedder(args.embedder)
    with tempfile.TemporaryDirectory() as name:
        pages = Path(name) / "pages"
        pages.mkdir()
        for number, row in rows:
            (pages / f"{number}.txt").write_text("\n\n".join(row["CONTEXTS"]))
        built = build_index([str(pages)], str(Path(name) / "index"), embedder)
        retriever = Retriever(open_store(Path(name) / "index"), embedder)
        first = [Path(retriever.search(row["QUESTION"], 1)[0].passage.file).stem == number for number, row in rows]
    print(f"{len(rows)} questions, {built.manifest.counts.passages} passages: own abstract first {np.mean(first):.3f}")


def rate(args: argparse.Namespace) -> None:
    """`index` on some passages against the embedder's own rate on the same texts, in one run."""
    texts = [text for _, text in read_cranfield()[0].values()]
    pieces = [part.strip() for text in texts for part in text.split(" .") if len(part.split()) > 5]
    embedder = open_embedder(args.embedder)
    rows = [". ".join(pieces[4 * place : 4 * place + 4]) for place in range(min(2000, len(pieces) // 4))]
    shares = []
    for number in range(3):
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
            began = time.perf_counter()
            built = build_index([str(Path(name) / "rows.jsonl")], str(Path(name) / "index"), embedder)
            whole = built.manifest.counts.passages / (time.perf_counter() - began)
            store = open_store(Path(name) / "index")
            searched = [one.searched for one in store.passages(range(built.manifest.counts.passages))]
            began = time.perf_counter()
            embedder.embed(searched)
            alone = len(searched) / (time.perf_counter() - began)
        shares.append(whole / alone)
        print(f"round {number + 1}: {len(searched)} passages, index {whole:.1f}/s, embedder {alone:.1f}/s", flush=True)
    print(f"index: {np.median(shares):.2f} of the embedder's own rate ({min(shares):.2f} to {max(shares):.2f})")


def speed(args: argparse.Namespace) -> None:
    """A hybrid query without embedding, against tantivy and faiss called directly at the same recall."""
    import faiss
    import tantivy

    generator = np.random.default_rng(0)
    sentences = [text for _, text in read_cranfield()[0].values()]
    pieces = [part.strip() for text in sentences for part in text.split(" .") if len(part.split()) > 5]
    embedder = open_embedder(args.embedder)

    centres = generator.standard_normal((max(64, args.passages // 50), 384), np.float32)

    class Random:
        """Vectors around random centres, 50 passages each: in pure noise, no search but an exact one finds anything."""

        name, sha256, dimension, max_tokens, unrelated_cosine = "random", "r" * 64, 384, 254, None
        count_tokens = staticmethod(embedder.count_tokens)

        def embed(self, texts, *, is_query=False, on_batch=None):
            vectors = centres[generator.integers(0, len(centres), len(texts))]
            vectors = vectors + generator.standard_normal(vectors.shape, np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            if on_batch:
                on_batch(list(range(len(texts))), vectors)
            return vectors

    own = Random() if args.random else embedder
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "rows").mkdir()
        for first in range(0, args.passages, 50_000):
            with (Path(name) / "rows" / f"{first:07}.jsonl").open("w") as file:
                for number in range(first, min(first + 50_000, args.passages)):
                    text = " ".join(pieces[place] for place in generator.integers(0, len(pieces), 2))
                    file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
        began = time.perf_counter()
        built = build_index([str(Path(name) / "rows")], str(Path(name) / "index"), own)
        seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"indexed {built.manifest.counts.passages} passages in {seconds:.0f} s, peak {peak:.0f} MiB", flush=True)
        store = Retriever(open_store(Path(name) / "index"), own).store
        vectors = np.load(store.folder / store.manifest.generation / "vectors.npy", mmap_mode="r")
        queries = [pieces[place] for place in generator.integers(0, len(pieces), args.queries)]
        near = vectors[generator.integers(0, len(vectors), args.queries)]
        near = near + 0.05 * generator.standard_normal(near.shape, np.float32)
        near /= np.linalg.norm(near, axis=1, keepdims=True)
        exact = np.concatenate([np.argpartition(-(vectors @ one), 10)[None, :10] for one in near])
        found = [[number for number, _ in store.search_vectors(vector, 10)] for vector in near]
        recall = np.mean([len({*ours} & {*theirs}) / 10 for ours, theirs in zip(found, exact, strict=True)])
        index, clusters = tantivy.Index.open(str(store.folder / store.manifest.generation / "words")), None
        path = store.folder / store.manifest.generation / "clusters.faiss"
        if path.exists():
            clusters = faiss.read_index(str(path))
            clusters.nprobe = store._open_clusters().nprobe
        else:
            clusters = faiss.IndexFlatIP(vectors.shape[1])
            clusters.add(vectors)
        searcher, analysed = index.searcher(), [words(query, "english") for query in queries]

        def direct(number: int) -> None:
            parts = [
                (tantivy.Occur.Should, tantivy.Query.term_query(index.schema, "words", one)) for one in analysed[number]
            ]
            searcher.search(tantivy.Query.boolean_query(parts), CANDIDATES)
            clusters.search(near[number : number + 1], CANDIDATES)

        def ours(number: int) -> None:
            fused = fuse(
                store.search_words(analysed[number], CANDIDATES), store.search_vectors(near[number], CANDIDATES), 0.6
            )
            store.passages([one for one, _ in fused[:5]])

        times = {"direct": [], "ours": []}
        for _ in range(3):
            for label, run in (("direct", direct), ("ours", ours)):
                began = time.perf_counter()
                for number in range(args.queries):
                    run(number)
                times[label].append((time.perf_counter() - began) / args.queries * 1000)
        one, other = (float(np.median(times[label])) for label in ("ours", "direct"))
        print(f"recall@10 {recall:.3f} of exact")
        print(f"ours {one:.2f} ms, tantivy + faiss {other:.2f} ms, ratio {one / other:.2f}")
        print(f"rounds, ms: { ({label: [round(t, 2) for t in own] for label, own in times.items()}) }")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cranfield", "college", "pubmedqa", "rate", "speed"))
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--anserini", metavar="JAR")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--random", action="store_true", help="random vectors instead of the embedder's")
    args = parser.parse_args()
    {"cranfield": cranfield, "college": college, "pubmedqa": pubmedqa, "rate": rate, "speed": speed}[args.part](args)


if __name__ == "__main__":
    main()
