"""Payloads as bytes: every bit arrives, through a pickle as between processes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tasks.engines.protocols import SyncPayload
from tasks.engines.wire import WirePayload, pack, unpack

SCALES = {(0, "k"): 0.1, (1, "v"): 3.0000001}


def _bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def _bf16() -> Tensor:
    """All 65,536 bit patterns: negative zero, subnormals, infinities and every NaN."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


TENSORS = {
    "bf16": _bf16().reshape(256, 256),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16),
    "fp32": torch.tensor([[0.0, -0.0, 1e-45, float("inf")], [-float("inf"), float("nan"), 1 / 3, 3.4e38]]),
    "transposed": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(),
    "every second": torch.arange(8, dtype=torch.float32)[::2],
    "one number": torch.tensor(2.5),
    "parameter": torch.nn.Parameter(torch.tensor([1.5])),
}


@pytest.fixture(scope="module")
def payload() -> SyncPayload:
    return SyncPayload(7, TENSORS, SCALES, {"bf16": 2**64 - 1})


def _sent(payload: SyncPayload) -> WirePayload:
    # Arrays that come out of a shared object store cannot be written to.
    wire: WirePayload = pickle.loads(pickle.dumps(pack(payload)))
    for tensor in wire.tensors.values():
        tensor.data.flags.writeable = False
    return wire


@pytest.mark.parametrize("name", TENSORS)
def test_every_bit_arrives(payload: SyncPayload, name: str) -> None:
    got, want = unpack(_sent(payload)).tensors[name], TENSORS[name]
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert _bits(got) == _bits(want.detach())
    assert not got.requires_grad


def test_everything_else_arrives(payload: SyncPayload) -> None:
    got = unpack(_sent(payload))
    assert (got.version, got.kv_scales, got.fingerprints) == (7, SCALES, {"bf16": 2**64 - 1})
    assert list(got.tensors) == list(TENSORS)


def test_scales_of_heads_arrive_with_every_bit(payload: SyncPayload) -> None:
    scales = {(0, "k"): (0.1, 3.0000001, 1e-45), (0, "v"): (2.5,)}
    got = unpack(_sent(replace(payload, kv_scales=scales))).kv_scales
    assert got == scales
    assert [type(scale) for scale in got.values()] == [tuple, tuple]


def test_what_arrives_can_be_written_to_and_is_nobody_elses(payload: SyncPayload) -> None:
    wire = _sent(payload)
    first, second = unpack(wire).tensors["fp32"], unpack(wire).tensors["fp32"]
    first.fill_(9.0)
    assert _bits(second) == _bits(TENSORS["fp32"])


def test_packed_tensors_are_plain_bytes(payload: SyncPayload) -> None:
    wire = pack(payload).tensors
    assert {tensor.data.dtype.name for tensor in wire.values()} == {"uint8"}
    sizes = {"bf16": 2 * 65536, "e4m3": 256, "fp32": 32, "one number": 4}
    assert {name: wire[name].data.nbytes for name in sizes} == sizes
