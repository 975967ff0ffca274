"""Everything here reads or extends what vLLM does not promise to keep; guarded by version.

Reads: where layers keep weights, scales and cache. Extensions, made before an engine is built: the block-FP8
kernel for CPU (`tasks.engines.vllm_cpu`) joins vLLM's list of candidates, which has a public registration for
other kinds of kernels only; its experts are registered as any out-of-tree layer. Nothing of vLLM is replaced.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed import parallel_state
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import PlatformEnum
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

from tasks.engines.protocols import EngineError

LIVE_SCALES = ("FlashAttentionImpl", "TritonAttentionImpl", "RoundingImpl")
"""Attention of a quantised KV cache that reads its scales on the device at every step.

FlashInfer's keeps host numbers of its first forward pass, and captured graphs those of the capture, when all are 1: the
scales of a sync never reach its decode steps.
"""

SUPPORTED = ("0.26", "0.27")
"""Release series of vLLM against which this module was checked."""


def check_version() -> None:
    """`EngineError` for a vLLM whose private parts nobody has looked at."""
    series = ".".join(vllm.__version__.split(".")[:2])
    if series not in SUPPORTED:
        raise EngineError(f"vLLM {vllm.__version__} is installed; this engine was checked with {', '.join(SUPPORTED)}")


def check_process(mixture: bool) -> None:
    """`EngineError` for a mixture of experts in a process whose groups vLLM made for a dense model, and keeps."""
    if mixture and parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        raise EngineError(
            "this process has run a dense model in vLLM, whose process groups have no place for experts; "
            "allowed: a mixture of experts in a process of its own"
        )


def offer_cpu_block_kernel(kernel: type) -> None:
    """Make a block-FP8 kernel the first candidate on CPU. Idempotent.

    vLLM's own, which runs on machines with AMX alone, multiplies by activations in BF16 and keeps its weights in an
    order that no read-back knows.
    """
    candidates: list[type] = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if kernel not in candidates:
        candidates.insert(0, kernel)


def offer_cpu_experts(layer: type) -> None:
    """Make a subclass of vLLM's experts the one that models are built with. Idempotent."""
    if op_registry_oot.get("RoutedExperts") is not layer:
        RoutedExperts.register_oot(layer, name="RoutedExperts")


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


PLAIN_EXPERTS = ("TritonExperts", "BatchedTritonExperts", "BlockExperts")
"""Kernels that read experts as checkpoints have them: gate above up, rows and columns in order."""


@dataclass(frozen=True)
class LiveExperts:
    """The experts of one layer, side by side in `w13_weight` (gate above up) and `w2_weight` (down).

    `name` is what the checkpoint names of all of them start with.
    """

    name: str
    module: Any

    @property
    def kernel(self) -> str:
        """Class of what multiplies."""
        method = self.module.quant_method
        kernel = getattr(method, "cpu_fused_moe", None)
        chosen = getattr(method, "experts_cls", None) if kernel is None else type(kernel)
        return (chosen or type(method)).__name__

    @property
    def packing(self) -> str | None:
        """Instruction set for which vLLM's CPU build has put BF16 weights into another order, None if it has not."""
        method = getattr(self.module.quant_method, "cpu_fused_moe", None)
        return None if method is None or getattr(method, "isa", "none") == "none" else str(method.isa)

    @property
    def problem(self) -> str | None:
        """Why the weights cannot be read, None where they can."""
        config = self.module.moe_config
        held, all_of_them = int(self.module.w13_weight.shape[0]), int(config.num_logical_experts)
        if held != all_of_them or int(config.num_experts) != all_of_them:
            return f"{self.name}: {held} experts of {all_of_them} are held here; only whole layers can be read back"
        if self.packing is None and self.kernel not in PLAIN_EXPERTS:
            return (
                f"{self.name}: {self.kernel} keeps experts in a form that cannot be read back; allowed: "
                f"{', '.join(PLAIN_EXPERTS)} (rollout.engine_args.moe_backend=triton on a GPU)"
            )
        return None

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None for BF16."""
        size = getattr(self.module, "weight_block_size", None)
        return None if size is None else (int(size[0]), int(size[1]))

    @property
    def activation_group(self) -> int:
        quantizer = getattr(self.module.quant_method, "quant_fp8", None)
        # Triton's kernels quantise activations in groups as wide as a block of the weights.
        return int(self.module.weight_block_size[1] if quantizer is None else quantizer.group_shape.col)

    @property
    def power_of_two(self) -> bool:
        """Whether activations get power-of-two scales."""
        quantizer = getattr(self.module.quant_method, "quant_fp8", None)
        return bool(is_deep_gemm_e8m0_used() if quantizer is None else quantizer.use_ue8m0)

    def matrices(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Module name, weight `[rows, columns]` and block scales (FP8) of each projection of each expert."""
        gate, up = self._weight("w13_weight").chunk(2, dim=1)
        # Kernels may want more rows than the model has: zeros at the end of each half, which are left out.
        rows = int(self.module.moe_config.intermediate_size)
        weights = {
            "gate_proj": gate[:, :rows],
            "up_proj": up[:, :rows],
            "down_proj": self._weight("w2_weight")[..., :rows],
        }
        scales = self._scales()
        for expert in range(gate.shape[0]):
            for part, weight in weights.items():
                yield f"{self.name}.{expert}.{part}", weight[expert], scales[part][expert] if scales else None

    def _scales(self) -> dict[str, Tensor]:
        if self.block is None:
            return {}
        gate, up = self.module.w13_weight_scale_inv.detach().chunk(2, dim=1)
        return {"gate_proj": gate, "up_proj": up, "down_proj": self.module.w2_weight_scale_inv.detach()}

    def _weight(self, name: str) -> Tensor:
        held = getattr(self.module, name).detach()
        assert isinstance(held, Tensor)
        return held if self.packing is None else unpacked(held, self.packing)


def unpacked(packed: Tensor, instructions: str) -> Tensor:
    """Undo how vLLM's CPU build orders `[experts, rows, columns]` BF16 for its kernel; every bit pattern comes back.

    The order is learned by packing the numbers of the places, in two halves of 16 bits.
    """
    shape = (1, *packed.shape[1:])
    places, order = torch.arange(packed[0].numel()), torch.zeros(packed[0].numel(), dtype=torch.int64)
    for shift in (0, 16):
        half = ((places >> shift) & 0xFFFF).to(torch.uint16).view(torch.bfloat16).reshape(shape)
        order += cpu_prepack_moe_weight(half, instructions).view(torch.uint16).flatten().to(torch.int64) << shift
    if not torch.equal(order.sort().values, places):
        raise EngineError(f"vLLM's packing of experts ({instructions}) is no order of the weights")
    plain = torch.empty_like(packed).flatten(1)
    plain[:, order] = packed.flatten(1)
    return plain.reshape(packed.shape)


def experts(model: nn.Module) -> Iterator[LiveExperts]:
    """All layers of experts in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield LiveExperts(name.removesuffix(".routed_experts"), module)


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


def tied_head(model: nn.Module) -> nn.Module | None:
    """The lm_head of a tied model where it is a module of its own, which shares the embedding's weight (Llama)."""
    config, head = getattr(model, "config", None), getattr(model, "lm_head", None)
    own = isinstance(head, VocabParallelEmbedding) and head is not model.get_submodule("model.embed_tokens")
    return head if own and getattr(config, "tie_word_embeddings", False) else None


def tables(model: nn.Module) -> Iterator[LiveTable]:
    """Embedding and lm_head, unless they are one module; rows beyond the vocabulary (padding) left out."""
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            weight = module.weight
            assert isinstance(weight, Tensor)
            yield LiveTable(name, module, weight.detach()[: int(module.org_vocab_size)])


_EXPERT_PARAMETERS = ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv")


def other_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters outside linear layers, experts, tables and attention, such as norms."""
    known = (LinearBase, VocabParallelEmbedding, Attention)
    covered = {id(p) for m in model.modules() if isinstance(m, known) for p in m.parameters()}
    for layer in experts(model):
        covered |= {id(p) for name, p in layer.module.named_parameters() if name in _EXPERT_PARAMETERS}
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
