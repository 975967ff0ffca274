"""How an optimiser update is applied: torch's AdamW in fp32, or AdamW with rounded weights or moments.

Libraries that were tried and not taken: torch-optimi 0.3's Kahan AdamW keeps both moments in the weights' dtype and
rounds them to nearest (with beta2 = 0.999 its second moment stood at 5.7 times its value, 800 updates after the
gradients had become ten times smaller), and has no fp32 or FP8 moments beside BF16 weights; torchao 0.18's FP8 AdamW
compiles a kernel for every shape (on CPU with a C++ compiler), knows no Kahan summation, and rounds the second moment
itself to nearest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from conf.schema import Optimizer
from tasks.engines.protocols import EngineError
from tasks.numerics.adamw import AdamWSettings, adamw_step, add_rounded, clip_weights_, kahan_add
from tasks.numerics.moments import Slot, moment_slots, pack_moments, unpack_moments

_STEP = "step"
_COMPENSATION = "compensation"

State = dict[str, dict[str, Tensor]]
"""State tensors by parameter, then by kind; no entry for a parameter that was never updated."""


class UpdateRule(Protocol):
    """Applies updates in place to the weights that it was made with."""

    def update(self, gradients: dict[str, Tensor], rate: float, number: int) -> None:
        """Apply finite fp32 gradients; a weight without one is left alone. `number` decides random rounding."""

    def clip(self, limit: float) -> dict[str, Tensor]:
        """Clamp all weights to [-limit, limit]; returns how many of each were outside (int64, no dimensions)."""

    def state(self) -> State:
        """The live state, not copies."""

    def slots(self, name: str) -> dict[str, Slot]:
        """Shapes and types of the state of an updated parameter."""

    def load(self, state: State) -> None:
        """Take over a state that fits `slots`."""


def new_rule(
    weights: dict[str, Parameter], settings: Optimizer, streams: Mapping[str, int] | None = None
) -> UpdateRule:
    """torch's AdamW where weights and moments are fp32, `RoundedAdamW` otherwise."""
    plain = settings.weights == "fp32_master" and settings.state == "fp32"
    return TorchAdamW(weights, settings) if plain else RoundedAdamW(weights, settings, streams)


def _copies(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies on `device`, but for the step counter: torch keeps it on the CPU, where reading it waits for nothing."""
    return {key: t.to("cpu" if key == _STEP else device, copy=True) for key, t in tensors.items()}


class TorchAdamW:
    """`torch.optim.AdamW` on fp32 weights."""

    def __init__(self, weights: dict[str, Parameter], settings: Optimizer) -> None:
        self._weights = weights
        # As a group, which may be empty: a rank may own no parameter.
        self._adam = torch.optim.AdamW(
            [{"params": list(weights.values())}],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def update(self, gradients: dict[str, Tensor], rate: float, number: int) -> None:
        for name, grad in gradients.items():
            self._weights[name].grad = grad
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def clip(self, limit: float) -> dict[str, Tensor]:
        return {name: clip_weights_(weight, limit) for name, weight in self._weights.items()}

    def state(self) -> State:
        return {n: dict(self._adam.state[w]) for n, w in self._weights.items() if w in self._adam.state}

    def slots(self, name: str) -> dict[str, Slot]:
        return moment_slots(self._weights[name].shape, "fp32") | {_STEP: Slot((), torch.float32)}

    def load(self, state: State) -> None:
        self._adam.state.clear()
        for name, tensors in state.items():
            weight = self._weights[name]
            self._adam.state[weight] = _copies(tensors, weight.device)


class RoundedAdamW:
    """AdamW computed in fp32 one parameter at a time; weights and moments are stored as the settings say.

    One at a time keeps the fp32 temporaries to those of the largest parameter. Random rounding is drawn from a
    generator seeded with the update's number, so that a resumed run repeats it bit for bit. `streams`: a number for
    each parameter, so that the rounding of one does not depend on which others are here; None: one stream for all.
    """

    def __init__(
        self, weights: dict[str, Parameter], settings: Optimizer, streams: Mapping[str, int] | None = None
    ) -> None:
        self._weights = weights
        self._streams = streams
        self._storage = settings.state
        self._kahan = settings.weights == "bf16_kahan"
        self._adamw = AdamWSettings(settings.beta1, settings.beta2, settings.eps, settings.weight_decay)
        self._state: State = {}

    @torch.no_grad()
    def update(self, gradients: dict[str, Tensor], rate: float, number: int) -> None:
        generators: dict[torch.device, torch.Generator] = {}
        for name, grad in gradients.items():
            if grad.device not in generators:
                generators[grad.device] = torch.Generator(grad.device).manual_seed(number)
            generator = generators[grad.device]
            if self._streams is not None:
                generator.manual_seed(self._streams[name] + number)
            weight = self._weights[name]
            stored = self._state.get(name) or self._fresh(name)
            done = int(stored[_STEP]) + 1
            step = adamw_step(weight, grad, *unpack_moments(stored), done, rate, self._adamw)
            kept = {_STEP: torch.tensor(float(done))}
            if self._kahan:
                new, kept[_COMPENSATION] = kahan_add(weight, stored[_COMPENSATION], step.update)
            else:
                new = add_rounded(weight, step.update)
            weight.copy_(new)
            moments = pack_moments(step.first, step.second, self._storage, generator)
            self._state[name] = moments | kept

    def _fresh(self, name: str) -> dict[str, Tensor]:
        device = self._weights[name].device
        return {
            key: torch.zeros(slot.shape, dtype=slot.dtype, device="cpu" if key == _STEP else device)
            for key, slot in self.slots(name).items()
        }

    def clip(self, limit: float) -> dict[str, Tensor]:
        return {
            name: clip_weights_(weight, limit, self._state.get(name, {}).get(_COMPENSATION))
            for name, weight in self._weights.items()
        }

    def state(self) -> State:
        return {name: self._state[name] for name in self._weights if name in self._state}

    def slots(self, name: str) -> dict[str, Slot]:
        weight = self._weights[name]
        found = moment_slots(weight.shape, self._storage) | {_STEP: Slot((), torch.float32)}
        return found | {_COMPENSATION: Slot(tuple(weight.shape), weight.dtype)} if self._kahan else found

    def load(self, state: State) -> None:
        self._state = {name: _copies(tensors, self._weights[name].device) for name, tensors in state.items()}


def split_state(rule: UpdateRule, weights: dict[str, Parameter], tensors: dict[str, Tensor]) -> State:
    """A checkpoint's `<parameter>.<kind>` tensors by parameter; `EngineError` where they are not this rule's."""
    state: State = {}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition(".")
        if name not in weights:
            raise EngineError(f"{full}: optimiser state of a weight that the model lacks")
        state.setdefault(name, {})[key] = tensor
    for name, found in state.items():
        wanted = rule.slots(name)
        if found.keys() != wanted.keys():
            raise EngineError(
                f"{name}: the checkpoint's optimiser state is {sorted(found)}, this optimiser's {sorted(wanted)}: "
                "trainer.optimizer.weights or .state differ"
            )
        for key, slot in wanted.items():
            if Slot(tuple(found[key].shape), found[key].dtype) != slot:
                raise EngineError(
                    f"{name}.{key}: checkpoint {found[key].dtype} {tuple(found[key].shape)}, "
                    f"this optimiser {slot.dtype} {slot.shape}"
                )
    return state
