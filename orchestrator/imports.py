"""Bring models that were trained elsewhere into a store, as the checkpoints of an `imported` trial.

folder or hub id, revisions -> evaluators.hub -> [imports] -> checkpoints, trials, chains (store)
The trial is a sweep of its own: `geosweep eval NAME --evaluators ...` evaluates its checkpoints like any others.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evaluators.hub import Foreign, read_foreign
from orchestrator.driving import only_driver
from orchestrator.identity import canonical_json, digest, short_count
from orchestrator.store import registry
from orchestrator.store.checkpoints import fetch_checkpoint, put_checkpoint
from orchestrator.store.layout import StoreLayout, create_or_open, safe_name
from orchestrator.store.sweeps import IMPORTED, ask, asked_evaluations, current_revision, stored_sweep
from orchestrator.store.tables import publish_once
from trainers.checkpoint import CheckpointManifest, circumstances, content_sha256, read_manifest, write_imported
from trainers.errors import InputError

_TOKENS = re.compile(r"tokens(\d+)([BM])")
_STEP = re.compile(r"step(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an imported checkpoint lies: a segment of no length, at so many tokens of the model's own training."""

    id: str
    from_tokens: int
    to_tokens: int
    steps: int
    parent: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportEnd:
    """What an import left. equal: groups of token counts whose checkpoints have the same unembedding, bit for bit"""

    sweep: str
    trial: str
    manifests: tuple[CheckpointManifest, ...]
    equal: tuple[tuple[int, ...], ...]


def import_models(
    root: Path,
    source: str,
    revisions: Sequence[str],
    *,
    name: str | None = None,
    tokens_per_step: int | None = None,
    tokens: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ImportEnd:
    """Import a model at some revisions; more revisions of the same name are added to those that are there.

    source           folder or hub id;  revisions   of the hub; none: its newest state, or the folder as it is
    name             of the sweep; None: the last part of the source
    tokens_per_step  of the model's training, for revisions that are named by a step (Pythia: 2,097,152)
    tokens           that the model has seen, where no revision says it; None: 0, which means unknown
    """
    positions = {r: _position(r, tokens_per_step) for r in revisions} if revisions else {None: (tokens or 0, 0)}
    sweep = safe_name(name or Path(source).name, "sweep")
    layout = create_or_open(root)
    with only_driver(layout, "import"):
        places = _known(layout, sweep)
        for revision, (at, steps) in positions.items():
            say(f"reading {source}" + f" at {revision}" * bool(revision))
            foreign = _read(layout, sweep, source, revision)
            _refuse_other_model(layout, sweep, places, foreign)
            place = _store(layout, foreign, at, steps)
            places[place.to_tokens] = place
        chain = [places[at] for at in sorted(places)]
        manifests = tuple(_manifest(layout, place) for place in chain)
        trial = _submit(layout, sweep, chain, manifests)
    return ImportEnd(sweep=sweep, trial=trial, manifests=manifests, equal=_equal(manifests))


def _read(layout: StoreLayout, sweep: str, source: str, revision: str | None) -> Foreign:
    """As read_foreign; why a model cannot be evaluated stays in the store, as an event."""
    try:
        return read_foreign(source, revision)
    except InputError as error:
        registry.record_event(layout, "import_refused", sweep, detail=str(error))
        raise


def _position(revision: str, tokens_per_step: int | None) -> tuple[int, int]:
    """Tokens and steps that a revision's name says: step1000, or step1000-tokens4B."""
    step = _STEP.search(revision)
    steps = int(step[1]) if step else 0
    if found := _TOKENS.search(revision):
        return int(found[1]) * {"B": 10**9, "M": 10**6}[found[2]], steps
    if step is None:
        raise InputError(
            f"--revision {revision}: its name says neither step nor tokens, nothing was imported",
            next_step="import it alone, as a folder, with --tokens",
        )
    if tokens_per_step is None:
        raise InputError(
            f"--revision {revision}: how many tokens is a step? nothing was imported",
            next_step="say it with --tokens-per-step (Pythia: 2097152)",
        )
    return steps * tokens_per_step, steps


def _manifest(layout: StoreLayout, place: Place) -> CheckpointManifest:
    return read_manifest(fetch_checkpoint(layout, layout.checkpoint(place.id, place.to_tokens), ()))


def _store(layout: StoreLayout, foreign: Foreign, tokens: int, steps: int) -> Place:
    """The checkpoint folder and its rows; the same weights again change nothing."""
    known = foreign.imported.model_dump(mode="json", exclude={"source", "revision"})
    identity = digest([known, content_sha256(foreign.weights)])
    id = f"imported-{foreign.imported.family}-{short_count(tokens)}-{identity[:16]}"
    place = Place(id=id, from_tokens=tokens, to_tokens=tokens, steps=steps)
    write = partial(
        write_imported,
        **{name: getattr(foreign, name) for name in Foreign.__slots__},
        segment=id,
        tokens=tokens,
        steps=steps,
        made=circumstances(device="cpu", threads=1, micro_batch=None, compiled=False),
        temporary=layout.temporary(),
    )
    put_checkpoint(layout, layout.checkpoint(id, tokens), write)
    registry.commit(layout, place, attempt=1)
    return place


def _known(layout: StoreLayout, sweep: str) -> dict[int, Place]:
    """The checkpoints of earlier imports under this name, by tokens. raises InputError if the name is a real sweep's"""
    if current_revision(layout, sweep) is None:
        return {}
    content = json.loads(stored_sweep(layout, sweep).read_text().removeprefix(IMPORTED) or "null")
    if not isinstance(content, list):
        raise InputError(f"'{sweep}' is a sweep that was trained here, nothing was imported", next_step="set --name")
    return {entry["to_tokens"]: Place(**entry) for entry in content}


def _refuse_other_model(layout: StoreLayout, sweep: str, places: Mapping[int, Place], foreign: Foreign) -> None:
    """The checkpoints of one trial are states of one model."""
    for place in places.values():
        there = _manifest(layout, place).imported
        if there is not None and there.config != foreign.imported.config:
            what = f"'{sweep}' holds checkpoints of another model, nothing was added to it"
            raise InputError(what, next_step="set another --name")


def _submit(layout: StoreLayout, sweep: str, chain: Sequence[Place], manifests: Sequence[CheckpointManifest]) -> str:
    """Trial, chain and what was asked for before, under a new revision; the event that makes it current comes last."""
    last = manifests[-1].imported
    assert last is not None
    revision = digest([sweep, [manifest.checkpoint for manifest in manifests]])[:12]
    trial = f"imported-{sweep[:80]}"
    file = layout.sweep(sweep, revision)
    text = IMPORTED + json.dumps([asdict(place) for place in chain])
    layout.files.publish(file, text.encode())
    publish_once(layout, "trials", [_trial_row(sweep, revision, trial, manifests[-1])])
    names = {"sweep": sweep, "revision": revision, "trial": trial}
    publish_once(layout, "chains", [{**names, **_chain_row(n, place)} for n, place in enumerate(chain)])
    before = current_revision(layout, sweep)
    if before is not None and before != revision:
        ask(layout, sweep, revision, asked_evaluations(layout, sweep, before))
    if before != revision:
        registry.record_event(layout, "sweep_submitted", sweep, detail=revision)
    return trial


def _chain_row(position: int, place: Place) -> dict[str, Any]:
    return {
        "position": position,
        "asked": True,
        "segment": place.id,
        "parent": None,
        "from_tokens": place.from_tokens,
        "to_tokens": place.to_tokens,
    }


def _trial_row(sweep: str, revision: str, trial: str, manifest: CheckpointManifest) -> dict[str, Any]:
    """What is known of the training; everything else is null."""
    imported = manifest.imported
    assert imported is not None
    unknown = (
        "batch_size weight_decay peak_lr schedule warmup_tokens decay_tokens final_lr_fraction seed attention "
        "precision corpus corpus_digest flops"
    )
    recipe = imported.model_dump(mode="json")
    return {
        **dict.fromkeys(unknown.split()),
        "sweep": sweep,
        "revision": revision,
        "trial": trial,
        "grids": ["imported"],
        "family": imported.family,
        "scale": sweep,
        **{f"params_{name}": value for name, value in asdict(manifest.parameters).items()},
        "context": imported.context,
        "token_budget": manifest.tokens,
        "tied": manifest.tied,
        "varied": "{}",
        "recipe": canonical_json(recipe),
        "recipe_digest": digest(recipe),
        "steps": manifest.steps or None,
    }


def _equal(manifests: Sequence[CheckpointManifest]) -> tuple[tuple[int, ...], ...]:
    groups: dict[str, list[int]] = defaultdict(list)
    for manifest in manifests:
        groups[manifest.unembedding_sha256].append(manifest.tokens)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
