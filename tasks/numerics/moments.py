"""Storage of AdamW's two moments: fp32, BF16 or FP8 blocks, with stochastic rounding below fp32.

A moving average changes by a share 1 - beta each update. Rounded to nearest, a change under half a step of the
format is lost, so that with beta2 = 0.999 a BF16 second moment never decays, and an E4M3 one does not even with
0.95. Stochastic rounding keeps every average right in expectation: a value between two neighbours a < x < b of the
format becomes b with probability (x - a) / (b - a). A value that the format holds is never changed.

FP8 layout (blockwise as the 8-bit optimizers of arXiv 2110.02861, with E4M3 in place of their table): 256 neighbours
in row-major order share one fp32 scale amax / 448; tensors under 4096 elements stay fp32. Of the second moment the
root is stored: its magnitudes within a block spread as those of the gradients do, not as their squares, which E4M3
would lose under 1/480 of the block's largest gradient, leaving eps alone as the denominator. It is still rounded so
that the expected *square* is exact, and a root above zero never becomes zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tasks.numerics.fp8 import E4M3_MAX, decode, encode_scales, to_e4m3

MomentFormat = Literal["fp32", "bf16", "fp8"]

FP8_BLOCK = 256
"""Elements that share one scale."""

FP8_SMALLEST = 4096
"""Tensors of fewer elements (norms, biases) keep fp32 moments in the FP8 format."""

_NOISE_BITS = 16
_SMALLEST_NORMAL, _SMALLEST_CODE = 2.0**-6, 2.0**-9
_BF16_MAX = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class Slot:
    """Shape and type of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def moment_slots(shape: Sequence[int], storage: MomentFormat) -> dict[str, Slot]:
    """What `pack_moments` stores for a parameter of this shape, by key.

    `exp_avg` and `exp_avg_sq`; in FP8 `exp_avg_codes`, `exp_avg_scales`, `exp_avg_sq_root_codes` and
    `exp_avg_sq_root_scales`: codes in the parameter's shape, scales `[ceil(elements / 256)]`.
    """
    if storage not in get_args(MomentFormat):
        raise ValueError(f"moment format {storage!r}: allowed are {', '.join(get_args(MomentFormat))}")
    size = math.prod(shape)
    if storage == "fp8" and size >= FP8_SMALLEST:
        codes = Slot(tuple(shape), torch.float8_e4m3fn)
        scales = Slot((-(-size // FP8_BLOCK),), torch.float32)
        moments = ("exp_avg", "exp_avg_sq_root")
        return {f"{m}_{part}": slot for m in moments for part, slot in (("codes", codes), ("scales", scales))}
    slot = Slot(tuple(shape), torch.bfloat16 if storage == "bf16" else torch.float32)
    return {"exp_avg": slot, "exp_avg_sq": slot}


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform integers from 0 to 2^16 - 1, int32, on the tensor's device."""
    return torch.randint(1 << _NOISE_BITS, like.shape, generator=generator, dtype=torch.int32, device=like.device)


def stochastic_bf16(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 to BF16 stochastically, unbiased; values beyond BF16's range saturate. Same shape.

    Probabilities are exact: the 16 bits that BF16 drops are compared with 16 random ones.
    """
    bits = x.clamp(-_BF16_MAX, _BF16_MAX).contiguous().view(torch.int32)
    return ((bits + _noise(bits, generator)) & -(1 << _NOISE_BITS)).view(torch.float32).to(torch.bfloat16)


def _stochastic_e4m3(magnitude: Tensor, generator: torch.Generator, squares: bool) -> Tensor:
    """Round 0 <= x <= 448 to the E4M3 grid so that E[rounded] = x, or E[rounded^2] = x^2 with `squares`; fp32."""
    binade = (magnitude.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
    step = binade.clamp(min=_SMALLEST_NORMAL) * 2.0**-3
    below = torch.floor(magnitude / step) * step
    share = (magnitude - below) / step
    if squares:
        share = share * ((magnitude + below) / (2 * below + step))
    up = share * (1 << _NOISE_BITS) > _noise(magnitude, generator)
    return torch.where(up, below + step, below)


def _blocks(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % FP8_BLOCK)).view(-1, FP8_BLOCK)


def _to_fp8(x: Tensor, generator: torch.Generator, root_of_square: bool) -> tuple[Tensor, Tensor]:
    """Codes in the shape of `x` and scales `[blocks]`."""
    blocks = _blocks(x)
    encode = encode_scales(blocks.abs().amax(1))
    scaled = (blocks * encode[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    rounded = _stochastic_e4m3(scaled.abs(), generator, root_of_square)
    if root_of_square:
        # A denominator of zero would turn a first moment that is still there into a step of m / eps.
        rounded = torch.where(blocks > 0, rounded.clamp(min=_SMALLEST_CODE), rounded)
    codes = to_e4m3(torch.copysign(rounded, scaled)).view(-1)[: x.numel()]
    return codes.view(x.shape).clone(), 1.0 / encode


def _from_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    values = _blocks(decode(codes)) * scales[:, None]
    return values.view(-1)[: codes.numel()].view(codes.shape)


def pack_moments(first: Tensor, second: Tensor, storage: MomentFormat, generator: torch.Generator) -> dict[str, Tensor]:
    """Store finite fp32 moments of one parameter (`second` >= 0) as `moment_slots` says.

    A stored value lies within one step of its format of the value: BF16 2^-7 of it (or 2^-133, where that is more);
    FP8 2^-3 of it (or 2^-9 scales), of the second moment's root rather than of itself. `generator` stands on the
    moments' device; its state alone decides the rounding.
    """
    # A square of a finite gradient may overflow, and an infinite amax would spoil its whole block.
    second = second.clamp(max=torch.finfo(torch.float32).max)
    if "exp_avg" not in moment_slots(first.shape, storage):
        first_codes, first_scales = _to_fp8(first, generator, False)
        root_codes, root_scales = _to_fp8(second.sqrt(), generator, True)
        return {
            "exp_avg_codes": first_codes,
            "exp_avg_scales": first_scales,
            "exp_avg_sq_root_codes": root_codes,
            "exp_avg_sq_root_scales": root_scales,
        }
    if storage == "bf16":
        return {"exp_avg": stochastic_bf16(first, generator), "exp_avg_sq": stochastic_bf16(second, generator)}
    return {"exp_avg": first, "exp_avg_sq": second}


def unpack_moments(stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """fp32 first and second moment of what `pack_moments` stored; of fp32 storage the tensors themselves."""
    if "exp_avg_codes" in stored:
        root = _from_fp8(stored["exp_avg_sq_root_codes"], stored["exp_avg_sq_root_scales"])
        return _from_fp8(stored["exp_avg_codes"], stored["exp_avg_scales"]), root.square()
    return stored["exp_avg"].to(torch.float32), stored["exp_avg_sq"].to(torch.float32)
