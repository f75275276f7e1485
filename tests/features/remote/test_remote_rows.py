"""Rows in object storage: a real S3 server, with a proxy before it that makes faults."""

import gc
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from s3_server import KEY, SECRET, Fault, Request

from corpora import prepare_in, row, rows_file, tree
from tunewell.config.rules import Storage
from tunewell.core.errors import UserError
from tunewell.data.sources.base import SourceOptions, find_files
from tunewell.data.sources.blocks import ReadOptions, read_blocks
from tunewell.features.remote import fetch, store
from tunewell.features.remote.access import find_access
from tunewell.features.remote.address import compile_pattern, parse_address
from tunewell.features.remote.cache import ObjectCache
from tunewell.features.remote.store import RemoteStore
from tunewell.records.manifest import read_manifest
from tunewell.workflows.prepare import prepare

_ROW_BYTES = 300


@pytest.fixture
def bucket(cloud, request):
    """A folder of this test in a bucket, with three objects of rows; its address."""
    name = f"rows/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}"
    for number in range(3):
        put(f"s3://{name}/data/part-{number}.jsonl", lines(number * 100, 100))
    cloud.requests.clear()
    return f"s3://{name}"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(fetch, "_WAITS", (0.01, 0.02, 0.05))
    monkeypatch.setattr(store, "_WAITS", (0.01, 0.02))
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}
    monkeypatch.setitem(store.RETRY_CONFIG, "backoff", backoff)


def lines(first: int, number: int) -> bytes:
    return b"".join(json.dumps(row(index)).encode() + b"\n" for index in range(first, first + number))


def put(address: str, data: bytes) -> None:
    parsed = parse_address(address)
    RemoteStore(parsed, Storage()).upload(data, parsed)


def found(path: str, **settings) -> list:
    return find_files(path, base=Path(), options=SourceOptions(Storage(**settings)))


def build(folder: Path, model: Path, path: str, *sets: str) -> Path:
    prepare(model=str(model), data=[path], out=folder / "corpus", sets=["data.held_out=0.1", *sets])
    return folder / "corpus"


def test_a_prefix_gives_the_same_documents_as_local_files(bucket, tiny_model, tmp_path):
    """Remote rows that became other documents would make a run on the cluster differ from one on a laptop."""
    for number in range(3):
        rows_file(tmp_path / "local" / f"part-{number}.jsonl", 100, first=number * 100)
    local = prepare_in(tmp_path / "one", tiny_model, tmp_path / "local", "data.held_out=0.1").manifest
    remote = read_manifest(build(tmp_path / "two", tiny_model, f"{bucket}/data"))
    assert remote.corpus_sha256 == local.corpus_sha256
    assert [source.sha256 for source in remote.sources] == [source.sha256 for source in local.sources]
    assert [source.name for source in remote.sources] == [f"{bucket}/data/part-{number}.jsonl" for number in range(3)]
    assert all(len(source.version) == 32 for source in remote.sources)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("data/part-[01].jsonl", ["part-0", "part-1"]),
        ("data/*.jsonl", ["part-0", "part-1", "part-2"]),
        ("**/part-2.jsonl", ["part-2"]),
        ("**", ["part-0", "part-1", "part-2"]),
        ("", ["part-0", "part-1", "part-2"]),
        ("data/", ["part-0", "part-1", "part-2"]),
        ("data/part-1.jsonl", ["part-1"]),
    ],
)
def test_globs_and_prefixes_name_objects_as_in_a_folder(pattern, names, bucket):
    assert [Path(file.name).stem for file in found(f"{bucket}/{pattern}")] == names


def test_a_star_does_not_cross_a_slash():
    assert not compile_pattern("a/*.jsonl").fullmatch("a/b/c.jsonl")
    assert compile_pattern("a/**/c.jsonl").fullmatch("a/c.jsonl")
    assert compile_pattern("a/[!b]?.jsonl").fullmatch("a/cx.jsonl")
    assert not compile_pattern("a/[!b]?.jsonl").fullmatch("a/bx.jsonl")


def test_a_second_build_sends_one_request_and_downloads_nothing(bucket, cloud, tiny_model, tmp_path):
    """A cache that asked for every object would make an up-to-date corpus of 10,000 objects wait minutes."""
    corpus = build(tmp_path, tiny_model, f"{bucket}/data")
    before, stamp = tree(corpus), (corpus / "manifest.json").stat().st_mtime_ns
    cloud.requests.clear()
    build(tmp_path, tiny_model, f"{bucket}/data")
    assert tree(corpus) == before and (corpus / "manifest.json").stat().st_mtime_ns == stamp
    assert [request.method for request in cloud.requests] == ["HEAD", "GET"]  # no such object, then the listing


def test_a_change_at_the_source_is_noticed(bucket, tiny_model, tmp_path):
    before = read_manifest(build(tmp_path, tiny_model, f"{bucket}/data")).corpus_sha256
    put(f"{bucket}/data/part-1.jsonl", lines(1000, 100))
    after = read_manifest(build(tmp_path, tiny_model, f"{bucket}/data"))
    assert after.corpus_sha256 != before


def test_offline_uses_the_earlier_download_and_sends_nothing(bucket, cloud, tiny_model, tmp_path):
    corpus = build(tmp_path / "one", tiny_model, f"{bucket}/data")
    cloud.requests.clear()
    again = build(tmp_path / "two", tiny_model, f"{bucket}/data", "storage.offline=true")
    assert read_manifest(again).corpus_sha256 == read_manifest(corpus).corpus_sha256
    assert cloud.requests == []
    with pytest.raises(UserError, match="has not been downloaded, and offline mode is on"):
        found(f"{bucket}/other", offline=True)


def test_a_throttled_server_is_asked_again(bucket, cloud, tiny_model, tmp_path):
    """S3 answers `503 SlowDown` to every third request here."""
    body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    cloud.decide = lambda request: Fault(503, body) if request.number % 3 else None
    assert len(read_manifest(build(tmp_path, tiny_model, f"{bucket}/data")).sources) == 3


def test_a_server_that_stays_overloaded_is_a_clear_error(bucket, cloud):
    cloud.decide = lambda request: Fault(503, b"<Error><Code>SlowDown</Code></Error>")
    with pytest.raises(UserError, match=r"overloaded or has failed \(status 503") as caught:
        found(f"{bucket}/data")
    assert "continues" in str(caught.value.fix)


def test_a_cut_connection_is_resumed_from_the_last_byte(bucket, cloud, tiny_model, tmp_path):
    """Every download is cut after 5,000 bytes; starting from the first byte again would never end."""
    cloud.decide = lambda request: (
        Fault(cut_after=5000) if request.method == "GET" and "part-" in request.path else None
    )
    corpus = build(tmp_path, tiny_model, f"{bucket}/data")
    ranges = [request.headers["range"] for request in cloud.requests if "range" in request.headers]
    assert len(ranges) >= 6 and all(int(text.removeprefix("bytes=").rstrip("-").split("-")[0]) for text in ranges)
    assert {source.sha256 for source in read_manifest(corpus).sources} == {
        file.sha256() for file in found(f"{bucket}/data")
    }


def test_an_object_that_is_replaced_midway_is_refused_and_the_old_corpus_stays(bucket, cloud, tiny_model, tmp_path):
    """Half of the old object and half of the new one would be rows that nobody wrote."""
    corpus = build(tmp_path, tiny_model, f"{bucket}/data/part-0.jsonl")
    before = tree(corpus)
    put(f"{bucket}/data/part-0.jsonl", lines(500, 100))
    replaced: list[int] = []

    def replace(request: Request) -> Fault | None:
        if request.method != "GET" or "part-0" not in request.path:
            return None
        if "range" in request.headers and not replaced:
            replaced.append(1)
            put(f"{bucket}/data/part-0.jsonl", lines(900, 100))
        return Fault(cut_after=5000)

    cloud.decide = replace
    with pytest.raises(UserError, match="changed while it was read"):
        build(tmp_path, tiny_model, f"{bucket}/data/part-0.jsonl")
    assert tree(corpus) == before and replaced


def is_data(request: Request, name: str) -> bool:
    return request.method == "GET" and name in request.path


def test_a_file_is_read_while_the_next_ones_are_downloaded(bucket, cloud):
    """Before, the first row was read after the last download: a first read took 1.7 times as long as from a disk."""
    is_read = threading.Event()
    in_time: list[bool] = []

    def hold(request: Request) -> None:
        if is_data(request, "part-2"):
            in_time.append(is_read.wait(20))

    cloud.decide = hold
    first, second, third = found(f"{bucket}/data")
    rows = [sum(map(len, read_blocks(file, ReadOptions(1 << 22, 64)))) for file in (first, second)]
    is_read.set()
    assert third.sha256() == hashlib.sha256(lines(200, 100)).hexdigest()
    assert rows == [100, 100] and in_time == [True]


def test_a_failed_download_stops_the_reader_before_its_file(bucket, cloud):
    """An hour of tokenising before the error of the last file would be lost time."""
    cloud.decide = lambda request: (
        Fault(403, b"<Error><Code>AccessDenied</Code></Error>") if is_data(request, "part-2") else None
    )
    first, second, _ = found(f"{bucket}/data")
    with pytest.raises(UserError, match=r"part-2.* is denied"):
        for file in [first, *[second] * 200]:  # the third fails during this
            file.open().close()
            time.sleep(0.05)
    cloud.decide = lambda request: None
    assert second.open().read() == lines(100, 100)


def test_downloads_stop_when_nobody_reads_the_files(bucket, cloud, monkeypatch):
    """They would fill the cache during the training, or keep a failed command from ending."""
    monkeypatch.setattr(fetch, "_WAITS", (60.0,))
    cloud.decide = lambda request: (
        Fault(503, b"<Error><Code>SlowDown</Code></Error>") if is_data(request, "part-2") else None
    )
    files = found(f"{bucket}/data")
    files[0].open().close()
    del files
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name == "tunewell-download"]
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_limit_downloads_only_the_files_it_needs(bucket, cloud, tiny_model, tmp_path):
    """500 rows of a terabyte need one object."""
    sources = [{"path": f"{bucket}/data", "limit": 150}]
    for expected in (["part-0", "part-1"], []):
        cloud.requests.clear()
        result = prepare({"model": str(tiny_model), "data": {"sources": sources}}, out=tmp_path / "corpus")
        assert [
            name for name in ("part-0", "part-1", "part-2") if any(is_data(r, name) for r in cloud.requests)
        ] == expected
        assert result.was_up_to_date == (not expected)
    assert [source.rows for source in result.manifest.sources] == [100, 50, 0]
    assert [bool(source.sha256) for source in result.manifest.sources] == [True, True, False]
    offline = {"model": str(tiny_model), "data": {"sources": sources}, "storage": {"offline": True}}
    assert prepare(offline, out=tmp_path / "offline").manifest.corpus_sha256 == result.manifest.corpus_sha256


def test_wrong_bytes_are_noticed_by_the_checksum_of_the_server(bucket, cloud, monkeypatch):
    """A proxy that damages data would otherwise change rows silently."""
    real = RemoteStore.read

    def damaged(self, entry, **options):
        for chunk in real(self, entry, **options):
            yield os.urandom(len(bytes(chunk)))

    monkeypatch.setattr(RemoteStore, "read", damaged)
    (file,) = found(f"{bucket}/data/part-0.jsonl")
    with pytest.raises(UserError, match=r"two downloads of .* differ"):
        file.open()
    assert not list(ObjectCache(Storage()).folder.glob("content/*/*"))


def _skewed(request: Request) -> Fault | None:
    sent = next(value for name, value in request.headers.items() if name.lower() == "x-amz-date")
    server = datetime.now(UTC) + timedelta(hours=2)  # the clock of a server that is right, and ours is late
    is_late = abs(server - datetime.strptime(sent, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)) > timedelta(minutes=15)
    return Fault(403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>") if is_late else None


def _wrong_region(request: Request) -> Fault | None:
    text = "the region 'us-east-1' is wrong; expecting 'eu-central-1'"
    return Fault(400, f"<Error><Code>AuthorizationHeaderMalformed</Code><Message>{text}</Message></Error>".encode())


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret-value"}, "the secret key is wrong", "missing character"),
        ({"AWS_ACCESS_KEY_ID": "AKWRONGWRONGWRONG"}, "the access key is wrong", "AWS_ACCESS_KEY_ID"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "no access keys were found", "storage.profile"),
        ({"AWS_ACCESS_KEY_ID": None}, "AWS_ACCESS_KEY_ID is not set", "set AWS_ACCESS_KEY_ID"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached", "--offline"),
        ({"AWS_PROFILE": "teem"}, "there is no profile `teem`", "aws configure"),
        (_skewed, "the clock of this machine is wrong", "set the clock"),
        (_wrong_region, "not in the region `us-east-1`", "eu-central-1"),
    ],
)
def test_access_problems_are_named_with_their_fix_and_without_keys(change, what, fix, bucket, cloud, monkeypatch):
    if callable(change):
        cloud.decide = change
    else:
        for name, value in change.items():
            monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        found(f"{bucket}/data/part-0.jsonl")
    text = str(caught.value)
    assert what in text and fix in text
    assert SECRET not in text and "wrong-secret-value" not in text and caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("s3://no-such-bucket-here/rows.jsonl", "there is no bucket `no-such-bucket-here`"),
        ("{bucket}/data/part-9.jsonl", "no object and no prefix"),
        ("{bucket}/none/*.jsonl", "no object matches"),
        ("{bucket}/empty.jsonl", r"is empty \(0 bytes\)"),
        ("s3:///rows.jsonl", "does not name a bucket"),
        ("s3://A_B/rows.jsonl", "not a valid bucket name"),
        ("https://user:secret-word@example.com/rows.jsonl", "contains a user name or a password"),
        ("https://example.com/rows.jsonl?X-Amz-Signature=abcdef", "has a query"),
        ("r2://bucket/rows.jsonl", "account for `r2://` is not set"),
    ],
)
def test_wrong_addresses_are_named(path, what, bucket, monkeypatch):
    put(f"{bucket}/empty.jsonl", b"")
    monkeypatch.delenv("R2_ACCOUNT_ID", raising=False)
    with pytest.raises(UserError, match=what) as caught:
        found(path.format(bucket=bucket))
    assert "secret-word" not in str(caught.value) and "abcdef" not in str(caught.value)


def test_a_web_server_is_read_and_a_missing_file_named(bucket, server, tmp_path):
    """The proxy answers as a plain web server does for an address without a signature: refused by S3."""
    with pytest.raises(UserError, match="is denied"):
        found(f"{server}/{bucket.removeprefix('s3://')}/data/part-0.jsonl")


def test_a_file_on_a_web_server_is_read(tmp_path, tiny_model, cloud):
    rows_file(tmp_path / "web" / "rows.jsonl", 50)
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path / "web")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
    ) as web:
        try:
            port = web.stdout.readline().split("port ")[1].split()[0]
            manifest = read_manifest(build(tmp_path, tiny_model, f"http://127.0.0.1:{port}/rows.jsonl"))
            assert manifest.rows_in == 50
            with pytest.raises(UserError, match="there is no file"):
                found(f"http://127.0.0.1:{port}/other.jsonl")
        finally:
            web.terminate()


def test_keys_come_from_profiles_and_named_settings(tmp_path, monkeypatch):
    """A profile in the config comes before the variables; a profile in AWS_PROFILE after them, as in AWS's tools."""
    (tmp_path / "c").write_text("[team]\naws_access_key_id = AKTEAM\naws_secret_access_key = teamsecret\n")
    (tmp_path / "g").write_text("[profile team]\nregion = eu-west-3\nendpoint_url = https://minio.example\n")
    environ = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "c"), "AWS_CONFIG_FILE": str(tmp_path / "g")}
    variables = {"AWS_ACCESS_KEY_ID": "AKENV", "AWS_SECRET_ACCESS_KEY": "envsecret"}
    address = parse_address("s3://bucket/x")
    named = find_access(address, Storage(profile="team"), environ | variables)
    assert (named.options["access_key_id"], named.region, named.endpoint) == (
        "AKTEAM",
        "eu-west-3",
        "https://minio.example",
    )
    by_variable = find_access(address, Storage(), environ | {"AWS_PROFILE": "team"})
    assert by_variable.options["access_key_id"] == "AKTEAM" and by_variable.origin == "profile `team`"
    assert (
        find_access(address, Storage(), environ | variables | {"AWS_PROFILE": "team"}).options["access_key_id"]
        == "AKENV"
    )
    r2 = find_access(parse_address("r2://bucket/x"), Storage(), environ | variables | {"R2_ACCOUNT_ID": "abc"})
    assert (r2.endpoint, r2.region) == ("https://abc.r2.cloudflarestorage.com", "auto")
    assert "secret" not in repr(named) and "AKTEAM" not in repr(named)


def test_the_cache_stays_below_its_limit_and_keeps_what_this_command_needs(bucket, monkeypatch):
    sizes = [file.source.size() for file in found(f"{bucket}/data")]
    limit = (max(sizes) + 10) / 1e9
    monkeypatch.setattr(ObjectCache, "_used", set())
    for number in range(3):
        (file,) = found(f"{bucket}/data/part-{number}.jsonl", cache_gb=limit)
        file.open().close()
        ObjectCache._used.clear()  # as in a new process
    cached = list(ObjectCache(Storage()).folder.glob("content/*/*"))
    assert [path.name for path in cached] == [file.sha256()]
    with pytest.raises(UserError, match="do not fit in the cache") as caught:
        found(f"{bucket}/data", cache_gb=limit)[0].open()
    assert "storage.cache_gb" in str(caught.value.fix)


def test_a_full_cache_disk_is_an_error_that_leaves_the_cache_intact(bucket, cloud, monkeypatch):
    (first,) = found(f"{bucket}/data/part-0.jsonl")
    first.open().close()
    usage = type("Usage", (), {"free": 70 << 20})
    monkeypatch.setattr("tunewell.features.remote.cache._RESERVE_BYTES", 70 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    (second,) = found(f"{bucket}/data/part-1.jsonl")
    with pytest.raises(UserError, match="not enough disk space for the remote files"):
        second.open()
    assert first.sha256() and first.open().read()


def test_a_changed_copy_in_the_cache_is_downloaded_again(bucket):
    """A copy that somebody edited would otherwise be trained on under the hash of the original."""
    (file,) = found(f"{bucket}/data/part-0.jsonl")
    with file.open() as stream:
        before, path = stream.read(), Path(stream.name)
    path.chmod(0o644)
    path.write_bytes(b"x" * len(before))
    (again,) = found(f"{bucket}/data/part-0.jsonl")
    with again.open() as stream:
        assert stream.read() == before


def test_no_key_is_written_anywhere(bucket, cloud, tiny_model, tmp_path, capfd):
    from tunewell.cli.main import main

    def command(*extra: str) -> None:
        main(
            [
                "prepare",
                "--model",
                str(tiny_model),
                "--data",
                f"{bucket}/data",
                "--out",
                str(tmp_path / "corpus"),
                *extra,
            ]
        )

    command("--set", "data.held_out=0.1")
    os.environ["AWS_SECRET_ACCESS_KEY"], right = "another+secret/VALUE", SECRET
    command("--set", "seed=1")
    os.environ["AWS_SECRET_ACCESS_KEY"] = right
    printed = capfd.readouterr()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (KEY, SECRET, "another+secret/VALUE"):
        assert secret not in printed.out + printed.err and secret.encode() not in written
    assert "the secret key is wrong" in printed.err


_KILLED = """
import sys, os, signal
from tunewell.features.remote import fetch
from tunewell.features.remote.cache import ObjectCache
moment, count = int(sys.argv[1]), 0
def step(*_):
    global count
    count += 1
    if count == moment:
        os.kill(os.getpid(), signal.SIGKILL)
for owner, name in ((fetch._Download, "count"), (ObjectCache, "add"), (ObjectCache, "save_listing"),
                    (ObjectCache, "find")):
    def wrap(real):
        def wrapped(*args, **kwargs):
            step()
            result = real(*args, **kwargs)
            step()
            return result
        return wrapped
    setattr(owner, name, wrap(getattr(owner, name)))
from tunewell.cli.main import main
sys.exit(main(["prepare", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", [2, 9, pytest.param(0, marks=pytest.mark.faults)])
def test_after_kill_9_the_next_run_ends_with_the_same_corpus(moment, bucket, tiny_model, tmp_path):
    """`faults` tries ten moments: between listing, chunks, moves into the cache and records."""
    whole = tree(build(tmp_path / "whole", tiny_model, f"{bucket}/data"))
    for at in [moment] if moment else [1, 3, 5, 7, 8, 11, 13, 16, 19, 22]:
        cache = tmp_path / f"cache-{at}"
        out = tmp_path / f"killed-{at}" / "corpus"
        arguments = [
            "--model",
            str(tiny_model),
            "--data",
            f"{bucket}/data",
            "--out",
            str(out),
            "--set",
            "data.held_out=0.1",
        ]
        environ = {**os.environ, "TUNEWELL_CACHE": str(cache)}
        command = [sys.executable, "-c", _KILLED]
        killed = subprocess.run([*command, str(at), *arguments], env=environ, capture_output=True, check=False)
        assert killed.returncode == -9, killed.stderr.decode()
        assert not out.exists()
        again = subprocess.run([*command, "0", *arguments], env=environ, capture_output=True, check=False)
        assert again.returncode == 0, again.stderr.decode()
        assert tree(out) == whole
