"""Scales of FP8 moments that are spread over elements, and put together again for smaller or other blocks."""

from __future__ import annotations

import pytest
import torch

from tasks.numerics.moment_layout import block_of, narrow_scales, shared_in_blocks, spread_scales
from tasks.numerics.moments import moment_slots


@pytest.mark.parametrize("shape", [(4096,), (33, 131), (5, 1000), (64, 256)])
@pytest.mark.parametrize("block", [256, 64, 1])
def test_scales_come_back_from_all_elements(shape: tuple[int, ...], block: int) -> None:
    size = torch.Size(shape).numel()
    scales = torch.rand(-(-size // block), generator=torch.Generator().manual_seed(0))
    spread = spread_scales(scales, shape)
    assert spread.shape == shape
    flat = spread.reshape(-1)
    for element in (0, block - 1, block, size // 2, size - 1):
        assert flat[element] == scales[element // block]
    assert torch.equal(narrow_scales(spread, block), scales)
    assert shared_in_blocks(spread) == (block == 256)


def test_stored_moments_have_blocks_of_256() -> None:
    for shape in ((64, 64), (4097,), (3, 4099)):
        (scales,) = moment_slots(shape, "fp8")["exp_avg_scales"].shape
        assert block_of(scales, torch.Size(shape).numel()) == 256


@pytest.mark.parametrize("scales", [0, 3, 5, 4097])
def test_another_number_of_scales_is_refused(scales: int) -> None:
    with pytest.raises(ValueError, match=f"{scales} scales for 4096 elements; allowed: one for each 256 of them"):
        block_of(scales, 4096)
