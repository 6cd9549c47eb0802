"""Real hosts for the tests of this folder: network namespaces with a Ray node each. They need root's rights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_tools import sweep_text, tokens_of_seconds

from cluster.testbed import Bed

SECONDS_OF_TRIAL = 20.0  # long enough for all that is to be lost while it goes on


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="module")
def testbed() -> Iterator[Bed]:
    """A new one for each file; where hosts cannot be made, every test fails and says what right is missing."""
    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as folder, Bed(Path(folder)) as made:
        yield made


@pytest.fixture(scope="session")
def sweep_file(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    path = folder / "lost.yaml"
    path.write_text(sweep_text(tokens_of_seconds(new_store(folder, corpus), SECONDS_OF_TRIAL)))
    return path


def new_store(folder: Path, corpus: Path) -> Path:
    """The folder of a store that every host sees: no store yet, but its corpus."""
    shutil.copytree(corpus, folder / "store" / "corpora" / "builtin")
    return folder / "store"


@pytest.fixture
def shared_store(tmp_path: Path, corpus: Path) -> Path:
    return new_store(tmp_path, corpus)


@pytest.fixture(scope="module")
def lost_store(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return new_store(tmp_path_factory.mktemp("lost"), corpus)


@pytest.fixture(scope="module")
def undisturbed_store(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return new_store(tmp_path_factory.mktemp("undisturbed"), corpus)
