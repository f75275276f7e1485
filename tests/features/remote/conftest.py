import sys

import pytest
from s3_server import KEY, SECRET, faulty_proxy, s3_server


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip("the S3 server of the tests runs on Linux only")
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server):
    with faulty_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def cloud(proxy, tmp_path, monkeypatch):
    """Environment of a user with access keys, an endpoint behind the faulty proxy and an empty cache."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    return proxy
