"""Moving tensors of a GPU to host memory and back without a change of their identity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.engines.protocols import EngineError


@dataclass(frozen=True)
class _Moved:
    storage: torch.UntypedStorage
    device: torch.device
    copy: Tensor


class HostCopies:
    """Host memory for one set of tensors, kept and used again by every round.

    A tensor that is away keeps its shape, and whatever refers to it; its storage on the device is empty. One that
    leaves (`start`) is still on the device and may be read, not written, until `take` or `give_back`.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._moved: list[_Moved] = []
        self._leaving = False

    @property
    def away(self) -> bool:
        return bool(self._moved) and not self._leaving

    @property
    def leaving(self) -> bool:
        return self._leaving

    def start(self, tensors: Iterable[Tensor]) -> None:
        """Begin to copy what lies on a GPU, beside what that computes. Tensors that share memory are copied once.

        `EngineError` when they are away or leave already.
        """
        if self._moved:
            raise EngineError("these tensors are in host memory already, or on their way to it")
        streams: dict[torch.device, torch.cuda.Stream] = {}
        seen: set[int] = set()
        moved: list[_Moved] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" or not storage.nbytes() or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            if tensor.device not in streams:
                streams[tensor.device] = torch.cuda.Stream(tensor.device)
                streams[tensor.device].wait_stream(torch.cuda.current_stream(tensor.device))
            copy = self._buffer(storage.nbytes())
            with torch.cuda.stream(streams[tensor.device]):
                copy.copy_(_bytes(storage, tensor.device), non_blocking=True)
            moved.append(_Moved(storage, tensor.device, copy))
        # Not before: where memory cannot be pinned nothing has left.
        self._moved, self._leaving = moved, bool(moved)

    def take(self, tensors: Iterable[Tensor]) -> int:
        """Move what lies on a GPU, or end what `start` began; returns bytes. `EngineError` when away."""
        if not self._leaving:
            self.start(tensors)
        if self._leaving:
            torch.cuda.synchronize()
        for moved in self._moved:
            moved.storage.resize_(0)
        self._leaving = False
        torch.cuda.empty_cache()
        return sum(moved.copy.numel() for moved in self._moved)

    def give_back(self) -> None:
        """Bring everything back; nothing happens to what is there, and what leaves stays."""
        if not self._leaving:
            for moved in self._moved:
                moved.storage.resize_(moved.copy.numel())
                _bytes(moved.storage, moved.device).copy_(moved.copy, non_blocking=True)
        if self._moved:
            torch.cuda.synchronize()
        for moved in self._moved:
            self._free.setdefault(moved.copy.numel(), []).append(moved.copy)
        self._moved, self._leaving = [], False

    def _buffer(self, size: int) -> Tensor:
        if self._free.get(size):
            return self._free[size].pop()
        buffer = torch.empty(size, dtype=torch.uint8)
        # PyTorch's own pinned memory is rounded up to a power of two: up to twice the size, of tens of gigabytes.
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
        return buffer


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
