"""Calibration on the device and across workers: no wait per observation, exact merging, round trips, histograms."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.numerics.calibration import PARTS, CalibrationError, CalibrationObserver, Scales, scale_from_amax
from tasks.numerics.magnitudes import MAGNITUDE_BINS, bin_values, histogram_percentile, magnitude_bins
from tests.unit.numerics_support import generator, one_torch_thread, randn

LAYERS, HEADS = 2, 2
LAYER_SCALES: Scales = {(n, part): 0.004 for n in range(LAYERS) for part in PARTS}
HEAD_SCALES: Scales = {(n, part): (0.004, 0.002) for n in range(LAYERS) for part in PARTS}
KINDS = [
    pytest.param(heads, percentile, in_use, id=f"{heads or 'layer'}-{percentile}-{'in use' if in_use else 'first'}")
    for heads, percentile in itertools.product((None, HEADS), (100.0, 97.0))
    for in_use in (None, LAYER_SCALES if heads is None else HEAD_SCALES)
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def observer(heads: int | None, percentile: float, in_use: Scales | None) -> CalibrationObserver:
    return CalibrationObserver(LAYERS, 1.05, percentile, in_use, heads)


def batch(seed: int, tokens: int = 7) -> dict[tuple[int, str], Tensor]:
    """Values of every layer and part, 4 query heads over 2 KV heads, some of them zero."""
    made = {}
    for n, part in itertools.product(range(LAYERS), PARTS):
        x = randn(100 * seed + 10 * n + PARTS.index(part), 2, 4 if part == "q" else 2, tokens, 8).to(torch.bfloat16)
        made[(n, part)] = torch.where(x.abs() < 0.1, 0, x)
    return made


def mask(seed: int, tokens: int = 7) -> Tensor:
    return torch.rand(2, tokens, generator=generator(seed)) < 0.7


def watch(to: CalibrationObserver, seed: int) -> None:
    for (n, part), x in batch(seed).items():
        to.observe(n, part, x, mask(seed))


@pytest.mark.parametrize(("heads", "percentile", "in_use"), KINDS)
def test_an_observation_never_waits_for_the_device(heads: int | None, percentile: float, in_use: Scales | None) -> None:
    """Tensors without storage: whatever needs a value on the host raises."""
    watched = observer(heads, percentile, in_use)
    for (n, part), x in batch(0).items():
        watched.observe(n, part, x.to("meta"), mask(0).to("meta"))
    assert watched.maxima.device.type == watched.sums.device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):
        watched.result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("heads", "percentile", "in_use"), KINDS)
def test_on_a_gpu_nothing_waits_and_the_result_is_that_of_the_cpu(
    heads: int | None, percentile: float, in_use: Scales | None
) -> None:
    here, there = observer(heads, percentile, in_use), observer(heads, percentile, in_use)
    watch(here, 1)
    values = {key: x.cuda() for key, x in batch(1).items()}
    real = mask(1).cuda()
    there.observe(0, "q", values[(0, "q")], real)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for (n, part), x in list(values.items())[1:]:
            there.observe(n, part, x, real)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.result() == here.result()


@pytest.mark.parametrize(("heads", "percentile", "in_use"), KINDS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_merged_workers_equal_one_that_saw_everything(
    heads: int | None, percentile: float, in_use: Scales | None, order: tuple[int, ...]
) -> None:
    workers = [observer(heads, percentile, in_use) for _ in range(3)]
    alone = observer(heads, percentile, in_use)
    for seed, worker in enumerate(workers):
        watch(worker, seed)
        watch(alone, seed)
    merged = observer(heads, percentile, in_use)
    for number in order:
        merged.merge(workers[number].state_dict())
    assert merged.result() == alone.result()
    assert torch.equal(merged.state_dict()["state"], alone.state_dict()["state"])


@pytest.mark.parametrize(("heads", "percentile", "in_use"), KINDS)
def test_one_maximum_and_one_sum_merge_in_place(heads: int | None, percentile: float, in_use: Scales | None) -> None:
    """What two all-reduce calls over the live views do."""
    workers = [observer(heads, percentile, in_use) for _ in range(2)]
    alone = observer(heads, percentile, in_use)
    for seed, worker in enumerate(workers):
        watch(worker, seed)
        watch(alone, seed)
    largest = torch.maximum(workers[0].maxima, workers[1].maxima)
    total = workers[0].sums + workers[1].sums
    for worker in workers:
        assert worker.maxima.is_contiguous() and worker.sums.is_contiguous()
        worker.maxima.copy_(largest)
        worker.sums.copy_(total)
    assert workers[0].result() == workers[1].result() == alone.result()


def test_workers_that_hold_different_layers_and_heads_merge() -> None:
    """Pipeline stages hold some layers; tensor-parallel ranks hold some KV heads of all tokens."""
    alone = observer(HEADS, 97.0, HEAD_SCALES)
    watch(alone, 0)
    merged = observer(HEADS, 97.0, HEAD_SCALES)
    for stage, rank in itertools.product(range(LAYERS), range(HEADS)):
        worker = observer(HEADS, 97.0, HEAD_SCALES)
        for (n, part), x in batch(0).items():
            if n == stage:
                worker.observe(n, part, x.chunk(HEADS, dim=1)[rank], mask(0), range(rank, rank + 1))
        with pytest.raises(CalibrationError, match="no real token was seen"):
            worker.result()
        merged.merge(worker.state_dict())
    assert merged.result() == alone.result()


def test_inf_and_nan_of_one_worker_are_an_error_of_all() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        good, broken = observer(None, 100.0, None), observer(None, 100.0, None)
        watch(good, 0)
        watch(broken, 1)
        x = batch(1)[(1, "k")].clone()
        x[0, 0, 0, 0] = bad
        broken.observe(1, "k", x, torch.ones(2, 7, dtype=torch.bool))
        good.merge(broken.state_dict())
        with pytest.raises(CalibrationError, match=r"^layer 1 k: values are not finite \(amax inf\)$"):
            good.result()


@pytest.mark.parametrize(("heads", "percentile", "in_use"), KINDS)
def test_the_state_makes_the_round_trip_through_a_file_bitwise(
    heads: int | None, percentile: float, in_use: Scales | None
) -> None:
    first = observer(heads, percentile, in_use)
    watch(first, 0)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = observer(heads, percentile, in_use)
    watch(second, 5)
    second.load_state_dict(torch.load(file))
    before, after = first.state_dict(), second.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8))
    watch(first, 1)
    watch(second, 1)
    assert first.result() == second.result()


def test_a_state_is_a_copy_and_a_loaded_one_belongs_to_its_observer() -> None:
    first, second = observer(None, 100.0, None), observer(None, 100.0, None)
    watch(first, 0)
    saved = first.state_dict()
    second.load_state_dict(saved)
    expected = first.result()
    second.observe(0, "q", 50 * batch(0)[(0, "q")], mask(0))
    saved["state"].zero_()
    assert first.result() == expected != second.result()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (CalibrationObserver(3, 1.05, 100.0, None), "layout"),
        (CalibrationObserver(LAYERS, 1.05, 99.0, None), "layout"),
        (CalibrationObserver(LAYERS, 1.05, 100.0, None, 1), "layout"),
        (CalibrationObserver(LAYERS, 1.05, 100.0, LAYER_SCALES), "in_use"),
    ],
)
def test_states_of_other_kinds_are_refused(other: CalibrationObserver, message: str) -> None:
    """Counts against other scales in use must not be added up either."""
    own = observer(None, 100.0, None)
    with pytest.raises(CalibrationError, match=f"the other calibration has {message}"):
        own.merge(other.state_dict())
    with pytest.raises(CalibrationError, match=f"the other calibration has {message}"):
        own.load_state_dict(other.state_dict())
    with pytest.raises(CalibrationError, match="in_use"):
        observer(None, 100.0, dict.fromkeys(LAYER_SCALES, 0.005)).merge(
            observer(None, 100.0, LAYER_SCALES).state_dict()
        )


def test_there_is_one_bin_for_each_bf16_number() -> None:
    codes = torch.arange(0x7F80, dtype=torch.int32)
    values = codes.to(torch.int16).view(torch.bfloat16).to(torch.float32)
    assert torch.equal(magnitude_bins(values), codes.to(torch.int64))
    assert torch.equal(bin_values(codes), values.to(torch.float64))
    assert magnitude_bins(torch.tensor([math.inf, math.nan])).tolist() == [MAGNITUDE_BINS - 1] * 2
    loudest_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert magnitude_bins(loudest_nan).tolist() == [MAGNITUDE_BINS - 1]


@given(st.floats(min_value=0.0, max_value=float(np.float32(3.38e38)), width=32))
@settings(max_examples=200, deadline=None)
def test_a_bin_is_at_or_above_its_magnitudes_by_less_than_a_128th(x: float) -> None:
    value = float(bin_values(magnitude_bins(torch.tensor([x])))[0])
    assert x <= value <= max(x * (1 + 2**-7), x + 2.0**-133)
    assert value == float(torch.tensor(value).to(torch.bfloat16)), "a BF16 number"


@given(
    st.lists(st.floats(0.0, 1e4, width=32), min_size=1, max_size=60),
    st.sampled_from([0.1, 5.0, 33.3, 50.0, 90.0, 99.0, 99.9, 100.0]),
)
@settings(max_examples=150, deadline=None)
def test_a_percentile_is_the_nearest_rank_rounded_up_to_bf16(values: list[float], percentile: float) -> None:
    """The rank by sorting: the ceil(p / 100 * n)-th smallest, with the product formed exactly."""
    x = torch.tensor(values)
    histogram = torch.bincount(magnitude_bins(x), minlength=MAGNITUDE_BINS).to(torch.float64)
    rank = max(1, -(-round(percentile * 10) * len(values) // 1000))
    exact = sorted(values)[rank - 1]
    got = float(histogram_percentile(histogram, percentile / 100))
    assert exact <= got <= max(exact * (1 + 2**-7), exact + 2.0**-133)


class _Deterministic(TorchDispatchMode):
    """Refuses what torch.use_deterministic_algorithms refuses on a GPU among running sums."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cumsum.default and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


def test_a_percentile_comes_out_of_a_deterministic_run() -> None:
    histogram = torch.zeros(MAGNITUDE_BINS, dtype=torch.float64)
    histogram[int(magnitude_bins(torch.tensor([1.5]))[0])] = 3
    with _Deterministic():
        assert float(histogram_percentile(histogram, 0.99)) == 1.5


def test_an_empty_histogram_gives_0() -> None:
    assert float(histogram_percentile(torch.zeros(MAGNITUDE_BINS, dtype=torch.float64), 0.5)) == 0.0


def test_ranks_are_exact_for_more_elements_than_fp32_can_count() -> None:
    histogram = torch.zeros(MAGNITUDE_BINS, dtype=torch.float64)
    small, large = (int(magnitude_bins(torch.tensor([v]))[0]) for v in (1.0, 2.0))
    histogram[small], histogram[large] = 2.0**33 * 0.75, 2.0**33 * 0.25
    assert float(histogram_percentile(histogram, 0.75)) == 1.0
    histogram[small] -= 1
    histogram[large] += 1
    assert float(histogram_percentile(histogram, 0.75)) == 2.0


def test_a_percentile_of_wider_values_is_rounded_up_but_never_above_their_amax() -> None:
    x = torch.full((1, 1, 10, 1), 1.0)
    x[0, 0, 9] = 1.001
    real = torch.ones(1, 10, dtype=torch.bool)
    for percentile, amplitude in ((90.0, 1.0), (95.0, float(np.float32(1.001)))):
        watched = CalibrationObserver(1, 1.0, percentile)
        for part in PARTS:
            watched.observe(0, part, x, real)
        assert set(watched.result().scales.values()) == {scale_from_amax(amplitude, 1.0)}
    x[0, 0, 8] = 1.001
    x[0, 0, 9] = 5.0
    watched = CalibrationObserver(1, 1.0, 90.0)
    for part in PARTS:
        watched.observe(0, part, x, real)
    assert set(watched.result().scales.values()) == {scale_from_amax(1 + 2**-7, 1.0)}, "the next BF16 number"


@given(st.integers(0, 2**31), st.sampled_from([100.0, 90.0]))
@settings(max_examples=25, deadline=None)
def test_any_split_of_the_tokens_gives_the_same_state(seed: int, percentile: float) -> None:
    g = generator(seed)
    x = (torch.randn(3, 2, 9, 4, generator=g) * 3).to(torch.bfloat16)
    real = torch.rand(3, 9, generator=g) < 0.5
    cut = int(torch.randint(0, 10, (1,), generator=g))
    whole, pieces = (
        CalibrationObserver(1, 1.0, percentile, dict.fromkeys(((0, p) for p in PARTS), 0.01)) for _ in "ab"
    )
    whole.observe(0, "k", x, real)
    pieces.observe(0, "k", x[:, :, cut:], real[:, cut:])
    pieces.observe(0, "k", x[:, :, :cut], real[:, :cut])
    assert torch.equal(whole.state_dict()["state"], pieces.state_dict()["state"])
