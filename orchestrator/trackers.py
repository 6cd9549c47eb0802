"""Refuse a tracker that is not installed before anything starts.

spec -> [trackers] -> check, run
not   Ray, or the trackers themselves: tracking.py feeds them
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

from orchestrator.spec import SweepSpec, refuse

MODULES: Mapping[str, str] = MappingProxyType({"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"})
"""The package that Ray's logger of each tracker imports."""


def require_trackers(spec: SweepSpec, source: str) -> None:
    """raises InputError that names each tracker of the sweep file that is not installed, and how to install it"""
    problems = [
        f"execution.track[{place}]: {name} is not installed: pip install 'geosweep[{name}]'"
        for place, name in enumerate(spec.execution.track)
        if find_spec(MODULES[name]) is None
    ]
    if problems:
        raise refuse(source, problems, "nothing was started")
