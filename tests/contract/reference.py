"""An independent forward pass: transformers' model, whole sequences, quantisers written from their definition.

Nothing here is shared with the engines: E4M3 rounding by exponent arithmetic, groups by reshaping, FP8
attention as two fp32 products and a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from tasks.engines.protocols import RolloutBatch, SyncPayload

_ATTENTION = "contract_reference"


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value, ties to even, saturating: 3 mantissa bits, smallest normal 2^-6. Same shape, fp32."""
    magnitude = x.abs().clamp(max=448.0).to(torch.float64)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=-6)
    step = torch.ldexp(torch.ones_like(magnitude), exponent - 3)
    return (x.sign() * torch.round(magnitude / step) * step).to(torch.float32)


def quantize_groups(x: Tensor, group: int = 128) -> Tensor:
    """Values after rounding in groups of `group` neighbouring channels (a divisor of the width)."""
    grouped = x.reshape(*x.shape[:-1], -1, group)
    amax = grouped.abs().amax(-1, keepdim=True)
    encode = torch.where(amax > 0, torch.full_like(amax, 448.0) / amax, 1.0)
    return (round_e4m3(grouped * encode) * (1.0 / encode)).reshape(x.shape)


def quantize_blocks(x: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """E4M3 values (before scaling) and decode scales of a matrix whose sides are multiples of `block`."""
    rows, columns = x.shape
    view = x.to(torch.float32).reshape(rows // block, block, columns // block, block)
    amax = view.abs().amax((1, 3))
    encode = torch.full_like(amax, 448.0) / amax
    return round_e4m3(view * encode[:, None, :, None]).reshape(x.shape), 1.0 / encode


def decoded(payload: SyncPayload) -> dict[str, Tensor]:
    """fp32 weights by name; codes are multiplied by the scale of their 128x128 block."""
    weights = {}
    for name, tensor in payload.tensors.items():
        if name.endswith("_scale_inv"):
            continue
        weights[name] = tensor.to(torch.float32)
        scales = payload.tensors.get(f"{name}_scale_inv")
        if scales is not None:
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            weights[name] *= spread[: tensor.shape[0], : tensor.shape[1]]
    return weights


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    reference: Reference = module.contract_reference  # type: ignore[assignment]
    dtype, heads = q.dtype, q.shape[1]
    q, k, v = (reference.seen(module.layer_idx, part, x) for part, x in (("q", q), ("k", k), ("v", v)))  # type: ignore[arg-type]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    if reference.rounds_attention:
        scores = (q.float() @ k.float().transpose(2, 3)) * kwargs["scaling"]
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v.float()
    else:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=kwargs["scaling"])
    return out.transpose(1, 2).contiguous().to(dtype), None


def _make_fp8(linear: nn.Module) -> None:
    """Round the input in groups, multiply in fp32, give back the input's dtype."""
    linear.float()
    linear.register_forward_pre_hook(lambda _, inputs: (quantize_groups(inputs[0].to(torch.float32)),))


class Reference:
    """The model of `model_dir` under the weights of `payload`; E4M3 where the payload holds codes.

    `dtype`: fp32, or BF16 to compare with FP8 engines: a last bit of BF16 before rounding to E4M3 moves a
    value by a whole E4M3 step, so that fp32 activations would give other codes.
    `kv_scales`: round Q, K and V (query only with `query`) under these scales, as an FP8 cache does.
    """

    def __init__(
        self,
        model_dir: Path,
        payload: SyncPayload,
        kv_scales: Mapping[tuple[int, str], float] | None = None,
        query: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        AttentionInterface.register(_ATTENTION, _attend)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=_ATTENTION, local_files_only=True
        ).eval()
        self._scales, self._query = dict(kv_scales or {}), query
        self.amax: dict[tuple[int, str], float] = {}
        self.real: Tensor | None = None
        for name, module in self._model.named_modules():
            if hasattr(module, "layer_idx") and hasattr(module, "k_proj"):
                module.contract_reference = self
            if f"{name}.weight_scale_inv" in payload.tensors:
                _make_fp8(module)
                module.register_forward_hook(lambda _, inputs, out: out.to(dtype))
        self.parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, weight in decoded(payload).items():
                self.parameters[name].copy_(weight)

    def seen(self, layer: int, part: str, x: Tensor) -> Tensor:
        """Note the largest magnitude over real tokens, and round if there is a scale."""
        if self.real is not None:
            self.amax[(layer, part)] = float(x.detach().transpose(1, 2)[self.real].abs().max())
        scale = self._scales.get((layer, part))
        if scale is None or (part == "q" and not self._query):
            return x
        return round_e4m3(x.float() / scale) * scale

    @property
    def rounds_attention(self) -> bool:
        return bool(self._scales)

    def logits(self, tokens: Tensor) -> Tensor:
        """`[rows, width, vocabulary]`; right padding does no harm under a causal mask."""
        out: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return out

    def logprobs(self, batch: RolloutBatch, temperature: float = 1.0) -> Tensor:
        """At each response token its log-probability, 0 elsewhere. Differentiable, `[samples, width]`."""
        logp = (self.logits(batch.tokens).float() / temperature).log_softmax(-1)
        shifted = logp[:, :-1].gather(2, batch.tokens[:, 1:, None]).squeeze(2)
        padded = torch.nn.functional.pad(shifted, (1, 0))
        return torch.where(batch.response_mask(), padded, 0.0)

    @torch.no_grad()
    def next_logprobs(self, prefix: list[int]) -> Tensor:
        """Distribution of the token after `prefix`, fp64 `[vocabulary]`."""
        return self.logits(torch.tensor([prefix]))[0, -1].double().log_softmax(-1)


def effect_share(live: Tensor, rounded: Tensor, unrounded: Tensor) -> float:
    """How much of the effect of a rounding is in `live`: about 1 where an engine rounds, about 0 where not.

    The projection of (`live` - `unrounded`) on (`rounded` - `unrounded`). What an engine rounds at other places in
    BF16 turns some E4M3 codes over; that is independent of the effect, and leaves a share below 1.
    """
    effect = rounded - unrounded
    return float((effect * (live.double() - unrounded)).sum() / (effect * effect).sum())
