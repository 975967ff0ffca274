"""A decoder of RMS norms, attention and gated MLPs widened with zeros, so that FP8 blocks divide it, its function kept.

Pure maths on tensors by Hugging Face names. Every matrix keeps its entries and gets zero rows and columns behind them:

- The residual stream gets channels that are 0 at every token, since what writes them is 0: columns of the embedding,
  rows of o_proj and down_proj. What reads them has zero columns there, lm_head (a tied embedding, too) among it.
- An RMS norm divides by sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv:1910.07467). With d' channels instead of
  d, of which d' - d are 0, the mean is r times what it was, r = d / d'. With eps' = r eps the root is sqrt(r) times
  as large, and with w' = sqrt(r) w the quotient is what it was. Weights of new channels are 0.
- Heads come in whole groups, behind those there are: a new key and value head with as many new query heads as the
  others have. Its values are 0, hence what its query heads read, and o_proj has zero columns for them. A query head
  that joined a group of the model would read that group's values: nothing for the model's function, but the gradient
  of o_proj would not be 0.
- Channels of the MLP: act(0) * 0 = 0 goes into zero columns of down_proj.

So whatever a new entry multiplies is 0, forward and backward: its gradient is exactly 0, and an optimiser without
noise (AdamW with or without weight decay) leaves it 0. `head_dim` stays, since rotary frequencies and the softmax scale
depend on it; so does the vocabulary, since a new token would get a logit of 0, and with it probability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from tasks.engines.megatron_names import ModelShape, check_names, hf_shapes
from tasks.engines.protocols import EngineError

_SCALED_NORMS: Final = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
"""Norms over the residual stream; those of Q and K are over a head, whose width stays."""

_LLAMA_ALONE: Final = ("attention_bias", "mlp_bias", "pretraining_tp")
"""Keys of a Llama's config.json that a Mistral's does not have; the tensors' names say that there are no biases."""

_KEPT: Final = ("layers", "head_dim", "vocabulary", "padded_vocabulary", "tied", "qkv_bias", "qk_norm", "experts")


@dataclass(frozen=True)
class Padding:
    """From the dimensions `before` to those `after`: hidden, heads, groups and mlp may grow.

    `EngineError` names a size that may not change, that shrinks, or heads that do not come in whole groups.
    """

    before: ModelShape
    after: ModelShape

    def __post_init__(self) -> None:
        before, after = self.before, self.after
        if before.experts:
            raise EngineError(f"padding: experts = {before.experts}: not computed for a mixture of experts; allowed: 0")
        for key in _KEPT:
            old, new = getattr(before, key), getattr(after, key)
            if old != new:
                raise EngineError(f"padding: {key} = {new}: this size stays; allowed: {old}")
        for key in ("hidden", "groups", "mlp"):
            old, new = getattr(before, key), getattr(after, key)
            if new < old:
                raise EngineError(f"padding: {key} = {new}: below the model's; allowed: {old} and more")
        if after.heads * before.groups != before.heads * after.groups:
            each = before.heads // before.groups
            raise EngineError(
                f"padding: heads = {after.heads}: not {each} to each of {after.groups} key and value heads, as in the "
                f"model; allowed: {each * after.groups}"
            )

    @property
    def share(self) -> float:
        """r: the share of the residual stream that is not padding."""
        return self.before.hidden / self.after.hidden


def filled_blocks(shape: ModelShape, block: int = 128) -> ModelShape:
    """The smallest dimensions whose linear layers are whole `block` x `block` blocks, head groups kept whole.

    `EngineError` for a vocabulary that is no multiple: it is not padded.
    """
    if shape.vocabulary % block:
        raise EngineError(f"vocabulary = {shape.vocabulary}: cannot be padded; allowed: a multiple of {block}")
    whole = math.lcm(shape.head_dim, block)
    groups = -(-shape.keys // whole) * whole // shape.head_dim
    return replace(
        shape,
        hidden=-(-shape.hidden // block) * block,
        groups=groups,
        heads=shape.heads // shape.groups * groups,
        mlp=-(-shape.mlp // block) * block,
    )


def pad_tensors(tensors: Mapping[str, Tensor], padding: Padding) -> dict[str, Tensor]:
    """All tensors of a checkpoint at the dimensions `after`; dtype and device stay.

    Exact but for the norms over the residual stream, whose product with sqrt(r) is rounded once to their dtype.
    `EngineError` names every tensor that is missing, unknown or of another shape than `before`.
    """
    _check(tensors, padding.before, "the model to pad")
    wanted = hf_shapes(padding.after)
    return {name: _padded(_scaled(name, t, math.sqrt(padding.share)), wanted[name]) for name, t in tensors.items()}


def unpad_tensors(tensors: Mapping[str, Tensor], padding: Padding) -> dict[str, Tensor]:
    """The inverse of `pad_tensors`: at the dimensions `before`, norms up to a rounding.

    `EngineError` also for a tensor whose padding is not zero everywhere, which would be lost.
    """
    _check(tensors, padding.after, "the padded model")
    dirty = nonzero_padding(tensors, padding)
    if dirty:
        raise EngineError(f"padding is not zero in {', '.join(dirty[:5])} ({len(dirty)} of {len(tensors)} tensors)")
    wanted = hf_shapes(padding.before)
    inside = {name: tensor[_inside(wanted[name])].contiguous() for name, tensor in tensors.items()}
    return {name: _scaled(name, tensor, 1 / math.sqrt(padding.share)) for name, tensor in inside.items()}


def nonzero_padding(tensors: Mapping[str, Tensor], padding: Padding) -> list[str]:
    """Names of padded tensors, weights or gradients, with an entry other than 0 where `pad_tensors` puts zeros."""
    inner = hf_shapes(padding.before)
    found = []
    for name, tensor in tensors.items():
        outside = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
        outside[_inside(inner[name])] = False
        if bool((tensor[outside] != 0).any()):
            found.append(name)
    return found


def padded_config(config: Mapping[str, Any], padding: Padding) -> dict[str, Any]:
    """A Hugging Face config.json of the model `before` as that of the model `after`, rms_norm_eps times r.

    transformers takes a Llama only where hidden_size is a multiple of num_attention_heads, whatever head_dim says.
    Other sizes become a Mistral without a window (arXiv:2310.06825), which is computed alike. `EngineError` names a
    size of `config` that is not the one of `before`.
    """
    sizes = {
        "hidden_size": "hidden",
        "num_attention_heads": "heads",
        "num_key_value_heads": "groups",
        "intermediate_size": "mlp",
    }
    for key, size in sizes.items():
        if config.get(key) != getattr(padding.before, size):
            raise EngineError(f"config.json: {key} = {config.get(key)}; allowed: {getattr(padding.before, size)}")
    made = dict(config) | {key: getattr(padding.after, size) for key, size in sizes.items()}
    # Without head_dim a reader would take hidden_size / num_attention_heads.
    made |= {"head_dim": padding.after.head_dim, "rms_norm_eps": config["rms_norm_eps"] * padding.share}
    if config.get("model_type") == "llama" and padding.after.hidden % padding.after.heads:
        made = {key: value for key, value in made.items() if key not in _LLAMA_ALONE}
        made |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    return made


def _check(tensors: Mapping[str, Tensor], shape: ModelShape, where: str) -> None:
    check_names({name: tuple(t.shape) for name, t in tensors.items()}, hf_shapes(shape), where)


def _scaled(name: str, tensor: Tensor, factor: float) -> Tensor:
    return (tensor.double() * factor).to(tensor.dtype) if name.endswith(_SCALED_NORMS) else tensor


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    padded = tensor.new_zeros(shape)
    padded[_inside(tuple(tensor.shape))] = tensor
    return padded


def _inside(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)
