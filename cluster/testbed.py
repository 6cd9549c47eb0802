"""Hosts on one Linux machine: real Ray nodes that can be killed, cut off, paused and added.

tests/cluster -> [testbed] -> network, process and mount namespaces; Ray nodes in them
A host is an init process in namespaces of its own: address, host name, process ids, /dev/shm and scratch disk are its
own, the rest of the file system (so also a store's folder) is shared, as on a cluster with a network file system.
in    root's rights, iproute2 and util-linux
out   Bed, Host; when the testbed is left, nothing of it is left
not   a store, a sweep, a job
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from trainers.errors import EnvironmentFault

_TOOLS = ("ip", "setpriv", "unshare", "nsenter", "mount")
_SCRATCH_MIB = 512
_SHARED_MEMORY_MIB = 192
_OBJECT_STORE_BYTES = 80 * 2**20
_START_S = 120
HEAD_PORT, DASHBOARD_PORT = 6379, 8265
HEALTH_CHECKS = {  # a lost node is noticed within ten seconds; Ray's default is a minute
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
# should this process be killed, unshare is killed by the kernel, and the host's init with it
_NEW_HOST = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_INIT = """
set -e
hostname "$1"
mount -t tmpfs -o size="$3"m tmpfs /dev/shm
mount -t tmpfs -o size="$4"m tmpfs "$2"
ip link set lo up
echo ready
trap '' CHLD  # inherited by what follows: the kernel reaps orphans
exec sleep infinity
"""


def missing_rights() -> str | None:
    """Why hosts cannot be made on this machine; None where they can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        return f"namespaces are refused: {probe.stderr.strip()} (run as root with CAP_SYS_ADMIN and CAP_NET_ADMIN)"
    return None


def new_token(path: Path) -> None:
    """Write a new token for a Ray cluster, readable by its owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


@dataclass(slots=True, kw_only=True)
class Host:
    """One machine of the testbed.

    scratch       its own small disk, not shared
    environment   what its processes get beside the caller's
    """

    name: str
    address: str
    scratch: Path
    environment: Mapping[str, str]
    init: int
    link: str
    _launcher: subprocess.Popen[str]

    def run(self, *command: str, timeout_s: float = _START_S, **environment: str) -> str:
        """Run a command on the host and wait; returns what it printed. raises EnvironmentFault if it fails"""
        done = subprocess.run(
            self._enter(command),
            env=self._environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            what = f"{self.name}: {' '.join(command)} ended with exit code {done.returncode}: {done.stdout}"
            raise EnvironmentFault("host_command", what)
        return done.stdout

    def start_ray(self, head: str | None = None, *options: str, cpus: int = 1, **environment: str) -> None:
        """Make the host a node of a cluster: the head of a new one, or of the one whose head has that address."""
        place = (
            ["--head", f"--port={HEAD_PORT}", f"--dashboard-host={self.address}", f"--dashboard-port={DASHBOARD_PORT}"]
            if head is None
            else [f"--address={head}:{HEAD_PORT}"]
        )
        self.run(
            str(Path(sys.executable).with_name("ray")),
            "start",
            *place,
            f"--node-ip-address={self.address}",
            f"--temp-dir={self.scratch}/ray",
            f"--num-cpus={cpus}",
            "--num-gpus=0",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
            *options,
            timeout_s=_START_S,
            **environment,
        )

    def processes(self) -> list[psutil.Process]:
        """Every process of the host, its init too."""
        mine = _process_space(self.init)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if _process_space(process.pid) == mine:
                    found.append(process)
        return found

    def find(self, *words: str) -> list[psutil.Process]:
        """The processes of the host whose command line has all the words."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                if all(word in line for word in words):
                    found.append(process)
        return found

    def kill(self) -> None:
        """Power off: with its init, the kernel kills every process of the host, and its address is gone."""
        if self._launcher.poll() is not None:
            return
        os.kill(self.init, signal.SIGKILL)
        self._launcher.communicate()

    def pause(self) -> None:
        """Stop every process where it is; `thaw` lets them go on."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def cut(self) -> None:
        """Unplug the network; the host goes on."""
        _ip("link", "set", self.link, "down")

    def reconnect(self) -> None:
        _ip("link", "set", self.link, "up")

    def _signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _enter(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self.init}", "--net", "--uts", "--mount", "--pid", "--", *command]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {**os.environ, **self.environment, **more}


class Bed:
    """Hosts on one bridge, which the machine itself is on too. Leaving it kills them all.

    token   file with the token of every Ray cluster in it
    """

    def __init__(self, folder: Path) -> None:
        """folder: an empty one, whose path is short (sockets lie in it)."""
        if reason := missing_rights():
            raise EnvironmentFault("no_rights", f"a testbed of real hosts cannot be made here: {reason}")
        self._folder = folder
        self._id = f"gs{secrets.token_hex(3)}"
        self._network = _free_network()
        self._count = 0
        self.hosts: dict[str, Host] = {}
        self.token = folder / "token"
        new_token(self.token)

    def __enter__(self) -> Bed:
        _ip("link", "add", self._id, "type", "bridge")
        _ip("address", "add", f"{self._network}.1/24", "dev", self._id)
        _ip("link", "set", self._id, "up")
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        try:
            for host in self.hosts.values():
                host.kill()
        finally:
            _ip("link", "delete", self._id)

    @property
    def environment(self) -> dict[str, str]:
        """What a process on the machine itself needs to talk to a cluster in the testbed."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}

    def new_host(self, name: str) -> Host:
        """A new machine on the bridge; a name is used once."""
        assert name not in self.hosts, f"there was a host {name}"
        self._count += 1
        scratch = self._folder / name
        scratch.mkdir()
        launcher = subprocess.Popen(
            [*_NEW_HOST, "sh", "-c", _INIT, "init", name, str(scratch), str(_SHARED_MEMORY_MIB), str(_SCRATCH_MIB)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert launcher.stdout is not None
        if launcher.stdout.readline() != "ready\n":
            raise EnvironmentFault("host_start", f"{name}: the host's init ended with exit code {launcher.wait()}")
        (init,) = psutil.Process(launcher.pid).children()
        host = Host(
            name=name,
            address=f"{self._network}.{self._count + 9}",
            scratch=scratch,
            environment={**self.environment, **HEALTH_CHECKS, **_own_places(scratch)},
            init=init.pid,
            link=f"{self._id}.{self._count}",
            _launcher=launcher,
        )
        self.hosts[name] = host
        self._plug_in(host)
        return host

    def _plug_in(self, host: Host) -> None:
        _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", str(host.init))
        _ip("link", "set", host.link, "master", self._id, "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "route", "add", "default", "via", f"{self._network}.1")


def wait_for_port(address: str, port: int, timeout_s: float = 30.0) -> None:
    """Until something listens there. raises EnvironmentFault if nothing does in time"""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            return
        time.sleep(0.1)
    raise EnvironmentFault("cluster_unreachable", f"nothing listens at {address}:{port} after {timeout_s:g} s")


def _own_places(scratch: Path) -> dict[str, str]:
    """Home and temporary files on the host's own disk; its Python is ours."""
    own = {"HOME": str(scratch), "TMPDIR": str(scratch)}
    return {**own, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _process_space(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())


def _free_network() -> str:
    """The first three numbers of a private network that no interface of this machine is on."""
    used = {address.address.rsplit(".", 1)[0] for found in psutil.net_if_addrs().values() for address in found}
    free: Iterator[str] = (f"10.213.{number}" for number in range(256))
    return next(network for network in free if network not in used)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFault("host_network", f"ip {' '.join(words)}: {done.stderr.strip()}")
