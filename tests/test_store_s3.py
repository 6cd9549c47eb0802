"""A store on a real S3 server of this machine: every promise of the local one."""

from __future__ import annotations

import http.client
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from s3_server import SECRET
from store_rows import metric_row, row
from test_attempt import begin, never, only_leg, planned, stored, train
from test_live import MACHINE

from orchestrator.activity import Activity
from orchestrator.evals import Ledger, StoreEvaluations, metric_rows
from orchestrator.garbage import find_garbage
from orchestrator.legs import Leg
from orchestrator.query import Store
from orchestrator.store import checkpoints, live, registry
from orchestrator.store.checkpoints import fetch_checkpoint, remove_leftovers
from orchestrator.store.committer import only_committer
from orchestrator.store.copies import put_corpus
from orchestrator.store.files import folder_of
from orchestrator.store.inbox import StoreConflict, list_units, publish
from orchestrator.store.layout import StoreLayout, create_or_open, open_existing
from orchestrator.store.leases import Lease
from orchestrator.store.live import LiveSession, read_live, telling
from orchestrator.store.tables import read_rows
from orchestrator.store.verify import verify
from trainers.checkpoint import CURVE, STATE, WEIGHTS, verify_checkpoint
from trainers.errors import EnvironmentFault, InputError


@pytest.fixture
def layout(s3_store: str) -> StoreLayout:
    return create_or_open(folder_of(s3_store))


def on_another_machine(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> StoreLayout:
    """The same store, opened where nothing of it was ever fetched."""
    monkeypatch.setenv("GEOSWEEP_CACHE", str(layout.root.parent / "another"))
    return open_existing(folder_of(layout.url))


def test_units_are_published_once_folded_compacted_and_read_on_another_machine(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unit in range(12):
        publish(layout, "metrics", [metric_row(f"c{unit}", "rank", float(unit))])
        publish(layout, "metrics", [metric_row(f"c{unit}", "rank", float(unit))])
    with pytest.raises(StoreConflict, match=r"value: 3.0 stored, 9.0 given"):
        publish(layout, "metrics", [metric_row("c3", "rank", 9.0)])
    with only_committer(layout) as committer:
        assert committer.fold("metrics") == 12
        publish(layout, "metrics", [metric_row("c12", "rank", 12.0)])
        assert committer.everything() == 1
    publish(layout, "metrics", [metric_row("c13", "rank", 13.0)])
    elsewhere = on_another_machine(layout, monkeypatch)
    assert elsewhere.root != layout.root
    with Store(elsewhere.root) as reader:
        assert reader.sql("select sum(value) total, count(*) n from metrics").rows() == [{"total": 91.0, "n": 14}]
    assert len(list_units(elsewhere, "metrics")) == 1
    assert len(read_rows(elsewhere, "metrics", ["checkpoint"])) == 14
    assert layout.files.exists(layout.export("metrics"))
    assert verify(elsewhere).damaged == []


def test_a_unit_that_was_folded_with_another_result_is_kept_aside_and_named(layout: StoreLayout) -> None:
    publish(layout, "metrics", [metric_row("c1", "rank", 1.0)])
    with only_committer(layout) as committer:
        committer.fold("metrics")
        publish(layout, "metrics", [metric_row("c1", "rank", 2.0)])
        committer.fold("metrics")
        assert "value: 1.0 stored, 2.0 given" in "".join(committer.problems.values())
    (aside,) = layout.files.children(layout.conflicts("metrics"))
    assert read_rows(layout, "metrics", ["value"]) == [{"value": 1.0}]
    assert [line for line in verify(layout).damaged if aside.name in line]


def test_of_two_contenders_one_holds_a_lease_until_it_is_silent_or_lets_go(layout: StoreLayout) -> None:
    now = [0.0]
    first, second = (Lease(layout, "committer", clock=lambda: now[0]) for _ in range(2))
    assert (first.hold(), second.hold()) == (True, False)
    first.release()
    assert (second.hold(), first.hold()) == (True, False)


def test_what_a_session_does_is_seen_on_another_machine(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    activity = Activity("small", (), lambda: MACHINE)
    told = threading.Event()

    def look(beat: int) -> LiveSession:
        if beat:
            told.set()
        return activity.look(beat)

    monkeypatch.setattr(live, "BEAT_S_REMOTE", 0.01)
    with telling(layout, "small", look, pytest.fail):
        assert told.wait(30)
        found = read_live(on_another_machine(layout, monkeypatch), "small")
        assert found is not None
        assert (found[0].pid, found[0].machine.cpus_held) == (os.getpid(), 3)
    assert read_live(layout, "small") is None


def test_a_leg_is_trained_on_two_machines_with_the_bits_of_one(
    layout: StoreLayout, store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(store_root, only_leg(store_root, planned(store_root)))
    shutil.copytree(store_root / "corpora" / "builtin", layout.corpus("builtin"))
    put_corpus(layout.root, "builtin")
    leg = only_leg(layout.root, planned(layout.root))
    for _ in range(3):
        attempt = begin(layout.root, leg, rescue_s=0.0)
        attempt.advance(0.01, never)
        attempt.wait()
    assert not list(layout.root.glob("temporary/*"))
    elsewhere = on_another_machine(layout, monkeypatch)
    assert train(elsewhere.root, leg).state == "committed"
    assert stored(elsewhere.root) == stored(store_root)
    last = elsewhere.checkpoint(leg.segments[-1].id, 8192)
    assert verify_checkpoint(fetch_checkpoint(elsewhere, last, (WEIGHTS, STATE, CURVE))).tokens == 8192
    left_alone_and_removed(layout, elsewhere, leg)


def left_alone_and_removed(layout: StoreLayout, elsewhere: StoreLayout, leg: Leg) -> None:
    """The same checkpoint again changes nothing; what is given up is gone on both machines, and verify knows why."""
    first, second, last = leg.segments
    before = layout.files.below(layout.root / "checkpoints")
    registry.recommit(layout, last)
    assert layout.files.below(layout.root / "checkpoints") == before
    assert {(item.tokens, item.segment) for item in registry.held_states(layout)} == {
        (segment.to_tokens, segment.id) for segment in leg.segments
    }
    registry.release_state(layout, second, "small")
    registry.release(layout, first, "small")
    assert (registry.is_committed(elsewhere, first), registry.has_state(elsewhere, second)) == (False, False)
    assert registry.is_committed(elsewhere, second)
    assert verify(layout).damaged == []
    lost = next(path for path in layout.files.below(layout.root / "checkpoints") if path.name.startswith("weights-"))
    layout.files.remove(lost)
    (damage,) = verify(layout).damaged
    assert damage.startswith(f"{layout.url}/checkpoints/")
    assert "weights" in damage


def test_an_evaluation_fetches_what_it_reads_and_gc_says_what_would_go(
    layout: StoreLayout, store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(store_root / "corpora" / "builtin", layout.corpus("builtin"))
    put_corpus(layout.root, "builtin")
    plan = planned(layout.root, evaluations=[{"evaluator": "loss", "suite": "builtin", "tokens_per_domain": 64}])
    train(layout.root, only_leg(layout.root, plan))
    elsewhere = on_another_machine(layout, monkeypatch)
    for item in Ledger(elsewhere, plan.evaluations).owed(set(plan.trials[0].chain)):
        evaluations = StoreEvaluations.__new__(StoreEvaluations)  # its start is for a process of its own
        path = str(Path(item.folder).relative_to(elsewhere.root))
        answer = evaluations.evaluate_stored(layout.url, path, item.evaluation.settings.model_dump(mode="json"))
        publish(elsewhere, "metrics", metric_rows(item, answer))
    with Store(layout.url) as store:
        (cell,) = store.sql("select state from cells").rows()
    assert cell == {"state": "complete"}
    assert [item.path.name for item in find_garbage(layout)] == ["state.parquet", "state.parquet"]
    unfinished = layout.checkpoint(plan.trials[0].chain[0], 0) / "weights-0123456789abcdef.parquet"
    layout.files.publish(unfinished, b"of an attempt that died")
    assert remove_leftovers(layout) == 0
    monkeypatch.setattr(checkpoints, "_LEFTOVER_AGE_S", -60.0)
    assert remove_leftovers(layout) == 1
    assert not layout.files.exists(unfinished)
    assert verify(layout).damaged == []


def test_a_url_that_names_no_bucket_or_no_s3_is_refused(s3_store: str) -> None:
    for url in ("s3://", "gs://bucket/x", "s3://bucket/../x"):
        with pytest.raises(InputError, match=r"a store is a folder, or s3://BUCKET/PREFIX"):
            folder_of(url)
    with pytest.raises(InputError, match=rf"no store at {s3_store}"):
        open_existing(folder_of(s3_store))


def test_without_credentials_the_message_says_where_they_come_from(
    s3_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InputError, match=r"no AWS credentials\nset AWS_PROFILE, or AWS_ACCESS_KEY_ID"):
        create_or_open(folder_of(s3_store))
    (tmp_path / "aws").write_text(f"[lab]\naws_access_key_id = test\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    layout = create_or_open(folder_of(s3_store))
    publish(layout, "events", [row("events", event="e")])
    with only_committer(layout) as committer:
        assert committer.fold("events") == 1


def test_a_prefix_that_holds_something_else_is_no_place_for_a_store(layout: StoreLayout) -> None:
    layout.files.publish(layout.root / "photos" / "cat.jpg", b"a cat")
    layout.files.remove(layout.marker)
    with pytest.raises(InputError, match=r"is not empty and is not a store\n  it holds photos"):
        create_or_open(layout.root)


def test_a_bucket_that_is_not_there_is_named(s3_store: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"s3://no-such-bucket/x"):
        create_or_open(folder_of("s3://no-such-bucket/x"))


def test_a_server_that_ignores_the_condition_is_refused(
    s3_store: str, unconditional: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", unconditional)
    with pytest.raises(EnvironmentFault, match=r"two writers put one name there and both were told that they were fi"):
        create_or_open(folder_of(s3_store))


@pytest.fixture
def unconditional(s3_endpoint: str) -> Iterator[str]:
    """The same server as it looks through one that passes everything on but the condition of a put."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _WithoutCondition)
    server.daemon_threads = True
    _WithoutCondition.behind = urlsplit(s3_endpoint).netloc
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class _WithoutCondition(BaseHTTPRequestHandler):
    behind = ""

    def _pass_on(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "if-none-match"}
        connection = http.client.HTTPConnection(self.behind)
        connection.request(self.command, self.path, content, headers)
        answer = connection.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        connection.close()

    def __getattr__(self, name: str) -> Callable[[], None]:
        """do_GET, do_PUT, ..."""
        if name.startswith("do_"):
            return self._pass_on
        raise AttributeError(name)

    def log_message(self, format: str, *args: object) -> None:
        pass
