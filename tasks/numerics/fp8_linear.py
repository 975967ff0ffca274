"""The FP8 linear layer as training computes it: three products, each on quantised operands.

With q(t, b) = quantise t in blocks b, then decode (`tasks.numerics.fp8.fake_quantize`):

    forward   Y  = q(X, 1x128)  @ q(W, 128x128)^T
    dgrad     dX = q(dY, 1x128) @ q(W, 128x128)
    wgrad     dW = q(dY, 128x1)^T @ q(X, 128x1)        groups run along tokens

Products accumulate in fp32, as the block-scaled GEMMs on Hopper do; results are rounded to the dtype of
the operand that they belong to. (Transformer Engine, `Float8BlockScaling`; DeepSeek-V3 report, 3.3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.numerics.fp8 import ACTIVATION_GROUP, TOKEN_GROUP, WEIGHT_BLOCK, fake_quantize


@dataclass(frozen=True)
class BlockSpec:
    """Block shapes of one FP8 linear layer: weights `(rows, columns)`, activations `group` wide."""

    weight: tuple[int, int] = WEIGHT_BLOCK
    group: int = ACTIVATION_GROUP[1]
    power_of_two: bool = False

    @property
    def activation(self) -> tuple[int, int]:
        return (ACTIVATION_GROUP[0], self.group)

    @property
    def along_tokens(self) -> tuple[int, int]:
        return (self.group, TOKEN_GROUP[1])


def forward_product(x: Tensor, weight: Tensor, spec: BlockSpec) -> Tensor:
    """X `[tokens, in]` times a weight already decoded to fp32 `[out, in]`; returns `[tokens, out]` in X's dtype."""
    return (fake_quantize(x, spec.activation, spec.power_of_two) @ weight.t()).to(x.dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spec: BlockSpec) -> Tensor:
        decoded = fake_quantize(weight, spec.weight, spec.power_of_two)
        ctx.save_for_backward(x, weight)
        ctx.spec = spec
        return forward_product(x, decoded, spec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        spec: BlockSpec = ctx.spec
        dx = dw = None
        if ctx.needs_input_grad[0]:
            decoded = fake_quantize(weight, spec.weight, spec.power_of_two)
            dx = (fake_quantize(dy, spec.activation, spec.power_of_two) @ decoded).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dyt = fake_quantize(dy, spec.along_tokens, spec.power_of_two)
            xt = fake_quantize(x, spec.along_tokens, spec.power_of_two)
            dw = (dyt.t() @ xt).to(weight.dtype)
        return dx, dw, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: BlockSpec) -> Tensor:
    """Differentiable FP8 linear layer.

    `x` `[..., in]`, `weight` `[out, in]` (the BF16 compute copy), `bias` `[out]` or None (added in the
    dtype of `x`, never quantised). Returns `[..., out]`.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = _Fp8Linear.apply(flat, weight, spec).reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias
