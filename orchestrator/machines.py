"""How fast a device trains a model: measured where somebody measured it, assumed and called so elsewhere.

`geosweep bench` -> speeds (store) -> [machines] -> cost
in    measured speeds, as rows of the table `speeds`
out   devices with their FLOP/s for a model of a given cost a token
not   measuring (bench.py)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ASSUMED_UTILISATION = 0.15
"""Share of the peak that training reaches. An assumption: models of 4M to 75M parameters leave a large GPU waiting for
launches and memory, so it is far less than the 0.4 to 0.5 that large models are reported with. As a check: the study
took about 3,000 GPU-hours, as its readers say (of which GPU they do not); study-text takes 1,900 at this share of an
A100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One type of device.

    kind         cuda or cpu
    peak_flops   FLOP/s of dense bfloat16 matrix products by its data sheet; None for a device that was measured
    measured     (FLOPs a token of the model, FLOP/s that its training reached), ascending; empty: nothing measured
    source       where the numbers come from, in words
    """

    name: str
    kind: str
    peak_flops: float | None
    measured: tuple[tuple[float, float], ...]
    source: str

    def flops_per_s(self, flops_per_token: float) -> float:
        """FLOP/s for a model: of the measured model of the nearest cost, else the assumed share of the peak."""
        if self.measured:
            nearest = min(self.measured, key=lambda point: abs(math.log(point[0] / flops_per_token)))
            return nearest[1]
        assert self.peak_flops is not None
        return self.peak_flops * ASSUMED_UTILISATION


def _assumed(name: str, peak_teraflops: float) -> Device:
    source = f"assumed: {ASSUMED_UTILISATION:.0%} of its data sheet's {peak_teraflops:g} TFLOP/s"
    return Device(name=name, kind="cuda", peak_flops=peak_teraflops * 1e12, measured=(), source=source)


# Dense bfloat16 products, NVIDIA. The data sheets of L4, L40S, H100 and H200 print twice these figures, with sparsity.
SHIPPED = (
    _assumed("L4", 121),
    _assumed("RTX-4090", 165.2),
    _assumed("A100", 312),
    _assumed("L40S", 362),
    _assumed("H100", 989),  # SXM
    _assumed("H200", 989),
)


def devices(speeds: Iterable[Mapping[str, Any]]) -> tuple[Device, ...]:
    """The shipped types, and those of the table `speeds`; a measured device takes the place of an assumed one.

    speeds   rows of the table; of several for one model the newest counts
    """
    points: dict[str, dict[float, float]] = {}
    kinds: dict[str, str] = {}
    for row in sorted(speeds, key=lambda row: row["time"]):
        cost = row["flops_per_token"]
        points.setdefault(row["device"], {})[cost] = cost * row["tokens_per_s"]
        kinds[row["device"]] = row["kind"]
    measured = tuple(
        Device(
            name=name,
            kind=kinds[name],
            peak_flops=None,
            measured=tuple(sorted(found.items())),
            source=f"measured by `geosweep bench` at {len(found)} model{'s'[: len(found) > 1]}",
        )
        for name, found in points.items()
    )
    return measured + tuple(device for device in SHIPPED if device.name not in points)
