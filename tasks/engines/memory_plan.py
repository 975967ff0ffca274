"""What a configuration takes of a GPU's memory, from shapes alone: a rank of the Megatron trainer, and the KV pool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from conf.schema import MegatronTrainer, VllmRollout
from tasks.engines.checkpoint_names import checkpoint_parameters, fused_experts

_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_MOMENTS: Final = {"fp32": 8, "bf16": 4, "fp8": 2}
"""Bytes of both moments of an element."""

_MASTER: Final = {"fp32_master": 4, "bf16_kahan": 2, "bf16": 0}
"""Bytes of an element beside the BF16 weight that the model computes with."""

_VOCABULARY: Final = 128
"""The padded vocabulary is a multiple of this on every tensor rank."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. `fp8_copies`: quantised weights, along rows and columns, beside the BF16 ones; `gradients`:
    fp32, held throughout; `optimizer`: masters (or Kahan compensation) and moments; `activations` of all micro-batches
    under way; `output`: what chunked log-probabilities hold; `reference`: the frozen BF16 policy of a KL term.

    What Transformer Engine and NCCL take for themselves, and fragmentation, come on top.
    """

    weights: int
    fp8_copies: int
    gradients: int
    optimizer: int
    activations: int
    output: int
    reference: int

    @property
    def held(self) -> int:
        """What it holds throughout, whatever it computes."""
        return self.weights + self.fp8_copies + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        return self.held + self.activations + self.output


@dataclass(frozen=True)
class LayerShape:
    """Dimensions of a decoder layer. `width`: of the MLP, or of all experts that one token goes through together;
    `routed`: how many those are, 0 in a dense layer; `experts`: how many there are."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    qk_norm: bool
    routed: int = 0
    experts: int = 0


def layer_shape(model: nn.Module) -> LayerShape:
    """Of a Qwen or Llama on the meta device or any other."""
    hf: Any = model.config
    routed = hf.num_experts_per_tok if fused_experts(model) else 0
    return LayerShape(
        hidden=hf.hidden_size,
        heads=hf.num_attention_heads,
        kv_heads=getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        width=routed * hf.moe_intermediate_size if routed else hf.intermediate_size,
        qk_norm=any(name.endswith(".q_norm") for name, _ in model.named_modules()),
        routed=routed,
        experts=hf.num_experts if routed else 0,
    )


def activation_bytes(shape: LayerShape, tensor: int = 1, sequence_parallel: bool = False) -> float:
    """Bytes that one token leaves in one layer for its backward pass on a rank, attention's inside made again.

    Counted as Korthikanti et al. 2022 (arXiv:2205.05198, section 4) count a GPT layer (34 bytes a channel without the
    attention's inside), for RMS norms, grouped queries and a gated MLP without dropout, in BF16. Both norms' inputs and
    the inputs of the QKV and gate/up products are split over tensor ranks by sequence parallelism only; the rest is
    split always. FP8 keeps some of the inputs in one byte: these are upper bounds then.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    whole = 2 * 4 * shape.hidden
    split = 2 * (queries + 2 * keys) + 2 * queries + 4 * shape.heads
    split += 2 * (queries + keys) if shape.qk_norm else 0
    split += 2 * 3 * shape.width
    if shape.routed:
        # Copies of a token for its experts, and the router's logits and shares in fp32.
        split += 2 * shape.routed * shape.hidden
        whole += 2 * 4 * shape.experts
    return (whole / tensor if sequence_parallel else whole) + split / tensor


def stage_ranks(
    model: nn.Module, trainer: MegatronTrainer, quantized: Set[str], reference: bool
) -> tuple[RankMemory, ...]:
    """A rank of each pipeline stage. `quantized`: names of the linear layers that train in FP8; `reference`: whether
    a frozen policy is kept beside the one that trains."""
    hf: Any = model.config
    stages = trainer.pipeline_parallel_size
    layers = hf.num_hidden_layers // stages
    counts = [{"dense": 0, "experts": 0, "fp8 dense": 0, "fp8 experts": 0} for _ in range(stages)]
    for name, parameter in checkpoint_parameters(model).items():
        kind = "experts" if ".experts." in name else "dense"
        elements = _elements(name, parameter, trainer, hf)
        for stage in _stages(name, layers, stages, hf.tie_word_embeddings):
            counts[stage][kind] += elements
            counts[stage][f"fp8 {kind}"] += elements if name.removesuffix(".weight") in quantized else 0
    shape = layer_shape(model)
    found = []
    for stage, count in enumerate(counts):
        activations = _activations(shape, trainer, layers, micro_batches=stages - stage)
        output = _output(hf, trainer) if stage == stages - 1 else 0
        found.append(_rank(count, trainer, activations, output, reference))
    return tuple(found)


def _rank(
    count: Mapping[str, int], trainer: MegatronTrainer, activations: int, output: int, reference: bool
) -> RankMemory:
    """From the elements of a stage on a tensor rank; of the experts, all that the stage has were counted."""
    experts = count["experts"] // trainer.expert_parallel_size
    fp8 = count["fp8 dense"] + count["fp8 experts"] // trainer.expert_parallel_size
    elements = count["dense"] + experts
    return RankMemory(
        weights=2 * elements,
        fp8_copies=2 * fp8,
        gradients=4 * elements,
        optimizer=_optimizer(count["dense"], experts, trainer),
        activations=activations,
        output=output,
        reference=2 * elements if reference else 0,
    )


def _stages(name: str, layers: int, stages: int, tied: bool) -> tuple[int, ...]:
    """The pipeline stages that hold a parameter."""
    match = _LAYER.search(name)
    if match:
        return (int(match.group(1)) // layers,)
    if "embed_tokens" in name:
        # A tied output layer needs the embedding at the other end, too.
        return (0, stages - 1) if tied and stages > 1 else (0,)
    return (stages - 1,)


def _elements(name: str, parameter: Tensor, trainer: MegatronTrainer, hf: Any) -> int:
    """Elements of a parameter on a tensor rank that holds it; experts are never split."""
    tensor = trainer.tensor_parallel_size
    if "embed_tokens" in name or name.startswith("lm_head"):
        return _vocabulary(hf.vocab_size, tensor) // tensor * hf.hidden_size
    if parameter.ndim < 2 or ".experts." in name or name.endswith(".mlp.gate.weight"):
        return parameter.numel()
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        tensor = min(tensor, getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads)
    return parameter.numel() // tensor


def _vocabulary(size: int, tensor: int) -> int:
    multiple = _VOCABULARY * tensor
    return -(-size // multiple) * multiple


def _optimizer(dense: int, experts: int, trainer: MegatronTrainer) -> int:
    """Masters and moments; if distributed, all ranks that hold the same weights have about equal parts of them."""
    element = _MASTER[trainer.optimizer.weights] + _MOMENTS[trainer.optimizer.state]
    if not trainer.distributed_optimizer:
        return element * (dense + experts)
    copies = trainer.data_parallel_size * trainer.context_parallel_size
    expert_copies = trainer.ranks // (trainer.pipeline_parallel_size * trainer.expert_parallel_size)
    return element * (-(-dense // copies) + -(-experts // expert_copies))


def _activations(shape: LayerShape, trainer: MegatronTrainer, layers: int, micro_batches: int) -> int:
    """`micro_batches` under way: a stage starts as many as there are stages from it to the last."""
    tensor, sequence_parallel = trainer.tensor_parallel_size, trainer.sequence_parallel
    tokens = -(-trainer.tokens_per_micro_batch // trainer.context_parallel_size)
    layer = activation_bytes(shape, tensor, sequence_parallel)
    if trainer.recompute == "selective":
        return round(tokens * layer * layers * micro_batches)
    inputs = 2 * shape.hidden / (tensor if sequence_parallel else 1)
    return round(tokens * (inputs * layers * micro_batches + layer))


def _output(hf: Any, trainer: MegatronTrainer) -> int:
    """Hidden states and their gradient, three fp32 tensors of a chunk's logits, the weight's gradient in fp32."""
    tensor = trainer.tensor_parallel_size
    tokens = -(-trainer.tokens_per_micro_batch // trainer.context_parallel_size)
    rows = _vocabulary(hf.vocab_size, tensor) // tensor
    return 2 * 2 * tokens * hf.hidden_size + 3 * 4 * trainer.logprob_chunk * rows + 4 * rows * hf.hidden_size


def kv_capacity_tokens(rollout: VllmRollout, weight_bytes: int, bytes_per_token: int, device_bytes: float) -> int:
    """Tokens of KV cache by arithmetic: the engine's share of the device less its weights, or the budget in bytes.

    vLLM's own activations (about 2 GB for an 8B model) are not taken off.
    """
    budget = rollout.kv_cache_memory_bytes
    if budget is None:
        assert rollout.gpu_memory_utilization is not None
        budget = int(rollout.gpu_memory_utilization * device_bytes) - weight_bytes
    return max(0, budget // bytes_per_token)
