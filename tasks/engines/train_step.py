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

Update = Sequence[Tensor]
"""Row numbers of each micro-batch of one optimiser update."""


@torch.no_grad()
def score_rows(batch: RolloutBatch, parts: Iterable[Tensor], evaluate: Evaluate) -> tuple[Tensor, float]:
    """Log-probabilities `[samples, width]`, NaN off the response, and the mean entropy of the response tokens.

    `parts`: row numbers of each forward pass.
    """
    mask = batch.response_mask()
    logprobs, entropies = torch.full(mask.shape, float("nan")), []
    for rows in parts:
        valid = mask[rows]
        part = torch.full(valid.shape, float("nan"))
        part[valid], entropy = evaluate(rows, valid, True)
        assert entropy is not None
        logprobs[rows] = part
        entropies.append(entropy)
    together = torch.cat(entropies).to(torch.float64)
    return logprobs, float(together.mean()) if together.numel() else 0.0


@dataclass(frozen=True)
class StepParts:
    """What a trainer brings to a step.

    `reference`: log-probabilities `[samples, width]` of the KL term's policy for the rows of an update, or None without
    such a term. `advance` is called after each update of the weights.
    """

    evaluate: Evaluate
    optimizer: PolicyOptimizer
    reference: Callable[[Update], Tensor] | None
    advance: Callable[[], None]


def run_updates(
    parts: StepParts, step: StepInputs, updates: Sequence[Update], algorithm: Algorithm
) -> dict[str, float]:
    """All updates of a step; returns its metrics."""
    ledger, norms, skipped, empty, clipped = LossLedger(algorithm.entropy_coef > 0), [], 0, 0, 0
    rate = parts.optimizer.learning_rate
    for update in updates:
        if not bool(step.kept[torch.cat(tuple(update))].any()):
            empty += 1
            continue
        # Scored here, not once for all: under delayed scaling the scales move with each update.
        reference = None if parts.reference is None else parts.reference(update)
        for rows in update:
            _accumulate(parts.evaluate, step, rows, reference, algorithm, ledger)
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
        | ledger.metrics(len(updates) - empty, int(step.kept.sum()))
        | {
            "optim/grad_norm": _mean_norm(norms),
            "optim/lr": rate,
            "optim/skipped_steps": float(skipped),
            "optim/empty_updates": float(empty),
            "optim/clipped_weights": float(clipped),
            **parts.optimizer.memory(),
        }
    )


def _accumulate(
    evaluate: Evaluate,
    step: StepInputs,
    rows: Tensor,
    reference: Tensor | None,
    algorithm: Algorithm,
    ledger: LossLedger,
) -> None:
    """Forward and backward of one micro-batch; gradients add up until the optimiser's step."""
    if not bool(step.kept[rows].any()):
        return
    logprobs, entropy = evaluate(rows, step.kept[rows], algorithm.entropy_coef > 0)
    out = policy_loss(step.loss_inputs(rows, logprobs, reference, entropy), objective_of(algorithm))
    out.loss.backward()
    ledger.add(out.sums, out.counts, out.maxima)


def _mean_norm(norms: list[float]) -> float:
    """Mean of the finite norms, so that one skipped update does not hide the others; 0 for no update at all."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return sum(finite) / len(finite) if finite else math.fsum(norms[:1])
