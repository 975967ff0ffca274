"""A fingerprint of a tensor's bytes, reduced on its own device.

Equal on sender and receiver if and only if the bytes are equal (up to a 64-bit collision): each
byte-word is mixed with its position by the finaliser of SplitMix64 (Steele et al., 2014) and the results
are summed modulo 2^64, which needs one pass, no host copy and no order of reduction.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _sum(x: Tensor) -> Tensor:
    """The sum of mixed words, int64 on the device of `x`."""
    data = x.detach().contiguous().reshape(-1).view(torch.uint8)
    spare = -data.numel() % 8
    if spare:
        data = torch.nn.functional.pad(data, (0, spare))
    elif data.storage_offset() % 8:
        # A word has to start at a multiple of its size.
        data = data.clone()
    padded = data.view(torch.int64)
    position = torch.arange(padded.numel(), device=padded.device, dtype=torch.int64)
    words = _mix(padded ^ _mix((position + 1) * _GOLDEN))
    return words.sum()


def _finish(total: int, x: Tensor) -> int:
    return (total * 31 + x.numel() * x.element_size()) & 0xFFFFFFFFFFFFFFFF


def fingerprint(x: Tensor) -> int:
    """64-bit fingerprint of the bytes of `x` in row-major order, its length in bytes included."""
    return _finish(int(_sum(x).item()), x)


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """`fingerprint` of each; all tensors are on one device, which is waited for once."""
    if not tensors:
        return {}
    totals = torch.stack([_sum(x) for x in tensors.values()]).tolist()
    return {name: _finish(total, x) for (name, x), total in zip(tensors.items(), totals, strict=True)}


def combine(parts: dict[str, int]) -> str:
    """One hex digest of named fingerprints, independent of their order."""
    total = 0
    for name in sorted(parts):
        encoded = torch.frombuffer(bytearray(f"{name}={parts[name]:016x}".encode()), dtype=torch.uint8)
        total = (total * 1099511628211 + fingerprint(encoded)) & 0xFFFFFFFFFFFFFFFF
    return f"{total:016x}"
