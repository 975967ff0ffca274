"""The policy of the PyTorch trainer: the model in the precision of training, and its log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from conf.schema import Recipe
from tasks.engines.precision_plan import block_spec, plan_linears
from tasks.engines.protocols import RolloutBatch
from tasks.engines.torch_attention import WholeSequenceAttention, install_hook
from tasks.engines.torch_linears import use_fp8_training
from tasks.engines.torch_models import check_plain_head, forward_hidden, head_logits, loaded_model
from tasks.engines.train_step import score_rows
from tasks.numerics.logprobs import token_entropy, token_logprobs


class TorchPolicy:
    """A BF16 model whose linear layers compute as the recipe's training side says.

    Serves the policy that trains and the frozen reference of the KL term alike.
    """

    def __init__(self, model_dir: Path, recipe: Recipe, temperature: float) -> None:
        self.model = loaded_model(model_dir, torch.bfloat16)
        plan = plan_linears(self.model, recipe.training_linears)
        use_fp8_training(self.model, plan.quantized, block_spec(recipe.training_linears))
        self.attention = WholeSequenceAttention()
        self.layers = install_hook(self.model, self.attention)
        check_plain_head(self.model)
        self._temperature = temperature

    def freeze(self) -> TorchPolicy:
        """Take part in no gradient from now on."""
        self.model.requires_grad_(False)
        return self

    def evaluate(self, tokens: Tensor, mask: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (and entropies) of the tokens under `mask`, `[selected]` fp32, row-major, with gradient."""
        hidden = forward_hidden(self.model, tokens, torch.arange(tokens.shape[1]).unsqueeze(0))
        # Only selected tokens reach the head: its logits are the largest tensor of the pass.
        logits = head_logits(self.model, hidden[:, :-1][mask[:, 1:]])
        selected = token_logprobs(logits, tokens[mask], self._temperature)
        return selected, token_entropy(logits, self._temperature) if entropy else None

    def score(self, batch: RolloutBatch, parts: Iterable[Tensor]) -> tuple[Tensor, float]:
        """See `tasks.engines.train_step.score_rows`."""
        return score_rows(batch, parts, lambda rows, mask, entropy: self.evaluate(batch.tokens[rows], mask, entropy))
