"""How the ranks of a trainer find each other: a store that rank 0 holds open from before they are told of it.

The port is bound once and never given back in between, so that no other process can take it. PyTorch's `tcp://` joins
the same store: in rank 0's process a second one on that port shares the first one's server.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import DistError

from tasks.engines.protocols import EngineError

_POLL_S = 0.05
_SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of an interface."""
_TCPStore: Any = vars(torch.distributed)["TCPStore"]


class Meeting:
    """The place where `ranks` ranks meet, on this machine's address `host`."""

    def __init__(self, host: str, ranks: int, timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        listener = _listen(host)
        port = listener.getsockname()[1]
        self.url = f"tcp://{_bracketed(host)}:{port}"
        self._store: Any = _TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            # The store closes it.
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Leave; the port stays open for those in this process that have joined it."""
        self._store = None

    def wait(self) -> None:
        """Until all others have come; `EngineError` names those that have not come in time."""
        deadline = time.monotonic() + self._timeout_s
        missing = list(range(1, self._ranks))
        while missing and (store := self._store) is not None:
            missing = [rank for rank in missing if not store.check([_key(rank)])]
            if missing and time.monotonic() > deadline:
                who = f"rank {', '.join(map(str, missing))} of {self._ranks}"
                limit = f"cluster.startup_timeout_s = {self._timeout_s:g}"
                raise EngineError(f"{who} did not come to {self.url} within {limit}")
            time.sleep(_POLL_S)


def arrive(url: str, rank: int, timeout_s: float) -> None:
    """Say to rank 0 that this rank is there; `EngineError` where `url` cannot be reached within `timeout_s`."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    limit = timedelta(seconds=timeout_s)
    try:
        store = _TCPStore(host.strip("[]"), int(port), timeout=limit, wait_for_workers=False)
        store.set(_key(rank), "here")
    except DistError as error:
        raise EngineError(f"rank 0 cannot be reached at {url}: {error}") from error


def use_interface_of(host: str) -> None:
    """Let gloo talk over the network that owns this machine's IPv4 address `host`, as Ray does.

    Gloo itself takes what the machine's name resolves to, which other machines often cannot reach. A user's own
    GLOO_SOCKET_IFNAME stays.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            if _address_of(asking, name) == host:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _address_of(asking: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        # It has no address.
        return None
    return socket.inet_ntoa(answer[20:24])


def _key(rank: int) -> str:
    return f"fp8-grpo/here/{rank}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listen(host: str) -> socket.socket:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:
        # Behind address translation a machine cannot bind the address that others know it by.
        return socket.create_server(("", 0), family=family)
