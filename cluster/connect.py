"""Start a local Ray for one session, quietly, and end it.

run -> [connect] -> Ray
Ray is a pool of workers and remembers nothing for us. The settings are those that RAY's own defaults get wrong for many
short trials; each says why.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from trainers.errors import EnvironmentFault

_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # five files a trial that nobody reads
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # one report without a metric would abort the sweep
    "TUNE_FORCE_TRIAL_CLEANUP_S": "60",  # a trial that never reports keeps its GPU until then
    "TUNE_GLOBAL_CHECKPOINT_S": "300",  # Tune's snapshot is of no use to us
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a relative --store stays what it was
    "RAY_worker_niceness": "0",  # Ray's 15 would let any other process on the machine starve the training
    "RAY_AIR_NEW_OUTPUT": "0",  # boxes on the terminal, even at verbose=0
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_START_TRIES = 2  # Ray gives its own processes 30 s to start, too little on a busy machine


@contextmanager
def local_ray(cpus: int | None = None) -> Iterator[None]:
    """A Ray of this machine for the body; its processes and temporary folder end with it.

    cpus    CPU slots; None: as many as the machine has
    raises  EnvironmentFault (ray_start) if Ray does not start
    """
    os.environ.update(_ENVIRONMENT)
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="geosweep-ray-", ignore_cleanup_errors=True) as folder:
        _start(cpus, folder)
        try:
            yield
        finally:
            ray.shutdown()


def machine_use() -> dict[str, float]:
    """What this Ray and its machine have, and what of it is in use: fields as in orchestrator.store.live.MachineUse."""
    import psutil
    import ray

    whole, free = ray.cluster_resources(), ray.available_resources()
    slots = {
        field: (whole.get(resource, 0.0), whole.get(resource, 0.0) - free.get(resource, 0.0))
        for field, resource in (("cpus", "CPU"), ("gpus", "GPU"))
    }
    memory = psutil.virtual_memory()
    return {
        "cpus": slots["cpus"][0],
        "cpus_held": slots["cpus"][1],
        "gpus": slots["gpus"][0],
        "gpus_held": slots["gpus"][1],
        "cpu_percent": psutil.cpu_percent(),
        "memory_bytes": memory.total,
        "memory_used_bytes": memory.total - memory.available,
    }


def _start(cpus: int | None, folder: str) -> None:
    import ray

    for left in reversed(range(_START_TRIES)):
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                _temp_dir=folder,
            )
            return
        except Exception as error:
            ray.shutdown()
            if not left:
                what = f"Ray did not start on this machine: {error}"
                raise EnvironmentFault("ray_start", what, "see whether memory is left, then try again") from error
