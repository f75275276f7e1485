"""Secrets and personal data in rows: all planted ones are found, arithmetic is not, and the policy is applied."""

import json
from collections import Counter

import pytest
from tests.corpora import prepare_in, tree, write_rows

from tunewell.cli.main import main
from tunewell.core.redact import hide_secrets
from tunewell.data.rows.cleaning import find_possible_secrets

A = "aB3dE6gH9jK2mN5pQ8sT"
PLANTED = {
    "Hugging Face token": [f"hf_{A}", f"login with hf_{A}{A} now", f'{{"token": "hf_{A}x"}}'],
    "API key": [f"sk-{A}{A}", f"key=sk-ant-api03-{A}-{A}", f"sk-proj-{A}_{A}."],
    "GitHub token": [f"ghp_{A}{A}", f"github_pat_{A}_{A}", f"https://ghs_{A}{A}/x"],
    "AWS key": ["AKIAIOSFODNN7EXAMPLE", "ASIA1234567890ABCDEF", f"aws_secret_access_key = {A}{A}"],
    "password": [
        "password: hunter2-and-more",
        "postgres://ann:s3cr3tpw@db.local/x",
        "Authorization: Bearer abc.def-123",
    ],
    "JSON Web Token": [f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{A}{end}" for end in "abc"],
    "private key": [f"-----BEGIN {kind}PRIVATE KEY-----\nMIIE{A}\n" for kind in ("", "RSA ", "OPENSSH ")],
    "e-mail address": ["ann.smith@acme.io", "Write to bob+x@mail.co.uk, please", "<c_d@sub.host.org>"],
    "phone number": ["Call +44 20 7946 0958.", "at (415) 555-2671, or", "phone: 030 1234567"],
    "card number": ["4111 1111 1111 1111", "paid with 5500005555555559.", "3782-822463-10005"],
}
CLEAN = [
    "password: YOUR_PASSWORD_1", "api_key = <your-key-123>", "ann@example.com", "4111 1111 1111 1112",
    "<<500-250-1000=5>>", "She has 5+100 - 200 apples", "The token economy of 1999-2003", "a bearer of good news",
    "15*20=300+4000-120", "tel. 12", "GB00 0000 0000 0000 0000 00", "https://host.org/a:b?x=1",
    "version 1.2.3-456-7890",
]  # fmt: skip


def found_in(text: str) -> Counter[str]:
    found: Counter[str] = Counter()
    hide_secrets(text, found)
    return found


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in PLANTED.items() for text in texts])
def test_planted_secrets_are_found(kind, text):
    """Guards all kinds, in the search, in the fast search before it, and in JSON's escapes."""
    assert kind in found_in(f"Some text. {text} And more.")
    rows = [json.dumps({"text": text}).encode(), json.dumps({"text": text}).replace("/", "\\/").encode(), text.encode()]
    assert find_possible_secrets(rows) == [True] * 3


def test_there_are_thirty_secrets_of_ten_kinds():
    """Guards the two tests around it against a shorter list."""
    assert (len(PLANTED), sum(map(len, PLANTED.values()))) == (10, 30)


@pytest.mark.parametrize("text", CLEAN)
def test_other_text_is_not_flagged(text):
    """Guards against warnings that nobody reads any more: placeholders, arithmetic, wrong check digits."""
    assert found_in(f"Some text. {text} And more.") == {}


def test_more_kinds_by_their_check_digits():
    """Guards account numbers: every word of letters and digits would be one without the check."""
    assert found_in("IBAN DE89 3704 0044 0532 0130 00") == {"bank account": 1}
    assert found_in("SSN 219-09-9999") == {"social security number": 1}


@pytest.fixture
def rows(tmp_path):
    secrets = [text for texts in PLANTED.values() for text in texts]
    rows = [{"question": f"What is {n}?", "answer": f"It is {n * 7}."} for n in range(60)]
    rows += [{"question": f"Case {n}: what now?", "answer": f"Use {text}"} for n, text in enumerate(secrets)]
    return write_rows(tmp_path / "rows.jsonl", rows)


def test_rows_with_secrets_are_counted_and_listed(tmp_path, tiny_model, rows, monkeypatch, capsys):
    """Guards the default: nothing is dropped, and the screen names the kinds but no secret."""
    monkeypatch.chdir(tmp_path)
    result = prepare_in(tmp_path, tiny_model, rows)
    found = result.manifest.secrets
    assert found is not None
    assert (found.action, found.rows) == ("warn", 30)
    assert set(found.kinds) == set(PLANTED)
    lines = [json.loads(line) for line in (tmp_path / "corpus" / "secrets.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(61, 91))
    assert A not in (tmp_path / "corpus" / "secrets.jsonl").read_text()
    assert result.manifest.dropped == {}
    assert main(["inspect", "corpus", "--show", "0"]) == 0
    assert "3 e-mail address" in " ".join(capsys.readouterr().out.split())


def test_secrets_are_replaced_if_configured(tmp_path, tiny_model, rows):
    """Guards the tokens: no secret may be left in any file of the corpus or of its cache."""
    from tunewell.data.corpus.reader import open_corpus
    from tunewell.data.tokenizers.load import load_tokenizer

    prepare_in(tmp_path, tiny_model, rows, "data.clean.secrets=redact", "data.held_out=0")
    corpus = open_corpus(tmp_path / "corpus")
    backend = load_tokenizer(corpus.path / "tokenizer").backend
    texts = [backend.decode(document.input_ids, skip_special_tokens=False) for document in corpus]
    assert len(texts) == 90
    assert sum("[API key]" in text for text in texts) == 3
    assert not any(A in text or "acme.io" in text or "1111" in text for text in texts)
    assert not any(A.encode() in data for data in tree(tmp_path / "corpus").values())


def test_rows_with_secrets_are_dropped_if_configured(tmp_path, tiny_model, rows):
    """Guards the ledger."""
    manifest = prepare_in(tmp_path, tiny_model, rows, "data.clean.secrets=drop").manifest
    assert manifest.dropped == {"has_secret": 30}
    assert manifest.documents + manifest.held_out == 60


def test_secrets_made_by_a_map_function_are_found(tmp_path, tiny_model):
    """Guards rows that a function changes: the file itself has no secret."""
    data = write_rows(tmp_path / "rows.jsonl", [{"q": f"Who is {n}?", "a": f"user{n}"} for n in range(20)])
    (tmp_path / "rows.py").write_text(
        "def f(row):\n    return {'question': row['q'], 'answer': row['a'] + '@' + 'acme.io'}\n", encoding="utf-8"
    )
    sources = f'data.sources=[{{path: "{data}", map: "{tmp_path}/rows.py:f"}}]'
    found = prepare_in(tmp_path, tiny_model, data, sources).manifest.secrets
    assert found is not None
    assert found.kinds == {"e-mail address": 20}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("gsm8k/train.jsonl", {}),
        ("wikisql_mlx/train.jsonl", {}),
        ("self_instruct/seed_tasks.jsonl", {166: "e-mail address"}),  # the sender of a bank's mail
        ("self_instruct/user_oriented_instructions.jsonl", {235: "phone number"}),  # "Call us at ..."
    ],
)
def test_real_rows_are_flagged_for_a_reason(shared_data, file, flags):
    """Guards against patterns that match arithmetic or tables."""
    lines = (shared_data / file).read_bytes().splitlines()
    found = {
        number: next(iter(kinds))
        for number, (line, is_possible) in enumerate(zip(lines, find_possible_secrets(lines), strict=True))
        if is_possible and (kinds := found_in("\n".join(_texts(json.loads(line)))))
    }
    assert len(lines) > 100
    assert found == flags


def _texts(value):
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inner for text in _texts(part)]
