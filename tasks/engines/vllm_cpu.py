"""What vLLM lacks on CPU, through its own extension points: block-FP8 products, FP8 queries, a cache of nearest codes.

vLLM ships block-FP8 linears and query quantisation for GPUs; its CPU build has them for machines with AMX, or not
at all, and its block-FP8 experts leave activations in BF16. Here they run in plain PyTorch, so that an FP8 recipe is
the same computation on a CPU: slower, never another rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tasks.engines.vllm_private import offer_cpu_block_kernel, offer_cpu_experts

OPTIONS = "fp8_grpo"
"""Key of this module's options in vLLM's `additional_config`: `power_of_two` and `quantize_query`."""


def _option(name: str) -> bool:
    config: Any = get_current_vllm_config().additional_config
    return bool(config.get(OPTIONS, {}).get(name, False))


def _decoded(codes: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Codes `[rows, columns]` times the scale of their block, fp32."""
    spread = scales.to(torch.float32).repeat_interleave(rows, 0)[: codes.shape[0]]
    return codes.to(torch.float32) * spread.repeat_interleave(columns, 1)[:, : codes.shape[1]]


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
        product = _decoded(A, As, 1, columns) @ _decoded(B, Bs, rows, columns).t()
        return product.to(self.config.out_dtype)


class BlockExperts(Fp8MoEMethod):
    """The experts' products as `BlockProduct` computes one; results are rounded to BF16 where those of a GPU are.

    The method of vLLM's CPU build multiplies by activations in BF16, which is another recipe.
    """

    def __init__(self, quant_config: Any, layer: RoutedExperts) -> None:
        super().__init__(quant_config, layer)
        self._rows, self._columns = (int(size) for size in self.weight_block_size)
        # What multiplies is this class, not the one that vLLM has chosen.
        self.experts_cls = type(self)
        group = GroupShape(1, self._columns)
        self.quant_fp8 = QuantFP8(static=False, group_shape=group, use_ue8m0=_option("power_of_two"))

    @property
    def is_monolithic(self) -> bool:
        return True

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Nothing: the products read codes and scales as they were sent."""

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        # Not at the top: it registers operators for CPU.
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        shares, chosen = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            scoring_func=layer.scoring_func,
        )
        inputs, out = self._rounded(x), torch.zeros(x.shape, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            both = inputs[tokens] @ self._weight(layer, "w13_weight", expert).t()
            inner = self._rounded(SiluAndMul.forward_native(both.to(x.dtype)))
            result = inner @ self._weight(layer, "w2_weight", expert).t() * shares[tokens, places, None]
            out.index_add_(0, tokens, result.to(x.dtype).to(torch.float32))
        return out.to(x.dtype)

    def _rounded(self, x: Tensor) -> Tensor:
        codes, scales = self.quant_fp8(x.contiguous())
        return _decoded(codes, scales, 1, self._columns)

    def _weight(self, layer: Any, name: str, expert: int) -> Tensor:
        scales = getattr(layer, f"{name}_scale_inv")[expert]
        return _decoded(getattr(layer, name)[expert], scales, self._rows, self._columns)


class Experts(RoutedExperts):
    """vLLM's experts with `BlockExperts` where it would take its own block-FP8 method."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        method = super()._get_quant_method(prefix, quant_config, moe_config)
        return BlockExperts(quant_config, self) if type(method) is Fp8MoEMethod and method.block_quant else method


class _UnitScales:
    """In place of an attention layer whose keys and values are codes already."""

    _k_scale_float = 1.0
    _v_scale_float = 1.0


def _codes(x: Tensor, scale: float) -> Tensor:
    """The nearest E4M3 values before their scale, saturating, in the dtype of `x`, where they are exact."""
    return (x.to(torch.float32) / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype)


def _kernel(chosen: str, fp8_cache: bool) -> str:
    """vLLM's choice, but for an FP8 cache where there is AMX: that kernel gives NaN for an outlier channel of K (2^18
    times the others), where the vector kernel is exact."""
    return "vec" if fp8_cache and chosen == "amx" else chosen


class RoundingImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention with an FP8 cache of nearest codes, and with queries as codes where the recipe asks for it.

    The kernel of vLLM's CPU build that stores keys and values rounds towards zero, which doubles the error and
    shrinks everything it touches. Codes given to it under a scale of 1 stay as they are.
    """

    scale: float
    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.isa = _kernel(self.isa, self.is_fp8_kv_cache)
        self._softmax_scale: float = self.scale
        # With this vLLM's attention layer quantises the query itself, as before its FP8 kernels on GPUs.
        self.supports_quant_query_input = self.is_fp8_kv_cache and _option("quantize_query")

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.is_fp8_kv_cache:
            key, value = _codes(key, layer._k_scale_float), _codes(value, layer._v_scale_float)
            layer = _UnitScales
        super().do_kv_cache_update(layer, key, value, *args, **kwargs)

    def forward(self, layer: Any, query: Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.is_fp8_kv_cache:
            # They are in the cache; vLLM 0.26 would store them once more here, rounded towards zero.
            key = value = None
        if query.dtype == torch.float8_e4m3fn:
            # Codes are exact in BF16; their scale joins that of the softmax.
            query, self.scale = query.to(torch.bfloat16), self._softmax_scale * layer._q_scale_float
        else:
            self.scale = self._softmax_scale
        return super().forward(layer, query, key, value, *args, **kwargs)


class RoundingMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's plan of a batch, for the kernel that `RoundingImpl` calls."""

    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.isa = _kernel(self.isa, is_quantized_kv_cache(self.vllm_config.cache_config.cache_dtype))


class RoundingBackend(CPUAttentionBackend):
    """vLLM's CPU backend with `RoundingImpl`."""

    @staticmethod
    def get_builder_cls() -> type[RoundingMetadataBuilder]:
        return RoundingMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[RoundingImpl]:
        return RoundingImpl


def register() -> None:
    """Make all of it known to vLLM in this process, before an engine is built; no effect off CPU. Idempotent."""
    if current_platform.is_cpu():
        offer_cpu_block_kernel(BlockProduct)
        offer_cpu_experts(Experts)
        name = f"{RoundingBackend.__module__}.{RoundingBackend.__qualname__}"
        register_backend(AttentionBackendEnum.CPU_ATTN, name)
