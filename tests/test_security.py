"""Names from a sweep file stay inside the store; tokens are closed to others; credentials go nowhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_spec import sweep_file

from cluster.connect import host_and_port, use_token
from cluster.testbed import new_token
from orchestrator.corpora import require_corpora
from orchestrator.preview import preview
from orchestrator.store.layout import StoreLayout
from trainers.errors import InputError

BASE = {"preset": "tiny", "scale": "tiny-32", "context": 32, "token_budget": 8192, "batch_size": 8}
OUTSIDE = ["../outside", "/outside", "..", "a/../../outside", "a/b", "", ".hidden", "a\x00b"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("field", ["name", "corpus", "suite"])
def test_a_name_in_a_sweep_file_that_leads_out_of_the_store_is_refused(store_root: Path, name: str, field: str) -> None:
    outside = store_root.parent / "outside"
    shutil.copytree(store_root / "corpora" / "builtin", outside)  # what a way out would find
    changes: dict[str, Any] = {
        "name": {"name": name, "base": BASE},
        "corpus": {"base": {**BASE, "corpus": name}},
        "suite": {"base": BASE, "evaluations": [{"evaluator": "loss", "suite": name}]},
    }[field]
    before = sorted(store_root.parent.rglob("*"))
    with pytest.raises(InputError):
        require_corpora(store_root, preview(sweep_file(**changes), "sweep.yaml", store_root).plan)  # as `run` begins
    assert sorted(store_root.parent.rglob("*")) == before


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_place_of_a_store_can_be_named_outside_it(tmp_path: Path, name: str) -> None:
    layout = StoreLayout(tmp_path)
    places = (
        lambda: layout.corpus(name),
        lambda: layout.sweep(name, "revision"),
        lambda: layout.sweep("sweep", name),
        lambda: layout.checkpoint(name, 0),
        lambda: layout.lease(name),
        lambda: layout.claims(name),
        lambda: layout.inbox(name),
    )
    for place in places:
        with pytest.raises(InputError):
            place()


def test_a_token_file_that_others_can_read_is_closed_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    new_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert use_token() == path
    assert path.stat().st_mode & 0o777 == 0o600


def test_tune_is_kept_from_copying_keys_into_the_environment_of_trials() -> None:
    code = """
import os
from orchestrator import tune
from ray.tune.execution.class_cache import ENV_VARS_TO_PROPAGATE
assert not [name for name in ENV_VARS_TO_PROPAGATE if name.startswith("AWS")], ENV_VARS_TO_PROPAGATE
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "http://head:8265", ":6379", "head:port"])
def test_what_is_no_address_of_a_head_is_refused_with_what_is(address: str) -> None:
    with pytest.raises(InputError, match="HOST:PORT"):
        host_and_port(address)
