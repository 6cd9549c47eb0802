"""What a trial asks of a machine, and whether any machine of the cluster has it.

sweep's execution + the cluster's nodes -> [placement] -> tune, run
in    Resources of a scale; nodes as their names and what they have
out   Ray's names for what is asked; one line for each scale that no node can ever hold; how many trials fit at a time
not   Ray: the caller asks it for the nodes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.spec import Execution, Resources

_KIND = "accelerator_type:"  # Ray's resource that every node with such a GPU has once
_LEAST = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living machine of the cluster. has: everything it could give, by Ray's names of resources"""

    name: str
    has: Mapping[str, float]

    def __str__(self) -> str:
        counts = [f"{self.has.get(name, 0):g} {name}" for name in ("CPU", "GPU")]
        kinds = [name.removeprefix(_KIND) for name in self.has if name.startswith(_KIND)]
        return f"{self.name}: {', '.join(counts + kinds)}"


def bundle_of(resources: Resources) -> dict[str, float]:
    """What Ray holds for one trial, all on one node."""
    bundle = {"CPU": float(resources.cpus)}
    if resources.gpus:
        bundle["GPU"] = resources.gpus
    if resources.accelerator_type:
        bundle[f"{_KIND}{resources.accelerator_type}"] = _LEAST
    return bundle


def unplaceable(execution: Execution, scales: Iterable[str], nodes: Sequence[Node]) -> list[str]:
    """A line for each scale whose trials fit on no node, even an idle one: what is asked, what is missing."""
    lines = []
    for scale in sorted(set(scales)):
        bundle = bundle_of(execution.resources_of(scale))
        if not any(_holds(node, bundle) for node in nodes):
            lines.append(f"execution.resources of {scale}: a trial holds {_text(bundle)}; {_missing(bundle, nodes)}")
    return lines


def places(execution: Execution, scales: Iterable[str], nodes: Sequence[Node]) -> int:
    """How many trials the idle nodes hold at a time, of the scale that asks for least; at least 1."""
    bundles = [bundle_of(execution.resources_of(scale)) for scale in set(scales)]
    counts = (sum(_holds(node, bundle) for node in nodes) for bundle in bundles)
    return max([1, *counts])


def _holds(node: Node, bundle: Mapping[str, float]) -> int:
    """How many of such trials the idle node holds."""
    return min((int(node.has.get(name, 0.0) / amount) for name, amount in bundle.items() if amount), default=0)


def _missing(bundle: Mapping[str, float], nodes: Sequence[Node]) -> str:
    for name, amount in bundle.items():
        most = max((node.has.get(name, 0.0) for node in nodes), default=0.0)
        if most < amount:
            if name.startswith(_KIND):
                return f"no node has a GPU of the kind {name.removeprefix(_KIND)}"
            return f"the most that a node has is {most:g} {name}"
    return "no node has all of it"


def _text(bundle: Mapping[str, float]) -> str:
    return ", ".join(
        name.removeprefix(_KIND) if name.startswith(_KIND) else f"{amount:g} {name}" for name, amount in bundle.items()
    )
