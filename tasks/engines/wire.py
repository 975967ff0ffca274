"""A sync payload as plain arrays, for the way between processes.

Pickled torch tensors are copied, and FP8 storages do not unpickle at all; byte arrays pass through Ray's
shared object store without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.engines.protocols import SyncPayload
from tasks.numerics.kv_scales import Scales

_DTYPES = {str(d): d for d in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu)}


@dataclass(frozen=True)
class WireTensor:
    """Row-major bytes of a tensor with its dtype (torch's name) and shape."""

    data: NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WirePayload:
    """`SyncPayload` with its tensors as bytes."""

    version: int
    tensors: dict[str, WireTensor]
    kv_scales: Scales
    fingerprints: dict[str, int]


def _pack(tensor: Tensor) -> WireTensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return WireTensor(flat.numpy(), str(tensor.dtype), tuple(tensor.shape))


def _unpack(wire: WireTensor) -> Tensor:
    # Arrays from the object store are read-only, and torch wants to own writable memory.
    return torch.from_numpy(wire.data.copy()).view(_DTYPES[wire.dtype]).reshape(wire.shape)


def pack(payload: SyncPayload) -> WirePayload:
    """For sending."""
    tensors = {name: _pack(tensor) for name, tensor in payload.tensors.items()}
    return WirePayload(payload.version, tensors, payload.kv_scales, payload.fingerprints)


def unpack(wire: WirePayload) -> SyncPayload:
    """After receiving; every tensor has the bytes that were packed."""
    tensors = {name: _unpack(tensor) for name, tensor in wire.tensors.items()}
    return SyncPayload(wire.version, tensors, wire.kv_scales, wire.fingerprints)
