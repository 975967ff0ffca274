"""Linear modules of the PyTorch engines: FP8 for inference (codes at rest) and for training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tasks.numerics.fp8 import Quantized, dequantize
from tasks.numerics.fp8_linear import BlockSpec, forward_product, fp8_linear


class Fp8InferenceLinear(nn.Module):
    """Holds E4M3 codes and fp32 block scales; activations are quantised at each call.

    The fp32 decoding is kept between calls: CPU has no FP8 product, and decoding for every token would
    cost more than the product. It is derived from the codes at each `install` and nowhere else.
    """

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, spec: BlockSpec) -> None:
        super().__init__()
        rows, columns = shape
        blocks = (-(-rows // spec.weight[0]), -(-columns // spec.weight[1]))
        self.spec = spec
        self.register_buffer("weight", torch.zeros(shape, dtype=torch.float8_e4m3fn))
        self.register_buffer("weight_scale_inv", torch.zeros(blocks, dtype=torch.float32))
        self.register_buffer("bias", bias)
        self._decoded = torch.zeros(shape, dtype=torch.float32)

    def install(self) -> None:
        """Decode the codes and scales that were just written."""
        weight, scales = self.get_buffer("weight"), self.get_buffer("weight_scale_inv")
        self._decoded = dequantize(Quantized(weight, scales, self.spec.weight))

    def is_consistent(self) -> bool:
        """Whether the product would use exactly the codes and scales that are held."""
        weight, scales = self.get_buffer("weight"), self.get_buffer("weight_scale_inv")
        return torch.equal(self._decoded, dequantize(Quantized(weight, scales, self.spec.weight)))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y = forward_product(flat, self._decoded, self.spec).reshape(*x.shape[:-1], -1)
        bias = self._buffers["bias"]
        return y if bias is None else y + bias


class Fp8TrainingLinear(nn.Linear):
    """An `nn.Linear` whose three products run on quantised operands. Parameters keep their names."""

    def __init__(self, source: nn.Linear, spec: BlockSpec) -> None:
        super().__init__(source.in_features, source.out_features, source.bias is not None, device="meta")
        self.spec = spec
        self.weight = source.weight
        self.bias = source.bias

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias, self.spec)


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
