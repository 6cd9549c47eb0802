from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import NOON, curve_rows, metric_row, row

from orchestrator.query import Answer, Format, Store, write_result
from orchestrator.schema import TABLES, VIEWS
from orchestrator.store.inbox import list_units, publish
from orchestrator.store.layout import StoreLayout, create_or_open
from trainers.errors import EnvironmentFault, InputError


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return create_or_open(tmp_path / "store")


Chain = list[tuple[str, int]]  # segments of a trial in order, each with the tokens at its end


def submit(layout: StoreLayout, trials: dict[str, Chain], revision: str = "r1", at: datetime = NOON) -> None:
    """What a submitted sweep 'demo' stores, evaluation geometry (settings s1, version 1) at every checkpoint."""
    names = {"sweep": "demo", "revision": revision}
    cells = [row("trials", **names, trial=t, token_budget=chain[-1][1]) for t, chain in trials.items()]
    links = []
    for trial, chain in trials.items():
        parent, tokens = None, 0
        for position, (segment, end) in enumerate(chain):
            link = {"position": position, "segment": segment, "parent": parent, "from_tokens": tokens}
            links.append(row("chains", **names, trial=trial, **link, to_tokens=end))
            parent, tokens = segment, end
    publish(layout, "trials", cells)
    publish(layout, "chains", links)
    ask(layout, {segment: end for chain in trials.values() for segment, end in chain}, revision)
    publish(layout, "events", [submission(revision, at)])


def submission(revision: str, at: datetime) -> dict[str, Any]:
    event = f"submitted-{revision}-{at.isoformat()}"
    return row("events", event=event, kind="sweep_submitted", sweep="demo", detail=revision, time=at)


def ask(layout: StoreLayout, ends: dict[str, int], revision: str = "r1", version: int = 1) -> None:
    evaluation = {"evaluator": "geometry", "settings_digest": "s1", "evaluator_version": version}
    asked = {"sweep": "demo", "revision": revision, **evaluation}
    publish(layout, "asked", [row("asked", **asked, segment=segment, tokens=end) for segment, end in ends.items()])


def commit(layout: StoreLayout, segment: str, tokens: int) -> str:
    """A trained segment with its checkpoint; returns the checkpoint."""
    checkpoint = f"checkpoint-of-{segment}"
    publish(layout, "checkpoints", [row("checkpoints", checkpoint=checkpoint, segment=segment, tokens=tokens)])
    publish(layout, "segments", [row("segments", segment=segment, state="committed", to_tokens=tokens)])
    return checkpoint


def evaluate(layout: StoreLayout, checkpoint: str, value: float = 1.0, **given: Any) -> None:
    publish(layout, "metrics", [metric_row(checkpoint, "effective_rank", value, **given)])


@pytest.fixture
def study(layout: StoreLayout) -> Store:
    """A sweep with one trial in each state; done, reading and going share their first segment."""
    submit(
        layout,
        {
            "done": [("a", 100), ("b", 200)],
            "reading": [("a", 100), ("c", 300)],
            "going": [("a", 100), ("d", 400)],
            "new": [("e", 100), ("f", 200)],
            "exploded": [("g", 100), ("h", 200), ("i", 300)],
            "broken": [("j", 100), ("k", 200)],
        },
    )
    for segment, tokens in {"a": 100, "b": 200, "g": 100}.items():
        evaluate(layout, commit(layout, segment, tokens))
    commit(layout, "c", 300)
    diverged = {"segment": "h", "state": "diverged", "reason": "loss is nan", "diverged_at_tokens": 150}
    publish(layout, "segments", [row("segments", **diverged)])
    publish(layout, "segments", [row("segments", segment="j", state="failed", reason="out of memory")])
    return Store(layout.root)


# tables and views


def test_tables_and_views_of_an_empty_store_have_the_documented_columns(layout: StoreLayout) -> None:
    with Store(layout.root) as store:
        for name, table in {**TABLES, **VIEWS}.items():
            schema = store.table(name).arrow().schema
            assert [(f.name, f.type) for f in schema] == [(c.name, c.type) for c in table.columns], name


def test_cells_tell_the_state_of_each_trial(study: Store) -> None:
    rows = study.table("cells").rows()
    counts = ("state", "tokens", "checkpoints_done", "checkpoints_asked", "evaluations_done", "evaluations_asked")
    assert {cell["trial"]: tuple(cell[c] for c in counts) for cell in rows} == {
        "done": ("complete", 200, 2, 2, 2, 2),
        "reading": ("evaluating", 300, 2, 2, 1, 2),
        "going": ("training", 100, 1, 2, 1, 2),
        "new": ("waiting", 0, 0, 2, 0, 2),
        "exploded": ("diverged", 100, 1, 3, 1, 1),
        "broken": ("failed", 0, 0, 2, 0, 2),
    }
    reasons = {cell["trial"]: cell["reason"] for cell in rows if cell["reason"]}
    assert reasons == {"exploded": "loss is nan", "broken": "out of memory"}


def test_a_fork_is_on_a_trials_way_and_not_among_its_results(layout: StoreLayout) -> None:
    names = {"sweep": "demo", "revision": "r1", "trial": "one"}
    publish(layout, "trials", [row("trials", **names, token_budget=300)])
    fork = row("chains", **names, position=0, segment="fork", to_tokens=100, asked=False)
    end = row("chains", **names, position=1, segment="end", parent="fork", from_tokens=100, to_tokens=300)
    publish(layout, "chains", [fork, end])
    publish(layout, "events", [submission("r1", NOON)])
    commit(layout, "fork", 100)
    with Store(layout.root) as store:
        (cell,) = store.table("cells").rows()
        assert (cell["state"], cell["tokens"]) == ("training", 100)
        assert (cell["checkpoints_done"], cell["checkpoints_asked"]) == (0, 1)
        assert len(store.results()) == 0
        commit(layout, "end", 300)
        store.refresh()
        (cell,) = store.table("cells").rows()
        assert (cell["state"], cell["checkpoints_done"]) == ("complete", 1)
        assert [result["tokens"] for result in store.results().rows()] == [300]


def test_owed_is_what_was_asked_less_what_is_there_and_less_what_divergence_put_out_of_reach(study: Store) -> None:
    owed = {r["segment"]: (r["state"], r["ready"], r["checkpoint"]) for r in study.table("owed").rows()}
    waiting = ("waiting", False, None)
    assert owed == {
        "c": ("ready", True, "checkpoint-of-c"),
        **dict.fromkeys(("d", "e", "f", "j", "k"), waiting),
    }
    unreachable = study.sql("select segment from evaluations where state = 'unreachable' order by 1").rows()
    assert [r["segment"] for r in unreachable] == ["h", "i"]


def test_failed_segment_that_commits_later_counts_as_committed(layout: StoreLayout, study: Store) -> None:
    commit(layout, "j", 100)
    study.refresh()
    cell = study.sql("select state, reason from cells where trial = 'broken'").rows()
    assert cell == [{"state": "training", "reason": None}]
    assert study.sql("select state from segments where segment = 'j'").rows() == [{"state": "committed"}]


def test_evaluation_that_could_not_be_done_is_not_owed_and_not_counted_as_done(layout: StoreLayout) -> None:
    submit(layout, {"t": [("a", 100)]})
    reason = "width 64 does not divide by 128"
    checkpoint = commit(layout, "a", 100)
    failure = {"checkpoint": checkpoint, "evaluator": "geometry", "settings_digest": "s1", "evaluator_version": 1}
    publish(layout, "failures", [row("failures", **failure, reason=reason)])
    with Store(layout.root) as store:
        cell = store.sql("select state, evaluations_done, evaluations_failed from cells").rows()
        assert cell == [{"state": "complete", "evaluations_done": 0, "evaluations_failed": 1}]
        assert store.sql("select state, reason from evaluations").rows() == [{"state": "failed", "reason": reason}]
        assert len(store.table("owed")) == 0
        publish(layout, "metrics", [metric_row(checkpoint, "effective_rank", 2.0)])  # tried again, it went well
        store.refresh()
        assert store.sql("select state, reason from evaluations").rows() == [{"state": "done", "reason": None}]


def test_saturation_is_where_the_loss_turned_and_what_the_rank_did_since(layout: StoreLayout) -> None:
    chains = {"turns": [("a", 100), ("b", 200), ("c", 300)], "falls": [("d", 100), ("e", 200)]}
    submit(layout, chains)
    curves = {"a": (5.0, 20.0), "b": (3.0, 30.0), "c": (3.5, 10.0), "d": (5.0, 20.0), "e": (4.0, 15.0)}
    convention = json.dumps({"in_distribution": True})
    for segment, tokens in (step for chain in chains.values() for step in chain):
        loss, rank = curves[segment]
        checkpoint = commit(layout, segment, tokens)
        evaluate(layout, checkpoint, rank)
        place = {"evaluator": "loss", "settings_digest": "l", "dataset": "docs", "split": "heldout"}
        publish(layout, "metrics", [metric_row(checkpoint, "loss", loss, **place, convention=convention)])
    with Store(layout.root) as store:
        falls, turns = store.sql("select * from saturation order by trial").rows()
    assert (falls["rise"], falls["saturated"], falls["turned_at_tokens"]) == (0.0, False, 200)
    expected = {"turned_at_tokens": 200, "last_tokens": 300, "lowest_loss": 3.0, "rise": 0.5, "checkpoints": 3}
    assert {name: turns[name] for name in expected} == expected
    assert (turns["rank_at_turn"], turns["rank_change"], turns["saturated"]) == (30.0, -20.0, True)
    assert turns["in_distribution"] is True


def test_results_have_a_row_for_each_trial_and_checkpoint_and_final_the_last_of_each(study: Store) -> None:
    columns = "trial, tokens, checkpoint, effective_rank"
    rows = [tuple(r.values()) for r in study.sql(f"select {columns} from results order by 1, 2").rows()]
    assert rows == [
        ("done", 100, "checkpoint-of-a", 1.0),
        ("done", 200, "checkpoint-of-b", 1.0),
        ("exploded", 100, "checkpoint-of-g", 1.0),
        ("going", 100, "checkpoint-of-a", 1.0),
        ("reading", 100, "checkpoint-of-a", 1.0),
        ("reading", 300, "checkpoint-of-c", None),
    ]
    final = study.sql("select trial, tokens from final order by 1").rows()
    assert final == [{"trial": "done", "tokens": 200}, {"trial": "reading", "tokens": 300}]


def test_only_the_revision_submitted_last_counts_even_when_it_is_an_old_one(layout: StoreLayout) -> None:
    submit(layout, {"t1": [("a", 100)]}, "r1")
    submit(layout, {"t2": [("a", 100), ("b", 200)]}, "r2", at=NOON + timedelta(hours=1))
    commit(layout, "a", 100)
    with Store(layout.root) as store:
        assert store.sql("select trial, state from cells").rows() == [{"trial": "t2", "state": "training"}]
        assert [r["trial"] for r in store.results("demo").rows()] == ["t2"]
        publish(layout, "events", [submission("r1", NOON + timedelta(hours=2))])
        store.refresh()
        assert store.sql("select trial, state from cells").rows() == [{"trial": "t1", "state": "evaluating"}]
        assert len(store.table("trials")) == 2


# metric columns


def result_names(store: Store) -> set[str]:
    return {r["name"] for r in store.table("result_columns").rows()}


def test_metric_columns_are_named_by_metric_dataset_split_and_layer(layout: StoreLayout) -> None:
    submit(layout, {"t": [("a", 100)]})
    checkpoint = commit(layout, "a", 100)
    loss = {"evaluator": "loss", "settings_digest": "s2"}
    rows = [
        metric_row(checkpoint, "loss", 3.0, **loss, dataset="docs", split="heldout"),
        metric_row(checkpoint, "loss", 2.0, **loss, dataset="docs", split="train"),
        metric_row(checkpoint, "bits_per_byte", 1.0, **loss, dataset="c++/headers", split="heldout", unit="bits/byte"),
    ]
    publish(layout, "metrics", rows)
    others = [metric_row(checkpoint, "seed", 9.0), metric_row(checkpoint, "rank_H", 5.0, layer=3)]
    publish(layout, "metrics", others)
    with Store(layout.root) as store:
        (result,) = store.results().rows()
        described = [r for r in store.describe() if r["column"] == "bits_per_byte_c_headers"]
    values = {name: result[name] for name in ("loss_docs", "loss_docs_train", "bits_per_byte_c_headers")}
    assert values == {"loss_docs": 3.0, "loss_docs_train": 2.0, "bits_per_byte_c_headers": 1.0}
    assert (result["seed"], result["seed_s1"], result["rank_H_layer3"]) == (None, 9.0, 5.0)
    assert [(r["table"], r["unit"]) for r in described] == [("results", "bits/byte"), ("final", "bits/byte")]


def test_rarer_settings_of_a_metric_get_a_part_of_their_digest_in_the_column_name(layout: StoreLayout) -> None:
    submit(layout, {"t": [("a", 100), ("b", 200)]})
    first, second = commit(layout, "a", 100), commit(layout, "b", 200)
    evaluate(layout, first, 1.0, settings_digest="ffff00001111")
    evaluate(layout, second, 2.0, settings_digest="ffff00001111")
    evaluate(layout, second, 3.0, settings_digest="aaaa00002222")
    evaluate(layout, second, 4.0, settings_digest="aaaa00003333")
    with Store(layout.root) as store:
        assert result_names(store) == {"effective_rank", "effective_rank_aaaa00", "effective_rank_aaaa00_2"}
        (last,) = store.table("final").rows()
    assert (last["effective_rank"], last["effective_rank_aaaa00"], last["effective_rank_aaaa00_2"]) == (2.0, 3.0, 4.0)


def test_results_never_mix_two_versions_of_an_evaluator_in_one_column(layout: StoreLayout) -> None:
    submit(layout, {"t": [("a", 100), ("b", 200)]})
    first, second = commit(layout, "a", 100), commit(layout, "b", 200)
    evaluate(layout, first, 1.0)
    evaluate(layout, second, 1.5)
    evaluate(layout, second, 2.0, evaluator_version=2)
    with Store(layout.root) as store:
        values = "select effective_rank from results order by tokens"
        assert [r["effective_rank"] for r in store.sql(values).rows()] == [1.0, 1.5], "version 1 is what was asked for"
        ask(layout, {"a": 100, "b": 200}, version=2)
        store.refresh()
        assert [r["effective_rank"] for r in store.sql(values).rows()] == [None, 2.0]
        assert [(r["segment"], r["evaluator_version"]) for r in store.table("owed").rows()] == [("a", 2)]


def test_evaluator_that_no_sweep_asks_for_shows_its_newest_version(layout: StoreLayout) -> None:
    submit(layout, {"t": [("a", 100)]})
    checkpoint = commit(layout, "a", 100)
    for version in (1, 2):
        evaluate(layout, checkpoint, float(version), evaluator="spectrum", evaluator_version=version)
    with Store(layout.root) as store:
        assert [r["effective_rank"] for r in store.results().rows()] == [2.0]


def test_text_in_the_store_cannot_become_sql(layout: StoreLayout) -> None:
    submit(layout, {"t": [("a", 100)]})
    odd = """x"') or 1=1; --"""
    evaluate(layout, commit(layout, "a", 100), 7.0, dataset=odd, settings_digest=odd, unit=odd)
    with Store(layout.root) as store:
        assert [(r["dataset"], r["unit"]) for r in store.table("result_columns").rows()] == [(odd, odd)]
        assert [r["effective_rank_x_or_1_1_"] for r in store.results().rows()] == [7.0]


# curves


def test_curve_has_one_row_per_step_from_the_newest_attempt(layout: StoreLayout) -> None:
    publish(layout, "curves", curve_rows("a", 1, range(6), loss=1.0))
    publish(layout, "curves", curve_rows("a", 2, range(4), loss=2.0))
    with Store(layout.root) as store:
        rows = store.sql("select step, loss from curves order by step").rows()
        assert [r["loss"] for r in rows] == [2.0] * 4 + [1.0] * 2
        publish(layout, "curves", curve_rows("a", 2, range(4, 8), loss=2.0))
        store.refresh()
        assert store.sql("select count(*) n, min(loss) low from curves").rows() == [{"n": 8, "low": 2.0}]


def test_damaged_curve_is_named_by_the_query_that_needs_it_and_only_by_that(layout: StoreLayout) -> None:
    path = publish(layout, "curves", curve_rows("a", 1, range(6), loss=1.0))
    path.write_bytes(path.read_bytes()[:-20])
    with Store(layout.root) as store:
        with pytest.raises(EnvironmentFault, match="not a whole Parquet file") as caught:
            store.sql("select avg(loss) from curves")
        assert str(path) in caught.value.what
        assert len(store.table("cells")) == 0
        with pytest.raises(InputError):
            store.sql("select lss from cells")


# asking


def test_answer_is_the_same_as_rows_arrow_pandas_and_polars(study: Store) -> None:
    answer = study.sql("select trial, tokens from final order by trial")
    assert isinstance(answer, Answer)
    rows = [{"trial": "done", "tokens": 200}, {"trial": "reading", "tokens": 300}]
    assert answer.rows() == rows == answer.arrow().to_pylist()
    assert answer.pandas().to_dict("records") == rows
    assert answer.polars().to_dicts() == rows
    assert repr(answer) == "Answer(2 rows: trial, tokens)"


def test_parameters_are_given_by_place_or_by_name(study: Store) -> None:
    by_place = study.sql("select trial from cells where state = ? and tokens > ?", ["complete", 5]).rows()
    by_name = study.sql("select trial from cells where state = $state", {"state": "complete"}).rows()
    assert by_place == by_name == [{"trial": "done"}]


def test_sums_of_counts_are_int64_and_json_columns_can_be_read(study: Store, layout: StoreLayout) -> None:
    assert study.sql("select sum(tokens) t from checkpoints").arrow().schema.field("t").type == pa.int64()
    publish(layout, "trials", [row("trials", sweep="s", varied='{"seed": 3}')])
    study.refresh()
    assert study.sql("select varied->>'$.seed' v from trials where sweep = 's'").rows() == [{"v": "3"}]


def test_times_are_utc(study: Store) -> None:
    (event,) = study.sql("select time, time::varchar as text from events").rows()
    assert event["time"] == NOON.astimezone(UTC)
    assert event["text"] == "2026-01-01 12:00:00+00"


REFUSED = [
    "copy (select 1) to '{folder}/out.csv'",
    "copy trials to '{folder}/out.parquet'",
    "export database '{folder}/out'",
    "attach '{folder}/out.db'",
    "create table mine (a int)",
    "insert into result_columns values ('x')",
    "with new as (insert into stored_trials select * from trials returning *) select * from new",
    "with gone as (delete from stored_trials returning *) select * from gone",
    "drop view trials",
    "install httpfs",
    "load httpfs",
    "set enable_external_access = true",
    "reset lock_configuration",
    "pragma database_list",
    "call pragma_version()",
    "select * from read_csv('/etc/passwd')",
    "select * from read_text('/etc/passwd')",
    "select * from read_blob('/etc/passwd')",
    "select * from '/etc/passwd'",
    "select * from glob('/etc/*')",
    "select * from glob('{store}/../*')",
    "select * from read_parquet('{store}/inbox/metrics/*.parquet')",
    "select * from '{store}/checkpoints/a/100/weights.parquet'",
    "select * from parquet_metadata('{store}/checkpoints/a/100/weights.parquet')",
    "select * from query('copy (select 1) to ''{folder}/out.csv''')",
    "select getenv('HOME')",
    "select * from layout",
    "select 1; select 2",
    "",
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Path]]:
    """A store with a checkpoint file, and its folder."""
    layout = create_or_open(tmp_path_factory.mktemp("guarded") / "store")
    weights = layout.checkpoint("a", 100) / "weights.parquet"
    weights.parent.mkdir(parents=True)
    pq.write_table(pa.table({"data": [1.0]}), weights)
    with Store(layout.root) as store:
        yield store, layout.root


@pytest.mark.parametrize("text", REFUSED)
def test_query_that_is_not_one_select_over_the_tables_is_refused(guarded: tuple[Store, Path], text: str) -> None:
    store, root = guarded
    before = sorted(root.parent.rglob("*"))
    with pytest.raises(InputError):
        store.sql(text.format(folder=root.parent, store=root))
    assert store.sql("select count(*) n from trials").rows() == [{"n": 0}]
    assert sorted(root.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("select effective_rnk from results", 'Referenced column "effective_rnk".*; nearest is .effective_rank.'),
        ("select * from resutls", "Table with name resutls does not exist; nearest is 'results'"),
        ("select trial frm cells where", "Parser Error: syntax error"),
        ("select no_such_function(trial) from cells", "Scalar Function with name no_such_function does not exist"),
        ("select * from cells where tokens = $t", "Values were not provided"),
        ("drop view cells", "it is a statement of kind DROP"),
        ("select * from read_csv('/etc/passwd')", "it reads or writes a file"),
        ("select list(range) from range(1000000000)", "needs more than 1GiB of memory"),
    ],
)
def test_query_that_cannot_be_answered_says_why_and_what_is_near(study: Store, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        study.sql(text)


def test_unknown_table_or_sweep_is_refused_with_the_nearest_name(study: Store) -> None:
    with pytest.raises(InputError, match="'result' is not a table of the store; nearest is 'results'"):
        study.table("result")
    with pytest.raises(InputError, match="has no sweep 'dmo'; nearest is 'demo'"):
        study.results("dmo")


def test_asking_changes_no_file(study: Store, layout: StoreLayout) -> None:
    before = {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")}
    with Store(layout.root) as store:
        for name in store.tables():
            store.table(name)
    assert {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")} == before


def test_refresh_shows_what_was_stored_since(study: Store, layout: StoreLayout) -> None:
    evaluate(layout, "checkpoint-of-c", 3.0)
    assert study.sql("select state from cells where trial = 'reading'").rows() == [{"state": "evaluating"}]
    study.refresh()
    assert study.sql("select state from cells where trial = 'reading'").rows() == [{"state": "complete"}]
    assert len(list_units(layout, "metrics")) == 4


# output

ODD = pa.table(
    {
        "trial": ["a,b", 'say "x"', None],
        "value": [0.1234567891, float("nan"), float("-inf")],
        "tokens": pa.array([10**12, 2, None], pa.int64()),
        "grids": [["g", "h"], [], None],
        "time": pa.array([NOON, None, NOON], pa.timestamp("us", tz="UTC")),
    }
)


def written(rows: pa.Table, form: Format, **more: Any) -> str:
    stream = io.StringIO()
    write_result(rows, form, stream, **more)
    return stream.getvalue()


def test_table_output_aligns_numbers_right_and_tells_how_many_rows_are_left_out() -> None:
    lines = written(ODD, "table", limit=2).splitlines()
    starts = [line for line in lines if line.strip()]
    assert starts[0].split() == ["trial", "value", "tokens", "grids", "time"]
    end = starts[0].index("tokens") + len("tokens")
    wide = starts[2].index("1000000000000") + len("1000000000000")
    assert end == wide
    assert "0.123457" in starts[2]
    assert starts[-1] == "... 1 more rows (--limit 0 shows all)"
    assert "more rows" not in written(ODD, "table", limit=0)
    assert "more rows" not in written(ODD, "table", limit=3)


def test_table_output_cannot_steer_the_terminal() -> None:
    text = written(pa.table({"a": ["\x1b[31mred", "[bold]x[/bold]", "two\nlines"]}), "table")
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
    assert "[bold]x[/bold]" in text
    assert "two\\nlines" in text


def test_csv_output_is_exact_and_quoted() -> None:
    assert written(ODD, "csv").splitlines() == [
        "trial,value,tokens,grids,time",
        '"a,b",0.1234567891,1000000000000,"[""g"", ""h""]",2026-01-01T12:00:00+00:00',
        '"say ""x""",nan,2,[],',
        ",-inf,,,2026-01-01T12:00:00+00:00",
    ]


def test_json_output_is_strict_json_also_with_nan() -> None:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    rows = json.loads(written(ODD, "json"), parse_constant=no_constants)
    assert [r["value"] for r in rows] == [0.1234567891, "NaN", "-Infinity"]
    assert rows[0] == {
        "trial": "a,b",
        "value": 0.1234567891,
        "tokens": 10**12,
        "grids": ["g", "h"],
        "time": "2026-01-01T12:00:00+00:00",
    }
    assert json.loads(written(ODD.slice(0, 0), "json")) == []


def test_output_to_files(tmp_path: Path) -> None:
    write_result(ODD, "parquet", tmp_path / "answer.parquet")
    assert repr(pq.read_table(tmp_path / "answer.parquet").to_pylist()) == repr(ODD.to_pylist())  # nan too
    write_result(ODD, "csv", tmp_path / "answer.csv")
    assert (tmp_path / "answer.csv").read_text() == written(ODD, "csv")
    with pytest.raises(InputError, match="parquet is not for a terminal"):
        written(ODD, "parquet")
    with pytest.raises(InputError, match="'jsn' is not an output format; nearest is 'json'"):
        written(ODD, "jsn")  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFault, match="the answer was not saved"):
        write_result(ODD, "csv", tmp_path / "nowhere" / "answer.csv")


def test_a_kept_view_answers_alike_until_the_store_is_looked_at_again(layout: StoreLayout, study: Store) -> None:
    columns = ("sweep", "segment", "revision", "evaluator", "checkpoint", "state")
    before = study.sql(f"select {', '.join(columns)} from owed order by all").rows()
    cells = study.sql("select * from cells order by all").rows()
    ready = study.sql("select * from owed where ready order by all").rows()[0]
    study.keep("evaluations", columns)
    assert study.sql("select * from owed order by all").rows() == before
    assert study.sql("select * from cells order by all").rows() == cells
    names = ("checkpoint", "evaluator", "settings_digest", "evaluator_version", "segment", "tokens")
    publish(layout, "failures", [row("failures", **{name: ready[name] for name in names}, reason="broken")])
    assert study.sql("select * from owed order by all").rows() == before
    assert study.refresh()
    assert ready not in study.sql("select * from owed").rows()
