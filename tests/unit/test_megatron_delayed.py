"""A checkpoint's history of amax that does not fit; what fits is loaded on a GPU alone (tests/gpu)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tasks.engines.megatron_delayed import load_history, save_history
from tasks.engines.protocols import EngineError


class _Linear(nn.Module):
    """As a module of Transformer Engine with `num_gemms` products and a history of 4 updates.

    Grouped ones alone say how many; attention has 3 from its first pass on.
    """

    def __init__(self, num_gemms: int, says: bool = False) -> None:
        super().__init__()
        if says:
            self.num_gemms = num_gemms
        sides = {"scaling_fwd": 3 * num_gemms, "scaling_bwd": 2 * num_gemms}
        self.fp8_meta = {
            side: SimpleNamespace(scale=torch.ones(count), amax_history=torch.zeros(4, count))
            for side, count in sides.items()
        }

    def init_fp8_meta_tensors(self, recipe: Any) -> None: ...

    def _get_weight_quantizers(self) -> None: ...


def _model(experts: int) -> Any:
    parts = {"core_attention": _Linear(3), "linear_proj": _Linear(1), "experts": _Linear(experts, says=True)}
    layer = nn.ModuleDict(parts)
    module = SimpleNamespace(decoder=SimpleNamespace(layers=nn.ModuleList([layer])), config=None)
    return SimpleNamespace(module=module, part=SimpleNamespace(layers=range(3, 4)))


def test_the_history_of_other_experts_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        save_history(_model(4), tmp_path, rank, 2)
    with pytest.raises(EngineError, match=r"decoder\.layers\.3\.experts is of 4 products, and a rank has 8 here"):
        load_history(_model(8), tmp_path)


def test_a_layer_without_a_history_is_named(tmp_path: Path) -> None:
    model = _model(4)
    del model.module.decoder.layers[0]["experts"].fp8_meta["scaling_bwd"]
    save_history(model, tmp_path, 0, 1)
    with pytest.raises(EngineError, match=r"no history of amax for decoder\.layers\.3\.experts"):
        load_history(_model(4), tmp_path)
