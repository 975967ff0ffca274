"""A small mixture of experts with random weights, what a sender would send of it, and an independent forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from conf.schema import Recipe
from tasks.engines.checkpoint_names import checkpoint_parameters
from tasks.engines.precision_plan import block_spec, plan_linears, scale_name
from tasks.engines.protocols import RolloutBatch, SyncPayload
from tasks.numerics.fingerprint import fingerprint
from tasks.numerics.fp8 import quantize_weight_as
from tests.contract.reference import decoded, quantize_groups

LAYERS, EXPERTS, CHOSEN, VOCABULARY = 2, 4, 2, 128
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def mixture_config(**shape: Any) -> Qwen3MoeConfig:
    """Two layers of four experts; `shape` overrides."""
    dimensions = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256} | shape
    return Qwen3MoeConfig(
        **({"num_hidden_layers": LAYERS, "num_experts": EXPERTS} | dimensions),
        num_experts_per_tok=CHOSEN,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.09,
    )


def save_mixture(folder: Path, **shape: Any) -> Path:
    """A Hugging Face folder; routers are drawn wide apart, so that rounding seldom changes who is chosen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(mixture_config(**shape)).to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                nn.init.normal_(parameter, 0, 1)
    model.save_pretrained(folder)
    return folder


def names_of_experts(experts: int = EXPERTS) -> tuple[str, ...]:
    return tuple(
        f"model.layers.{layer}.mlp.experts.{expert}.{part}"
        for layer in range(LAYERS)
        for expert in range(experts)
        for part in PROJECTIONS
    )


def payload_of(folder: Path, recipe: Recipe, version: int = 0) -> SyncPayload:
    """Quantised once, as a trainer would; Q/K/V scales are all different."""
    model, spec = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), block_spec(recipe.rollout_linears)
    quantized = {f"{name}.weight" for name in plan_linears(model, recipe.rollout_linears).quantized}
    tensors: dict[str, Tensor] = {}
    for name, weight in checkpoint_parameters(model).items():
        if name in quantized:
            q = quantize_weight_as(name, weight, spec.weight_format)
            tensors[name], tensors[scale_name(name)] = q.codes, q.scales
        else:
            tensors[name] = weight.clone()
    parts = [(layer, part) for layer in range(LAYERS) for part in ("q", "k", "v")] if recipe.kv.quantized else []
    scales = {key: float(torch.tensor(0.01 + 0.001 * i)) for i, key in enumerate(parts)}
    return SyncPayload(version, tensors, scales, {name: fingerprint(t) for name, t in tensors.items()})


class MixtureReference:
    """transformers' model in BF16 under a payload's weights; where it holds codes, inputs are rounded as well.

    `rounds_inputs` False: the weights' rounding alone.
    """

    def __init__(self, folder: Path, payload: SyncPayload, rounds_inputs: bool = True) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._weights = decoded(payload)
        self._codes = {name.removesuffix("_scale_inv") for name in payload.tensors if name.endswith("_scale_inv")}
        self._rounds = rounds_inputs
        own = dict(self._model.named_parameters())
        for name, module in self._model.named_modules():
            if name.endswith(".experts"):
                module.forward = self._experts(name)
            elif isinstance(module, nn.Linear):
                module.forward = self._linear(f"{name}.weight")
        with torch.no_grad():
            for name in own.keys() & self._weights.keys():
                own[name].copy_(self._weights[name])

    def _linear(self, name: str):  # type: ignore[no-untyped-def]
        return lambda x: self._product(x, name)

    def _experts(self, module: str):  # type: ignore[no-untyped-def]
        def forward(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
            out = torch.zeros(x.shape, dtype=torch.float32)
            for token in range(x.shape[0]):
                for expert, share in zip(chosen[token].tolist(), shares[token].float(), strict=True):
                    gate, up = (self._product(x[token], f"{module}.{expert}.{p}.weight") for p in PROJECTIONS[:2])
                    out[token] += share * self._product(silu(gate) * up, f"{module}.{expert}.down_proj.weight").float()
            return out.to(x.dtype)

        return forward

    def _product(self, x: Tensor, name: str) -> Tensor:
        wide = quantize_groups(x.float()) if name in self._codes and self._rounds else x.float()
        return (wide @ self._weights[name].t()).to(x.dtype)

    @torch.no_grad()
    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Of the response tokens, one after another, fp64."""
        logp = self._model(input_ids=batch.tokens, use_cache=False).logits.double().log_softmax(-1)
        shifted = logp[:, :-1].gather(2, batch.tokens[:, 1:, None]).squeeze(2)
        return torch.nn.functional.pad(shifted, (1, 0))[batch.response_mask()]
