"""Bytes that an optimiser holds, from the shapes of its parameters alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conf.schema import Optimizer
from tasks.numerics.moments import moment_slots


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes once every parameter has been updated; AdamW's step counters (4 bytes a parameter tensor) not counted.

    `master`: fp32 copies of the weights; `state`: moments and Kahan compensation; `gradients`: the fp32 accumulators,
    held from the first backward pass of an update to its end. The weights that the model computes with come on top.
    """

    master: int
    state: int
    gradients: int


def optimizer_bytes(shapes: Iterable[Sequence[int]], settings: Optimizer) -> OptimizerBytes:
    """The sum over all parameters, tied weights counted once."""
    elements, moments = 0, 0
    for shape in shapes:
        elements += math.prod(shape)
        moments += sum(slot.size for slot in moment_slots(shape, settings.state).values())
    compensation = 2 * elements if settings.weights == "bf16_kahan" else 0
    master = 4 * elements if settings.weights == "fp32_master" else 0
    return OptimizerBytes(master, moments + compensation, 4 * elements)
