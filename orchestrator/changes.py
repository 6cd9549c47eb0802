"""Say what an edited sweep file would train again, and which field is the cause.

stored plan of the last revision, new plan, what is left -> [changes] -> plan page
not   the store: the stored plan is passed in as plain data
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.identity import canonical_json
from orchestrator.plan import Plan, Trial
from orchestrator.sharing import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One field of the recipe that is not what it was.

    cells          trials of the new plan in which it changed
    trained_again  those of them that the store does not hold to their end
    """

    field: str
    before: Any
    after: Any
    cells: tuple[str, ...]
    trained_again: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """A new plan against the last stored revision. added, removed: cells that only one of the two has."""

    revision: str
    fields: tuple[FieldChange, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        return not (self.fields or self.added or self.removed)


def changes_since(stored: Mapping[str, Any], plan: Plan, left: Sequence[Segment]) -> Changes:
    """What differs from a stored plan, cell by cell; a cell is the same one if its varied fields are.

    stored   the plan of an earlier revision as the store keeps it (store/sweeps.py)
    left     what is still to be trained of the new plan
    """
    before = {trial["trial"]: trial for trial in stored["trials"]}
    after = {trial.id: trial for trial in plan.trials}
    gone = {canonical_json(old["varied"]): old for id, old in before.items() if id not in after}
    training = {trial for segment in left for trial in segment.trials}
    pairs, added = [], []
    for trial in (trial for id, trial in after.items() if id not in before):
        old = gone.pop(canonical_json(dict(trial.varied)), None)
        if old is None:
            added.append(trial.id)
        else:
            pairs.append((old, trial))
    return Changes(
        revision=stored["revision"],
        fields=_field_changes(pairs, training),
        added=tuple(added),
        removed=tuple(old["trial"] for old in gone.values()),
    )


def _field_changes(pairs: Sequence[tuple[Mapping[str, Any], Trial]], training: set[str]) -> tuple[FieldChange, ...]:
    found: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
    for old, trial in pairs:
        then, now = _flat(old["recipe"]), _flat(trial.recipe.model_dump(mode="json"))
        for name in sorted(then.keys() | now.keys()):
            values = then.get(name), now.get(name)
            if values[0] != values[1]:
                key = (name, canonical_json(values[0]), canonical_json(values[1]))
                found.setdefault(key, (*values, []))[2].append(trial.id)
    return tuple(
        FieldChange(
            field=name,
            before=before,
            after=after,
            cells=tuple(cells),
            trained_again=tuple(cell for cell in cells if cell in training),
        )
        for (name, _, _), (before, after, cells) in found.items()
    )


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value})
    return flat
