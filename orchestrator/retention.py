"""Say which checkpoints of a sweep stay in the store, and which may go already.

plan, keep -> [retention] -> cost, plan page; store
in    a Plan, the sweep's `keep`, what is left to train and to evaluate
out   ids of segments: whose weights, whose optimizer state
not   deleting anything
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from orchestrator.plan import Plan
from orchestrator.sharing import Segment
from orchestrator.spec import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of checkpoints, named by the segments that leave them. A state is of no use without its weights."""

    weights: frozenset[str]
    state: frozenset[str]


def kept(plan: Plan, keep: Keep) -> Parts:
    """What of its checkpoints a finished plan keeps; everything else is temporary, forks above all."""
    asked = frozenset(id for trial in plan.trials for id in trial.checkpoints)
    last = frozenset(trial.chain[-1] for trial in plan.trials)
    weights = asked if keep.weights == "all" else last
    match keep.state:
        case "all":
            return Parts(weights=weights, state=weights)
        case "last":
            return Parts(weights=weights, state=last)
        case "none":
            return Parts(weights=weights, state=frozenset())


def removable(
    plan: Plan, keep: Keep, committed: Collection[str], left: Sequence[Segment], owing: Collection[str]
) -> Parts:
    """What may be removed now: not kept, and needed by no segment that is left and by no evaluation that is owed.

    committed  segments of the plan whose checkpoints were made
    left       what is still to be trained (legs.work_left)
    owing      segments whose checkpoints owe an evaluation
    returns    weights: whose whole folder may go; state: whose state may go, of those the folder stays
    """
    stays = kept(plan, keep)
    starts = {segment.parent for segment in left}
    idle = {id for id in committed if id not in starts}
    folders = frozenset(idle - stays.weights - set(owing))
    return Parts(weights=folders, state=frozenset(idle - stays.state - folders))
