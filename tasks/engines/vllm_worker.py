"""The worker's side of the vLLM engine: reads back what the live model really holds.

What is proven for each kind of tensor:

- FP8 codes, block scales, norms, embedding, biases, experts on a GPU: fingerprints of the very tensors that the kernels
  read. Experts in a form that is not known are a problem.
- BF16 experts that vLLM's CPU build packs for its kernel: the same, brought back into the order that they came in.
- BF16 matrices that vLLM keeps as they are (GPU): the same.
- BF16 matrices that vLLM's CPU build packs for its kernel and drops: the layer multiplies the identity, which gives
  every weight back exactly, up to the sign of zeros and subnormals. If those values are the ones that arrived in the
  last sync, the fingerprint of what arrived is reported; if not, that of the values, and a problem.
- The packed copy from which lm_head multiplies: the same, held against the table itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tasks.engines import vllm_cpu, vllm_private, vllm_transfer
from tasks.engines.precision_plan import scale_name
from tasks.engines.vllm_private import LiveAttention, LiveExperts, LiveLinear
from tasks.engines.vllm_transfer import Received, plain_values
from tasks.numerics.fingerprint import fingerprint, fingerprints

# Worker processes import this module by its name, and nothing else of ours.
vllm_cpu.register()
vllm_transfer.register()


@dataclass
class ReadBack:
    """`sizes` in bytes of each held tensor; `linears` the quantised ones; `blocks` (rows, columns, group, po2)."""

    fingerprints: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    linears: list[str] = field(default_factory=list)
    linear_dtypes: list[str] = field(default_factory=list)
    blocks: list[tuple[int, int, int, bool]] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    attentions: list[LiveAttention] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    live: dict[str, Tensor] = field(default_factory=dict)
    """Tensors whose fingerprints are still to be taken, all at once: each by itself would wait for the device."""

    def hold(self, name: str, tensor: Tensor, known: int | None = None) -> None:
        if known is None:
            self.live[name] = tensor
        else:
            self.fingerprints[name] = known
        self.sizes[name] = tensor.numel() * tensor.element_size()

    def take_fingerprints(self) -> None:
        self.fingerprints |= fingerprints(self.live)
        self.live = {}


def _identity(width: int, like: torch.device) -> Tensor:
    return torch.eye(width, dtype=torch.bfloat16, device=like)


def _parts(linear: LiveLinear, whole: Tensor, block: int = 1) -> Iterator[tuple[str, Tensor]]:
    """The rows of each part; with `block`, rows of its block scales."""
    start = 0
    for name, rows in linear.parts:
        count = -(-rows // block)
        yield name, whole[start : start + count]
        start += count


class ReadBackExtension:
    """Methods that vLLM adds to its worker."""

    model_runner: Any
    weight_transfer_engine: Any
    model_config: Any
    device: torch.device

    @torch.no_grad()
    def fp8_grpo_randomize(self) -> None:
        """Fill the weights with random numbers of a trained model's size, for a benchmark; never before a rollout.

        Codes are normal with deviation 40 under block scales that make 0.02 of them; norms are 1. Layers whose
        weights are packed away (CPU) keep what they have.
        """
        generator = torch.Generator(device=self.device).manual_seed(0)
        for name, parameter in self.model_runner.get_model().named_parameters():
            if parameter.dtype == torch.float8_e4m3fn:
                codes = torch.empty(parameter.shape, dtype=torch.bfloat16, device=self.device)
                parameter.copy_(codes.normal_(0, 40, generator=generator).clamp_(-448, 448).to(parameter.dtype))
            elif "scale" in name:
                parameter.fill_(0.02 / 40 if parameter.numel() > 1 else 1.0)
            elif "norm" in name:
                parameter.fill_(1.0)
            elif parameter.ndim >= 2:
                parameter.normal_(0, 0.02, generator=generator)
        for scale in vllm_private.scale_tensors(self.model_runner.get_model()):
            scale.fill_(1.0)

    def fp8_grpo_taken_bytes(self) -> int:
        """Device memory of weights and KV cache, each storage once."""
        tensors = [*self.model_runner.get_model().parameters(), *vllm_private.caches(self.model_runner)]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(sizes.values())

    @torch.no_grad()
    def fp8_grpo_read_back(self) -> ReadBack:
        model = self.model_runner.get_model()
        received: dict[str, Received] = getattr(self.weight_transfer_engine, "received", {})
        read = ReadBack()
        for linear in vllm_private.linears(model):
            if linear.scales is not None:
                self._quantized(read, linear, linear.scales)
            else:
                self._plain(read, linear, received)
            if linear.bias is not None:
                for name, bias in _parts(linear, linear.bias):
                    read.hold(f"{name}.bias", bias)
        for layer in vllm_private.experts(model):
            self._experts(read, layer)
        self._tables(read, model)
        for name, parameter in vllm_private.other_parameters(model):
            read.hold(name, parameter)
        read.take_fingerprints()
        read.attentions = list(vllm_private.attentions(model))
        return read

    def _tables(self, read: ReadBack, model: torch.nn.Module) -> None:
        tied, held = vllm_private.tied_head(model), {}
        for table in vllm_private.tables(model):
            name, held[table.name] = f"{table.name}.weight", table.weight
            if table.module is not tied:
                read.hold(name, table.weight)
            elif not torch.equal(table.weight, held["model.embed_tokens"]):
                read.problems.append(f"{name}: is not the embedding, to which the model ties it")
            if table.packed:
                live = table.multiply(_identity(table.weight.shape[1], table.weight.device)).t()
                if not torch.equal(live[: table.weight.shape[0]], table.weight):
                    read.problems.append(f"{name}: logits do not come from the weights that are held")

    def _quantized(self, read: ReadBack, linear: LiveLinear, scales: Tensor) -> None:
        rows, columns = linear.block
        read.blocks.append((rows, columns, linear.activation_group, linear.power_of_two))
        read.kernels.append(linear.kernel)
        for name, codes in _parts(linear, linear.weight):
            read.hold(f"{name}.weight", codes)
            read.linears.append(name)
            read.linear_dtypes.append(str(codes.dtype).removeprefix("torch."))
        for name, part in _parts(linear, scales, rows):
            read.hold(scale_name(f"{name}.weight"), part)

    def _experts(self, read: ReadBack, layer: LiveExperts) -> None:
        if layer.problem is not None:
            read.problems.append(layer.problem)
            return
        read.kernels.append(layer.kernel)
        if layer.block is not None:
            read.blocks.append((*layer.block, layer.activation_group, layer.power_of_two))
        for name, weight, scales in layer.matrices():
            read.hold(f"{name}.weight", weight)
            if scales is not None:
                read.hold(scale_name(f"{name}.weight"), scales)
                read.linears.append(name)
                read.linear_dtypes.append(str(weight.dtype).removeprefix("torch."))

    def _plain(self, read: ReadBack, linear: LiveLinear, received: dict[str, Received]) -> None:
        if linear.weight.numel():
            for name, part in _parts(linear, linear.weight):
                read.hold(f"{name}.weight", part)
            return
        width = int(linear.module.input_size)
        live = linear.multiply(_identity(width, self.device)).t()
        for part_name, part in _parts(linear, live):
            name, values = f"{part_name}.weight", fingerprint(plain_values(part))
            sent = received.get(name)
            if sent is not None and sent.values == values:
                read.hold(name, part, sent.exact)
            else:
                read.hold(name, part, values)
                if sent is not None:
                    read.problems.append(f"{name}: the product does not use the weights that arrived")
