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

    A tensor that is away keeps its shape, and whatever refers to it; its storage on the device is empty.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._away: list[_Moved] = []

    @property
    def away(self) -> bool:
        return bool(self._away)

    def take(self, tensors: Iterable[Tensor]) -> int:
        """Move what lies on a GPU; returns bytes. Tensors that share memory move once. `EngineError` when away."""
        if self._away:
            raise EngineError("these tensors are in host memory already")
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" or not storage.nbytes() or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            copy = self._buffer(storage.nbytes())
            copy.copy_(_bytes(storage, tensor.device), non_blocking=True)
            self._away.append(_Moved(storage, tensor.device, copy))
        if self._away:
            torch.cuda.synchronize()
        for moved in self._away:
            moved.storage.resize_(0)
        torch.cuda.empty_cache()
        return sum(moved.copy.numel() for moved in self._away)

    def give_back(self) -> None:
        """Bring everything back; nothing happens to what is there."""
        for moved in self._away:
            moved.storage.resize_(moved.copy.numel())
            _bytes(moved.storage, moved.device).copy_(moved.copy, non_blocking=True)
        if self._away:
            torch.cuda.synchronize()
        for moved in self._away:
            self._free.setdefault(moved.copy.numel(), []).append(moved.copy)
        self._away = []

    def _buffer(self, size: int) -> Tensor:
        if self._free.get(size):
            return self._free[size].pop()
        buffer = torch.empty(size, dtype=torch.uint8)
        # PyTorch's own pinned memory is rounded up to a power of two: up to twice the size, of tens of gigabytes.
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
        return buffer


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
