"""A weight-transfer backend of vLLM for a sender in the same process: tensors are handed over as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from tasks.engines import vllm_private
from tasks.numerics.fingerprint import fingerprint

BACKEND = "fp8_grpo_in_process"

EMBEDDING = "model.embed_tokens.weight"
"""Hugging Face name of the matrix that a tied lm_head shares."""


@dataclass
class InProcessInit(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    """Tensors of one sync by Hugging Face name, Q/K/V scales among them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """Fingerprints of a BF16 matrix as it arrived, and of its values: zeros without sign, nothing below normals."""

    exact: int
    values: int


def plain_values(x: Tensor) -> Tensor:
    """`x` with every zero positive and every subnormal zero: what a product with 1 can give back."""
    return torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, torch.zeros_like(x), x)


class InProcessTransfer(WeightTransferEngine):
    """Loads through vLLM's layer-wise reload, and notes what arrived."""

    init_info_cls = InProcessInit
    update_info_cls = InProcessUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: dict[str, Received] = {}

    def init_transfer_engine(self, init_info: InProcessInit) -> None:
        self.received = {}

    def start_weight_update(self) -> None:
        self.received = {}
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        for name, tensor in update_info.tensors.items():
            # Only a CPU build packs matrices and drops them; everywhere else the read-back sees them as they are.
            if tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16 and tensor.ndim == 2:
                self.received[name] = Received(fingerprint(tensor), fingerprint(plain_values(tensor)))
        self.model.load_weights(iter(update_info.tensors.items()))
        head = vllm_private.tied_head(self.model)
        if head is not None and EMBEDDING in update_info.tensors:
            # vLLM loads it through the embedding alone, and what a CPU build packed of it would stay the old one.
            weight: Any = head.weight
            weight.weight_loader(weight, update_info.tensors[EMBEDDING])

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.received = {}

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        raise NotImplementedError("the sender calls update_weights itself")


def register() -> None:
    """Make the backend known to vLLM in this process. Idempotent."""
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, InProcessTransfer)
    except ValueError:  # registered before
        return
