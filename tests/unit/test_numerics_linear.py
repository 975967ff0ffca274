"""The FP8 linear layer: its three products against fp64 products of operands quantised by the reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.numerics.delayed_scaling import HistorySettings
from tasks.numerics.fp8 import fake_quantize
from tasks.numerics.fp8_linear import BlockSpec, Scaling, forward_product, fp8_linear, linear_spec
from tests.unit.formats_support import Block, values_of
from tests.unit.numerics_support import independent_values, one_torch_thread, randn

WEIGHT, GROUP, TOKENS = (128, 128), (1, 128), (128, 1)
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def run(
    x: Tensor, weight: Tensor, dy: Tensor, spec: BlockSpec | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = fp8_linear(x, weight, bias, spec or BlockSpec())
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


def assert_product(got: Tensor, left: NDArray[np.float64], right: NDArray[np.float64]) -> None:
    """`got` is left @ right rounded once to its dtype, but for the rounding of the fp32 accumulation."""
    want, size = left @ right, np.abs(left) @ np.abs(right)
    assert got.shape == want.shape
    allowed = UNIT_ROUNDOFF[got.dtype] * np.abs(want) + left.shape[1] * 2.0**-24 * size
    error = np.abs(got.detach().to(torch.float64).numpy() - want)
    assert (error <= allowed).all(), f"error {error.max()} where {allowed.flat[(error - allowed).argmax()]} is allowed"


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "width_in", "width_out"), [(130, 257, 131), (1, 128, 128), (128, 128, 1), (5, 1, 3), (127, 129, 256)]
)
def test_three_products(tokens: int, width_in: int, width_out: int, dtype: torch.dtype, power_of_two: bool) -> None:
    x, dy = randn(1, tokens, width_in, dtype=dtype), randn(2, tokens, width_out, dtype=dtype)
    weight = randn(3, width_out, width_in, dtype=dtype) * 0.05
    # Rows and columns of unlike size, so that the direction of a group matters.
    x = x * torch.exp2(torch.arange(tokens) % 7 - 3.0).unsqueeze(1).to(dtype)
    dy = dy * torch.exp2(torch.arange(width_out) % 9 - 4.0).to(dtype)
    y, dx, dw = run(x, weight, dy, BlockSpec(power_of_two=power_of_two))
    assert y.dtype == dx.dtype == dw.dtype == dtype
    w = independent_values(weight, WEIGHT, power_of_two)
    assert_product(y, independent_values(x, GROUP, power_of_two), w.T)
    assert_product(dx, independent_values(dy, GROUP, power_of_two), w)
    dy_tokens, x_tokens = independent_values(dy, TOKENS, power_of_two), independent_values(x, TOKENS, power_of_two)
    assert_product(dw, dy_tokens.T, x_tokens)


def test_products_are_those_of_quantised_operands_and_not_of_the_originals() -> None:
    x, weight, dy = randn(4, 130, 256), randn(5, 130, 256), randn(6, 130, 130)
    y, dx, dw = run(x, weight, dy)
    for got, exact in ((y, x @ weight.T), (dx, dy @ weight), (dw, dy.T @ x)):
        relative = float((got - exact).norm() / exact.norm())
        assert 0.01 < relative < 0.08, relative


def test_wgrad_groups_run_along_tokens() -> None:
    # One huge token: with groups along features the other tokens stay exact, along tokens they become coarse.
    small, huge = 1.25 * 2.0**-5, 448 * 2.0**4
    x, dy = torch.full((128, 128), small), torch.ones(128, 128)
    x[7] = huge
    y, _, dw = run(x, torch.eye(128), dy, BlockSpec(power_of_two=True))
    assert torch.equal(y, x)
    # Scale 16, so 1.25 * 2^-5 is 1.25 of the smallest subnormal steps (2^-9) and rounds to one: 16 * 2^-9 = 2^-5.
    assert torch.equal(dw, torch.full((128, 128), huge + 127 * 2.0**-5))
    assert float((dy.T @ x)[0, 0]) == huge + 127 * small


def test_wgrad_drops_tokens_that_vanish_beside_an_outlier_of_their_column() -> None:
    x = torch.full((130, 128), 2.0**-4)
    x[7, 0] = 2.0**16
    dy = torch.ones(130, 128)
    _, _, dw = run(x, torch.eye(128), dy)
    # Column 0: 2^-4 is 2^-20 of the amax and rounds to 0 in the first 128 tokens; tokens 128, 129 form their own group.
    assert dw[:, 0].tolist() == [2.0**16 + 2 * 2.0**-4] * 128
    assert torch.equal(dw[:, 1:], torch.full((128, 127), 130 * 2.0**-4))


def test_dgrad_uses_the_weight_quantisation_of_the_forward() -> None:
    # One huge weight per 128x128 block: 1 x 128 or 128 x 1 groups of the weight would keep the small ones.
    weight = torch.full((256, 256), 2.0**-8)
    weight[0, 0] = 2.0**12
    y, dx, _ = run(torch.eye(256), weight, torch.eye(256))
    kept = torch.full((256, 256), 2.0**-8)
    kept[:128, :128] = 0.0
    kept[0, 0] = 2.0**12
    assert torch.equal(y, kept.T)
    assert torch.equal(dx, kept)


def test_dgrad_groups_run_along_output_features() -> None:
    # dY: token 0 has an outlier in output 0; the small values of that token vanish, those of others stay.
    dy = torch.full((2, 128), 2.0**-8)
    dy[0, 0] = 2.0**12
    _, dx, dw = run(torch.ones(2, 128), torch.eye(128), dy)
    assert dx[0].tolist() == [2.0**12] + [0.0] * 127
    assert torch.equal(dx[1], dy[1])
    # The weight gradient groups the same dY by output: only token 1's value of output 0 vanishes.
    assert torch.equal(dw[0], torch.full((128,), 2.0**12))
    assert torch.equal(dw[1:], torch.full((127, 128), 2 * 2.0**-8))


def test_bias_is_added_in_the_dtype_of_x_and_never_quantised() -> None:
    x, weight = randn(7, 5, 128, dtype=torch.bfloat16), randn(8, 64, 128, dtype=torch.bfloat16)
    bias = (randn(9, 64) * 1e-3).to(torch.bfloat16).requires_grad_()
    plain = fp8_linear(x, weight, None, BlockSpec())
    y = fp8_linear(x, weight, bias, BlockSpec())
    assert y.dtype == torch.bfloat16 and torch.equal(y, plain + bias)
    y.backward(torch.ones_like(y))
    assert bias.grad is not None and bias.grad.tolist() == [5.0] * 64


def test_leading_dimensions_are_tokens() -> None:
    x, weight, dy = randn(10, 3, 50, 128), randn(11, 64, 128), randn(12, 3, 50, 64)
    y, dx, dw = run(x, weight, dy)
    flat_y, flat_dx, flat_dw = run(x.reshape(150, 128), weight, dy.reshape(150, 64))
    assert y.shape == (3, 50, 64) and torch.equal(y.reshape(150, 64), flat_y)
    assert dx.shape == x.shape and torch.equal(dx.reshape(150, 128), flat_dx)
    assert torch.equal(dw, flat_dw)
    assert_product(
        dw, independent_values(dy.reshape(150, 64), TOKENS).T, independent_values(x.reshape(150, 128), TOKENS)
    )


def test_one_vector_is_one_token() -> None:
    x, weight = randn(13, 128), randn(14, 64, 128)
    y = fp8_linear(x, weight, None, BlockSpec())
    assert y.shape == (64,) and torch.equal(y, fp8_linear(x.unsqueeze(0), weight, None, BlockSpec())[0])


def test_expanded_and_strided_gradients_are_accepted() -> None:
    x, weight = randn(15, 130, 128).requires_grad_(), randn(16, 64, 128).requires_grad_()
    fp8_linear(x, weight, None, BlockSpec()).sum().backward()
    _, dx, dw = run(x.detach(), weight.detach(), torch.ones(130, 64))
    assert x.grad is not None and weight.grad is not None
    assert torch.equal(x.grad, dx) and torch.equal(weight.grad, dw)


@pytest.mark.parametrize(("wants_x", "wants_weight"), [(True, False), (False, True), (False, False)])
def test_only_wanted_gradients_are_formed(wants_x: bool, wants_weight: bool) -> None:
    x, weight, dy = randn(17, 130, 128), randn(18, 64, 128), randn(19, 130, 64)
    _, dx, dw = run(x, weight, dy)
    leaf_x, leaf_w = x.clone().requires_grad_(wants_x), weight.clone().requires_grad_(wants_weight)
    y = fp8_linear(leaf_x, leaf_w, None, BlockSpec())
    assert y.requires_grad == (wants_x or wants_weight)
    if y.requires_grad:
        y.backward(dy)
    assert (leaf_x.grad is not None) == wants_x and (leaf_w.grad is not None) == wants_weight
    assert leaf_x.grad is None or torch.equal(leaf_x.grad, dx)
    assert leaf_w.grad is None or torch.equal(leaf_w.grad, dw)


def test_other_block_sizes_reach_every_product() -> None:
    spec = BlockSpec(weight=(32, 64), group=32)
    assert spec.activation == (1, 32) and spec.along_tokens == (32, 1)
    x, weight, dy = randn(20, 70, 130), randn(21, 66, 130), randn(22, 70, 66)
    y, dx, dw = run(x, weight, dy, spec)
    w = independent_values(weight, (32, 64))
    assert_product(y, independent_values(x, (1, 32)), w.T)
    assert_product(dx, independent_values(dy, (1, 32)), w)
    assert_product(dw, independent_values(dy, (32, 1)).T, independent_values(x, (32, 1)))


# Blocks of X, W, dY and W in dgrad, dY and X in wgrad; whether scales are always powers of two.
OPERANDS: dict[Scaling, tuple[Block, Block, Block, Block, Block, bool]] = {
    "block": ((1, 32), (16, 24), (1, 32), (16, 24), (32, 1), False),
    "tensor": ((None, None), (None, None), (None, None), (None, None), (None, None), False),
    "channel": ((1, None), (1, None), (1, None), (None, 1), (None, 1), False),
    "mxfp8": ((1, 32), (1, 32), (1, 32), (32, 1), (32, 1), True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("scaling", list(OPERANDS))
def test_three_products_of_every_scaling(
    scaling: Scaling, power_of_two: bool, gradient: str, dtype: torch.dtype
) -> None:
    activation, weight_block, dy_block, dgrad_weight, along_tokens, always = OPERANDS[scaling]
    power = power_of_two or always
    spec = linear_spec(scaling, power_of_two, gradient, (16, 24), 32)  # type: ignore[arg-type]
    # Rows and columns of unlike size, so that the direction of a block matters.
    x = randn(31, 37, 70, dtype=dtype) * torch.exp2(torch.arange(37) % 7 - 3.0).unsqueeze(1).to(dtype)
    dy = randn(32, 37, 41, dtype=dtype) * torch.exp2(torch.arange(41) % 9 - 4.0).to(dtype)
    weight = randn(33, 41, 70, dtype=dtype) * torch.exp2(torch.arange(70) % 5 - 8.0).to(dtype)
    y, dx, dw = run(x, weight, dy, spec)
    assert_product(y, values_of(x, activation, "e4m3", power), values_of(weight, weight_block, "e4m3", power).T)
    assert_product(dx, values_of(dy, dy_block, gradient, power), values_of(weight, dgrad_weight, "e4m3", power))
    dy_tokens, x_tokens = values_of(dy, along_tokens, gradient, power), values_of(x, along_tokens, "e4m3", power)
    assert_product(dw, dy_tokens.T, x_tokens)


@pytest.mark.parametrize("scaling", ["block", "channel", "mxfp8"])
def test_a_token_is_rounded_by_itself(scaling: Scaling) -> None:
    x, weight = randn(34, 6, 64), randn(35, 8, 64)
    spec = linear_spec(scaling)
    alone = fp8_linear(x[2:3], weight, None, spec)
    x[4] *= 1e4
    torch.testing.assert_close(fp8_linear(x, weight, None, spec)[2:3], alone)


def test_under_tensor_scaling_a_token_depends_on_the_others() -> None:
    x, weight = randn(34, 6, 64), randn(35, 8, 64)
    before = fp8_linear(x, weight, None, linear_spec("tensor"))[2]
    x[4] *= 1e7
    assert not fp8_linear(x, weight, None, linear_spec("tensor"))[2].any() and bool(before.abs().max() > 1)


def test_e5m2_gradients_touch_only_the_backward_products() -> None:
    x, weight, dy = randn(36, 40, 64), randn(37, 48, 64), randn(38, 40, 48)
    plain, hybrid = run(x, weight, dy, linear_spec()), run(x, weight, dy, linear_spec(gradient="e5m2"))
    assert torch.equal(plain[0], hybrid[0])
    for got, coarse, exact in ((plain[1], hybrid[1], dy @ weight), (plain[2], hybrid[2], dy.T @ x)):
        errors = [float((g - exact).norm() / exact.norm()) for g in (got, coarse)]
        assert 1.2 < errors[1] / errors[0] < 2.5, "one mantissa bit less in one of two operands"


def test_e5m2_keeps_gradients_that_vanish_in_e4m3() -> None:
    # 2^-20 of the amax: below half of E4M3's smallest subnormal (2^-10 / 448), above that of E5M2 (2^-17 / 57344).
    dy = torch.full((4, 64), 2.0**-20)
    dy[:, 0] = 1.0
    weight = torch.eye(64)
    assert not run(torch.ones(4, 64), weight, dy, linear_spec("tensor"))[1][:, 1:].any()
    assert torch.equal(run(torch.ones(4, 64), weight, dy, linear_spec("tensor", True, "e5m2"))[1], dy)


def test_what_a_spec_says_of_itself() -> None:
    history = HistorySettings(16, "most_recent")
    words = {
        linear_spec(): "weights 128x128, activations 1x128, fp32 scales",
        linear_spec("block", True, "e5m2"): "weights 128x128, activations 1x128, power_of_two scales, e5m2 gradients",
        linear_spec("tensor"): "per-tensor, fp32 scales",
        linear_spec("tensor_delayed", history=history): "per-tensor, delayed by most_recent of 16, fp32 scales",
        linear_spec("channel"): "weights per output channel, activations per token, fp32 scales",
        linear_spec("mxfp8"): "MXFP8, groups of 32, E8M0 scales",
    }
    assert {spec: spec.describe() for spec in words} == words
    assert linear_spec() == BlockSpec()


def test_forward_product_with_a_decoded_weight_is_the_forward() -> None:
    x, weight = randn(23, 130, 257, dtype=torch.bfloat16), randn(24, 131, 257, dtype=torch.bfloat16)
    spec = BlockSpec()
    decoded = fake_quantize(weight, spec.weight)
    assert torch.equal(forward_product(x, decoded, spec), fp8_linear(x, weight, None, spec))


def test_inf_in_one_token_reaches_only_that_token_forward() -> None:
    x, weight = randn(25, 4, 256), randn(26, 64, 256)
    clean = fp8_linear(x, weight, None, BlockSpec())
    x[2, 200] = float("inf")
    y = fp8_linear(x, weight, None, BlockSpec())
    assert bool(torch.isnan(y[2]).all())
    # Not bitwise: the matrix product may order its sums by what surrounds a row.
    torch.testing.assert_close(y[[0, 1, 3]], clean[[0, 1, 3]])
