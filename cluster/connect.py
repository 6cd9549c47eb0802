"""Start a local Ray for one session, or join a cluster for it, quietly, and end it.

run, eval -> [connect] -> Ray
in    nothing, or the address of a cluster; its token from the environment or ~/.ray/auth_token, as Ray finds it
out   a Ray to use inside a `with`; its living nodes; a function called once on each of them
not   a store, a sweep: Ray is a pool of workers and remembers nothing for us
The settings are those that Ray's own defaults get wrong for many short trials; each says why.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from trainers.errors import EnvironmentFault, InputError

_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # five files a trial that nobody reads
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # one report without a metric would abort the sweep
    "TUNE_FORCE_TRIAL_CLEANUP_S": "60",  # a trial that never reports keeps its GPU until then
    "TUNE_GLOBAL_CHECKPOINT_S": "300",  # Tune's snapshot is of no use to us
    "RAY_worker_niceness": "0",  # Ray's 15 would let any other process on the machine starve the training
    "RAY_AIR_NEW_OUTPUT": "0",  # boxes on the terminal, even at verbose=0
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_START_TRIES = 2  # Ray gives its own processes 30 s to start, too little on a busy machine
_CONNECT_S = 5.0
_JOIN_S = 60.0
_CALL_S = 45.0
_TOKEN_STEP = "put the cluster's token into ~/.ray/auth_token (mode 600), or name its file in RAY_AUTH_TOKEN_PATH"


@contextmanager
def ray_session(address: str | None, code: Sequence[Path] = ()) -> Iterator[None]:
    """A Ray for the body: of this machine, or the cluster at `address`; ours of it ends with the body.

    address  HOST:PORT of the head (6379), or "auto" on a machine of the cluster, as in a job
    code     folders of Python packages that its workers get from us
    raises   InputError for an address of another form; EnvironmentFault as local_ray, and cluster_unreachable,
             wrong_token, version_mismatch
    """
    with local_ray() if address is None else joined_ray(address, code):
        yield


@contextmanager
def local_ray(cpus: int | None = None) -> Iterator[None]:
    """A Ray of this machine for the body; its processes and temporary folder end with it.

    cpus    CPU slots; None: as many as the machine has
    raises  EnvironmentFault (ray_start) if Ray does not start
    """
    _prepare()
    import ray

    with tempfile.TemporaryDirectory(prefix="geosweep-ray-", ignore_cleanup_errors=True) as folder:
        _start(cpus, folder)
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def joined_ray(address: str, code: Sequence[Path] = ()) -> Iterator[None]:
    """The cluster at `address` for the body. A machine that is no node of it becomes one without CPUs meanwhile."""
    _prepare()
    use_token()
    import ray

    options: dict[str, Any] = {"runtime_env": {"py_modules": [str(folder) for folder in code]}} if code else {}
    with contextlib.ExitStack() as node:
        if address != "auto":
            host, port = host_and_port(address)
            require_reachable(host, port)
            _require_same_versions(address)
            if not _is_node(address):
                node.enter_context(_node_without_cpus(address))
                options["_node_ip_address"] = _own_address(address)  # else Ray guesses, and may take the head's
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **options)
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise _explained(address, error) from error
        try:
            yield
        finally:
            ray.shutdown()


def living_nodes() -> list[tuple[str, dict[str, float]]]:
    """Name and resources of each living node of the Ray that is connected."""
    import ray

    return [(node["NodeManagerHostname"], dict(node["Resources"])) for node in ray.nodes() if node["Alive"]]


def machine_use() -> dict[str, float]:
    """What this Ray and its machine have, and what of it is in use: fields as in orchestrator.store.live.MachineUse."""
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


def call_on_every_node(function: Callable[[], Any]) -> dict[str, Any]:
    """Call a function once on each living node; node name -> its result, or the exception that it ended with."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def call() -> Any:  # Ray takes nothing but plain functions
        return function()

    calls = {}
    for node in ray.nodes():
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(call)
            calls[node["NodeManagerHostname"]] = task.remote()
    until = time.monotonic() + _CALL_S
    return {name: _answer(call, until - time.monotonic()) for name, call in calls.items()}


def _answer(call: Any, timeout_s: float) -> Any:
    import ray

    try:
        return ray.get(call, timeout=max(timeout_s, 0.1))
    except ray.exceptions.RayTaskError as error:
        return error.cause
    except (ray.exceptions.RayError, TimeoutError) as error:
        return error


def use_token() -> Path | None:
    """Turn token authentication on where a token is found, and see that only its owner can read its file.

    returns  the token's file; None if there is none, or the token is in RAY_AUTH_TOKEN itself
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_MODE"] = "token"
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not path.exists():
        return None
    os.environ["RAY_AUTH_MODE"] = "token"  # the file alone is not enough for Ray's clients
    if path.stat().st_mode & 0o077 and path.stat().st_uid == os.geteuid():
        path.chmod(0o600)  # Ray writes it readable for everybody
    return path


def token() -> str | None:
    """The token that requests to a cluster carry, found where Ray finds it."""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given.strip()
    path = use_token()
    return path.read_text().strip() if path else None


def host_and_port(address: str) -> tuple[str, int]:
    """HOST:PORT in its parts. raises InputError for anything else, Ray Client's ray:// too"""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        problems = ["allowed: HOST:PORT of the head (its port is 6379), auto on a machine of the cluster"]
        raise InputError(
            f"--address {address}: not the address of a Ray cluster",
            problems,
            "to send the sweep as a job, use geosweep submit --address http://HOST:8265",
        )
    return host, int(port)


def require_reachable(host: str, port: int) -> None:
    """Find out in seconds what Ray finds out in minutes. raises EnvironmentFault (cluster_unreachable)"""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        what = f"--address {host}:{port}: nothing answers there ({error.strerror or error}); nothing was started"
        step = "see that the cluster's head runs, that the port is right, and that no firewall is between"
        raise EnvironmentFault("cluster_unreachable", what, step) from error


def wrong_token(address: str) -> EnvironmentFault:
    found = "the token that was found is not the cluster's" if token() else "it asks for a token and none was found"
    what = f"--address {address}: refused: {found}; nothing was started"
    return EnvironmentFault("wrong_token", what, _TOKEN_STEP)


def _prepare() -> None:
    """Ray reads its settings when it is imported."""
    os.environ.update(_ENVIRONMENT)
    logging.getLogger("ray").setLevel(logging.CRITICAL)


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
            use_token()
            return
        except Exception as error:
            ray.shutdown()
            if not left:
                what = f"Ray did not start on this machine: {error}"
                raise EnvironmentFault("ray_start", what, "see whether memory is left, then try again") from error


def _require_same_versions(address: str) -> None:
    """Ray connects only equal versions, and says so late. raises EnvironmentFault (version_mismatch, wrong_token)"""
    import ray
    from ray._common.usage.usage_lib import get_cluster_metadata

    cluster = get_cluster_metadata(_gcs(address)) or {}
    there = (cluster.get("ray_version"), cluster.get("python_version"))
    here = (ray.__version__, platform.python_version())
    if there != here:
        what = (
            f"--address {address}: the cluster has Ray {there[0]} and Python {there[1]}, "
            f"this process has Ray {here[0]} and Python {here[1]}; nothing was started"
        )
        step = "install the cluster's versions here, or send the sweep as a job: geosweep submit"
        raise EnvironmentFault("version_mismatch", what, step)


def _is_node(address: str) -> bool:
    """Whether a node of the cluster runs on this machine."""
    mine = {found.address for interface in psutil.net_if_addrs().values() for found in interface}
    nodes = _gcs(address).get_all_node_info(timeout=_CONNECT_S)
    return any(info.node_manager_address in mine for info in nodes.values() if info.state == 0)  # 0: alive


def _gcs(address: str) -> Any:
    """Ray's own client of the head's table of nodes, which answers before anything is joined."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        return GcsClient(address=address)
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise _explained(address, error) from error


def _explained(address: str, error: Exception) -> EnvironmentFault:
    """What kept us from joining, in words; Ray tells it in the exceptions behind its own."""
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    said = " ".join(str(one) for one in chain)
    if "AuthenticationError" in {type(one).__name__ for one in chain} or "auth token" in said.lower():
        return wrong_token(address)
    if "Version mismatch" in said:
        return EnvironmentFault(
            "version_mismatch", f"--address {address}: {error}", "install the cluster's versions here"
        )
    what = f"--address {address}: Ray did not join the cluster: {said.splitlines()[0]}"
    return EnvironmentFault("cluster_unreachable", what, "see the head's log, gcs_server.out")


@contextmanager
def _node_without_cpus(address: str) -> Iterator[None]:
    """A Ray node on this machine that takes no trials: Ray's drivers talk to a node beside them."""
    with tempfile.TemporaryDirectory(prefix="geosweep-ray-", ignore_cleanup_errors=True) as folder:
        command = [str(Path(sys.executable).with_name("ray")), "start", f"--address={address}", "--block"]
        command += [f"--node-ip-address={_own_address(address)}", f"--temp-dir={folder}", "--disable-usage-stats"]
        process = subprocess.Popen(
            [*command, "--num-cpus=0", "--num-gpus=0"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_until_node(address, process)
            yield
        finally:
            process.terminate()
            process.wait()


def _wait_until_node(address: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _JOIN_S
    while not _is_node(address):
        if process.poll() is not None or time.monotonic() > until:
            what = f"--address {address}: this machine did not become a node of the cluster within {_JOIN_S:g} s"
            step = "the head must reach this machine too; else send the sweep as a job: geosweep submit"
            raise EnvironmentFault("cluster_unreachable", what, step)
        time.sleep(0.5)


def _own_address(address: str) -> str:
    """The address of this machine that the head sees."""
    host, port = host_and_port(address)
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        return str(ipaddress.ip_address(connection.getsockname()[0]))
