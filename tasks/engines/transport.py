"""The way of a sync from the trainer's process to a rollout engine's: chunks of bounded size, in order.

Chunks travel as bytes (any two processes), or as the handle of a CUDA buffer (one GPU, two processes), so that
8 GB never cross the host. Two buffers take turns: one is filled while the other is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from tasks.engines.protocols import RolloutEngine, SyncError, SyncHeader, SyncPayload, TensorForm

_ALIGNMENT = 256
"""Bytes to which pieces of a buffer are aligned: vector loads, and views of every dtype."""

_BUFFERS = 2


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `start + size` of a tensor, at `offset` of the chunk."""

    name: str
    start: int
    size: int
    offset: int


@dataclass(frozen=True)
class CudaBuffer:
    """A buffer on a GPU as another process can open it; `number` tells the sender's buffers apart."""

    number: int
    handle: tuple[Any, ...]


@dataclass(frozen=True)
class Chunk:
    """Pieces of tensors in one buffer."""

    pieces: tuple[Piece, ...]
    data: NDArray[np.uint8] | CudaBuffer


class Receiver(Protocol):
    """The far end, as the sender sees it. Each call raises `SyncError` when the far end fails or is gone."""

    def begin(self, header: SyncHeader) -> str | None:
        """Announce; returns the UUID of the far end's GPU, None where it has none."""
        ...

    def receive(self, chunk: Chunk) -> Callable[[], None]:
        """Hand a chunk over; the result waits until its buffer may be used again."""
        ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Sent:
    """How a sync travelled."""

    transport: str
    bytes: int
    chunks: int


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def size_of(form: TensorForm) -> int:
    """Bytes of a tensor."""
    return math.prod(form.shape) * form.dtype.itemsize


def plan_chunks(forms: Mapping[str, TensorForm], limit: int) -> Iterator[tuple[Piece, ...]]:
    """All tensors in order, in chunks of at most `limit` bytes (>= 256); a larger tensor is cut."""
    pieces: list[Piece] = []
    used = 0
    for name, form in forms.items():
        start, left = 0, size_of(form)
        while left or not start:
            if used >= limit:
                yield tuple(pieces)
                pieces, used = [], 0
            size = min(left, limit - used)
            pieces.append(Piece(name, start, size, used))
            start, left = start + size, left - size
            used += _aligned(size)
            if not left:
                break
    if pieces:
        yield tuple(pieces)


def gpu_uuid(device: torch.device) -> str | None:
    """UUID of a GPU, the same in every process; None for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _HostBuffers:
    """Chunks as bytes. Each gets an array of its own, since the channel may keep it."""

    name = "host"

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def fill(self, number: int, pieces: tuple[Piece, ...], tensors: Mapping[str, Tensor]) -> Chunk:
        array = np.empty(pieces[-1].offset + pieces[-1].size, dtype=np.uint8)
        whole = torch.from_numpy(array)
        for p in pieces:
            whole[p.offset : p.offset + p.size].copy_(_flat(tensors[p.name])[p.start : p.start + p.size])
        return Chunk(pieces, array)


class _CudaBuffers:
    """Chunks in two buffers of the GPU that both ends share."""

    name = "cuda_ipc"

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit, self._device = limit, device
        # Made when first filled: one that is shared and never opened by the far end is never freed.
        self._buffers: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}

    def fill(self, number: int, pieces: tuple[Piece, ...], tensors: Mapping[str, Tensor]) -> Chunk:
        if number not in self._buffers:
            made = torch.empty(self._limit, dtype=torch.uint8, device=self._device)
            self._buffers[number] = (made, reduce_tensor(made)[1])
        buffer, handle = self._buffers[number]
        for p in pieces:
            buffer[p.offset : p.offset + p.size].copy_(_flat(tensors[p.name])[p.start : p.start + p.size])
        # The other process does not wait for this one's stream.
        torch.cuda.current_stream(buffer.device).synchronize()
        return Chunk(pieces, CudaBuffer(number, handle))


def send(payload: SyncPayload, receiver: Receiver, limit: int) -> Sent:
    """Send a whole sync in chunks of at most `limit` bytes. Raises what the receiver raises."""
    header = payload.header
    place = receiver.begin(header)
    device = next(iter(payload.tensors.values())).device
    total = sum(map(size_of, header.forms.values()))
    shared = place is not None and gpu_uuid(device) == place
    buffers = _CudaBuffers(min(limit, _padded(header)), device) if shared else _HostBuffers(limit)
    waiting: dict[int, Callable[[], None]] = {}
    count = 0
    for count, pieces in enumerate(plan_chunks(header.forms, limit), 1):
        number = count % _BUFFERS
        if number in waiting:
            waiting.pop(number)()
        waiting[number] = receiver.receive(buffers.fill(number, pieces, payload.tensors))
    for wait in waiting.values():
        wait()
    receiver.finish()
    return Sent(buffers.name, total, count)


def _padded(header: SyncHeader) -> int:
    return sum(_aligned(size_of(form)) for form in header.forms.values())


class Arrivals:
    """The receiving side: puts a sync's pieces together and hands whole tensors to the engine."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._header: SyncHeader | None = None
        self._open: dict[int, Tensor] = {}
        self._parts: dict[str, tuple[Tensor, int]] = {}

    def begin(self, header: SyncHeader) -> str | None:
        """See `Receiver.begin`."""
        self._reset()
        self._engine.begin_sync(header)
        self._header = header
        return gpu_uuid(self._engine.device)

    def receive(self, chunk: Chunk) -> None:
        """Install what is complete with this chunk. On return nothing of its buffer is in use."""
        header = self._header
        if header is None:
            raise SyncError("no sync is under way: begin comes first")
        data = self._bytes(chunk)
        whole: dict[str, Tensor] = {}
        for piece in chunk.pieces:
            tensor = self._add(piece, data, header)
            if tensor is not None:
                whole[piece.name] = tensor
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize()
        if whole:
            self._engine.receive(whole)

    def finish(self) -> None:
        """See `Receiver.finish`."""
        self._reset()
        self._engine.finish_sync()

    def _reset(self) -> None:
        self._header, self._open, self._parts = None, {}, {}

    def _bytes(self, chunk: Chunk) -> Tensor:
        if isinstance(chunk.data, CudaBuffer):
            number = chunk.data.number
            if number not in self._open:
                arguments = list(chunk.data.handle)
                # The sender's number of the device; this process may have another for it.
                arguments[6] = torch.cuda.current_device()
                self._open[number] = rebuild_cuda_tensor(*arguments)
            return self._open[number]
        # Arrays from an object store are read-only, and torch wants to own writable memory.
        return torch.from_numpy(chunk.data if chunk.data.flags.writeable else chunk.data.copy())

    def _add(self, piece: Piece, data: Tensor, header: SyncHeader) -> Tensor | None:
        """Copy a piece to its tensor, which is returned when it is the last."""
        form = header.forms.get(piece.name)
        if form is None:
            raise SyncError(f"{piece.name} was not announced")
        size = size_of(form)
        buffer, have = self._parts.pop(piece.name, (None, 0))
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._engine.device)
        if piece.start != have or have + piece.size > size:
            raise SyncError(f"{piece.name}: bytes {piece.start} to {piece.start + piece.size} came after {have}")
        buffer[have : have + piece.size].copy_(data[piece.offset : piece.offset + piece.size])
        if have + piece.size < size:
            self._parts[piece.name] = (buffer, have + piece.size)
            return None
        return buffer.view(form.dtype).reshape(form.shape)
