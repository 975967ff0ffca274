"""The optimiser's keys, and the bytes that each choice of precision takes."""

from __future__ import annotations

import pytest

from conf.compose import compose
from conf.schema import Optimizer
from tasks.engines.optimizer_memory import optimizer_bytes
from tasks.engines.plan import plan_run


def test_bytes_of_each_choice_by_hand() -> None:
    """A matrix of 4,480 elements (18 blocks of 256) and a vector of 64, which keeps fp32 moments in fp8."""
    shapes, n = [(64, 70), (64,)], 4480 + 64
    expected = {
        ("fp32_master", "fp32"): (4 * n, 8 * n),
        ("fp32_master", "bf16"): (4 * n, 4 * n),
        ("fp32_master", "fp8"): (4 * n, 2 * (4480 + 18 * 4) + 8 * 64),
        ("bf16_kahan", "fp32"): (0, 10 * n),
        ("bf16_kahan", "bf16"): (0, 6 * n),
        ("bf16_kahan", "fp8"): (0, 2 * (4480 + 18 * 4) + 8 * 64 + 2 * n),
        ("bf16", "fp32"): (0, 8 * n),
        ("bf16", "bf16"): (0, 4 * n),
        ("bf16", "fp8"): (0, 2 * (4480 + 18 * 4) + 8 * 64),
    }
    for (weights, state), bytes_held in expected.items():
        held = optimizer_bytes(shapes, Optimizer.model_validate({"weights": weights, "state": state}))
        assert (held.master, held.state, held.gradients) == (*bytes_held, 4 * n), (weights, state)


def test_the_plan_counts_the_chosen_precision() -> None:
    default = plan_run(compose(["recipe=bf16"]))
    assert default.optimizer_bytes == 12 * default.parameters
    assert default.gradient_bytes == 4 * default.parameters
    kahan = plan_run(compose(["recipe=bf16", "trainer.optimizer.weights=bf16_kahan", "trainer.optimizer.state=bf16"]))
    assert kahan.optimizer_bytes == 6 * default.parameters


def test_keys() -> None:
    shipped = compose().trainer.optimizer
    assert (shipped.weights, shipped.state) == ("fp32_master", "fp32")
    assert (shipped.max_grad_norm, shipped.max_grad_value, shipped.max_weight) == (1.0, None, None)
    prefix = "trainer.optimizer"
    off = compose([f"{prefix}.max_grad_norm=null", f"{prefix}.max_grad_value=0.5", f"{prefix}.max_weight=3.0"])
    assert off.trainer.optimizer.max_grad_norm is None
    assert (off.trainer.optimizer.max_grad_value, off.trainer.optimizer.max_weight) == (0.5, 3.0)
    for wrong in ("weights=fp16", "state=int8", "max_grad_norm=0", "max_grad_value=-1.0", "max_weight=0.0"):
        with pytest.raises(Exception, match=rf"trainer\.optimizer\.{wrong.partition('=')[0]} = ") as error:
            compose([f"{prefix}.{wrong}"])
        assert "allowed" in str(error.value)
