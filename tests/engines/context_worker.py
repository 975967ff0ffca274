"""One of two context-parallel ranks on CPU: `python -m tests.engines.context_worker JOB RANK`.

Megatron's attention for CPU knows no context parallelism, but what comes after it does: the rank takes its share of
hidden states and writes log-probabilities, entropies and the gradients of a loss that couples all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tasks.engines.megatron_config import Layout
from tasks.engines.protocols import TokenRows
from tasks.numerics.packing import PackingRule

LENGTHS, WIDTH, CHANNELS, VOCABULARY, TEMPERATURE = (9, 3, 7), 9, 16, 30, 0.7


def made() -> tuple[TokenRows, Tensor, Tensor, Tensor]:
    """Rows; a mask bool `[rows, width]` of wanted tokens; hidden states `[rows, width, channels]`; an output weight."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (len(LENGTHS), WIDTH), generator=generator)
    lengths = torch.tensor(LENGTHS)
    position = torch.arange(WIDTH)
    mask = (position >= 2) & (position < lengths.unsqueeze(1))
    hidden = torch.randn(len(LENGTHS), WIDTH, CHANNELS, generator=generator)
    return TokenRows(tokens, lengths), mask, hidden, torch.randn(VOCABULARY, CHANNELS, generator=generator)


def coupled(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """A loss in which each token's gradient depends on all others."""
    return logprobs.sum().square() + logprobs.square().sum() + entropies.sum().square()


def results() -> dict[str, Tensor]:
    from tasks.engines.megatron_passes import Passes
    from tasks.engines.megatron_policy import MegatronPolicy

    rows, mask, hidden, weight = made()
    passes = Passes(PackingRule(32, 8, 4), True, 4, TEMPERATURE, torch.device("cpu"))
    chosen = torch.tensor([2, 0, 1])
    this = passes.inputs(rows, chosen)
    place, row, column = this._rows.real()
    whole = torch.zeros(this._rows.tokens.numel(), CHANNELS)
    whole[place] = hidden[chosen[row], column]
    own = whole[this._places].unsqueeze(1).requires_grad_()
    weight.requires_grad_()
    policy: Any = SimpleNamespace(
        passes=passes,
        model=SimpleNamespace(
            plan=SimpleNamespace(shape=SimpleNamespace(vocabulary=VOCABULARY)), part=SimpleNamespace(tensor_size=1)
        ),
        _head=lambda: weight,
    )
    logprobs, entropies = MegatronPolicy._values(policy, own, this, rows.tokens[chosen], mask[chosen], True)
    assert entropies is not None
    coupled(logprobs, entropies).backward()
    assert own.grad is not None and weight.grad is not None
    spread = torch.zeros(this._rows.tokens.numel(), CHANNELS)
    spread[this._places] = own.grad.squeeze(1)
    to_hidden = torch.zeros_like(hidden)
    to_hidden[chosen[row], column] = spread[place]
    found = {"logprobs": logprobs, "entropies": entropies, "to_hidden": to_hidden, "to_weight": weight.grad}
    return {name: tensor.detach() for name, tensor in found.items()} | {"places": this._places}


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    from tasks.engines import megatron_cpu

    megatron_cpu.install()
    from tasks.engines.megatron_model import start_groups, stop_groups

    start_groups(Layout(context=2, rank=rank), False, job["rendezvous"], timeout_s=60, seed=1)
    torch.save(results(), Path(job["out"]) / f"{rank}.pt")
    stop_groups()


if __name__ == "__main__":
    main()
