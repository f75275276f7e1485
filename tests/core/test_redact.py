"""Secrets leave no trace in what is written, and everything else stays as it was."""

import json
import random
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.core.redact import redact

# Made here from parts, so that no scanner takes this file for a leak.
LETTERS = string.ascii_letters + string.digits
CHANCE = random.Random(7)


def letters(number: int) -> str:
    return "".join(CHANCE.choice(LETTERS) for _ in range(number))


SECRETS = {
    "hugging face": "hf_" + letters(34),
    "openai": "sk-" + letters(48),
    "openai project": "sk-proj-" + letters(20) + "_" + letters(20),
    "anthropic": "sk-ant-api03-" + letters(40),
    "github": "ghp_" + letters(36),
    "github fine-grained": "github_pat_" + letters(22) + "_" + letters(59),
    "gitlab": "glpat-" + letters(20),
    "slack": "xoxb-" + "123456789012-" + letters(24),
    "google": "AIza" + letters(35),
    "aws": "AKIA" + "".join(CHANCE.choice(string.ascii_uppercase + string.digits) for _ in range(16)),
    "web token": "eyJ" + letters(20) + ".eyJ" + letters(30) + "." + letters(43),
}
IN_PLACE = {
    "aws_secret_access_key = {}": letters(20) + "/" + letters(19),
    '"SecretAccessKey": "{}"': letters(40),
    "Authorization: Bearer {}": letters(30) + "==",
    "https://user:{}@host.example/path": "p%40ss-w0rd",
    "s3://bucket/a?X-Amz-Signature={}&X-Amz-Date=1": letters(64),
    "password: {}": "correct-horse",
    "api_key={},": letters(12),
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----": letters(64) + "\n" + letters(64),
}


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
@pytest.mark.parametrize("around", ["{}", "token {} is here", '{{"token":"{}"}}', "TOKEN={}\n", "/x/{}/y", "é{}é"])
def test_a_token_is_known_by_its_shape(secret, around):
    """People paste them into rows, configs and paths."""
    assert redact(around.format(secret)) == around.format("[redacted]")


@pytest.mark.parametrize(("around", "secret"), IN_PLACE.items(), ids=IN_PLACE)
def test_a_secret_without_a_shape_is_known_by_what_stands_before_it(around, secret):
    """And what stands before it stays, so that one can see what it was."""
    assert redact(around.format(secret)) == around.format("[redacted]").replace("\n[redacted]\n", "[redacted]")


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "MY_SECRET", "PGPASSWORD", "db_passwd", "AWS_SECRET_ACCESS_KEY", "SIGNING_KEY"],
)
def test_the_value_of_a_secret_variable_is_known_wherever_it_turns_up(monkeypatch, name):
    """Most trackers' keys look like any other number."""
    secret = "0123 (s#cret.)*\\x"
    monkeypatch.setenv(name, secret)
    assert redact({"a": ["x" + secret + "y", {secret * 2: 1}]}) == {"a": ["x[redacted]y", {"[redacted][redacted]": 1}]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "short"),  # too common in other words
        ("TOKENIZERS_PARALLELISM", "disabled"),
        ("KEYBOARD", "querty-layout"),
        ("AWS_SHARED_CREDENTIALS_FILE", "/home/me/.aws/credentials"),
        ("SECRET", "00000000"),
        ("USER", "somebody"),
    ],
)
def test_values_that_are_no_secrets_stay(monkeypatch, name, value):
    """A log full of `[redacted]` is no log."""
    monkeypatch.setenv(name, value)
    assert redact(f"a {value} b") == f"a {value} b"


def test_a_variable_with_a_plain_word_hides_that_word_and_no_longer_one(monkeypatch):
    """`OPENAI_API_KEY=anything` is common where no key is needed."""
    monkeypatch.setenv("OPENAI_API_KEY", "anything")
    assert redact("anything but anythings") == "[redacted] but anythings"


@pytest.mark.parametrize("text", ["git+https://{}@host/rows.git", json.dumps(json.dumps({"login": "{}"}))])
def test_letters_alone_are_secret_in_an_address_and_in_json_within_json(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """What tells a path from a word kept them: the slashes before it, the backslash after it."""
    monkeypatch.setenv("DB_PASSWORD", "postgres")
    assert redact(text.replace("{}", "postgres")) == text.replace("{}", "[redacted]")


@pytest.mark.parametrize(
    "text", ["/srv/postgres/model", "postgres/model", "C:\\postgres", "postgres.jsonl", "my-postgres"]
)
def test_a_plain_word_stays_in_a_path(monkeypatch, text):
    """A folder named like a careless password must still be found by whoever reads the run."""
    monkeypatch.setenv("DB_PASSWORD", "postgres")
    assert redact(text) == text
    assert redact(f"the password is postgres. It is in {text}") == f"the password is [redacted]. It is in {text}"


def test_the_longer_of_two_secrets_goes_first(monkeypatch):
    """Otherwise the end of the longer one would stay."""
    monkeypatch.setenv("A_TOKEN", "abcd1234")
    monkeypatch.setenv("B_TOKEN", "abcd1234efgh5678")
    assert redact("abcd1234efgh5678 abcd1234") == "[redacted] [redacted]"


def test_a_variable_set_later_is_known_at_once(monkeypatch):
    """Programs set their token after their imports, and after their first event."""
    assert redact("my-token-1234") == "my-token-1234"
    monkeypatch.setenv("SOME_TOKEN", "my-token-1234")
    assert redact("my-token-1234") == "[redacted]"


@pytest.mark.parametrize("key", ["password", "API_KEY", "apikey", "hf_token", "client_secret", "aws_secret_access_key"])
def test_what_stands_under_a_secret_key_goes_whatever_it_looks_like(key):
    """Configs of trackers and stores look like this."""
    assert redact({"store": {key: "abc", "name": "abc"}}) == {"store": {key: "[redacted]", "name": "abc"}}


def test_words_of_our_trade_stay():
    """Tokens, keys and bearers are also what training is about."""
    value = {
        "eos_token": "<|im_end|>",
        "tokens": 1234,
        "key": "train.learning_rate",
        "text": "The bearer certificates of the task-oriented-dialogue-generation model; hf_transfer, sk-learn.",
        "url": "https://huggingface.co:443/a?rows=100&columns=token",
        "mail": "me@host.example",
        "sha256": "3f" * 32,
        "path": "s3://bucket/rows:2024@v2.jsonl",
        "layers": ("model.layers.0.self_attn.q_proj", None, True, 0.5),
    }
    assert redact(value) == value
    assert redact(value)["layers"] == value["layers"]


@given(text=st.text(alphabet=string.ascii_lowercase + " .,\n", max_size=200))
def test_plain_text_stays_as_it_is(text):
    """A false alarm costs a sentence of a sample."""
    assert redact(text) == text


HOSTILE = ["://", "a://b:", "eyJ", "sk-", "bearer ", "password=", "-----BEGIN PRIVATE KEY-----", "hf_", "?key=", "a:"]


def test_no_text_takes_more_than_linear_time():
    """Samples are a model's words, and a model repeats itself."""
    begin = time.monotonic()
    for part in HOSTILE:
        redact(part * (200_000 // len(part)))
    assert time.monotonic() - begin < 20, "about 0.1 s each; quadratic time would be hours"
