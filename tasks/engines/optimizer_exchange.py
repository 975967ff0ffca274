"""What an optimiser asks of the other ranks in an update, and the answers where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter


class Exchange(Protocol):
    """How ranks work on one update together. All ranks call every method alike, and in the same order."""

    def owned(self, name: str) -> bool:
        """Whether this rank holds the parameter's master and moments, and updates it."""

    def sums(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """From this rank's fp32 gradients, which are used up, the whole gradients of the parameters that it owns."""

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """L2 norm of the whole model's gradient from what `sums` gave, each parameter counted once; the same on all
        ranks, and not finite where any rank's gradient is not."""

    def total(self, counts: Mapping[str, Tensor]) -> int:
        """Sum over the whole model of a number for each parameter that this rank owns (int64, no dimensions)."""

    def publish(self, parameters: Mapping[str, Parameter]) -> None:
        """Copy this rank's owned values of the model's parameters to the ranks that do not own them."""


class Alone:
    """`Exchange` of a single rank."""

    def owned(self, name: str) -> bool:
        return True

    def sums(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradients

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        return float(torch.nn.utils.get_total_norm(list(gradients.values())))

    def total(self, counts: Mapping[str, Tensor]) -> int:
        return sum(int(count) for count in counts.values())

    def publish(self, parameters: Mapping[str, Parameter]) -> None:
        pass
