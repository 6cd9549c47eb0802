"""One sweep that loses a worker's machine, a network, its driver and the whole cluster, beside one that loses nothing."""

from __future__ import annotations
