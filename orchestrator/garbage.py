"""Say which checkpoints no sweep in the store needs any more, and remove them.

store, its submitted sweeps -> [garbage] -> cli.py
in    the plan and the `keep` of each sweep's current revision; what is left and what is owed
out   Garbage, a record per folder or file
not   rows: that a checkpoint was made, and what was measured of it, stays
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.corpora import corpus_facts
from orchestrator.evals import Ledger
from orchestrator.plan import Plan, load_plan
from orchestrator.retention import Parts, removable
from orchestrator.sharing import Segment
from orchestrator.spec import read_text
from orchestrator.standing import read_standing
from orchestrator.store import registry
from orchestrator.store.checkpoints import has_checkpoint, has_state, stored_bytes
from orchestrator.store.layout import StoreLayout
from orchestrator.store.sweeps import IMPORTED, asked_evaluations, current_revisions, sweep_file
from orchestrator.store.tables import read_rows
from trainers.checkpoint import STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """One thing that may go: a checkpoint folder, or the optimizer state in one that stays.

    path   of the folder or file;  bytes   its size;  sweep   one that trained it
    """

    sweep: str
    segment: Segment
    path: Path
    bytes: int

    @property
    def whole(self) -> bool:
        return self.path.name != STATE


def find_garbage(layout: StoreLayout) -> list[Garbage]:
    """What each sweep that trains through a segment can do without.

    A sweep needs what its `keep` keeps, what a segment that is left starts from, and what owes an evaluation. What a
    revision asked for that is no longer current is needed too: nobody has said otherwise.
    raises  InputError when a sweep in the store cannot be planned any more: then nobody knows what it needs
    """
    current = current_revisions(layout)
    texts = {(name, revision): read_text(sweep_file(layout, name, revision)) for name, revision in current.items()}
    # What was imported cannot be made again: it stays.
    trained = {key: text for key, text in texts.items() if not text.startswith(IMPORTED)}
    plans = {key: _plan(layout, *key, text) for key, text in trained.items()}
    users: dict[str, set[tuple[str, str]]] = {}
    for row in read_rows(layout, "chains", ["sweep", "revision", "segment"]):
        users.setdefault(row["segment"], set()).add((row["sweep"], row["revision"]))
    found = []
    for id, asking in users.items():
        parts = [plans[key][1] for key in asking if key in plans]
        if len(parts) == len(asking) and all(id in part.weights | part.state for part in parts):
            sweep, revision = min(asking)
            segment = plans[sweep, revision][0].segment_by_id[id]
            found += list(_on_disk(layout, sweep, segment, whole=all(id in part.weights for part in parts)))
    return sorted(found, key=lambda garbage: garbage.path)


def remove(layout: StoreLayout, garbage: Sequence[Garbage]) -> None:
    """Remove it; an event each says so, and `geosweep store verify` knows."""
    for item in garbage:
        give_up = registry.release if item.whole else registry.release_state
        give_up(layout, item.segment, item.sweep)


def _plan(layout: StoreLayout, sweep: str, revision: str, text: str) -> tuple[Plan, Parts]:
    spec, plan = load_plan(text, str(layout.sweep(sweep, revision)), corpus_facts(layout.root))
    standing = read_standing(layout, plan)
    ledger = Ledger(layout, asked_evaluations(layout, sweep, revision))
    ledger.owed(standing.committed)
    return plan, removable(plan, spec.keep, standing.committed, standing.left, ledger.owing)


def _on_disk(layout: StoreLayout, sweep: str, segment: Segment, whole: bool) -> Iterator[Garbage]:
    folder = layout.checkpoint(segment.id, segment.to_tokens)
    if has_checkpoint(layout, folder) if whole else has_state(layout, folder):
        size = stored_bytes(layout, folder, state_only=not whole)
        yield Garbage(sweep=sweep, segment=segment, path=folder if whole else folder / STATE, bytes=size)
