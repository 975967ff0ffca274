"""One rank of a Megatron run on CPU, in a process of its own: `python -m tests.engines.megatron_worker JOB RANK`.

JOB is a JSON file: `folders`, `layout` (without the rank), `dtype`, `rendezvous`, `out`. For each folder the rank loads
the model, scores the tokens of `megatron_models.token_rows` and gives the weights back; under `out` it writes
`FOLDER.RANK.safetensors`: `logprobs`, `gradients/NAME` (single ranks only), `weights/NAME`, and of two tensor-parallel
ranks `logits/whole`, `logits/share`, `logprobs/whole` and `logprobs/share`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from conf.compose import compose
from tasks.engines import megatron_cpu
from tasks.engines.megatron_config import Layout
from tasks.numerics.chunked_logprobs import chunked_logprobs
from tests.engines.megatron_models import token_rows


def vocabulary_logprobs(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Of `targets` `[rows, tokens]` from hidden states `[tokens, rows, hidden]`, over all tensor-parallel ranks."""
    logits, columns = model.logits(hidden).transpose(0, 1).float(), model.token_columns
    total, own = logits.logsumexp(-1), (targets >= columns.start) & (targets < columns.stop)
    place = torch.where(own, targets - columns.start, 0).unsqueeze(-1)
    chosen = torch.where(own, logits.gather(-1, place).squeeze(-1), 0.0)
    size = model.part.tensor_size
    if size > 1:
        totals = [torch.empty_like(total) for _ in range(size)]
        dist.all_gather(totals, total)
        dist.all_reduce(chosen)
        total = torch.stack(totals).logsumexp(0)
    return chosen - total


def through_pipeline(model: Any, tokens: Tensor, layout: Layout) -> Tensor:
    """Hidden states of the rank's stage, received from the stage before and sent to the next."""
    stage, hidden = layout.rank, model.plan.shape.hidden
    if not model.part.first:
        received = torch.empty(tokens.shape[1], tokens.shape[0], hidden, dtype=model.module.config.params_dtype)
        dist.recv(received, stage - 1)
        model.module.set_input_tensor(received)
    out: Tensor = model.hidden_states(tokens)
    if not model.part.last:
        dist.send(out, stage + 1)
    return out


def head_gradients(model: Any, hidden: Tensor, rank: int) -> dict[str, Tensor]:
    """With respect to the rank's tokens: from whole hidden states, and from a share of them that is gathered.

    The latter is what sequence parallelism does, which Megatron's layers for CPU lack; its output layer has it. Of a
    sum over all logits, and of log-probabilities as a trainer has them.
    """
    from megatron.core import parallel_state

    module, vocabulary = model.module, model.plan.shape.vocabulary
    targets = torch.arange(hidden.shape[0] * hidden.shape[1]) % vocabulary

    def of_logits(whole: Tensor) -> Tensor:
        # Each rank's sum is of its own columns; the gradient is of the sum over both.
        return module.logits(whole).float().square().sum()

    def of_logprobs(whole: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        weight = module.shared_embedding_or_output_weight()
        weight = module.output_layer.weight if weight is None else weight
        logprobs, _ = chunked_logprobs(whole.flatten(0, 1), weight, targets, 1.0, 16, "none", vocabulary, group)
        return logprobs.sum()

    def backward(loss: Callable[[Tensor], Tensor], leaf: Tensor, whole: Tensor) -> Tensor:
        loss(whole).backward()
        assert leaf.grad is not None
        return leaf.grad

    found = {}
    for name, loss in (("logits", of_logits), ("logprobs", of_logprobs)):
        whole = hidden.detach().requires_grad_()
        found[f"{name}/whole"] = backward(loss, whole, whole).chunk(2)[rank].contiguous()
        whole.grad = None
    layer = module.output_layer
    layer.sequence_parallel, layer.allreduce_dgrad = True, False
    module.gather_before_logits()
    for name, loss in (("logits", of_logits), ("logprobs", of_logprobs)):
        share = hidden.detach().chunk(2)[rank].clone().requires_grad_()
        found[f"{name}/share"] = backward(loss, share, module.gathered(share))
    return found


def results(folder: Path, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    from tasks.engines.megatron_model import build_model
    from tasks.engines.megatron_names import split
    from tasks.engines.megatron_weights import load_weights
    from tests.engines.live_tensors import hf_tensors

    tokens, recipe = token_rows(), compose(["recipe=bf16"]).recipe
    model = build_model(folder, recipe, layout, on_gpu=False, dtype=dtype)
    load_weights(model, folder)
    model.module.train(layout.world == 1)
    found = {f"weights/{name}": tensor.clone() for name, tensor in hf_tensors(model)}
    with torch.set_grad_enabled(layout.world == 1):
        hidden = through_pipeline(model, tokens, layout)
        if not model.part.last:
            return found
        logprobs = vocabulary_logprobs(model, hidden[:-1], tokens[:, 1:])
    if layout.world == 1:
        logprobs.sum().backward()
        gradients = {name: p.grad for name, p in model.module.named_parameters()}
        for entry in model.entries:
            parts = split(model.plan.shape, entry, [gradients[entry.name]])
            found |= {f"gradients/{name}": gradient for name, gradient in parts.items()}
    if layout.tensor > 1:
        found |= head_gradients(model, hidden, layout.rank)
    return found | {"logprobs": logprobs.detach().contiguous()}


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    megatron_cpu.install()
    from tasks.engines.megatron_model import start_groups, stop_groups

    layout = Layout(**job["layout"], rank=rank)
    start_groups(layout, on_gpu=False, rendezvous=job["rendezvous"], timeout_s=60, seed=1)
    for folder in map(Path, job["folders"]):
        found = results(folder, layout, getattr(torch, job["dtype"]))
        save_file(found, Path(job["out"]) / f"{folder.name}.{rank}.safetensors")
    stop_groups()


if __name__ == "__main__":
    main()
