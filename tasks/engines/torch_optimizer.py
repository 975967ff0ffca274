"""AdamW on fp32 master weights for a BF16 compute copy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from conf.schema import Optimizer
from tasks.engines.protocols import EngineError


@dataclass(frozen=True)
class UpdateOutcome:
    """`grad_norm` before clipping (global L2 norm); `skipped` True when it was not finite; `learning_rate` of it."""

    grad_norm: float
    skipped: bool
    learning_rate: float


class MasterOptimizer:
    """Keeps `master` fp32 weights by name, and accumulates fp32 gradients from the compute copy's backward passes.

    The compute copy is `master` rounded to its own dtype after every update. `updates` counts the
    optimiser updates that were applied.
    """

    def __init__(self, compute: dict[str, Parameter], master: dict[str, Tensor], settings: Optimizer) -> None:
        self._compute = compute
        self._settings = settings
        self.master = {name: Parameter(master[name].to(torch.float32).clone()) for name in compute}
        self._adam = torch.optim.AdamW(
            self.master.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.updates = 0
        for name, parameter in compute.items():
            parameter.register_post_accumulate_grad_hook(self._accumulator(self.master[name]))
        self._copy_to_compute()

    @staticmethod
    def _accumulator(master: Parameter):  # type: ignore[no-untyped-def]
        def accumulate(parameter: Tensor) -> None:
            assert parameter.grad is not None
            grad = parameter.grad.to(torch.float32)
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

        return accumulate

    @torch.no_grad()
    def _copy_to_compute(self) -> None:
        for name, parameter in self._compute.items():
            parameter.copy_(self.master[name])

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update: linear warm-up, then constant."""
        warmup = self._settings.warmup_steps
        factor = min(1.0, (self.updates + 1) / warmup) if warmup else 1.0
        return self._settings.learning_rate * factor

    def step(self) -> UpdateOutcome:
        """Clip by global norm and update; a non-finite gradient is dropped and reported, weights stay."""
        rate = self.learning_rate
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.master.values() if p.grad is not None]))
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self.master.values(), self._settings.max_grad_norm, torch.tensor(norm))
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self.updates += 1
            self._copy_to_compute()
        self._adam.zero_grad(set_to_none=True)
        return UpdateOutcome(norm, not math.isfinite(norm), rate)

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments by `<name>.<moment>`; empty before the first update."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.master.items():
            for key, value in self._adam.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value.detach().clone().contiguous()
        return found

    @torch.no_grad()
    def load(self, master: dict[str, Tensor], state: dict[str, Tensor], updates: int) -> None:
        """Restore weights, moments and the count of updates; names and shapes must match exactly."""
        if master.keys() != self.master.keys():
            raise EngineError(
                f"checkpoint and model differ in weights: {sorted(master.keys() ^ self.master.keys())[:3]}"
            )
        for name, parameter in self.master.items():
            if master[name].shape != parameter.shape:
                raise EngineError(f"{name}: checkpoint {tuple(master[name].shape)}, model {tuple(parameter.shape)}")
        self._adam.state.clear()
        for name, parameter in self.master.items():
            parameter.copy_(master[name])
            prefix = f"{name}."
            moments = {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix) and key.count(".") == name.count(".") + 1
            }
            if moments:
                self._adam.state[parameter] = moments
        self.updates = updates
        self._copy_to_compute()
