"""A real S3 server on this machine (ministack), with an empty bucket; started and ended by the tests that need it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECRET = "a-secret-that-must-not-be-written-anywhere"
BUCKET = "studies"


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The URL of a server with the bucket `studies`; folder: for its own files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    settings = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "SERVICES": "s3",
        "IOT_MTLS_ENABLED": "false",
        "LOG_LEVEL": "ERROR",
    }
    with (folder / "s3-server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "ministack"], cwd=folder, env=os.environ | settings, stdout=log, stderr=log
        )
    try:
        make_bucket(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(10)


def make_bucket(url: str, server: subprocess.Popen[bytes]) -> None:
    """Ask until the server answers."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            continue
    raise RuntimeError(f"the S3 server ended with {server.returncode}")
