"""Everything here reads, extends or replaces what Megatron Core does not promise to keep; guarded by version.

`tasks.engines.megatron_cpu` besides replaces functions of PyTorch, on machines without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megatron.core
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor

from tasks.engines.megatron_config import ModelPlan
from tasks.engines.protocols import EngineError

SUPPORTED = ("0.16", "0.19")
"""Release series of Megatron Core against which this module was checked."""


def check_version() -> None:
    """`EngineError` for a Megatron Core whose private parts nobody has looked at."""
    series = ".".join(megatron.core.__version__.split(".")[:2])
    if series not in SUPPORTED:
        raise EngineError(
            f"Megatron Core {megatron.core.__version__} is installed; "
            f"this engine was checked with {', '.join(SUPPORTED)}"
        )


def use_random_state(get: Callable[..., Tensor], put: Callable[..., None]) -> None:
    """Megatron saves and restores the random state of its device by these functions from now on."""
    for name, function in (("_get_cuda_rng_state", get), ("_set_cuda_rng_state", put)):
        if not hasattr(megatron_random, name):
            raise EngineError(f"Megatron Core {megatron.core.__version__} has no {name}")
        setattr(megatron_random, name, function)


def complete_experts() -> None:
    """What Megatron's experts lack without Transformer Engine and a GPU.

    Release 0.16 asks for a product of Transformer Engine by a name that it leaves undefined; and sizes of messages
    become numbers only where they come from a device.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not hasattr(token_dispatcher, "maybe_move_tensor_to_cpu"):
        raise EngineError(f"Megatron Core {megatron.core.__version__} has no maybe_move_tensor_to_cpu")
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def layer_spec(plan: ModelPlan, transformer_engine: bool) -> Any:
    """Modules of a decoder layer: Transformer Engine's, or Megatron's own in plain PyTorch."""
    shape = plan.shape
    options: dict[str, Any] = {"num_experts": shape.experts or None, "qk_layernorm": shape.qk_norm}
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=shape.experts > 0, **options)
    return get_gpt_layer_local_spec(moe_grouped_gemm=False, normalization="RMSNorm", **options)


def fp32_block_scales() -> bool:
    """Whether Transformer Engine, as it is loaded, has block scales of any fp32 value, not powers of two."""
    from transformer_engine.common.recipe import Float8BlockScaling

    return bool(Float8BlockScaling.use_f32_scales)


class HiddenStatesModel(GPTModel):
    """Megatron's GPT, whose forward pass ends before the output layer.

    A call gives `[tokens, rows, hidden]` after the final norm (on a pipeline's earlier stages: what the next stage
    is to receive); `logits` applies the output layer to any of these. Gradients flow through both.
    """

    def gather_before_logits(self) -> None:
        """Under sequence parallelism gather hidden states once, before the output layer, instead of in each call.

        What takes them then adds up their gradients over tensor ranks, as it does without sequence parallelism.
        """
        if self.post_process and self.output_layer.sequence_parallel:
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

    @staticmethod
    def gathered(hidden: Tensor) -> Tensor:
        """Hidden states of all tokens from this rank's share of them, `[tokens, rows, hidden]`.

        The gradient that comes back is already the sum over tensor ranks: each takes its own tokens' part of it.
        """
        out: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return out

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.gathered(hidden_states) if self.post_process and self.config.sequence_parallel else hidden_states

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., padded vocabulary / tensor-parallel ranks]` of hidden states, in their dtype."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        out: Tensor = self.output_layer(hidden, weight=weight)[0]
        return out

    def use_frequencies(self, frequencies: Tensor) -> None:
        """Rotate by these inverse frequencies `[head_dim / 2]`, fp32."""
        held = self.rotary_pos_emb.inv_freq
        if held.shape != frequencies.shape:
            raise EngineError(f"rotary frequencies: {list(frequencies.shape)} for a table of {list(held.shape)}")
        self.rotary_pos_emb.inv_freq = frequencies.to(device=held.device, dtype=torch.float32)
