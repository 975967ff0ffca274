"""Linear modules of the PyTorch engines: FP8 for inference (codes at rest) and for training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from tasks.engines.protocols import EngineError
from tasks.numerics.delayed_scaling import DelayedScales, empty_history, push
from tasks.numerics.fp8 import Quantized, dequantize
from tasks.numerics.fp8_linear import BlockSpec, forward_product, fp8_linear

_HISTORY, _PENDING = "amax_history", "amax_pending"


class Fp8InferenceLinear(nn.Module):
    """Holds E4M3 codes and block scales; activations are quantised at each call.

    The fp32 decoding is kept between calls: CPU has no FP8 product, and decoding for every token would
    cost more than the product. It is derived from the codes at each `install` and nowhere else.
    `EngineError` for delayed scaling: the history of activations belongs to the engine that trains.
    """

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, spec: BlockSpec) -> None:
        super().__init__()
        if spec.history is not None:
            raise EngineError("delayed scaling has no histories in an engine that never trains")
        fmt = spec.weight_format
        self.spec = spec
        self.register_buffer("weight", torch.zeros(shape, dtype=torch.float8_e4m3fn))
        self.register_buffer("weight_scale_inv", torch.zeros(fmt.scale_shape(shape), dtype=fmt.scale_dtype))
        self.register_buffer("bias", bias)
        self._decoded = torch.zeros(shape, dtype=torch.float32)

    def _decode(self) -> Tensor:
        weight, scales = self.get_buffer("weight"), self.get_buffer("weight_scale_inv")
        return dequantize(Quantized(weight, scales, self.spec.weight_format.block_of(weight.shape)))

    def install(self) -> None:
        """Decode the codes and scales that were just written."""
        self._decoded = self._decode()

    def is_consistent(self) -> bool:
        """Whether the product would use exactly the codes and scales that are held."""
        return torch.equal(self._decoded, self._decode())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y = forward_product(flat, self._decoded, self.spec).reshape(*x.shape[:-1], -1)
        bias = self._buffers["bias"]
        return y if bias is None else y + bias


class Fp8TrainingLinear(nn.Linear):
    """An `nn.Linear` whose three products run on quantised operands. Parameters keep their names.

    Under delayed scaling it holds amax histories; forward and backward passes with gradients enabled add to
    the update's amax, and `advance_delayed` enters it after the update.
    """

    def __init__(self, source: nn.Linear, spec: BlockSpec) -> None:
        super().__init__(source.in_features, source.out_features, source.bias is not None, device="meta")
        self.spec = spec
        self.weight = source.weight
        self.bias = source.bias
        if spec.history is not None:
            history = empty_history(spec.history).to(source.weight.device)
            self.register_buffer(_HISTORY, history, persistent=False)
            self.register_buffer(_PENDING, torch.zeros_like(history[0]), persistent=False)

    def delayed_scales(self) -> DelayedScales | None:
        """The layer's amax histories; None unless scaling is delayed."""
        if self.spec.history is None:
            return None
        return DelayedScales(self.get_buffer(_HISTORY), self.get_buffer(_PENDING), self.spec.history)

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias, self.spec, self.delayed_scales())


def _delayed(model: nn.Module) -> Iterator[tuple[str, DelayedScales]]:
    for name, module in model.named_modules():
        scales = module.delayed_scales() if isinstance(module, Fp8TrainingLinear) else None
        if scales is not None:
            yield name, scales


def advance_delayed(model: nn.Module) -> None:
    """End an optimiser update: enter its amax values into the histories. Nothing to do without delayed scaling."""
    for _, scales in _delayed(model):
        scales.history.copy_(push(scales.history, scales.pending))
        scales.pending.zero_()


def share_delayed(source: nn.Module, target: nn.Module) -> None:
    """Let the layers of `target` quantise with the histories of `source`'s layers of the same names."""
    for name, scales in _delayed(source):
        layer = target.get_submodule(name)
        for part, tensor in _parts(scales):
            layer.register_buffer(part, tensor, persistent=False)


def delayed_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all amax histories, fp32, as `<layer>.amax_history` and `<layer>.amax_pending`; maybe empty."""
    state: dict[str, Tensor] = {}
    for name, scales in _delayed(model):
        state[f"{name}.{_HISTORY}"] = scales.history.clone()
        state[f"{name}.{_PENDING}"] = scales.pending.clone()
    return state


def load_delayed_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `delayed_state` gave, bitwise; `EngineError` where names or shapes differ, nothing changed then."""
    held = {f"{name}.{part}": tensor for name, s in _delayed(model) for part, tensor in _parts(s)}
    missing, extra = sorted(held.keys() - tensors.keys()), sorted(tensors.keys() - held.keys())
    if missing or extra:
        raise EngineError(f"amax histories do not fit the recipe: missing {missing[:3]}, extra {extra[:3]}")
    for name, target in held.items():
        if tensors[name].shape != target.shape:
            raise EngineError(f"{name}: saved {tuple(tensors[name].shape)}, the recipe has {tuple(target.shape)}")
    for name, target in held.items():
        target.copy_(tensors[name])


def _parts(scales: DelayedScales) -> tuple[tuple[str, Tensor], ...]:
    return ((_HISTORY, scales.history), (_PENDING, scales.pending))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def use_fp8_inference(model: nn.Module, names: tuple[str, ...], spec: BlockSpec) -> None:
    """Replace the named linear layers by `Fp8InferenceLinear`, empty until a sync fills them."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        _replace(model, name, Fp8InferenceLinear((linear.out_features, linear.in_features), bias, spec))


def use_fp8_training(model: nn.Module, names: tuple[str, ...], spec: BlockSpec) -> None:
    """Replace the named linear layers by `Fp8TrainingLinear` around the same parameters."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        _replace(model, name, Fp8TrainingLinear(linear, spec))
