"""Scores and updates of the Megatron trainer on two ranks against those of one, over gloo on CPU.

Weights are compared in fp32, in which a layout changes no more than the order of sums: after two updates at a rate of
0.01 the weights of two ranks were up to 4e-6 from those of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.engines.megatron_names import Form, ModelShape, Part, stage_entries
from tests.engines.context_worker import TEMPERATURE, coupled, made
from tests.engines.megatron_models import save_model
from tests.engines.megatron_rank_worker import STEPS, rollout_batch
from tests.engines.rank_processes import run_ranks

if find_spec("megatron") is None:
    pytest.skip("Megatron Core is not installed (extra engines-cpu)", allow_module_level=True)

TOLERANCE = 1e-5
MODELS = ("qwen3_tied", "qwen2_bias", "moe")
RICH = (
    "algorithm.kl_coef=0.05",
    "algorithm.entropy_coef=0.01",
    "algorithm.updates_per_step=4",
    # Small enough that a rank has a micro-batch less than the other.
    "trainer.tokens_per_micro_batch=30",
    "trainer.optimizer.weight_decay=0.1",
    "trainer.optimizer.max_grad_value=0.05",
    "trainer.optimizer.max_weight=1.5",
)
WHOLE = "trainer.distributed_optimizer=false"
# Norms are summed in another order with the state split; without clipping that changes nothing.
FP8 = ("trainer.optimizer.state=fp8", "trainer.optimizer.max_grad_norm=null")
KAHAN = (
    "trainer.optimizer.weights=bf16_kahan",
    "trainer.optimizer.state=bf16",
    "trainer.optimizer.max_grad_norm=null",
)


def _case(name: str, model: str, *overrides: str, dtype: str = "float32", poisoned: bool = False) -> dict[str, Any]:
    return {"name": name, "folder": model, "overrides": list(overrides), "dtype": dtype, "poisoned": poisoned}


def _unsplit(case: dict[str, Any]) -> dict[str, Any]:
    return {**case, "name": f"{case['name']}_whole", "overrides": [*case["overrides"], WHOLE]}


TIED, UNTIED, MOE = _case("tied", "qwen3_tied"), _case("untied", "qwen2_bias", *RICH), _case("moe", "moe", RICH[0])
BF16, BAD = _case("bf16", "qwen3_tied", dtype="bfloat16"), _case("bad", "qwen3_tied", poisoned=True)
LAYOUTS: Mapping[str, tuple[Mapping[str, int], tuple[dict[str, Any], ...]]] = {
    "one": ({"ranks": 1}, (TIED, UNTIED, MOE, BF16)),
    "tensor": ({"ranks": 2, "tensor_parallel_size": 2}, (TIED, UNTIED, BF16, BAD)),
    "pipeline": ({"ranks": 2, "pipeline_parallel_size": 2}, (TIED, UNTIED, MOE, BF16, BAD)),
    "data": (
        {"ranks": 2},
        (
            *(TIED, UNTIED, MOE, BF16, BAD),
            *(_unsplit(case) for case in (TIED, UNTIED, MOE, BAD)),
            *(_case("fp8", "qwen3_tied", *FP8), _unsplit(_case("fp8", "qwen3_tied", *FP8))),
            _case("kahan", "qwen3_tied", *KAHAN, dtype="bfloat16"),
            _unsplit(_case("kahan", "qwen3_tied", *KAHAN, dtype="bfloat16")),
        ),
    ),
    "expert": ({"ranks": 2, "expert_parallel_size": 2}, (MOE, _unsplit(MOE), {**MOE, "name": "bad", "poisoned": True})),
}
"""Keys of the trainer, and cases."""

COMPARED = [
    (layout, case["name"])
    for layout, (_, cases) in LAYOUTS.items()
    for case in cases
    if layout != "one" and case["name"].removesuffix("_whole") in ("tied", "untied", "moe")
]
POISONED = [("tensor", "bad"), ("pipeline", "bad"), ("data", "bad"), ("data", "bad_whole"), ("expert", "bad")]

Found = dict[str, list[dict[str, Any]]]
Run = Callable[[str], Found]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What each rank of a layout found in each case; every layout runs once, for all tests."""
    base, done = tmp_path_factory.mktemp("models"), dict[str, Found]()
    folders = {name: str(save_model(name, base / name)) for name in MODELS}

    def results(name: str) -> Found:
        if name not in done:
            (layout, cases), out = LAYOUTS[name], tmp_path_factory.mktemp("out")
            job = {"cases": [{**case, "folder": folders[case["folder"]]} for case in cases], "layout": dict(layout)}
            ranks = range(layout["ranks"])
            run_ranks("tests.engines.megatron_rank_worker", job, out, len(ranks))
            done[name] = {
                case["name"]: [torch.load(out / f"{case['name']}.{rank}.pt", weights_only=True) for rank in ranks]
                for case in cases
            }
        return done[name]

    return results


def _together(ranks: list[dict[str, Any]], step: int) -> dict[str, Tensor]:
    """The whole model after a step. What several ranks hold is bitwise the same on each, a tied copy as well."""
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for name, tensor in rank["middle"][step].items():
            place = "model.embed_tokens.weight" if name == "tied" else name
            assert torch.equal(found.setdefault(place, tensor), tensor), name
    return found


def _assert_near(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("layout, case", COMPARED)
def test_two_ranks_score_as_one(run: Run, layout: str, case: str) -> None:
    ranks, (one,) = run(layout)[case], run("one")[case.removesuffix("_whole")]
    for step in range(STEPS):
        for rank in ranks:
            torch.testing.assert_close(rank["scores"][step], ranks[0]["scores"][step], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ranks[0]["scores"][step], one["scores"][step], rtol=0, atol=1e-4, equal_nan=True)
    assert torch.equal(~one["scores"][0].isnan(), rollout_batch().response_mask())


@pytest.mark.parametrize("layout, case", COMPARED)
def test_two_ranks_learn_as_one(run: Run, layout: str, case: str) -> None:
    ranks, (one,) = run(layout)[case], run("one")[case.removesuffix("_whole")]
    for step in range(STEPS):
        _assert_near(_together(ranks, step), one["middle"][step])
    for name, tensor in one["middle"][-1].items():
        assert float((tensor - one["start"][name]).abs().max()) > 500 * TOLERANCE, f"{name} has hardly moved"


@pytest.mark.parametrize("layout, case", COMPARED)
def test_two_ranks_report_as_one(run: Run, layout: str, case: str) -> None:
    """The gradient's norm and all else, the same on both ranks; but for the memory of a rank."""
    ranks, (one,) = run(layout)[case], run("one")[case.removesuffix("_whole")]
    for step in range(STEPS):
        found = ranks[0]["metrics"][step]
        assert all(rank["metrics"][step] == found for rank in ranks)
        wanted = {name: value for name, value in one["metrics"][step].items() if not name.startswith("memory/")}
        assert wanted["optim/grad_norm"] > 0.1 and wanted["optim/skipped_steps"] == 0
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert (one["metrics"][-1]["optim/clipped_weights"] > 0) == case.startswith("untied")


def test_a_rank_without_rows_computes_along() -> None:
    """The case above has updates in which a rank has nothing to do in a micro-batch of the other."""
    from tasks.engines.megatron_passes import Passes
    from tasks.numerics.packing import PackingRule

    passes = Passes(PackingRule(30), False, 1, 1.0, torch.device("cpu"))
    updates = passes.rank_parts(rollout_batch().lengths, updates=4, ranks=2)
    assert any(part.numel() == 0 for ranks in updates for parts in ranks for part in parts)
    assert all(len(first) == len(second) for first, second in updates)


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "data"])
def test_bf16_scores_differ_by_rounding_alone(run: Run, layout: str) -> None:
    found, (one,) = run(layout)["bf16"][0]["scores"][0], run("one")["bf16"]
    mask = rollout_batch().response_mask()
    assert float((found - one["scores"][0])[mask].abs().mean()) < 0.02


@pytest.mark.parametrize("layout, case", POISONED)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(run: Run, layout: str, case: str) -> None:
    """Nothing changes, and the next step is what the first would have been."""
    ranks, (one,) = run(layout)[case], run("one")["moe" if layout == "expert" else "tied"]
    for rank in ranks:
        assert rank["metrics"][0]["optim/skipped_steps"] == 1.0
        assert rank["metrics"][1]["optim/skipped_steps"] == 0.0
        for name, tensor in rank["start"].items():
            assert torch.equal(rank["middle"][0][name], tensor), name
    _assert_near(_together(ranks, 1), one["middle"][0])


@pytest.mark.parametrize("layout, case", [("data", "tied"), ("data", "moe"), ("expert", "moe"), ("data", "fp8")])
def test_a_rank_holds_its_share_of_masters_and_moments(run: Run, layout: str, case: str) -> None:
    ranks, (one,) = run(layout)[case], run("one")["moe" if case == "moe" else "tied"]
    held = [set(rank["owned"]) for rank in ranks]
    if layout == "data":
        assert not held[0] & held[1]
        assert held[0] | held[1] == set(one["owned"])
    for rank in ranks:
        assert 0 < rank["master_bytes"] < 0.6 * one["master_bytes"]
        for name, key in (("master_weights", "master_bytes"), ("optimizer_state", "state_bytes")):
            assert rank["memory"][f"memory/{name}_gb"] * 1e9 == pytest.approx(rank[key])
            assert rank["metrics"][-1][f"memory/{name}_gb"] * 1e9 == pytest.approx(max(r[key] for r in ranks))
        assert rank["memory"]["memory/gradients_gb"] * 1e9 == pytest.approx(4 * sum(rank["computed"].values()))
    assert sum(rank["master_bytes"] for rank in ranks) == one["master_bytes"]


def test_without_the_split_a_rank_holds_all(run: Run) -> None:
    (one,) = run("one")["tied"]
    for rank in run("data")["tied_whole"]:
        assert rank["owned"] == one["owned"]
        assert (rank["master_bytes"], rank["state_bytes"]) == (one["master_bytes"], one["state_bytes"])


@pytest.mark.parametrize("case", ["fp8", "kahan"])
def test_random_rounding_does_not_depend_on_owners(run: Run, case: str) -> None:
    """Bitwise the same with the state split and not."""
    split, whole = (_together(run("data")[name], STEPS - 1) for name in (case, f"{case}_whole"))
    start = run("data")[case][0]["start"]
    for name, tensor in whole.items():
        assert torch.equal(split[name], tensor), name
        assert not torch.equal(start[name], tensor), name


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_who_adds_up_what_over_tensor_ranks(monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool) -> None:
    """With sequence parallelism, which the CPU lacks, a tensor rank's gradient of a norm or router is of its tokens."""
    from megatron.core import parallel_state

    from tasks.engines.megatron_ranks import sharings

    for name in ("tensor_model_parallel", "data_parallel", "embedding", "expert_data_parallel"):
        monkeypatch.setattr(parallel_state, f"get_{name}_group", lambda name=name, **_: name)
    shape = ModelShape(1, 64, 4, 2, 16, 96, 200, 256, tied=False, qk_norm=True, experts=2)
    part = Part(range(1), range(2), first=True, last=True, tensor_rank=1, tensor_size=2)
    module = SimpleNamespace(config=SimpleNamespace(sequence_parallel=sequence_parallel))
    entries = stage_entries(shape, Form(fused_norms=False, grouped_experts=True), part)
    model: Any = SimpleNamespace(module=module, plan=SimpleNamespace(shape=shape), part=part, entries=entries)
    found = sharings(model)
    partial = {
        name.rpartition("0.")[2] for name, sharing in found.items() if sharing.partial == "tensor_model_parallel"
    }
    by_head = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    by_token = {
        *("input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.router.weight"),
        "decoder.final_layernorm.weight",
    }
    assert partial == (by_head | by_token if sequence_parallel else by_head)
    experts = {name for name, sharing in found.items() if sharing.copies == "expert_data_parallel"}
    assert experts == {name for name in found if ".experts." in name} and len(experts) == 4
    assert all(found[name].copies == "data_parallel" for name in found.keys() - experts)
    whole = {name.rpartition("0.")[2] for name, sharing in found.items() if not sharing.counted}
    assert whole == by_head | by_token, "the first tensor rank counts what all have"


def test_context_ranks_have_the_log_probabilities_of_all_tokens(tmp_path: Path) -> None:
    """And the gradients of their own, which add up."""
    run_ranks("tests.engines.context_worker", {}, tmp_path, 2)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    rows, mask, hidden, weight = made()
    hidden.requires_grad_()
    weight.requires_grad_()
    chosen = torch.tensor([2, 0, 1])
    whole = ((hidden[:, :-1] @ weight.T) / TEMPERATURE).log_softmax(-1)
    by_token = whole.gather(2, rows.tokens[:, 1:, None]).squeeze(2)[chosen][mask[chosen][:, 1:]]
    entropies = -(whole.exp() * whole).sum(2)[chosen][mask[chosen][:, 1:]]
    coupled(by_token, entropies).backward()
    for rank in found:
        torch.testing.assert_close(rank["logprobs"], by_token.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank["entropies"], entropies.detach(), rtol=1e-5, atol=1e-5)
    assert not set(found[0]["places"].tolist()) & set(found[1]["places"].tolist())
    for name, leaf in (("to_hidden", hidden), ("to_weight", weight)):
        assert all(bool(rank[name].any()) for rank in found)
        torch.testing.assert_close(found[0][name] + found[1][name], leaf.grad, rtol=1e-4, atol=1e-3)
