"""Chunks of a sync: every bit arrives, in bounded buffers, in any cut; a broken course is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.engines.protocols import SyncError, SyncHeader, SyncPayload, TensorForm
from tasks.engines.sync_steps import StepwiseSync
from tasks.engines.transport import Arrivals, Chunk, Piece, plan_chunks, send, size_of

SCALES = {(0, "k"): 0.1, (1, "v"): 3.0000001}


def _bits(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def _bf16() -> Tensor:
    """All 65,536 bit patterns: negative zero, subnormals, infinities and every NaN."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


TENSORS = {
    "bf16": _bf16().reshape(256, 256),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16),
    "e8m0": torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(5, 51),
    "fp32": torch.tensor([[0.0, -0.0, 1e-45, float("inf")], [-float("inf"), float("nan"), 1 / 3, 3.4e38]]),
    "transposed": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(),
    "every second": torch.arange(8, dtype=torch.float32)[::2],
    "one number": torch.tensor(2.5),
    "nothing": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.tensor([1.5])),
}
PAYLOAD = SyncPayload(7, TENSORS, SCALES, {})


class Shelf(StepwiseSync):
    """An engine that keeps what came, in the order in which it came."""

    name = "shelf"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.course: list[str] = []
        self.tensors: dict[str, Tensor] = {}
        self.broken: str | None = None

    def _check(self, header: SyncHeader) -> None:
        if header.version < 0:
            raise SyncError("no such version")

    def _start(self) -> None:
        self.course.append("start")

    def _install(self, tensors: Mapping[str, Tensor]) -> None:
        if self.broken in tensors:
            raise OSError("the shelf broke")
        self.tensors |= tensors

    def _finish(self, header: SyncHeader) -> None:
        self.course.append("finish")
        self.scales = header.kv_scales

    def _recover(self) -> None:
        self.tensors = {}
        self.course.append("recover")

    def sleep(self) -> None: ...

    def _forget(self) -> None: ...


class Pickled:
    """A receiver behind a pickle, as between processes; the sender's buffer is lost as soon as `receive` waited."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals, self.sizes = arrivals, []

    def begin(self, header: SyncHeader) -> str | None:
        return self.arrivals.begin(pickle.loads(pickle.dumps(header)))

    def receive(self, chunk: Chunk) -> Callable[[], None]:
        copy: Chunk = pickle.loads(pickle.dumps(chunk))
        # Arrays that come out of a shared object store cannot be written to.
        copy.data.flags.writeable = False
        self.sizes.append(copy.data.nbytes)
        self.arrivals.receive(copy)
        return lambda: chunk.data.fill(0xAB)

    def finish(self) -> None:
        self.arrivals.finish()


@pytest.mark.parametrize("limit", [256, 300, 1000, 4096, 131072, 2**20])
def test_every_bit_arrives_in_buffers_of_any_size(limit: int) -> None:
    shelf = Shelf()
    receiver = Pickled(Arrivals(shelf))
    sent = send(PAYLOAD, receiver, limit)
    assert shelf.course == ["start", "finish"] and shelf._version == 7
    assert list(shelf.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        got = shelf.tensors[name]
        assert (got.dtype, got.shape, got.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert _bits(got) == _bits(tensor)
    assert max(receiver.sizes) <= limit
    assert (sent.transport, sent.chunks) == ("host", len(receiver.sizes))
    assert sent.bytes == 131072 + 256 + 255 + 32 + 24 + 16 + 4 + 0 + 4


def test_scales_arrive_with_every_bit() -> None:
    scales = {(0, "k"): (0.1, 3.0000001, 1e-45), (0, "v"): (2.5,), (1, "q"): 1 / 3}
    shelf = Shelf()
    send(replace(PAYLOAD, kv_scales=scales), Pickled(Arrivals(shelf)), 4096)
    assert shelf.scales == scales
    assert [type(scale) for scale in shelf.scales.values()] == [tuple, tuple, float]


def test_what_arrived_is_nobody_elses() -> None:
    shelf = Shelf()
    receiver = Pickled(Arrivals(shelf))
    send(PAYLOAD, receiver, 2**20)
    first = shelf.tensors["fp32"]
    send(PAYLOAD, receiver, 2**20)
    first.fill_(9.0)
    assert _bits(shelf.tensors["fp32"]) == _bits(TENSORS["fp32"])


@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(256, 2000))
@settings(max_examples=200, deadline=None)
def test_a_plan_has_every_byte_once_and_in_order(sizes: list[int], limit: int) -> None:
    forms = {f"t{i}": TensorForm((size,), torch.uint8) for i, size in enumerate(sizes)}
    chunks = list(plan_chunks(forms, limit))
    seen = dict.fromkeys(forms, 0)
    for pieces in chunks:
        assert pieces and max(p.offset + p.size for p in pieces) <= limit
        ends = 0
        for piece in pieces:
            assert piece.offset >= ends and piece.offset % 256 == 0
            assert piece.start == seen[piece.name]
            seen[piece.name] += piece.size
            ends = piece.offset + piece.size
    assert seen == {name: size_of(form) for name, form in forms.items()}
    assert {p.name for pieces in chunks for p in pieces} == set(forms)


def _begun() -> tuple[Shelf, Arrivals, dict[str, Chunk]]:
    """A sync of three tensors that was announced, and a chunk for each."""
    tensors = {name: torch.arange(4, dtype=torch.float32) + i for i, name in enumerate("abc")}
    shelf = Shelf()
    arrivals = Arrivals(shelf)
    arrivals.begin(SyncPayload(1, tensors, {}, {}).header)
    chunks = {n: Chunk((Piece(n, 0, 16, 0),), t.view(torch.uint8).numpy()) for n, t in tensors.items()}
    return shelf, arrivals, chunks


def _is_dirty(shelf: Shelf, arrivals: Arrivals) -> None:
    assert shelf._version is None and shelf.course[-1] == "recover" and shelf.tensors == {}
    with pytest.raises(SyncError, match="no sync is under way"):
        arrivals.finish()


def test_a_sync_that_lacks_tensors_does_not_finish() -> None:
    shelf, arrivals, chunks = _begun()
    arrivals.receive(chunks["b"])
    with pytest.raises(SyncError, match="shelf engine failed during the sync of version 1: 2 tensors never came, a"):
        arrivals.finish()
    _is_dirty(shelf, arrivals)


def test_a_tensor_that_comes_twice_is_refused() -> None:
    shelf, arrivals, chunks = _begun()
    arrivals.receive(chunks["a"])
    with pytest.raises(SyncError, match="version 1: a was not announced, or comes twice"):
        arrivals.receive(chunks["a"])
    _is_dirty(shelf, arrivals)


def test_a_failure_of_the_engine_recovers_it_and_leaves_it_dirty() -> None:
    shelf, arrivals, chunks = _begun()
    shelf.broken = "b"
    arrivals.receive(chunks["a"])
    with pytest.raises(SyncError, match="version 1: the shelf broke"):
        arrivals.receive(chunks["b"])
    _is_dirty(shelf, arrivals)


@pytest.mark.parametrize(
    "piece, message",
    [
        (Piece("z", 0, 16, 0), "z was not announced"),
        (Piece("a", 4, 12, 0), "a: bytes 4 to 16 came after 0"),
        (Piece("a", 0, 20, 0), "a: bytes 0 to 20 came after 0"),
    ],
)
def test_pieces_out_of_place_are_refused(piece: Piece, message: str) -> None:
    _, arrivals, chunks = _begun()
    with pytest.raises(SyncError, match=message):
        arrivals.receive(replace(chunks["a"], pieces=(piece,)))


def test_a_new_sync_gives_up_one_that_never_finished() -> None:
    shelf, arrivals, chunks = _begun()
    arrivals.receive(chunks["a"])
    send(replace(PAYLOAD, version=2), Pickled(arrivals), 4096)
    assert shelf.course == ["start", "recover", "start", "finish"] and shelf._version == 2
    assert list(shelf.tensors) == list(TENSORS)


def test_a_header_that_does_not_fit_changes_nothing_but_the_version() -> None:
    shelf = Shelf()
    send(PAYLOAD, Pickled(Arrivals(shelf)), 4096)
    with pytest.raises(SyncError, match="no such version"):
        send(replace(PAYLOAD, version=-1), Pickled(Arrivals(shelf)), 4096)
    assert shelf._version is None and shelf.course == ["start", "finish"] and list(shelf.tensors) == list(TENSORS)


def test_a_refused_header_does_not_hide_a_sync_that_was_given_up() -> None:
    shelf, arrivals, chunks = _begun()
    arrivals.receive(chunks["a"])
    with pytest.raises(SyncError, match="no such version"):
        arrivals.begin(replace(PAYLOAD, version=-1).header)
    send(replace(PAYLOAD, version=2), Pickled(arrivals), 4096)
    assert shelf.course == ["start", "recover", "start", "finish"] and shelf._version == 2


def test_nothing_is_received_before_it_was_announced() -> None:
    arrivals = Arrivals(Shelf())
    chunk = Chunk((Piece("a", 0, 0, 0),), torch.empty(0, dtype=torch.uint8).numpy())
    with pytest.raises(SyncError, match="no sync is under way"):
        arrivals.receive(chunk)
