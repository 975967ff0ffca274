"""Attention of the PyTorch engines, plugged into `transformers` through its attention interface.

Each attention module gets a hook that receives Q and K (after norm and rotary embedding) and V. The trainer's
hook attends over whole sequences and can show the three to a calibration observer; the rollout's hook
owns the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from conf.schema import Calibration
from tasks.engines.protocols import EngineError
from tasks.numerics.calibration import CalibrationObserver
from tasks.numerics.fp8 import decode, quantize_static
from tasks.numerics.kv_scales import PARTS, Scales, scale_values
from tasks.numerics.token_sample import TokenSample

ATTENTION_NAME = "fp8_grpo"


class AttentionHook(Protocol):
    """Attention of one layer: q `[batch, heads, tokens, dim]`, k and v `[batch, kv heads, tokens, dim]`.

    Returns `[batch, heads, tokens, dim]`.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor: ...


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    if kwargs.get("softcap") is not None:
        raise EngineError("attention with a soft cap is not supported by the torch engines")
    # Some models (Mistral) have the window in their configuration alone, where install_hook does not see it.
    if kwargs.get("sliding_window") is not None:
        raise EngineError(
            f"sliding_window = {kwargs['sliding_window']}: sliding-window attention is not supported by the torch "
            "engines; allowed: null in config.json"
        )
    hook = cast(AttentionHook, module.fp8_grpo_hook)
    scaling = kwargs.get("scaling")
    out = hook.attend(module.layer_idx, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)  # type: ignore[arg-type]
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make `attn_implementation="fp8_grpo"` known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def install_hook(model: nn.Module, hook: AttentionHook) -> int:
    """Attach the hook to every attention module; returns how many layers there are.

    Raises `EngineError` for layers that are not plain causal attention (sliding window, soft cap).
    """
    layers = []
    for name, module in model.named_modules():
        if not hasattr(module, "layer_idx") or not hasattr(module, "k_proj"):
            continue
        if getattr(module, "sliding_window", None) is not None:
            raise EngineError(f"{name}: sliding-window attention is not supported by the torch engines")
        module.fp8_grpo_hook = hook
        layers.append(int(module.layer_idx))
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise EngineError(f"attention layers found: {layers}; every decoder layer must have one")
    return len(layers)


def scale_heads(model: nn.Module, policy: Calibration) -> int | None:
    """Scales that each of q, k and v of a layer has: the model's KV heads, or None for one for the whole layer."""
    if policy.granularity == "layer":
        return None
    config: Any = model.config
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Give every query head its key or value head: `[b, kv, t, d]` to `[b, heads, t, d]`."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    heads = q.shape[1]
    return scaled_dot_product_attention(
        q, _repeat_heads(k, heads), _repeat_heads(v, heads), is_causal=True, scale=scaling
    )


@dataclass
class WholeSequenceAttention:
    """The trainer's attention: causal, BF16, over right-padded sequences, with an optional observer.

    The observer sees the tokens of `sample`, which must be set with it.
    """

    observer: CalibrationObserver | None = None
    sample: TokenSample | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        if self.observer is not None:
            assert self.sample is not None
            for part, x in zip(PARTS, (q, k, v), strict=True):
                self.observer.observe(layer, part, self.sample.of(x), self.sample.weights)
        return _causal(q, k, v, scaling)


def _by_head(attention: Callable[..., Tensor], *heads: Tensor, scaling: tuple[float, ...]) -> Tensor:
    """`attention(*tensors, scaling=s)` for each scale over its share of dimension 1, put together again.

    The fused kernel takes one number for all heads; a head's scale inside its operands would round them once more.
    """
    if len(scaling) == 1:
        return attention(*heads, scaling=scaling[0])
    shares = zip(*(x.chunk(len(scaling), dim=1) for x in heads), strict=True)
    return torch.cat([attention(*share, scaling=s) for share, s in zip(shares, scaling, strict=True)], dim=1)


def _encode(x: Tensor, scales: tuple[float, ...]) -> Tensor:
    """E4M3 codes of `[b, heads, t, d]`, each scale over its share of the heads."""
    if len(scales) == 1:
        return quantize_static(x, scales[0])
    shares = zip(x.chunk(len(scales), dim=1), scales, strict=True)
    return torch.cat([quantize_static(share, scale) for share, scale in shares], dim=1)


def _times(x: Tensor, scales: tuple[float, ...]) -> Tensor:
    """`[b, heads, t, d]`, each scale times its share of the heads."""
    if len(scales) == 1:
        return x * scales[0]
    return torch.cat([share * s for share, s in zip(x.chunk(len(scales), dim=1), scales, strict=True)], dim=1)


@dataclass
class _LayerCache:
    keys: Tensor
    values: Tensor


@dataclass
class CachedAttention:
    """The rollout's attention with its KV cache `[rows, kv heads, slots, dim]`; slot = position.

    Prompts are right-padded: a padded slot is overwritten before any query can see it. With FP8 the cache
    holds E4M3 codes under static scales, one a layer or one a KV head (its query heads share the q scale);
    attention reads them in prefill and decode alike, and the scales are applied outside the products, where
    codes are exact in BF16.
    """

    fp8: bool
    quantize_query: bool
    scales: Scales = field(default_factory=dict)
    lengths: Tensor | None = None
    _slots: int = 0
    _layers: dict[int, _LayerCache] = field(default_factory=dict)

    def start(self, slots: int) -> None:
        """Empty the cache; the next forward pass is a prefill into rows of `slots` positions."""
        self._layers, self._slots, self.lengths = {}, slots, None

    def expand(self, index: Tensor, lengths: Tensor) -> None:
        """Copy prompt rows to their samples (`index` `[samples]`); `lengths` `[samples]` tokens are cached."""
        for cache in self._layers.values():
            cache.keys, cache.values = cache.keys[index], cache.values[index]
        self.lengths = lengths.clone()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the cached keys; before anything was cached, the one that they will get."""
        for cache in self._layers.values():
            return cache.keys.dtype
        return torch.float8_e4m3fn if self.fp8 else torch.bfloat16

    def _scales(self, layer: int, part: str, kv_heads: int) -> tuple[float, ...]:
        """One number for all heads, or one for each KV head."""
        if not self.fp8:
            return (1.0,)
        try:
            scale = self.scales[(layer, part)]
        except KeyError:
            raise EngineError(f"layer {layer}: no {part} scale; FP8 attention never runs on a default scale") from None
        if isinstance(scale, tuple) and len(scale) != kv_heads:
            raise EngineError(f"layer {layer}: {len(scale)} {part} scales for {kv_heads} KV heads")
        return scale_values(scale)

    def _load(self, x: Tensor) -> Tensor:
        return decode(x, torch.bfloat16) if self.fp8 else x

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        key, value = self._scales(layer, "k", k.shape[1]), self._scales(layer, "v", k.shape[1])
        factors = tuple(scaling for _ in key)
        if self.fp8:
            if self.quantize_query:
                query = self._scales(layer, "q", k.shape[1])
                q = decode(_encode(q, query), torch.bfloat16)
                factors = tuple(f * s for f, s in zip(factors, query, strict=True))
            k, v = _encode(k, key), _encode(v, value)
        factors = tuple(f * s for f, s in zip(factors, key, strict=True))
        run = self._prefill if self.lengths is None else self._decode
        out = run(layer, q, k, v, factors)
        return _times(out, value) if self.fp8 else out

    def _prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: tuple[float, ...]) -> Tensor:
        shape = (k.shape[0], k.shape[1], self._slots, k.shape[3])
        cache = _LayerCache(k.new_zeros(shape), v.new_zeros(shape))
        cache.keys[:, :, : k.shape[2]], cache.values[:, :, : v.shape[2]] = k, v
        self._layers[layer] = cache
        return _by_head(_causal, q, self._load(k), self._load(v), scaling=scaling)

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: tuple[float, ...]) -> Tensor:
        cache, lengths = self._layers[layer], self.lengths
        assert lengths is not None
        rows = torch.arange(k.shape[0], device=k.device)
        cache.keys[rows, :, lengths], cache.values[rows, :, lengths] = k[:, :, 0], v[:, :, 0]
        filled = int(lengths.max()) + 1
        keys, values = self._load(cache.keys[:, :, :filled]), self._load(cache.values[:, :, :filled])
        visible = torch.arange(filled, device=k.device) <= lengths.unsqueeze(1)
        # One query token a row: the query heads of a KV head take the place of the query positions.
        grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
        mask = visible[:, None, None, :]

        def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)

        return _by_head(attention, grouped, keys, values, scaling=scaling).reshape(q.shape)
