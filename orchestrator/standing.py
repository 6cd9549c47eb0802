"""What of a plan the store already holds, and what is left.

plan + store -> [standing] -> plan page, run
in    a Plan and the store's tables
out   Standing: plain sets and lists, read once
not   changing anything; Ray
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.legs import work_left
from orchestrator.plan import Plan
from orchestrator.sharing import HeldState, Segment
from orchestrator.store import registry
from orchestrator.store.layout import StoreLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Of a plan's segments.

    committed   whose checkpoint was made, by whichever sweep, even if it is not kept any more
    diverged    whose loss stopped being finite
    left        what is still to be trained, parents first, each from where it really starts (legs.work_left)
    """

    committed: frozenset[str]
    diverged: frozenset[str]
    left: tuple[Segment, ...]

    @property
    def tokens_left(self) -> int:
        return sum(segment.tokens for segment in self.left)


def nothing_stored(plan: Plan) -> Standing:
    """Where a plan stands in a store that does not exist yet."""
    return Standing(committed=frozenset(), diverged=frozenset(), left=plan.segments)


def read_standing(layout: StoreLayout, plan: Plan) -> Standing:
    """Where a plan stands in this store."""
    states = registry.segment_states(layout)
    planned = {id: states[id] for id in plan.segment_by_id if id in states}
    committed = frozenset(id for id, state in planned.items() if state == "committed")
    diverged = frozenset(id for id, state in planned.items() if state == "diverged")
    held = _usable(plan, registry.held_states(layout))
    return Standing(committed=committed, diverged=diverged, left=work_left(plan, committed, diverged, held))


def _usable(plan: Plan, held: list[HeldState]) -> list[HeldState]:
    """A plan whose trials share nothing starts from no state that others have left either."""
    return held if plan.shared else [state for state in held if state.segment in plan.segment_by_id]
