"""The demo as `make demo` makes it: what its models show of fine-tuning, quantisation and learning; `make soak`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import geosweep_process

from orchestrator.query import Store

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("demo") / "store"
    for command in (("data", "prepare", "builtin"), ("run", "demo")):
        done = geosweep_process(*command, "--store", store)
        assert done.returncode == 0, done.stdout + done.stderr
    return store


def rows(store: Path, sql: str) -> list[dict[str, Any]]:
    with Store(store) as opened:
        return opened.sql(sql).rows()


def values(metric: str, dataset: str) -> str:
    return f"max(m.value) filter (m.metric = '{metric}' and m.dataset = '{dataset}')"


def test_fine_tuning_each_model_on_code_lowers_its_loss_there_and_raises_the_held_out_loss(demo: Path) -> None:
    found = rows(
        demo,
        f"""select {values("finetune_gain", "python")} as gained, {values("forgetting", "docs")} as forgotten
            from final f join metrics m using (checkpoint) group by f.trial""",
    )
    assert len(found) == 16
    assert all(row["gained"] > 0 and row["forgotten"] > 0 for row in found)


def test_three_bits_by_gptq_lose_less_than_by_rounding_over_all_models_and_domains(demo: Path) -> None:
    (found,) = rows(
        demo,
        """select count(distinct m.checkpoint) as models, count(distinct m.dataset) as domains,
               avg(m.value) filter (m.metric = 'gptq_loss_increase_3bit') as gptq,
               avg(m.value) filter (m.metric = 'rtn_loss_increase_3bit') as rtn
           from final f join metrics m using (checkpoint)""",
    )
    assert (found["models"], found["domains"]) == (16, 6)
    assert found["gptq"] < found["rtn"]


def test_every_model_learns_and_no_evaluation_fails(demo: Path) -> None:
    (found,) = rows(demo, "select max(loss_docs) filter (tokens > 0) as worst from final")
    (unigram,) = rows(
        demo,
        """select unigram_entropy as nats from corpora
           where corpus = 'builtin' and split = 'heldout' and domain = 'docs'""",
    )
    assert found["worst"] < unigram["nats"]
    assert rows(demo, "select * from failures") == []
    assert rows(demo, "select distinct state from cells") == [{"state": "complete"}]
