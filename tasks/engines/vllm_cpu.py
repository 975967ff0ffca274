"""What vLLM lacks on CPU, through its own extension points: block-FP8 products, FP8 queries, a cache of nearest codes.

vLLM ships block-FP8 linears and query quantisation for GPUs; its CPU build has them for machines with AMX, or not
at all. Here they run in plain PyTorch, so that an FP8 recipe is the same computation on a CPU: slower, never
another rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tasks.engines.vllm_private import offer_cpu_block_kernel

OPTIONS = "fp8_grpo"
"""Key of this module's options in vLLM's `additional_config`: `power_of_two` and `quantize_query`."""


def _option(name: str) -> bool:
    config: Any = get_current_vllm_config().additional_config
    return bool(config.get(OPTIONS, {}).get(name, False))


class BlockProduct(Fp8BlockScaledMMLinearKernel):
    """E4M3 codes of both operands are decoded to fp32, where they are exact, and multiplied there."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if _option("power_of_two"):
            group = config.activation_quant_key.scale.group_shape
            self.quant_fp8 = QuantFP8(static=False, group_shape=group, use_ue8m0=True)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if current_platform.is_cpu() else (False, "meant for CPU")

    def get_output_padding(self) -> int | None:
        return None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the product reads codes and scales as they were sent."""

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        rows, columns = self.weight_group_shape.row, self.weight_group_shape.col
        out, width = B.shape
        spread = Bs.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :width]
        x = A.to(torch.float32) * As.to(torch.float32).repeat_interleave(columns, 1)[:, :width]
        return (x @ (B.to(torch.float32) * spread).t()).to(self.config.out_dtype)


class _UnitScales:
    """In place of an attention layer whose keys and values are codes already."""

    _k_scale_float = 1.0
    _v_scale_float = 1.0


def _codes(x: Tensor, scale: float) -> Tensor:
    """The nearest E4M3 values before their scale, saturating, in the dtype of `x`, where they are exact."""
    return (x.to(torch.float32) / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype)


class RoundingImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention with an FP8 cache of nearest codes, and with queries as codes where the recipe asks for it.

    The kernel of vLLM's CPU build that stores keys and values rounds towards zero, which doubles the error and
    shrinks everything it touches. Codes given to it under a scale of 1 stay as they are.
    """

    scale: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._softmax_scale: float = self.scale
        # With this vLLM's attention layer quantises the query itself, as before its FP8 kernels on GPUs.
        self.supports_quant_query_input = self.is_fp8_kv_cache and _option("quantize_query")

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.is_fp8_kv_cache:
            key, value = _codes(key, layer._k_scale_float), _codes(value, layer._v_scale_float)
            layer = _UnitScales
        super().do_kv_cache_update(layer, key, value, *args, **kwargs)

    def forward(self, layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.dtype == torch.float8_e4m3fn:
            # Codes are exact in BF16; their scale joins that of the softmax.
            query, self.scale = query.to(torch.bfloat16), self._softmax_scale * layer._q_scale_float
        else:
            self.scale = self._softmax_scale
        return super().forward(layer, query, *args, **kwargs)


class RoundingBackend(CPUAttentionBackend):
    """vLLM's CPU backend with `RoundingImpl`."""

    @staticmethod
    def get_impl_cls() -> type[RoundingImpl]:
        return RoundingImpl


def register() -> None:
    """Make both known to vLLM in this process, before an engine is built; no effect off CPU. Idempotent."""
    if current_platform.is_cpu():
        offer_cpu_block_kernel(BlockProduct)
        name = f"{RoundingBackend.__module__}.{RoundingBackend.__qualname__}"
        register_backend(AttentionBackendEnum.CPU_ATTN, name)
