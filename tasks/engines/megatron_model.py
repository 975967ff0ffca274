"""A policy model in Megatron Core: process groups, building, loading and giving weights back.

On a GPU with Transformer Engine's layers, on a CPU with Megatron's own in plain PyTorch. The order:
`megatron_cpu.install` (CPU), `start_groups`, `build_model`, `megatron_weights.load_weights`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from conf.schema import Recipe
from tasks.engines import megatron_cpu
from tasks.engines.megatron_config import (
    FP32_SCALES,
    Layout,
    ModelPlan,
    Precision,
    check_kept_layers,
    check_machine,
    part_at,
    plan_model,
    precision_arguments,
)
from tasks.engines.megatron_names import Entry, Form, Part, check_names, entry_shape, stage_entries
from tasks.engines.megatron_private import HiddenStatesModel, check_version, fp8_fault, fp32_block_scales, layer_spec
from tasks.engines.megatron_world import World, join_world
from tasks.engines.protocols import EngineError


@dataclass(frozen=True)
class MegatronModel:
    """One rank's part of a model. `entries` name every parameter of `module`."""

    module: HiddenStatesModel
    plan: ModelPlan
    part: Part
    entries: tuple[Entry, ...]

    def hidden_states(self, tokens: Tensor, mask: Tensor | None = None, packed: Any = None) -> Tensor:
        """Hidden states `[tokens, rows, hidden]` of token ids `[rows, tokens]`, after the final norm on the last stage.

        `mask` bool, True where a token is not seen, or None: causal; `packed`: Megatron's `PackedSeqParams`, GPU only.
        Positions count from 0 in each row (with `packed`: in each sequence). On later stages of a pipeline
        `module.set_input_tensor` comes first.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        out: Tensor = self.module(tokens, positions, mask, packed_seq_params=packed)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., columns]` of hidden states `[..., hidden]`: this rank's tokens (see `token_columns`).

        Columns behind the vocabulary's last token are cut off: their weights are padding.
        """
        return self.module.logits(hidden)[..., : len(self.token_columns)]

    @property
    def token_columns(self) -> range:
        """Token ids of this rank's columns of logits, the padding of the vocabulary left out."""
        shape, part = self.plan.shape, self.part
        rows = shape.padded_vocabulary // part.tensor_size
        start = min(part.tensor_rank * rows, shape.vocabulary)
        return range(start, min((part.tensor_rank + 1) * rows, shape.vocabulary))


def start_groups(layout: Layout, on_gpu: bool, rendezvous: str | None, timeout_s: float, seed: int) -> None:
    """Join the other ranks, and seed Megatron's random states.

    `rendezvous` as PyTorch has it (`tcp://host:port`, `file:///path`); None for a single rank. What takes longer than
    `timeout_s` on any rank fails on all. The GPU must have been chosen before.
    """
    if rendezvous is None and layout.world > 1:
        raise EngineError(f"rendezvous: none for {layout.world} ranks; allowed: tcp://host:port or file:///path")
    alone: Any = dist
    how = {"store": alone.HashStore()} if rendezvous is None else {"init_method": rendezvous}
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        rank=layout.rank,
        world_size=layout.world,
        timeout=timedelta(seconds=timeout_s),
        **how,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
    )
    model_parallel_cuda_manual_seed(seed)


def ensure_groups(layout: Layout, on_gpu: bool, rendezvous: str | None, timeout_s: float, seed: int) -> None:
    """`start_groups`, unless this process has started them for the same layout already.

    `EngineError` in a process whose groups are others.
    """
    if not dist.is_initialized():
        start_groups(layout, on_gpu, rendezvous, timeout_s, seed)
        return
    if not parallel_state.model_parallel_is_initialized():
        raise EngineError("this process has groups that are not Megatron's; a trainer needs a process of its own")
    held = Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        rank=dist.get_rank(),
    )
    if held != layout:
        raise EngineError(f"this process has groups for {held}; a trainer with {layout} needs a process of its own")


def stop_groups() -> None:
    """Leave the groups of `start_groups`."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def local_place() -> tuple[int, int, int]:
    """This rank's pipeline stage, expert rank and tensor rank; after `start_groups`."""
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def _expert_arguments(plan: ModelPlan, on_gpu: bool) -> dict[str, Any]:
    shape = plan.shape
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.mlp,
        "moe_router_topk": plan.chosen_experts,
        # Softmax over the chosen ones is the renormalised softmax over all.
        "moe_router_pre_softmax": not plan.normalized_choice,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": on_gpu,
        "moe_permute_fusion": on_gpu,
        "expert_tensor_parallel_size": 1,
    }


def _layout_arguments(layout: Layout, on_gpu: bool) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": on_gpu and layout.tensor > 1,
        # Micro-batches of a packed step differ in length; what sends tokens to experts must bear it, experts or not.
        "variable_seq_lengths": layout.pipeline > 1,
    }


def transformer_config(
    plan: ModelPlan,
    layout: Layout,
    precision: Precision,
    on_gpu: bool,
    dtype: torch.dtype,
    execution: Mapping[str, Any],
) -> TransformerConfig:
    """Megatron's configuration. No dropout, no load-balancing loss, nothing initialised: weights are loaded."""
    shape = plan.shape
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.mlp,
        normalization="RMSNorm",
        layernorm_epsilon=plan.norm_eps,
        qk_layernorm=shape.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=on_gpu,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        # The schedule leaves losses as they are: their coefficients are those of the whole batch.
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",
        **_layout_arguments(layout, on_gpu),
        **_expert_arguments(plan, on_gpu),
        **precision.arguments,
        **execution,
    )


def _check_environment(precision: Precision) -> None:
    for name, value in precision.environment.items():
        if os.environ.get(name, "0") != value or (name == FP32_SCALES and fp32_block_scales() != (value == "1")):
            raise EngineError(
                f"{name} = {os.environ.get(name)}: the recipe needs {value}, "
                "and it must be set before Transformer Engine is loaded"
            )


def _check_hardware(recipe: Recipe) -> None:
    """`EngineError` for an FP8 scaling that this GPU does not compute; on CPU FP8 is refused before."""
    linears = recipe.training_linears
    fault = fp8_fault(linears.scaling) if linears.quantized else None
    if fault is not None:
        raise EngineError(
            f"recipe.training_linears.scaling = {linears.scaling}: not on {torch.cuda.get_device_name()}: {fault}"
        )


def build_model(
    folder: Path,
    recipe: Recipe,
    layout: Layout,
    on_gpu: bool,
    dtype: torch.dtype,
    execution: Mapping[str, Any] | None = None,
) -> MegatronModel:
    """The rank's part of a Hugging Face folder's model; its weights hold nothing yet. After `start_groups`.

    `dtype` of the weights: BF16, or fp32 to compare with; `execution`: see `execution_arguments`. `EngineError` for a
    model, recipe or layout that does not run here.
    """
    check_version()
    if not on_gpu and not megatron_cpu.installed():
        raise EngineError("Megatron on CPU needs megatron_cpu.install() first, in this process")
    plan, precision = plan_model(folder, layout), precision_arguments(recipe, on_gpu)
    check_machine(plan.shape, layout, on_gpu)
    check_kept_layers(plan.shape, layout, recipe)
    _check_environment(precision)
    _check_hardware(recipe)
    part = part_at(plan.shape, layout, *local_place())
    module = HiddenStatesModel(
        transformer_config(plan, layout, precision, on_gpu, dtype, execution or {}),
        layer_spec(plan, transformer_engine=on_gpu),
        vocab_size=plan.shape.padded_vocabulary,
        max_sequence_length=plan.positions,
        pre_process=part.first,
        post_process=part.last,
        parallel_output=True,
        share_embeddings_and_output_weights=plan.shape.tied,
        position_embedding_type="rope",
        rotary_base=plan.rotary.base,
    )
    module.use_frequencies(plan.rotary.frequencies(plan.shape.head_dim))
    module.gather_before_logits()
    # Megatron's own norms are built in fp32 whatever it is told.
    module.to(device="cuda" if on_gpu else "cpu", dtype=dtype)
    entries = stage_entries(plan.shape, Form(fused_norms=on_gpu, grouped_experts=on_gpu), part)
    held = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    check_names(held, {e.name: entry_shape(plan.shape, e, part.tensor_size) for e in entries}, "Megatron's model")
    return MegatronModel(module, plan, part, entries)


def world_of(model: MegatronModel, layout: Layout) -> World:
    """All ranks of the layout, which must all call this."""
    device = next(model.module.parameters()).device
    group = parallel_state.get_tensor_model_parallel_group()
    return join_world(model.plan, layout, model.entries, local_place(), device, group)
