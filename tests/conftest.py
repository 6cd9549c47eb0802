"""What several test files need: a store with a small built-in corpus, made once a session from real text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: tests share two cores
os.environ["COLUMNS"] = "160"  # before the command line is loaded: the width of its tables

import pytest
from hypothesis import settings
from s3_server import BUCKET, SECRET, s3_server
from small_corpus import SMALL

from trainers.tokens import prepare

settings.register_profile("untimed", deadline=None)  # other processes share the cores
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files with a real Ray first: they take longest, so the workers end together."""
    with_ray = {item.path for item in items if item.get_closest_marker("ray")}
    items.sort(key=lambda item: item.path not in with_ray)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small built-in corpus with a vocabulary of 500; read it, do not change it."""
    together = "PYTEST_XDIST_WORKER" in os.environ  # all workers share one: the first prepares it, the others wait
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if together else base) / "corpora" / "builtin"
    prepare("builtin", folder, settings=SMALL)
    return folder


@pytest.fixture
def store_root(tmp_path: Path, corpus: Path) -> Path:
    """A new store that holds the small corpus as 'builtin'."""
    from orchestrator.store.layout import create_or_open

    layout = create_or_open(tmp_path / "store")
    shutil.copytree(corpus, layout.corpus("builtin"))
    return layout.root


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real S3 server with an empty bucket."""
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture
def s3_store(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a store that is not there yet, on the test's own S3 server, reached as users reach theirs."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("GEOSWEEP_CACHE", str(tmp_path / "copies"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return f"s3://{BUCKET}/{tmp_path.name}"
