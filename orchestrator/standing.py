"""What of a plan the store already holds, and what is left.

plan + store -> [standing] -> plan page, run
in    a Plan and the store's tables
out   Standing (legs.py), read once
not   changing anything; Ray
"""

from __future__ import annotations

from orchestrator.legs import Standing, work_left
from orchestrator.plan import Plan
from orchestrator.sharing import HeldState
from orchestrator.store import registry
from orchestrator.store.layout import StoreLayout


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
