"""What several test files need: a store with a small built-in corpus, made once a session from real text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: tests share two cores

import pytest
from hypothesis import settings
from s3_server import BUCKET, s3_server

from trainers.corpus import BUILTIN_TEXT
from trainers.tokens import Settings, TrainedTokenizer, prepare

settings.register_profile("untimed", deadline=None)  # other processes share the cores
settings.load_profile("untimed")

SMALL_TEXT = BUILTIN_TEXT.model_copy(
    update={
        "domains": tuple(
            domain.model_copy(update={"max_bytes": 600_000 if domain.role == "mix" else 150_000})
            for domain in BUILTIN_TEXT.domains
        ),
        "max_characters": 10_000,
    }
)
SMALL = Settings(text=SMALL_TEXT, tokenizer=TrainedTokenizer(vocab_size=500, sample_bytes=200_000), shard_tokens=2**26)

SECRET = "a-secret-that-must-not-be-written-anywhere"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files with a real Ray first: they take longest, so the workers end together."""
    with_ray = {item.path for item in items if item.get_closest_marker("ray")}
    items.sort(key=lambda item: item.path not in with_ray)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small built-in corpus with a vocabulary of 500; read it, do not change it."""
    folder = tmp_path_factory.mktemp("corpora") / "builtin"
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
