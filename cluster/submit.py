"""Send a command of ours to a cluster as a Ray job, once, and follow it.

submit, resume -> [submit] -> Ray Jobs -> python -m orchestrator on the cluster
in    the URL of a cluster's dashboard, a command, the few files that it reads
out   Handle: the job's id and whether it was running already
not   a store: what the job does there decides what is done; the job itself is forgotten with its cluster
The id of a job is made from what it does, so two who send the same get the same job. Nothing secret is sent: no token,
no credentials; the cluster's machines have their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.code import own_code
from cluster.connect import require_reachable, use_token, wrong_token
from trainers.errors import EnvironmentFault, InputError

_STOP_WAIT_S = "60"  # between Ray's SIGTERM and its SIGKILL; running trials save their state in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A job on a cluster. joined: it was running before this call."""

    address: str
    id: str
    joined: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a job does.

    subject    what it works on (store and sweep): jobs of one subject are one job
    arguments  of `python -m orchestrator`
    files      name -> content, in the folder that it starts in
    revision   of the command: a running job of the same subject with another revision is not this one
    variables  of its environment; seen by everybody who sees the dashboard
    """

    name: str
    subject: str
    arguments: Sequence[str]
    files: Mapping[str, str]
    revision: str
    variables: Mapping[str, str]


def send(address: str, command: Command) -> Handle:
    """Start a command on the cluster, or join it where it runs already.

    raises  InputError for a bad address, or when another revision of it runs;
            EnvironmentFault (cluster_unreachable, wrong_token, job_refused)
    """
    client = _client(address)
    prefix = f"geosweep-{command.name}-{hashlib.sha256(command.subject.encode()).hexdigest()[:12]}-"
    while True:
        jobs = [job for job in client.list_jobs() if (job.submission_id or "").startswith(prefix)]
        for job in jobs:
            if not job.status.is_terminal():
                _require_revision(job, command)
                return Handle(address=address, id=job.submission_id, joined=True)
        id = f"{prefix}{len(jobs) + 1}"
        if _submit(client, id, command):
            return Handle(address=address, id=id, joined=False)


def follow(handle: Handle, say: Callable[[str], None]) -> int:
    """Print the job's log until it ends; returns the exit code of its command. raises EnvironmentFault"""
    client = _client(handle.address)

    async def tail() -> None:
        async for lines in client.tail_job_logs(handle.id):
            say(lines.rstrip("\n"))

    try:
        asyncio.run(tail())
        info = client.get_job_info(handle.id)
    except Exception as error:  # the head's machine may go at any moment, and each of Ray's layers says it its own way
        what = f"{handle.address}: the cluster answers no more: {error}; nothing that is in the store is lost"
        raise EnvironmentFault("cluster_unreachable", what, "start the cluster, then geosweep resume") from error
    if info.status == "SUCCEEDED":
        return 0
    if not info.driver_exit_code:
        what = f"job {handle.id}: {info.status}: {info.message}"
        raise EnvironmentFault(
            "job_failed", what, "geosweep status says where the sweep stands; geosweep resume goes on"
        )
    return int(info.driver_exit_code)


def _client(address: str) -> Any:
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        problems = ["allowed: http://HOST:8265 or https://HOST, the URL of the cluster's dashboard"]
        raise InputError(f"--address {address}: not the URL of a dashboard", problems)
    require_reachable(parts.hostname, port or (443 if parts.scheme == "https" else 80))
    use_token()
    from ray.job_submission import JobSubmissionClient

    for handler in logging.getLogger("ray").handlers:  # made when Ray is imported
        handler.setLevel(logging.CRITICAL)

    try:
        client = JobSubmissionClient(address)
        client.list_jobs()
    except Exception as error:
        raise _refusal(address, error) from error
    return client


def _submit(client: Any, id: str, command: Command) -> bool:
    """Start the job; False if one with this id came to be meanwhile."""
    with own_code() as code, tempfile.TemporaryDirectory(prefix="geosweep-job-") as folder:
        for name, content in command.files.items():
            (Path(folder) / name).write_text(content)
        environment = {
            "working_dir": folder,
            "py_modules": [str(package) for package in code],
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_WAIT_S, "PYTHONUNBUFFERED": "1", **command.variables},
        }
        entrypoint = shlex.join(["python", "-m", "orchestrator", *command.arguments])
        try:
            client.submit_job(
                submission_id=id,
                entrypoint=entrypoint,
                runtime_env=environment,
                metadata={"sweep": command.name, "revision": command.revision},
            )
        except Exception as error:
            if "already exists" in str(error):
                return False
            raise _refusal(client.get_address(), error) from error
    return True


def _require_revision(job: Any, command: Command) -> None:
    running = (job.metadata or {}).get("revision")
    if running != command.revision:
        raise InputError(
            f"{command.name}: job {job.submission_id} works on another revision of this sweep ({running}, "
            f"this file is {command.revision}); nothing was sent",
            next_step=f"geosweep stop {command.name}, then submit this one",
        )


def _refusal(address: str, error: Exception) -> EnvironmentFault:
    said = str(error)
    if any(sign in said for sign in ("401", "403", "Unauthorized", "Forbidden", "AuthenticationError")) or (
        type(error).__name__ == "AuthenticationError"
    ):
        return wrong_token(address)
    what = f"--address {address}: the cluster did not take the job: {said.splitlines()[0] if said else error!r}"
    return EnvironmentFault("job_refused", what, "see that this is the URL of a Ray dashboard, with Ray Jobs")
