"""Cranfield: 1,400 abstracts, 225 questions and their judged answers. PostgreSQL finds what the folder finds."""

import math
import re
from pathlib import Path

import pytest
from postgres_server import PostgresServer

from tunewell.features.retrieval.embedders.base import open_embedder
from tunewell.features.retrieval.indexing import build_index
from tunewell.features.retrieval.search import Retriever
from tunewell.features.retrieval.stores.base import open_store

pytestmark = [pytest.mark.shared, pytest.mark.slow]  # the embedder takes minutes on two cores
WEIGHTS = (0.0, 0.6, 1.0)


def ndcg(found: list[list[str]], judged: dict[int, set[str]]) -> float:
    """Return the mean nDCG@10 of the questions that have an answer; questions are numbered by position."""
    values = []
    for number, right in judged.items():
        gain = sum(1 / math.log2(place + 2) for place, name in enumerate(found[number - 1][:10]) if name in right)
        values.append(gain / sum(1 / math.log2(place + 2) for place in range(min(10, len(right)))))
    return sum(values) / len(values)


@pytest.mark.slow
def test_postgres_ranks_like_the_folder(shared_data, tmp_path, monkeypatch):
    """Its own ranking ignores how rare a word is, and loses a quarter of the quality."""
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    data = shared_data / "cranfield"
    docs = tmp_path / "docs"
    docs.mkdir()
    document = r"<docno>\s*(\d+)\s*</docno>\s*<title>(.*?)</title>.*?<text>(.*?)</text>"
    for number, title, text in re.findall(document, (data / "cran.all.1400.xml").read_text(), re.DOTALL):
        (docs / f"{number}.md").write_text(f"# {' '.join(title.split())}\n\n{text.strip() or title}\n")
    questions = re.findall(r"<title>\s*(.*?)\s*</title>", (data / "cran.qry.xml").read_text(), re.DOTALL)
    judged: dict[int, set[str]] = {}
    for line in (data / "cranqrel.trec.txt").read_text().splitlines():
        number, _, name, is_right = line.split()
        if int(is_right) > 0:
            judged.setdefault(int(number), set()).add(name)
    embedder = open_embedder("minilm")
    vectors = embedder.embed(questions, is_query=True)
    server = PostgresServer()
    try:
        quality = {}
        for address in (str(tmp_path / "index"), server.address("cranfield")):
            build_index([str(docs)], address, embedder)
            retriever = Retriever(open_store(address), embedder)
            for weight in WEIGHTS:
                found = []
                for question, vector in zip(questions, vectors, strict=True):
                    hits = retriever.search(question, 30, vector=vector, vector_weight=weight)
                    found.append(list(dict.fromkeys(Path(hit.passage.file).stem for hit in hits)))
                quality[address, weight] = ndcg(found, judged)
    finally:
        server.remove()
    print(quality)  # noqa: T201
    folder, postgres = (
        [quality[address, weight] for weight in WEIGHTS] for address in dict.fromkeys(a for a, _ in quality)
    )
    assert all(abs(one - two) < 0.01 for one, two in zip(folder, postgres, strict=True))
    assert folder[0] > 0.36
    assert folder[1] > max(folder[0], folder[2])
