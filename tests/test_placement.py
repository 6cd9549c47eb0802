from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.placement import Node, bundle_of, places, unplaceable
from orchestrator.spec import Execution, Resources

CPUS = Node(name="small", has={"CPU": 4.0, "memory": 1e9})
GPUS = Node(name="big", has={"CPU": 16.0, "GPU": 2.0, "accelerator_type:H100": 1.0})


def execution(**resources: Resources) -> Execution:
    return Execution(resources={"default": Resources(), **resources})


def test_trials_that_fit_on_some_node_raise_no_remark() -> None:
    asked = execution(large=Resources(cpus=8, gpus=0.5, accelerator_type="H100"))
    assert unplaceable(asked, ["small", "large"], [CPUS, GPUS]) == []


def test_what_no_single_node_has_is_named_even_if_the_cluster_has_it_in_sum() -> None:
    (line,) = unplaceable(execution(large=Resources(cpus=17)), ["large", "small"], [CPUS, GPUS])
    assert "large" in line
    assert "17 CPU" in line
    assert "the most that a node has is 16 CPU" in line


def test_a_kind_of_gpu_that_is_not_there_is_named() -> None:
    (line,) = unplaceable(execution(large=Resources(gpus=1, accelerator_type="A100")), ["large"], [CPUS, GPUS])
    assert "no node has a GPU of the kind A100" in line


def test_parts_that_are_there_on_different_nodes_only_are_not_enough() -> None:
    nodes = [Node(name="a", has={"CPU": 8.0}), Node(name="b", has={"CPU": 1.0, "GPU": 1.0})]
    (line,) = unplaceable(execution(large=Resources(cpus=8, gpus=1)), ["large"], nodes)
    assert "no node has all of it" in line


def test_places_are_those_of_the_scale_that_asks_for_least() -> None:
    asked = execution(large=Resources(cpus=8, gpus=0.5, accelerator_type="H100"), huge=Resources(cpus=17))
    assert places(asked, ["large"], [CPUS, GPUS]) == 2  # 16 CPUs in eights; four halves of a GPU would be more
    assert places(asked, ["large", "small"], [CPUS, GPUS]) == 20
    assert places(asked, ["huge"], [CPUS, GPUS]) == places(asked, [], []) == 1


def test_nodes_are_shown_with_what_they_have() -> None:
    assert str(GPUS) == "big: 16 CPU, 2 GPU, H100"


def test_a_bundle_has_rays_names() -> None:
    bundle = bundle_of(Resources(cpus=2, gpus=0.25, accelerator_type="H100"))
    assert bundle == {"CPU": 2.0, "GPU": 0.25, "accelerator_type:H100": 0.001}


@pytest.mark.parametrize("gpus", [1.5, -1])
def test_a_share_of_gpus_that_ray_cannot_give_is_refused(gpus: float) -> None:
    with pytest.raises(ValidationError):
        Resources(gpus=gpus)
