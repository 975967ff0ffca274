"""The fingerprint: what changes it, what does not, and a second implementation in plain integers."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.fingerprint import combine, fingerprint, fingerprints
from tasks.numerics.fp8 import WEIGHT_BLOCK, quantize
from tests.unit.numerics_support import randn

WORD = 2**64 - 1


def as_tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def reference(data: bytes) -> int:
    words = struct.unpack(f"<{-(-len(data) // 8)}Q", data + bytes(-len(data) % 8))
    total = sum(splitmix64(word ^ splitmix64((i + 1) * 0x9E3779B97F4A7C15 & WORD)) for i, word in enumerate(words))
    return (total * 31 + len(data)) & WORD


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_equals_the_integer_implementation(data: bytes) -> None:
    assert fingerprint(as_tensor(data)) == reference(data)


def test_known_values() -> None:
    assert fingerprint(torch.empty(0)) == 0
    # The first output of SplitMix64 seeded with 0 is the mix of the golden ratio; 8 zero bytes mix it once more.
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert fingerprint(torch.zeros(8, dtype=torch.uint8)) == (splitmix64(0xE220A8397B1DCDAF) * 31 + 8) & WORD


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=60), st.data())
def test_any_flipped_bit_changes_it(data: bytes, choose: st.DataObject) -> None:
    position, bit = choose.draw(st.integers(0, len(data) - 1)), choose.draw(st.integers(0, 7))
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    assert fingerprint(as_tensor(bytes(changed))) != fingerprint(as_tensor(data))


def test_every_byte_of_a_tensor_matters() -> None:
    x = randn(0, 5, 13, dtype=torch.bfloat16)
    seen = {fingerprint(x)}
    for i in range(x.numel() * 2):
        changed = x.clone()
        changed.view(-1).view(torch.uint8)[i] ^= 0x10
        seen.add(fingerprint(changed))
    assert len(seen) == 1 + x.numel() * 2


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_order_matters_within_and_across_words(width: int) -> None:
    data = bytes(range(1, 65))
    blocks = [data[i : i + width] for i in range(0, 64, width)]
    swapped = [blocks[1], blocks[0], *blocks[2:]]
    far = [blocks[-1], *blocks[1:-1], blocks[0]]
    prints = {fingerprint(as_tensor(b"".join(b))) for b in (blocks, swapped, far, blocks[::-1])}
    assert len(prints) == 4


def test_length_matters_although_the_tail_is_padded_with_zeros() -> None:
    zeros = {fingerprint(torch.zeros(n, dtype=torch.uint8)) for n in range(100)}
    assert len(zeros) == 100
    tails = {fingerprint(as_tensor(b"abc" + bytes(n))) for n in range(40)}
    assert len(tails) == 40


def test_the_sign_of_zero_and_nan_payloads_matter() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(payloads[:1]) != fingerprint(payloads[1:])


def test_it_is_of_the_bytes_whatever_the_dtype_or_shape_that_views_them() -> None:
    x = randn(1, 6, 8)
    want = fingerprint(x)
    for dtype in (torch.uint8, torch.int32, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        assert fingerprint(x.view(dtype)) == want
    flags = x > 0
    assert fingerprint(flags) == fingerprint(flags.to(torch.uint8))
    assert fingerprint(x.view(48)) == fingerprint(x.view(2, 3, 8)) == want
    assert fingerprint(torch.tensor(1.5)) == fingerprint(torch.tensor([1.5]))
    assert fingerprint(x.to(torch.bfloat16)) != want


def test_layout_in_memory_does_not_matter() -> None:
    x = randn(2, 7, 9)
    want = fingerprint(x)
    assert fingerprint(x.t().contiguous().t()) == want
    wide = torch.zeros(7, 20)
    wide[:, 3:12] = x
    assert fingerprint(wide[:, 3:12]) == want
    assert fingerprint(x.t()) != want
    assert fingerprint(torch.ones(1).expand(16)) == fingerprint(torch.ones(16))


@pytest.mark.parametrize("offset", range(1, 9))
def test_a_slice_at_any_byte_offset_is_accepted(offset: int) -> None:
    data = bytes(range(64))
    for size in (8, 13, 16, 40):
        got = fingerprint(as_tensor(data)[offset : offset + size])
        assert got == reference(data[offset : offset + size])


def test_gradients_and_the_tensor_are_left_alone() -> None:
    x = randn(3, 4, 4).requires_grad_()
    before = x.detach().clone()
    assert fingerprint(x) == fingerprint(before)
    assert torch.equal(x.detach(), before)


def test_codes_and_scales_of_a_quantised_weight() -> None:
    weight = randn(4, 130, 257, dtype=torch.bfloat16)
    first, again = quantize(weight, WEIGHT_BLOCK), quantize(weight.clone(), WEIGHT_BLOCK)
    assert fingerprint(first.codes) == fingerprint(again.codes)
    assert fingerprint(first.scales) == fingerprint(again.scales)
    weight[129, 256] = 100.0
    changed = quantize(weight, WEIGHT_BLOCK)
    assert fingerprint(changed.scales) != fingerprint(first.scales)


def test_combine_ignores_order_of_insertion() -> None:
    parts = {f"layer.{i}.weight": fingerprint(randn(i, 3)) for i in range(12)}
    digest = combine(parts)
    assert len(digest) == 16 and int(digest, 16) >= 0
    assert combine(dict(reversed(list(parts.items())))) == digest
    assert combine(dict(sorted(parts.items(), key=lambda item: item[1]))) == digest


def test_combine_depends_on_every_name_and_every_value() -> None:
    parts = {"a": 1, "b": 2, "c": 2**64 - 1}
    variants = [
        parts,
        {**parts, "a": 2},
        {**parts, "c": 2**64 - 2},
        {"a": 2, "b": 1, "c": 2**64 - 1},
        {"A": 1, "b": 2, "c": 2**64 - 1},
        {"a": 1, "b": 2},
        {**parts, "d": 0},
        {"a": 1},
        {},
    ]
    assert len({combine(v) for v in variants}) == len(variants)


def test_many_fingerprints_are_those_of_each() -> None:
    base = torch.arange(64, dtype=torch.uint8)
    tensors = {
        "whole words": base,
        "a word from an odd place": base[3:11],
        "ragged": base[5:18],
        "transposed": base.reshape(8, 8).t(),
        "codes": base.view(torch.float8_e4m3fn),
        "nothing": torch.empty(0),
    }
    assert fingerprints(tensors) == {name: fingerprint(x) for name, x in tensors.items()}
    assert fingerprints(tensors)["a word from an odd place"] == reference(bytes(range(3, 11)))
    assert fingerprints({}) == {}
