"""Building `transformers` models for the PyTorch engines from a local folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.engines.checkpoint_names import check_dense
from tasks.engines.plan import folder_shape
from tasks.engines.protocols import EngineError
from tasks.engines.torch_attention import ATTENTION_NAME, register_attention


def empty_model(directory: Path) -> PreTrainedModel:
    """The architecture in BF16, weights not loaded. Rotary tables stay fp32, as in a loaded model."""
    check_dense(folder_shape(directory), directory)
    register_attention()
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    return _prepare(model)


def loaded_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a local folder in `dtype`. Safetensors only; no remote code."""
    check_dense(folder_shape(directory), directory)
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        use_safetensors=True,
    )
    return _prepare(model)


def _prepare(model: PreTrainedModel) -> PreTrainedModel:
    dropout = {
        name: value
        for name, value in vars(model.config).items()
        if name.endswith("dropout") and isinstance(value, int | float) and value > 0
    }
    if dropout:
        raise EngineError(f"dropout makes scores random and is not supported: {dropout}")
    model.config.use_cache = False
    return model.eval()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights by Hugging Face name, tied ones once; the live tensors, not copies."""
    found = {name: p.detach() for name, p in model.named_parameters()}
    found |= {name: b for name, b in model.named_buffers() if name.endswith((".weight", ".weight_scale_inv", ".bias"))}
    return found


def forward_logits(model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits `[batch, tokens, vocabulary]` in BF16; masking is the attention hook's work."""
    out: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return out


def forward_hidden(model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> Tensor:
    """Last hidden states `[batch, tokens, hidden]`, before lm_head."""
    out: Tensor = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    return out


def check_plain_head(model: PreTrainedModel) -> None:
    """`EngineError` unless lm_head on the last hidden states gives the model's own logits.

    Some models scale or cap their logits after lm_head; leaving that out would change the policy on both sides
    alike, so that no mismatch metric could show it.
    """
    tokens = torch.arange(min(8, int(model.config.vocab_size))).unsqueeze(0)
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    with torch.no_grad():
        own = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        ours = head_logits(model, forward_hidden(model, tokens, positions))
    if not torch.equal(own, ours):
        raise EngineError(
            f"model type {model.config.model_type} changes its logits after lm_head, "
            "which the torch engines do not support"
        )


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """lm_head on selected hidden states `[..., hidden]`."""
    head = model.get_output_embeddings()
    assert head is not None
    out: Tensor = head(hidden)
    return out
