"""The rows of segments and checkpoints, made from the checkpoint folders themselves.

attempt -> [registry] -> inbox -> views -> query
A checkpoint folder appears whole, by one rename; its rows are derived from what lies in it. So a kill between the two
loses nothing: `recommit` makes the same rows again. A segment is committed when its row in `segments` is there, which
is written last.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from orchestrator.sharing import HeldState
from orchestrator.store import checkpoints
from orchestrator.store.checkpoints import (
    checkpoints_of,
    fetch_checkpoint,
    has_checkpoint,
    remove_checkpoint,
    remove_state,
    with_state,
)
from orchestrator.store.inbox import publish
from orchestrator.store.layout import StoreLayout
from orchestrator.store.tables import read_rows
from trainers.checkpoint import CURVE, STATE, CheckpointManifest, read_curve, read_manifest

REMOVED = "checkpoint_removed"  # kind of the event that says what was given up on purpose; its detail is the path


class SegmentLike(Protocol):
    """The part of a segment that its rows need (sharing.Segment, legs.LegSegment)."""

    @property
    def id(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def from_tokens(self) -> int: ...
    @property
    def to_tokens(self) -> int: ...


def segment_states(layout: StoreLayout) -> dict[str, str]:
    """How each segment in the store ended: committed or diverged. A failed one is to be tried again: not listed."""
    states: dict[str, str] = {}
    for row in read_rows(layout, "segments", ["segment", "state"]):
        if row["state"] != "failed" and states.get(row["segment"]) != "committed":
            states[row["segment"]] = row["state"]
    return states


def is_committed(layout: StoreLayout, segment: SegmentLike) -> bool:
    """Whether the segment's last checkpoint is in the store."""
    return has_checkpoint(layout, _end_of(layout, segment))


def has_state(layout: StoreLayout, segment: SegmentLike) -> bool:
    """Whether training can go on from the segment's last checkpoint: its optimizer state was not dropped."""
    return checkpoints.has_state(layout, _end_of(layout, segment))


def drop_stateless(layout: StoreLayout, segment: SegmentLike) -> None:
    """Make room for the segment's last checkpoint where an earlier one lies whose state was dropped."""
    if is_committed(layout, segment) and not has_state(layout, segment):
        remove_checkpoint(layout, _end_of(layout, segment))


def release(layout: StoreLayout, segment: SegmentLike, sweep: str) -> None:
    """Remove the segment's last checkpoint; its rows stay, since it was made, and an event says that it is gone."""
    folder = _end_of(layout, segment)
    if has_checkpoint(layout, folder):
        record_event(layout, REMOVED, sweep, segment.id, detail=str(folder.relative_to(layout.root)))
        remove_checkpoint(layout, folder)


def release_state(layout: StoreLayout, segment: SegmentLike, sweep: str) -> None:
    """Remove the optimizer state of the segment's last checkpoint: nothing will train on from it."""
    folder = _end_of(layout, segment)
    if checkpoints.has_state(layout, folder):
        record_event(layout, REMOVED, sweep, segment.id, detail=str((folder / STATE).relative_to(layout.root)))
        remove_state(layout, folder)


def held_states(layout: StoreLayout) -> list[HeldState]:
    """Every checkpoint in the store that training can go on from, whichever sweep asked for it."""
    rows = read_rows(layout, "checkpoints", ["segment", "tokens", "path", "history_digest"])
    held = with_state(layout, [layout.root / row["path"] for row in rows])
    return [
        HeldState(segment=row["segment"], tokens=row["tokens"], history=row["history_digest"])
        for row in rows
        if layout.root / row["path"] in held
    ]


def checkpoint_digests(layout: StoreLayout) -> dict[str, str]:
    """The digest of the checkpoint at each committed segment's end, also of those that are not kept."""
    rows = read_rows(layout, "checkpoints", ["segment", "checkpoint"])
    return {row["segment"]: row["checkpoint"] for row in rows}


def recommit(layout: StoreLayout, segment: SegmentLike, attempt: int) -> bool:
    """Whether the segment's last checkpoint is there; if so, its rows are too when this returns."""
    if not is_committed(layout, segment):
        return False
    commit(layout, segment, attempt)
    return True


def commit(layout: StoreLayout, segment: SegmentLike, attempt: int) -> None:
    """Store the rows of a finished checkpoint folder; then its rescues go. Doing it again changes nothing."""
    folder = fetch_checkpoint(layout, _end_of(layout, segment), (CURVE,))
    manifest = read_manifest(folder)
    curve = [_curve_row(segment.id, attempt, record) for record in read_curve(folder)]
    if curve:
        publish(layout, "curves", curve)
    publish(layout, "checkpoints", [_checkpoint_row(layout, segment, folder, manifest)])
    publish(layout, "segments", [_committed_row(segment, manifest, attempt)])
    drop_rescues(layout, segment, keep=segment.to_tokens)


def commit_divergence(
    layout: StoreLayout,
    segment: SegmentLike,
    curve: Sequence[Any],
    tokens: int,
    reason: str,
    attempt: int,
) -> None:
    """Store that a segment diverged after `tokens` tokens of the trial, with the curve up to there."""
    if curve:
        publish(layout, "curves", [_curve_row(segment.id, attempt, record) for record in curve])
    ended = {"diverged_at_tokens": tokens, "tokens_trained": tokens - segment.from_tokens}
    publish(layout, "segments", [_ended_row(segment, "diverged", reason, attempt, **ended)])
    drop_rescues(layout, segment, keep=-1)


def commit_failure(layout: StoreLayout, segment: SegmentLike, reason: str, attempt: int) -> None:
    """Store that a segment failed; the next session tries it again."""
    publish(layout, "segments", [_ended_row(segment, "failed", reason, attempt)])


def newest_rescue(layout: StoreLayout, segment: SegmentLike) -> Path | None:
    """The newest state that an earlier attempt saved inside the segment."""
    found = [tokens for tokens in checkpoints_of(layout, segment.id) if tokens < segment.to_tokens]
    return layout.checkpoint(segment.id, max(found)) if found else None


def drop_rescues(layout: StoreLayout, segment: SegmentLike, *, keep: int) -> None:
    """Remove the states saved inside the segment, but the one at `keep` tokens."""
    for tokens in checkpoints_of(layout, segment.id):
        if tokens != keep and tokens != segment.to_tokens:
            remove_checkpoint(layout, layout.checkpoint(segment.id, tokens))


def next_attempt(layout: StoreLayout, segment: str) -> int:
    """The number of a new attempt at a segment: one more than the last that was begun."""
    counter = layout.lease(segment)
    try:
        attempt = int(json.loads(layout.files.read(counter))["attempt"]) + 1
    except (FileNotFoundError, ValueError, KeyError):  # never begun, or its writer was killed while writing
        attempt = 1
    content = {"attempt": attempt, "owner": f"{socket.gethostname()}:{os.getpid()}"}
    layout.files.replace(counter, json.dumps(content).encode())
    return attempt


def record_event(
    layout: StoreLayout,
    kind: str,
    sweep: str,
    segment: str | None = None,
    attempt: int | None = None,
    detail: str = "",
    time: datetime | None = None,
) -> None:
    """Store what happened, for people and for counting faults; time: now, unless given."""
    event = {
        "event": f"{kind}-{uuid.uuid4().hex[:16]}",
        "time": time or datetime.now(UTC),
        "sweep": sweep,
        "trial": None,
        "segment": segment,
        "attempt": attempt,
        "kind": kind,
        "host": socket.gethostname(),
        "detail": detail,
    }
    publish(layout, "events", [event])


def _end_of(layout: StoreLayout, segment: SegmentLike) -> Path:
    return layout.checkpoint(segment.id, segment.to_tokens)


def _curve_row(segment: str, attempt: int, record: Any) -> dict[str, Any]:
    return {
        "segment": segment,
        "attempt": attempt,
        "step": record.step,
        "tokens": record.tokens,
        "loss": record.loss,
        "lr": record.lr,
        "weight_decay": record.weight_decay,
        "grad_norm": record.grad_norm,
        "tokens_per_s": record.tokens_per_s,
    }


def _checkpoint_row(
    layout: StoreLayout, segment: SegmentLike, folder: Path, manifest: CheckpointManifest
) -> dict[str, Any]:
    files = {name: file.model_dump() for name, file in manifest.files.items()}
    return {
        "checkpoint": manifest.checkpoint,
        "segment": segment.id,
        "tokens": manifest.tokens,
        "steps": manifest.steps,
        "path": str(folder.relative_to(layout.root)),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "files": json.dumps(files, sort_keys=True),
        "unembedding_sha256": manifest.unembedding_sha256,
        "weights_sha256": manifest.weights_sha256,
        "dtype": manifest.dtype,
        "tied": manifest.tied,
        "vocab_size": manifest.network.vocab_size,
        "vocab_rows": manifest.network.vocab_rows,
        "history_digest": manifest.history,
        "code_revision": manifest.made.code_revision,
        "time": manifest.made.time,
        "versions": json.dumps(dict(manifest.made.versions), sort_keys=True),
    }


def _committed_row(segment: SegmentLike, manifest: CheckpointManifest, attempt: int) -> dict[str, Any]:
    trained = segment.to_tokens - segment.from_tokens
    return _ended_row(
        segment,
        "committed",
        None,
        attempt,
        tokens_trained=trained,
        device=manifest.made.device,
        threads=manifest.made.threads,
        time=manifest.made.time,
    )


def _ended_row(segment: SegmentLike, state: str, reason: str | None, attempt: int, **more: Any) -> dict[str, Any]:
    return {
        "segment": segment.id,
        "parent": segment.parent,
        "from_tokens": segment.from_tokens,
        "to_tokens": segment.to_tokens,
        "state": state,
        "reason": reason,
        "diverged_at_tokens": None,
        "tokens_trained": 0,
        "attempt": attempt,
        "wall_s": None,
        "host": socket.gethostname(),
        "device": None,
        "threads": None,
        "time": datetime.now(UTC),
        **more,
    }
