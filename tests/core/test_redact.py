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


PASSWORD, WORD, TOKEN = "Zq7vK2xPw9", "correct" + "horsebattery", letters(19) + "A1b2C3d4"
HEX = "abcdef" + "0123"
PLANTED = [
    "PGPASSWORD='{p}' psql",
    'PGPASSWORD="{p}"',
    "PGPASSWORD={p}",
    "export PGPASSWORD={w}",
    "MYSQL_PWD={p}",
    "--token {p}",
    "--token={p}",
    "--token '{p}'",
    "curl -u admin:{p} http://h",
    "curl -u admin:{w} http://h",
    "--user admin:{p}",
    "https://u:{p}@host/x",
    "https://u:p@{p}@host/x",
    "https:/u:{p}@h/m",
    "http://u:{w}@h/v1#m",
    "postgresql://app:{p}@db:5432/x",
    "redis://:{p}@h:6379/0",
    "https://h/v1?api_key={p}",
    "https://h/x?a=1&signature={p}",
    "https://h/x?sig={p}&b=1",
    "https://h/#access_token={p}",
    "https://h/v1?key={w}",
    "Authorization: Bearer {p}",
    "Authorization: Basic {p}==",
    "'Authorization': 'Bearer {w}'",
    "authorization: token {w}",
    "Authorization: {p}",
    "X-API-Key: {p}",
    "x-auth-token: {p}",
    "Cookie: session={p}; theme=dark",
    "Set-Cookie: sid={p}; Path=/",
    "hf_{t}",
    "sk-proj-{t}",
    "sk-{t}",
    "ghp_{t}",
    "AKIA{a}",
    "sk_live_{t}",
    "gsk_{t}",
    "glpat-{t}",
    "xoxb-1234-{t}",
    "WANDB_API_KEY={w}",
    "wandb_api_key: {p}",
    "wandb login {p}",
    "MLFLOW_TRACKING_PASSWORD={p}",
    "MLFLOW_TRACKING_TOKEN={p}",
    "aws_secret_access_key = {p}",
    "AWS_SECRET_ACCESS_KEY={p}/x+y",
    "AWS_SESSION_TOKEN={p}==",
    '"secretAccessKey": "{p}"',
    '"aws_secret_access_key": "{w}"',
    "secret_key: {p}",
    "client_secret: {w}",
    "password: {p}",
    "password: {w}",
    "  password: '{w} and more'",
    '{{"password": "{w} two words"}}',
    "{{'api_key': '{p}'}}",
    '{{\\"password\\": \\"{p}\\"}}',
    "host=h password={p}",
    "host=h user=u password='{p}' dbname=x",
    "Server=h;Uid=u;Pwd={p};",
    "AccountKey={p}==;EndpointSuffix=x",
    "machine api.wandb.ai login user password {p}",
    "-----BEGIN RSA PRIVATE {k}-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,{p}\n\n{t}\n-----END",
    "-----BEGIN OPENSSH PRIVATE {k}-----\\n{t}",
    "passphrase={w}",
    "IDENTIFIED BY '{p}'",
    "token: {p}",
    "token={p}",
    "GITHUB_TOKEN={w}",
    "hf_token: {w}",
    "HF_TOKEN={p}",
    "u:{p}@host.example/x",
    "--api-key {w}",
    "--password {w} --x",
    "docker login -u me --password {p}",
    "db_password={p}",
    "password=hunter",
    "password: hunt3",
    "set password={w}, next",
    "apikey={p}",
    "OPENAI_API_KEY: {w}",
    "ssh://git:{p}@h:22/x",
    "params={{'token': '{p}'}}",
    "Secret: {p}",
    "['--token', '{p}']",
    "--set password={p}",
    "`password={p}`",
    "input_value='password={p}'",
    "jdbc:mysql://h/db?user=u&password={p}",
    "amqp://g:{p}@h//",
    "mongodb+srv://u:{p}@c.mongodb.net/?x=1",
    "SharedAccessSignature={p}",
    "private_key='{w}'",
    "DB_PASS={p}",
    "DATABASE_PASS: {p}",
    "PASSWORD={w}",
    "smtp_pass = '{p}'",
    "auth=('user', '{p}')",
    "export TOKEN={p}",
    "WANDB_KEY={p}",
    'export PASSPHRASE="a b {w}"',
    "S3_SECRET={w}",
    "KAGGLE_KEY={p}",
    "R2_SECRET_ACCESS_KEY={w}",
    "api-key: {w}",
    "apiKey: '{w}'",
    "COMET_API_KEY={w}",
    "NEPTUNE_API_TOKEN={w}",
    "sshpass -p {w} ssh x",
    "sshpass -p{w} scp a b",
    "mysql -u root -p{w}",
    "mysqldump -h db -u root -p'{p}' rows > rows.sql",
    "mariadb -p{p} rows",
    "curl -uadmin:{w} http://x",
    "curl -sSu admin:{w} http://x",
    "curl --user 1000:{p} http://x",
    "wget --header x -u me:{p} http://x",
    "docker login -u me -p {w}",
    "docker login registry.example.com -p {p} -u me",
    "helm registry login h -u me -p {p}",
    "['docker', 'login', '-u', 'me', '-p', '{w}']",
    "['mysql', '-u', 'root', '-p{p}']",
    "redis-cli -h x -a {p}",
    "unzip -P {w} rows.zip",
    "PASS={w}",
    "PASS=hunter2",
    "pass=hunter2",
    "export PASS='{p}'",
    "wandb.login(key='{h}')",
    "wandb.login(relogin=True, key='{h}')",
    'comet_ml.login(api_key="{p}")',
    '"key":"{h}{h}{h}99"',
    '{{"username": "me", "key": "{h}{h}{h}99"}}',
    "api key: {h}",
    "API key: {p}",
    "your API key = {p}",
    "https://hooks.slack.com/services/T0{a}/B0{a}/{t}",
    "https://discord.com/api/webhooks/1234567890/{t}",
    "https://discordapp.com/api/v10/webhooks/1234567890/{t}",
    "https://api.telegram.org/bot123456:{t}/sendMessage",
    "openssl rsa -passin pass:{w}",
    "openssl req -passout pass:{p}",
    "wandb login --relogin {h}{h}{h}99",
    "xai-{t}{t}",
    "SG.{t}.{t}",
    "pplx-{t}{t}",
]
ORDINARY = [
    "num_tokens=512",
    "tokens: 1,234",
    "tokenizer: x",
    "tokenizer=LlamaTokenizerFast(name_or_path='m', vocab_size=32000)",
    "Enter your password to continue",
    "the password was wrong",
    "Incorrect password: try again",
    "password: authentication failed for user",
    "fe_sendauth: no password supplied",
    "eos_token: <|im_end|>",
    "pad_token=</s>",
    "PAD_TOKEN=<pad>",
    "token_type_ids=None",
    "api_key=None",
    "api_key: str = ''",
    "password=${DB_PASSWORD}",
    "password: $PASSWORD",
    "token=<your token>",
    "api_key=os.environ['X']",
    "data.clean.secrets: redact",
    "data.clean.secrets=warn",
    "key=train.learning_rate",
    "num_key_value_heads=8",
    "commit 3f786850e387550fdab836ed7e6dc881de23001b",
    "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-0.6B@main",
    "/home/me/token/model:2",
    "s3://bucket/rows:2024@v2.jsonl",
    "https://huggingface.co:443/a?rows=100&columns=token",
    "http://localhost:8000/v1#m",
    "git@github.com:me/x.git",
    "docker run -u 1000:1000 image",
    "python -u train.py",
    "next token: the",
    "token 15 of 512",
    "Token indices sequence length is longer than the specified maximum sequence length for this model (1024 > 512)",
    "max_new_tokens=256",
    "tokens/s: 12345678",
    "special token: [PAD]",
    "`--token TOKEN` needs a value",
    "use --token to give one; --token-file FILE",
    "set `HF_TOKEN` or run `hf auth login`",
    "secret of success",
    "the key: value pairs",
    "KeyError: 'model.layers.0.weight'",
    "hf_transfer",
    "sk-learn",
    "at 10:30:00 user@host",
    "2026-11-18 12:00:00 [rank0] token: 17 loss=2.5",
    "me@host.example",
    "mailto:me@host.example",
    "image: repo/name:tag@sha256:9f86d081",
    "cookie consent",
    "authorization failed: 401",
    "the author: Bob",
    "PWD=/home/me/x",
    "OLDPWD=/home/me",
    "pass: 12 of 20",
    "bypass=true",
    "passes=3",
    "compass: north",
    "--auth-file x",
    "bearer of news",
    "Invalid credentials: set AWS_ACCESS_KEY_ID",
    "credentials: missing",
    "set `storage.profile` or the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "password=password",
    "api_key=api_key",
    "tok/s=12345678",
    "max_token=12345678",
    "use_auth_token=True",
    "hub_token=None",
    "token=None",
    "`token`: not allowed",
    "api_key: not set",
    "api key: use `--api-key`",
    "the token: `abc`",
    "pad_token_id=128001",
    "signature=(x: int)",
    "inspect.signature: bad",
    "sig=5",
    "eos_token_id: 151645",
    "PASS, 18 of 20",
    "verdict: PASS",
    "FAIL: pass=3",
    "token_embd.weight",
    "model.embed_tokens.weight: [32000, 4096]",
    "last_token: 12 tokens",
    "step 12: key=abc",
    "https://example.com/a@b",
    "http://h:8080/@x",
    "@pytest.fixture",
    "rows: 3 key: question",
    "cls_token='[CLS]'",
    "Secret scanning: 2 rows with secrets",
    "`tunewell train --set train.epochs=3`",
    "WEIGHT_KEY=model.layers.0",
    "train.py:12: password check",
    'secret = str(values.get("password") or "")',
    '-H "Authorization: Bearer $TUNEWELL_TOKEN"',
    "no such option: --token (did you mean: --json)",
    "docker run -u root:root image",
    "docker run --user app:staff image",
    "podman exec --user 1000:users x",
    "docker run --user 1000:users image",
    "chown -u www-data:www-data x",
    "python -u train.py:main",
    "python -u train.py:main2",
    "docker login failed: retry",
    "mysql -u root -p",
    "sshpass -p $PASS ssh x",
    "the login page -p is missing",
    "wandb login failed",
    "wandb login failed at 12",
    "wandb login",
    "password: required",
    "password: missing",
    "api_key: expired",
    "token: invalid",
    "BATCH_KEY=rows_2024",
    "SORT_KEY=created_2024",
    "TEXT_KEY=question_text1",
    "LABEL_KEY=answer-v2",
    "image_token=IMG_0001_PLACE",
    "video_token=VID_0002_END",
    "sk-learn-contrib-extra-package",
    "sk-image-tools-for-python3",
    "hf_Llama2ForCausal",
    "hf_Qwen3MoeForCausalLM",
    "xai-explainability-toolkit-2024",
    "r8_quantization_of_layers_12",
    "pplx-7b-online-chat-2024",
    "gsk_training_rows_2024_v2",
    "SG.model.layers.0.weight.very.long",
    "SG.encoder.block.11.attention.output",
    "PASS=3 FAIL=0",
    "PASS=ok",
    "mysql -u root -p$PW",
    "curl -u $USER:$PASS http://x",
    "zip -r rows.zip rows -a",
    "key='question_text1'",
    "https://discord.com/channels/12345678/12345678",
    "the webhooks of Slack",
]


@pytest.mark.parametrize("around", ["{}", "line one\n2026 ERROR {} RuntimeError: CUDA out of memory", "quoted"])
@pytest.mark.parametrize("text", PLANTED)
def test_a_secret_of_a_log_an_address_or_a_config_is_replaced(text: str, around: str) -> None:
    """`diagnose` showed `PGPASSWORD='...'`, `--token X` and `-u admin:X` of logs, and errors repeated addresses."""
    public = TOKEN[-16:].upper()
    planted = text.format(p=PASSWORD, w=WORD, t=TOKEN, a=public, h=HEX, k="KEY")
    shown = redact(repr(planted) if around == "quoted" else around.format(planted))
    assert not any(secret in shown for secret in (PASSWORD, WORD, TOKEN, public, HEX, "hunter", "hunt3", "two words"))
    assert "[redacted]" in shown


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_about_tokens_passwords_and_keys_stays(text: str) -> None:
    """Numbers of tokens, names of models, hashes and advice about keys must still be readable."""
    assert redact(text) == text
