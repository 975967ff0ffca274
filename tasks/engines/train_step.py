"""The passes of a score and of a training step, whatever model makes them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import Algorithm
from tasks.engines.protocols import RolloutBatch
from tasks.engines.step_inputs import LossLedger, StepInputs, objective_of
from tasks.engines.torch_optimizer import PolicyOptimizer
from tasks.numerics.loss import policy_loss

log = logging.getLogger(__name__)

Evaluate = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""Row numbers, mask `[rows, width]`, whether entropies are wanted: log-probabilities (and entropies) of the tokens
under the mask, `[selected]` fp32 on the CPU, row-major, with gradient where it is on."""

LossOf = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Row numbers, and what `Evaluate` gave for them: the loss to differentiate, a scalar."""

Learn = Callable[[Sequence[Tensor], Tensor, bool, LossOf], None]
"""Forward and backward of micro-batches (row numbers of each), in their order; gradients add up.

Of all tokens under the mask `[samples, width]`, with entropies or without.
"""


class ScoreSheet:
    """Log-probabilities of a batch's responses as passes give them, and the sum of their entropies in fp64.

    `mask` bool, `logprobs` fp32 `[samples, width]`, NaN off the responses; `scored` bool `[samples]`: rows that came.
    """

    def __init__(self, batch: RolloutBatch) -> None:
        self.mask = batch.response_mask()
        self.logprobs = torch.full(self.mask.shape, float("nan"))
        self.scored = torch.zeros(self.mask.shape[0], dtype=torch.bool)
        self._entropies: list[Tensor] = []

    def add(self, rows: Tensor, logprobs: Tensor, entropies: Tensor | None) -> None:
        """What `Evaluate` gave for all response tokens of these rows."""
        assert entropies is not None
        part = torch.full(self.mask[rows].shape, float("nan"))
        part[self.mask[rows]] = logprobs
        self.logprobs[rows] = part
        self.scored[rows] = True
        self._entropies.append(entropies)

    @property
    def entropy(self) -> Tensor:
        """Sum over the response tokens so far, and their number; fp64 `[2]`."""
        together = torch.cat([torch.empty(0), *self._entropies]).to(torch.float64)
        return torch.stack([together.sum(), torch.tensor(together.numel(), dtype=torch.float64)])


def mean_entropy(sums: Tensor) -> float:
    """From `ScoreSheet.entropy`, or the sum of several; 0 without any token."""
    return float(sums[0] / sums[1]) if float(sums[1]) else 0.0


@torch.no_grad()
def score_rows(batch: RolloutBatch, parts: Iterable[Tensor], evaluate: Evaluate) -> tuple[Tensor, float]:
    """Log-probabilities `[samples, width]`, NaN off the response, and the mean entropy of the response tokens.

    `parts`: row numbers of each forward pass.
    """
    sheet = ScoreSheet(batch)
    for rows in parts:
        sheet.add(rows, *evaluate(rows, sheet.mask[rows], True))
    return sheet.logprobs, mean_entropy(sheet.entropy)


@dataclass(frozen=True)
class Update:
    """Row numbers of each micro-batch of one optimiser update on this rank: of all, and of those to learn from."""

    passes: tuple[Tensor, ...]
    learned: tuple[Tensor, ...]


def update_of(ranks: Sequence[Sequence[Tensor]], kept: Tensor, rank: int = 0) -> Update:
    """An update of data-parallel rank `rank`, from the row numbers of each micro-batch of each.

    Micro-batches in which no rank has a token under `kept` bool `[samples, width]` teach nothing and are left out, on
    all ranks alike: a rank with nothing to learn computes along where others need it.
    """
    useful = [bool(kept[torch.cat(together)].any()) for together in zip(*ranks, strict=True)]
    passes = tuple(ranks[rank])
    return Update(passes, tuple(rows for rows, wanted in zip(passes, useful, strict=True) if wanted))


def _as_they_are(sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    return sums, maxima


@dataclass(frozen=True)
class StepParts:
    """What a trainer brings to a step.

    `reference`: log-probabilities `[samples, width]` of the KL term's policy for this rank's passes of an update, or
    None without such a term. `advance` is called after each update of the weights. `totals`: of fp64 vectors, the sum
    of the first and the maximum of the second over all ranks.
    """

    learn: Learn
    optimizer: PolicyOptimizer
    reference: Callable[[Sequence[Tensor]], Tensor] | None
    advance: Callable[[], None]
    totals: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _as_they_are


def one_by_one(evaluate: Evaluate) -> Learn:
    """A forward and a backward pass for each micro-batch."""

    def learn(passes: Sequence[Tensor], mask: Tensor, entropy: bool, loss: LossOf) -> None:
        for rows in passes:
            loss(rows, *evaluate(rows, mask[rows], entropy)).backward()

    return learn


def run_updates(
    parts: StepParts, step: StepInputs, updates: Sequence[Update], algorithm: Algorithm
) -> dict[str, float]:
    """All updates of a step; returns its metrics, the same on all ranks."""
    ledger, norms, skipped, empty, clipped = LossLedger(algorithm.entropy_coef > 0), [], 0, 0, 0
    rate = parts.optimizer.learning_rate
    for update in updates:
        if not update.learned:
            empty += 1
            continue
        # Scored here, not once for all: under delayed scaling the scales move with each update.
        reference = None if parts.reference is None else parts.reference(update.passes)
        loss = _loss_of(step, reference, algorithm, ledger)
        parts.learn(update.learned, step.kept, algorithm.entropy_coef > 0, loss)
        outcome = parts.optimizer.step()
        parts.advance()
        norms.append(outcome.grad_norm)
        rate = outcome.learning_rate
        clipped += outcome.clipped_weights
        if outcome.skipped:
            skipped += 1
            log.warning("update %d is skipped: its gradient norm is %s", parts.optimizer.updates, outcome.grad_norm)
    return (
        step.metrics
        | _over_ranks(parts, ledger, len(updates) - empty, int(step.kept.sum()))
        | {
            "optim/grad_norm": _mean_norm(norms),
            "optim/lr": rate,
            "optim/skipped_steps": float(skipped),
            "optim/empty_updates": float(empty),
            "optim/clipped_weights": float(clipped),
        }
    )


def _loss_of(step: StepInputs, reference: Tensor | None, algorithm: Algorithm, ledger: LossLedger) -> LossOf:
    """The objective of a micro-batch, entered into the ledger."""

    def loss(rows: Tensor, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        out = policy_loss(step.loss_inputs(rows, logprobs, reference, entropy), objective_of(algorithm))
        ledger.add(out.sums, out.counts, out.maxima)
        return out.loss

    return loss


def _over_ranks(parts: StepParts, ledger: LossLedger, updates: int, tokens: int) -> dict[str, float]:
    """Metrics of the ledgers of all ranks together, and the memory of the rank that holds most."""
    memory = parts.optimizer.memory()
    sums, maxima = ledger.entries
    added, highest = parts.totals(
        torch.tensor(sums, dtype=torch.float64), torch.tensor([*maxima, *memory.values()], dtype=torch.float64)
    )
    ledger.replace(added.tolist(), highest[: len(maxima)].tolist())
    return ledger.metrics(updates, tokens) | dict(zip(memory, highest[len(maxima) :].tolist(), strict=True))


def _mean_norm(norms: list[float]) -> float:
    """Mean of the finite norms, so that one skipped update does not hide the others; 0 for no update at all."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return sum(finite) / len(finite) if finite else math.fsum(norms[:1])
