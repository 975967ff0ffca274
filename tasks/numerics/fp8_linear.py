"""The FP8 linear layer as training computes it: three products, each on quantised operands.

With q(t, b) = quantise t in blocks b, then decode (`tasks.numerics.fp8.fake_quantize_as`), for the default
scaling `block`:

    forward   Y  = q(X, 1x128)  @ q(W, 128x128)^T
    dgrad     dX = q(dY, 1x128) @ q(W, 128x128)
    wgrad     dW = q(dY, 128x1)^T @ q(X, 128x1)        groups run along tokens

Blocks of the operands under each scaling (`all`: the whole dimension):

| scaling | X | W | dY, W of dgrad | dY, X of wgrad |
|---|---|---|---|---|
| `block` | 1x128 | 128x128 | 1x128, 128x128 | 128x1, 128x1 |
| `tensor` | all | all | all, all | all, all |
| `tensor_delayed` | all | all | all, all | all, all |
| `channel` | 1xall | 1xall | 1xall, allx1 | allx1, allx1 |
| `mxfp8` | 1x32 | 1x32 | 1x32, 32x1 | 32x1, 32x1 |

Sources: `block` Transformer Engine `Float8BlockScaling` and DeepSeek-V3 (arXiv 2412.19437, section 3.3); `tensor`
Transformer Engine `Float8CurrentScaling`; `tensor_delayed` its `DelayedScaling`; `channel` the rowwise scaling of
torchao's float8 training; `mxfp8` Transformer Engine `MXFP8BlockScaling` and OCP Microscaling v1.0.

Each scale is constant over the summed dimension, or over stretches of it, so that it can be applied to (partial)
sums, as the hardware does. Under `channel` and `mxfp8` that asks for two quantisations of each tensor, both
made from the BF16 original. X and W are E4M3; dY is E4M3, or E5M2
(the hybrid of Micikevicius et al., arXiv 2209.05433). Products accumulate in fp32, as the scaled GEMMs on
Hopper do; results are rounded to the dtype of the operand that they belong to.

Scales of `tensor` cover all tokens of a call, padding included: a token's result then depends on what it is
computed with. All other scalings of X, `tensor_delayed` with history included, treat each token by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tasks.numerics.delayed_scaling import DelayedScales, HistorySettings, Operand
from tasks.numerics.formats import MX_GROUP, PER_COLUMN, PER_ROW, PER_TENSOR, Block, Element, Format, ScaleKind
from tasks.numerics.fp8 import ACTIVATION_GROUP, TOKEN_GROUP, WEIGHT_BLOCK, fake_quantize_as

Scaling = Literal["block", "tensor", "tensor_delayed", "channel", "mxfp8"]


@dataclass(frozen=True)
class BlockSpec:
    """Formats of one FP8 linear layer: weights in blocks `(rows, columns)`, activations `group` wide.

    `linear_spec` fills the sizes for every scaling. `gradient` is the element type of dY; `history`
    belongs to `tensor_delayed` alone (`ValueError` otherwise).
    """

    weight: Block = WEIGHT_BLOCK
    group: int | None = ACTIVATION_GROUP[1]
    power_of_two: bool = False
    scaling: Scaling = "block"
    gradient: Element = "e4m3"
    history: HistorySettings | None = None

    def __post_init__(self) -> None:
        if (self.history is not None) != (self.scaling == "tensor_delayed"):
            raise ValueError(f"scaling {self.scaling} with history {self.history}: tensor_delayed has one, no other")

    @property
    def _per_tensor(self) -> bool:
        return self.scaling in ("tensor", "tensor_delayed")

    @property
    def activation(self) -> Block:
        return PER_TENSOR if self._per_tensor else (ACTIVATION_GROUP[0], self.group)

    @property
    def along_tokens(self) -> Block:
        return PER_TENSOR if self._per_tensor else (self.group, TOKEN_GROUP[1])

    @property
    def _scale(self) -> ScaleKind:
        if self.scaling == "mxfp8":
            return "e8m0"
        return "power_of_two" if self.power_of_two else "fp32"

    @property
    def weight_format(self) -> Format:
        """W as the forward product reads it; what a sync carries."""
        return Format(self.weight, "e4m3", self._scale)

    @property
    def dgrad_weight_format(self) -> Format:
        """W as the product with dY reads it, which sums over output features."""
        along_outputs: dict[Scaling, Block] = {"channel": PER_COLUMN, "mxfp8": (MX_GROUP, 1)}
        return Format(along_outputs.get(self.scaling, self.weight), "e4m3", self._scale)

    @property
    def activation_format(self) -> Format:
        return Format(self.activation, "e4m3", self._scale)

    @property
    def gradient_format(self) -> Format:
        return Format(self.activation, self.gradient, self._scale)

    def describe(self) -> str:
        """Sizes and kind of scale in a few words, for plans and reports."""
        scales = {"fp32": "fp32 scales", "power_of_two": "power_of_two scales", "e8m0": "E8M0 scales"}[self._scale]
        named: dict[Scaling, str] = {
            "block": f"weights {_size(self.weight)}, activations {_size(self.activation)}",
            "tensor": "per-tensor",
            "channel": "weights per output channel, activations per token",
            "mxfp8": f"MXFP8, groups of {self.group}",
        }
        if self.history is not None:
            named["tensor_delayed"] = f"per-tensor, delayed by {self.history.compute} of {self.history.length}"
        hybrid = ", e5m2 gradients" if self.gradient == "e5m2" else ""
        return f"{named[self.scaling]}, {scales}{hybrid}"


def _size(block: Block) -> str:
    return "x".join("all" if side is None else str(side) for side in block)


def linear_spec(
    scaling: Scaling = "block",
    power_of_two: bool = False,
    gradient: Element = "e4m3",
    weight_block: tuple[int, int] = WEIGHT_BLOCK,
    group: int = ACTIVATION_GROUP[1],
    history: HistorySettings | None = None,
) -> BlockSpec:
    """The formats of a scaling.

    `weight_block` and `group` count under `block` alone, `history` under `tensor_delayed`; E8M0 scales are
    powers of two whatever `power_of_two` says.
    """
    if scaling == "block":
        return BlockSpec(weight_block, group, power_of_two, scaling, gradient)
    if scaling == "channel":
        return BlockSpec(PER_ROW, None, power_of_two, scaling, gradient)
    if scaling == "mxfp8":
        return BlockSpec((1, MX_GROUP), MX_GROUP, True, scaling, gradient)
    delayed = (history or HistorySettings()) if scaling == "tensor_delayed" else None
    return BlockSpec(PER_TENSOR, None, power_of_two, scaling, gradient, delayed)


@dataclass(frozen=True)
class _Rounding:
    """Quantises operands of one call; under delayed scaling with `scales`, whose amax it records if asked to."""

    scales: DelayedScales | None
    record: bool

    def __call__(self, x: Tensor, fmt: Format, operand: Operand) -> Tensor:
        encode = None if self.scales is None else self.scales.encode(x, operand, fmt, self.record)
        return fake_quantize_as(x, fmt, encode)


def forward_product(x: Tensor, weight: Tensor, spec: BlockSpec) -> Tensor:
    """X `[tokens, in]` times a weight already decoded to fp32 `[out, in]`; returns `[tokens, out]` in X's dtype."""
    return (fake_quantize_as(x, spec.activation_format) @ weight.t()).to(x.dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spec: BlockSpec, rounded: _Rounding) -> Tensor:
        decoded = rounded(weight, spec.weight_format, "weight")
        ctx.save_for_backward(x, weight)
        ctx.spec, ctx.rounded = spec, rounded
        return (rounded(x, spec.activation_format, "input") @ decoded.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        spec: BlockSpec = ctx.spec
        rounded: _Rounding = ctx.rounded
        dx = dw = None
        if ctx.needs_input_grad[0]:
            decoded = rounded(weight, spec.dgrad_weight_format, "weight")
            dx = (rounded(dy, spec.gradient_format, "gradient") @ decoded).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dyt = rounded(dy, replace_block(spec.gradient_format, spec.along_tokens), "gradient")
            xt = rounded(x, replace_block(spec.activation_format, spec.along_tokens), "input")
            dw = (dyt.t() @ xt).to(weight.dtype)
        return dx, dw, None, None


def replace_block(fmt: Format, block: Block) -> Format:
    """The same format in other blocks."""
    return Format(block, fmt.element, fmt.scale)


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: BlockSpec, scales: DelayedScales | None = None
) -> Tensor:
    """Differentiable FP8 linear layer.

    `x` `[..., in]`, `weight` `[out, in]` (the BF16 compute copy), `bias` `[out]` or None (added in the
    dtype of `x`, never quantised). Returns `[..., out]`. `scales` are the histories of `tensor_delayed`
    (`ValueError` without them, and with them under any other scaling); they record only while gradients
    are enabled.
    """
    if (scales is not None) != (spec.scaling == "tensor_delayed"):
        raise ValueError(f"scaling {spec.scaling} {'without' if scales is None else 'with'} amax histories")
    flat = x.reshape(-1, x.shape[-1])
    rounded = _Rounding(scales, torch.is_grad_enabled())
    y = _Fp8Linear.apply(flat, weight, spec, rounded).reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias
