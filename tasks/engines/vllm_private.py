"""Everything here reads or extends what vLLM does not promise to keep; guarded by version.

Reads: where layers keep weights, scales and cache. Extensions, made before an engine is built: the block-FP8
kernel for CPU (`tasks.engines.vllm_cpu`) joins vLLM's list of candidates, which has a public registration for
other kinds of kernels only. Nothing of vLLM is replaced.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import vllm
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import PlatformEnum

from tasks.engines.protocols import EngineError

SUPPORTED = ("0.26", "0.27")
"""Release series of vLLM against which this module was checked."""


def check_version() -> None:
    """`EngineError` for a vLLM whose private parts nobody has looked at."""
    series = ".".join(vllm.__version__.split(".")[:2])
    if series not in SUPPORTED:
        raise EngineError(f"vLLM {vllm.__version__} is installed; this engine was checked with {', '.join(SUPPORTED)}")


def offer_cpu_block_kernel(kernel: type) -> None:
    """Make a block-FP8 kernel the last candidate on CPU. Idempotent."""
    candidates: list[type] = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if kernel not in candidates:
        candidates.append(kernel)


def shut_down(llm: Any) -> None:
    """Free weights and cache of an engine in this process.

    vLLM's own shutdown also destroys the process's parallel groups, and with them every other engine here: a new one
    may have been built before the old one is collected. Python's collector alone frees nothing: vLLM freezes the heap.
    """
    llm.llm_engine.engine_core.engine_core.model_executor.shutdown()
    gc.unfreeze()


def cache_tokens(llm: Any) -> int:
    """Tokens that the KV cache has room for."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks) * int(cache.block_size)


def caches(model_runner: Any) -> Iterator[Tensor]:
    """The tensors of a worker's KV cache."""
    for cache in model_runner.kv_caches:
        yield from cache if isinstance(cache, list) else [cache]


@dataclass(frozen=True)
class LiveLinear:
    """One linear layer of vLLM, which holds one or several of the model's side by side.

    `parts`: (Hugging Face module name, its rows). `weight` as stored, empty where only a packed form is left.
    """

    module: Any
    parts: tuple[tuple[str, int], ...]
    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.parts)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        rows, columns = self.module.weight_block_size
        return int(rows), int(columns)

    @property
    def activation_group(self) -> int:
        return int(self.module.quant_method.fp8_linear.quant_fp8.group_shape.col)

    @property
    def power_of_two(self) -> bool:
        """Whether activations get power-of-two scales."""
        return bool(self.module.quant_method.fp8_linear.quant_fp8.use_ue8m0)

    @property
    def kernel(self) -> str:
        return type(self.module.quant_method.fp8_linear).__name__

    def multiply(self, x: Tensor) -> Tensor:
        """The layer's own product `[tokens, in]` to `[tokens, out]`, without its bias."""
        out: Tensor = self.module.quant_method.apply(self.module, x, None)
        return out


def linears(model: nn.Module) -> Iterator[LiveLinear]:
    """All linear layers in the model's order, fused ones with the names of their parts."""
    fused = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase):
            continue
        prefix, _, kind = name.rpartition(".")
        names = [f"{prefix}.{part}" for part in fused[kind]] if kind in fused else [name]
        # Parallel layers say the widths of their parts; a plain one has a single part.
        widths = getattr(module, "output_partition_sizes", None) or [module.output_size]
        parts = tuple(zip(names, map(int, widths), strict=True))
        scales, bias = getattr(module, "weight_scale_inv", None), getattr(module, "bias", None)
        weight = module.weight
        assert isinstance(weight, Tensor)
        yield LiveLinear(module, parts, weight.detach(), scales, bias)


@dataclass(frozen=True)
class LiveTable:
    """An embedding or lm_head: its rows, and its product where it has one of its own packed weights."""

    name: str
    module: Any
    weight: Tensor

    @property
    def packed(self) -> bool:
        """Whether logits come from a packed copy and not from `weight`."""
        return hasattr(self.module, "cpu_linear")

    def multiply(self, x: Tensor) -> Tensor:
        out: Tensor = self.module.quant_method.apply(self.module, x, None)
        return out


def tables(model: nn.Module) -> Iterator[LiveTable]:
    """Embedding and, unless they are one, lm_head; rows beyond the vocabulary (padding) left out."""
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            weight = module.weight
            assert isinstance(weight, Tensor)
            yield LiveTable(name, module, weight.detach()[: int(module.org_vocab_size)])


def other_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters outside linear layers, tables and attention, such as norms."""
    known = (LinearBase, VocabParallelEmbedding, Attention)
    covered = {id(p) for m in model.modules() if isinstance(m, known) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered:
            yield name, parameter.detach()


@dataclass(frozen=True)
class LiveAttention:
    """Scales of one attention layer as each reader of vLLM finds them: on the device, and in its host mirrors."""

    layer: int
    device: dict[str, float]
    mirrors: dict[str, tuple[float, ...]]
    cache_dtype: str
    query_dtype: str
    backend: str


_FP8_NAMES = ("fp8", "fp8_e4m3")


def attentions(model: nn.Module) -> Iterator[LiveAttention]:
    """All attention layers in the model's order."""
    for name, module in model.named_modules():
        if not isinstance(module, Attention):
            continue
        numbers = [int(word) for word in name.split(".") if word.isdecimal()]
        device = {part: float(getattr(module, f"_{part}_scale")) for part in ("q", "k", "v")}
        mirrors = {
            part: tuple(float(getattr(module, f"_{part}_scale_{form}")) for form in forms)
            for part, forms in (("q", ("float",)), ("k", ("float", "cpu")), ("v", ("float", "cpu")))
        }
        cache = module.kv_cache[0] if isinstance(module.kv_cache, list) else module.kv_cache
        fp8 = module.kv_cache_dtype in _FP8_NAMES and cache.element_size() == 1
        query = module.query_quant is not None and module.impl.supports_quant_query_input
        yield LiveAttention(
            layer=numbers[0],
            device=device,
            mirrors=mirrors,
            cache_dtype="float8_e4m3fn" if fp8 else str(cache.dtype).removeprefix("torch."),
            query_dtype="float8_e4m3fn" if query else str(module.dtype).removeprefix("torch."),
            backend=type(module.impl).__name__,
        )


def scale_tensors(model: nn.Module) -> Iterator[Tensor]:
    """The Q, K and V scales of all attention layers on the device, live."""
    for module in model.modules():
        if isinstance(module, Attention):
            for part in ("q", "k", "v"):
                yield getattr(module, f"_{part}_scale")
