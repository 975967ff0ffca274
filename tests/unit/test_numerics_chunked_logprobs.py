"""Chunked log-probabilities against the plain formula: values, gradients, memory, and two ranks against one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.numerics.chunked_logprobs import EntropyKind, chunked_logprobs
from tasks.numerics.logprobs import token_entropy, token_logprobs

COUNT, CHANNELS, VOCABULARY = 11, 8, 24


def _case(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    hidden = torch.randn(COUNT, CHANNELS, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, CHANNELS, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (COUNT,))


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.T / temperature, 1)
    return logp.gather(1, targets.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(1)


def _loss(logprobs: Tensor, entropies: Tensor | None) -> Tensor:
    """Every token with a weight of its own."""
    weights = torch.linspace(-1, 2, logprobs.shape[0], dtype=logprobs.dtype)
    total = (weights * logprobs).sum()
    return total if entropies is None else total + (weights.flip(0) * entropies).sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 15), st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from(["none", "value", "gradient"]))
def test_values_and_gradients_are_those_of_float64_autograd(chunk: int, temperature: float, kind: EntropyKind) -> None:
    hidden, weight, targets = _case(seed=chunk)
    wanted, wanted_entropy = _plain(hidden, weight, targets, temperature)
    _loss(wanted, wanted_entropy if kind == "gradient" else None).backward()
    gradients = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    logprobs, entropies = chunked_logprobs(hidden, weight, targets, temperature, chunk, kind)
    torch.testing.assert_close(logprobs, wanted, rtol=1e-12, atol=1e-12)
    if kind == "none":
        assert entropies is None
    else:
        assert entropies is not None
        torch.testing.assert_close(entropies, wanted_entropy, rtol=1e-12, atol=1e-12)
        assert entropies.requires_grad == (kind == "gradient")
    _loss(logprobs, entropies if kind == "gradient" else None).backward()
    torch.testing.assert_close((hidden.grad, weight.grad), gradients, rtol=1e-11, atol=1e-11)


def test_gradcheck() -> None:
    hidden, weight, targets = _case()
    assert torch.autograd.gradcheck(lambda h, w: chunked_logprobs(h, w, targets, 0.7, 4, "gradient"), (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_it_agrees_with_the_plain_functions(dtype: torch.dtype, temperature: float) -> None:
    """The same products in the same type: fp32 rounding of the sums is all that may differ."""
    hidden, weight, targets = _case(dtype)
    logits = torch.nn.functional.linear(hidden, weight)
    logprobs, entropies = chunked_logprobs(hidden, weight, targets, temperature, 4, "value")
    assert logprobs.dtype is torch.float32
    assert entropies is not None
    torch.testing.assert_close(logprobs, token_logprobs(logits, targets, temperature), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(entropies, token_entropy(logits, temperature), rtol=2e-6, atol=2e-6)


def test_bf16_gradients_are_as_close_to_exact_ones_as_autograd_is() -> None:
    hidden, weight, targets = _case(torch.bfloat16)
    _loss(*chunked_logprobs(hidden, weight, targets, 1.0, 3, "gradient")).backward()
    ours = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    logits = torch.nn.functional.linear(hidden, weight)
    _loss(token_logprobs(logits, targets, 1.0), token_entropy(logits, 1.0)).backward()
    theirs = hidden.grad, weight.grad
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    _loss(*_plain(exact_hidden, exact_weight, targets, 1.0)).backward()
    for mine, plain, exact in zip(ours, theirs, (exact_hidden.grad, exact_weight.grad), strict=True):
        assert mine is not None and plain is not None and exact is not None
        assert mine.dtype is torch.bfloat16
        assert (mine.double() - exact).norm() <= 1.5 * (plain.double() - exact).norm()


def test_frozen_operands_get_no_gradient() -> None:
    hidden, weight, targets = _case()
    chunked_logprobs(hidden, weight.detach(), targets, chunk=4)[0].sum().backward()
    assert hidden.grad is not None
    hidden.grad = None
    chunked_logprobs(hidden.detach(), weight, targets, chunk=4)[0].sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None


class _LargestLogits(TorchDispatchMode):
    """The most tokens in any tensor of shape [tokens, vocabulary] that an operation returned."""

    tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and VOCABULARY in tensor.shape and CHANNELS not in tensor.shape:
                self.tokens = max(self.tokens, tensor.numel() // VOCABULARY)
        return out


@pytest.mark.parametrize("chunk", [1, 4])
def test_no_more_than_a_chunk_has_logits(chunk: int) -> None:
    hidden, weight, targets = _case()
    with _LargestLogits() as seen:
        _loss(*chunked_logprobs(hidden, weight, targets, 1.0, chunk, "gradient")).backward()
    assert seen.tokens == chunk
    with _LargestLogits() as seen:
        _loss(*_plain(hidden, weight, targets, 1.0)).backward()
    assert seen.tokens == COUNT


def test_no_tokens_at_all() -> None:
    _, weight, _ = _case()
    hidden = torch.zeros(0, CHANNELS, dtype=torch.float64, requires_grad=True)
    logprobs, entropies = chunked_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), entropy="gradient")
    assert entropies is not None
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_large_logits_neither_overflow_nor_vanish() -> None:
    hidden = torch.tensor([[100.0]])
    weight = torch.tensor([[10.0], [9.99], [-10.0]])
    logprobs, entropies = chunked_logprobs(hidden, weight, torch.tensor([0]), entropy="value")
    # Logits 1000, 999, -1000: log(1 + 1/e) and the entropy of two outcomes of odds e to 1.
    assert entropies is not None
    assert float(logprobs) == pytest.approx(-0.3132617, abs=1e-4)
    assert float(entropies) == pytest.approx(0.5822031, abs=1e-4)


def test_rows_that_pad_the_vocabulary_have_no_probability() -> None:
    hidden, weight, _ = _case()
    targets = torch.arange(COUNT)
    wanted, wanted_entropy = _plain(hidden, weight[:20], targets, 1.0)
    logprobs, entropies = chunked_logprobs(hidden, weight, targets, chunk=4, entropy="gradient", vocabulary=20)
    torch.testing.assert_close((logprobs, entropies), (wanted, wanted_entropy))
    _loss(logprobs, entropies).backward()
    assert weight.grad is not None
    assert not weight.grad[20:].any()
    assert bool(weight.grad[:20].any(1).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(4, CHANNELS)}, "one type, and as many channels"),
        ({"weight": torch.zeros(4, CHANNELS + 1).double()}, "one type, and as many channels"),
        ({"targets": torch.full((COUNT,), VOCABULARY)}, "targets from 24 to 24: allowed: 0 to 23"),
        ({"targets": torch.full((COUNT,), -1)}, "targets from -1 to -1"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets \(3,\)"),
        ({"chunk": 0}, "chunk 0"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"vocabulary": VOCABULARY + 1}, "vocabulary = 25: allowed: from 1 to 24"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    hidden, weight, targets = _case()
    with pytest.raises(ValueError, match=words):
        chunked_logprobs(**{"hidden": hidden, "weight": weight, "targets": targets, **change})


def _rank(rank: int, folder: str, vocabulary: int, dtype: torch.dtype) -> None:
    """One of two processes: its half of the weight."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    hidden, weight, targets = _case(dtype)
    mine = weight.detach().chunk(2)[rank].clone().requires_grad_()
    group = dist.group.WORLD
    targets = targets.clamp(max=vocabulary - 1)
    logprobs, entropies = chunked_logprobs(hidden, mine, targets, 0.7, 4, "gradient", vocabulary, group)
    _loss(logprobs, entropies).backward()
    results = {"logprobs": logprobs, "entropies": entropies, "hidden": hidden.grad, "weight": mine.grad}
    torch.save({name: t.detach() for name, t in results.items() if t is not None}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(VOCABULARY, torch.float64), (20, torch.float64), (VOCABULARY // 2, torch.float64), (20, torch.bfloat16)],
    ids=["whole", "padded", "second rank has padding alone", "bf16"],
)
def test_two_ranks_equal_one(tmp_path: Path, vocabulary: int, dtype: torch.dtype) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_rank, (str(tmp_path), vocabulary, dtype), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
    hidden, weight, targets = _case(dtype)
    targets = targets.clamp(max=vocabulary - 1)
    alone = chunked_logprobs(hidden, weight, targets, 0.7, 4, "gradient", vocabulary)
    _loss(*alone).backward()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    exact = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 2**-7, "atol": 2**-7}
    for rank in ranks:
        torch.testing.assert_close((rank["logprobs"], rank["entropies"]), alone, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(rank["hidden"], hidden.grad, **exact)
    assert torch.equal(ranks[0]["hidden"], ranks[1]["hidden"])
    torch.testing.assert_close(torch.cat([rank["weight"] for rank in ranks]), weight.grad, **exact)
