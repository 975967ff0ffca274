"""The trainer's optimiser: fp32 gradient accumulation, clipping, learning rate, and AdamW in the chosen precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from conf.schema import Optimizer
from tasks.engines.optimizer_exchange import Alone, Exchange
from tasks.engines.optimizer_memory import optimizer_bytes
from tasks.engines.optimizer_rules import UpdateRule, new_rule, split_state
from tasks.engines.protocols import EngineError
from tasks.numerics.lr_schedule import LearningRate

_GB = 1e9


@dataclass(frozen=True)
class UpdateOutcome:
    """What one call of `step` did.

    `grad_norm`: global L2 norm before any clipping; `skipped`: True when that was not finite and nothing changed;
    `learning_rate` of the update; `clipped_weights`: how many weights `max_weight` held back.
    """

    grad_norm: float
    skipped: bool
    learning_rate: float
    clipped_weights: int = 0


class GradientAccumulator:
    """Sums the gradients of backward passes in fp32, by parameter name, and frees the parameters' own."""

    def __init__(self, parameters: dict[str, Parameter]) -> None:
        self._sums: dict[str, Tensor] = {}
        self._names = tuple(parameters)
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(self._accumulator(name))

    def _accumulator(self, name: str) -> Callable[[Tensor], None]:
        def accumulate(parameter: Tensor) -> None:
            assert parameter.grad is not None
            grad = parameter.grad.to(torch.float32)
            total = self._sums.get(name)
            self._sums[name] = grad if total is None else total.add_(grad)
            parameter.grad = None

        return accumulate

    def take(self) -> dict[str, Tensor]:
        """The sums so far, in the parameters' order, and start afresh; parameters without gradient are absent."""
        sums, self._sums = self._sums, {}
        return {name: sums[name] for name in self._names if name in sums}


def clip_gradients_(
    gradients: dict[str, Tensor],
    norm: float,
    max_value: float | None,
    max_norm: float | None,
    exchange: Exchange,
) -> None:
    """Clip fp32 gradients of global L2 norm `norm` in place: each element to +-max_value, then the norm to max_norm.

    The norm is that of the elements already clipped. The factor is torch's: min(1, max_norm / (norm + 1e-6)).
    """
    if max_value is not None:
        for gradient in gradients.values():
            gradient.clamp_(-max_value, max_value)
    if max_norm is not None:
        total = torch.tensor(norm if max_value is None else exchange.norm(gradients))
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient.device))


class PolicyOptimizer:
    """AdamW on the authoritative weights; see `build_optimizer`.

    Backward passes through `compute` accumulate in fp32 until `step`. With fp32 masters the compute copy is the
    masters rounded to its own dtype after every update; otherwise the compute parameters are the weights themselves.
    `updates` counts the updates that were applied. Of several ranks each has the authoritative weights that it owns,
    and all call every method but `weights`, `state_tensors` and `memory` together.
    """

    def __init__(
        self,
        compute: dict[str, Parameter],
        authoritative: dict[str, Parameter],
        settings: Optimizer,
        rate: LearningRate | None = None,
        exchange: Exchange | None = None,
        streams: Mapping[str, int] | None = None,
    ) -> None:
        self._compute = compute
        self._weights = authoritative
        self._settings = settings
        self._rate = LearningRate(settings.learning_rate, settings.warmup_steps) if rate is None else rate
        self._exchange: Exchange = Alone() if exchange is None else exchange
        self._rule: UpdateRule = new_rule(authoritative, settings, streams)
        self._gradients = GradientAccumulator(compute)
        self.updates = 0
        self._copy_to_compute()

    @torch.no_grad()
    def _copy_to_compute(self) -> None:
        for name, weight in self._weights.items():
            if self._compute[name] is not weight:
                self._compute[name].copy_(weight)
        self._exchange.publish(self._compute)

    def weights(self) -> dict[str, Tensor]:
        """The weights that this rank owns, by name, live: fp32 masters, or the model's own BF16 parameters."""
        return {name: weight.detach() for name, weight in self._weights.items()}

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self._rate.at(self.updates)

    def step(self) -> UpdateOutcome:
        """Clip and update with what accumulated; a non-finite gradient is dropped and reported, weights stay.

        Gradients are summed over ranks, and the outcome is the same on all of them.
        """
        settings, rate = self._settings, self.learning_rate
        gradients = self._exchange.sums(self._gradients.take())
        norm = self._exchange.norm(gradients)
        if not math.isfinite(norm):
            return UpdateOutcome(norm, True, rate)
        clip_gradients_(gradients, norm, settings.max_grad_value, settings.max_grad_norm, self._exchange)
        self._rule.update(gradients, rate, self.updates)
        clipped = 0 if settings.max_weight is None else self._exchange.total(self._rule.clip(settings.max_weight))
        self.updates += 1
        self._copy_to_compute()
        return UpdateOutcome(norm, False, rate, clipped)

    def tensors(self) -> Iterator[Tensor]:
        """All masters and moments, live; not the parameters that the model itself computes with."""
        yield from (weight for name, weight in self._weights.items() if weight is not self._compute[name])
        yield from self.live_state().values()

    def live_state(self) -> dict[str, Tensor]:
        """Moments, step counters and Kahan compensation by `<name>.<kind>`, not copies; empty before the first update.

        An update may replace or change them.
        """
        return {
            f"{name}.{kind}": tensor.detach()
            for name, tensors in self._rule.state().items()
            for kind, tensor in tensors.items()
        }

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of `live_state`."""
        return {name: tensor.clone().contiguous() for name, tensor in self.live_state().items()}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], state: dict[str, Tensor], updates: int) -> None:
        """Restore weights, `state_tensors` and the count of updates; accumulated gradients are dropped.

        Raises `EngineError`, and changes nothing, unless names, shapes and types match exactly.
        """
        check_weights(weights, self._weights)
        self._rule.load(split_state(self._rule, self._weights, state))
        for name, parameter in self._weights.items():
            parameter.copy_(weights[name])
        self.updates = updates
        self._gradients.take()
        self._copy_to_compute()

    def memory(self) -> dict[str, float]:
        """Gigabytes (1e9 bytes) of masters, state and fp32 gradient accumulators on this rank, as all are in mid-run.

        Masters and state are those of the parameters that it owns; gradients accumulate for all that it computes with.
        """
        owned = optimizer_bytes([weight.shape for weight in self._weights.values()], self._settings)
        computed = optimizer_bytes([parameter.shape for parameter in self._compute.values()], self._settings)
        return {
            "memory/master_weights_gb": owned.master / _GB,
            "memory/optimizer_state_gb": owned.state / _GB,
            "memory/gradients_gb": computed.gradients / _GB,
        }


def check_weights(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """`EngineError` unless a checkpoint's weights have the names, shapes and types of the optimiser's `wanted`."""
    if found.keys() != wanted.keys():
        raise EngineError(f"checkpoint and model differ in weights: {sorted(found.keys() ^ wanted.keys())[:3]}")
    for name, weight in wanted.items():
        if found[name].shape != weight.shape:
            raise EngineError(f"{name}: checkpoint {tuple(found[name].shape)}, model {tuple(weight.shape)}")
        if found[name].dtype != weight.dtype:
            raise EngineError(
                f"{name}: checkpoint {found[name].dtype}, optimiser {weight.dtype}: trainer.optimizer.weights differs"
            )


def build_optimizer(
    compute: dict[str, Parameter],
    load_master: Callable[[], dict[str, Tensor]],
    settings: Optimizer,
    rate: LearningRate | None = None,
    exchange: Exchange | None = None,
    streams: Mapping[str, int] | None = None,
) -> PolicyOptimizer:
    """The optimiser that `settings` name, for the model's parameters `compute` on this rank.

    `load_master` gives the fp32 weights by name, those that the rank owns among them, and is called for
    `weights: fp32_master` only. The other two update BF16 parameters in place, and raise `EngineError` for parameters
    of another dtype. `rate` None: a linear warm-up to the settings' learning rate, then constant. `exchange` None: a
    single rank. `streams`: see `optimizer_rules.RoundedAdamW`.
    """
    owned = [name for name in compute if exchange is None or exchange.owned(name)]
    if settings.weights == "fp32_master":
        start = load_master()
        masters = {name: Parameter(start[name].to(torch.float32).clone()) for name in owned}
        return PolicyOptimizer(compute, masters, settings, rate, exchange, streams)
    for name, parameter in compute.items():
        if parameter.dtype is not torch.bfloat16:
            raise EngineError(
                f"trainer.optimizer.weights = {settings.weights} needs BF16 weights, {name} is {parameter.dtype}"
            )
    return PolicyOptimizer(compute, {name: compute[name] for name in owned}, settings, rate, exchange, streams)
