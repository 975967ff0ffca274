"""State of the Megatron trainer over two ranks: exports, checkpoints, scales and reports are those of one.

Each layout loads what the one before it has saved. What all of them must give comes from code that knows no ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.engines.megatron_config import Layout
from tasks.engines.plan import folder_shape
from tasks.engines.precision_plan import plan_linears
from tasks.engines.registry import build_trainer
from tasks.engines.tensor_files import rank_files
from tasks.engines.trainer_state import export_payload
from tasks.numerics.fingerprint import fingerprints
from tests.engines.megatron_state import (
    SCALINGS,
    UPDATES,
    Saved,
    make_model,
    recipe_of,
    synthetic,
    trainer_config,
    write_saved,
)
from tests.engines.rank_processes import run_ranks

if find_spec("megatron") is None:
    pytest.skip("Megatron Core is not installed (extra engines-cpu)", allow_module_level=True)

# The first test runs all processes.
pytestmark = pytest.mark.timeout(900)

START = "start"
ROUNDS: Mapping[str, tuple[dict[str, int], dict[str, tuple[str, str]]]] = {
    # Layout; of each task the model, and the round whose checkpoint of it is loaded.
    "pipeline": ({"pipeline": 2}, {"tied": ("tied", START), "bias": ("bias", START), "moe": ("moe", START)}),
    "tensor": (
        {"tensor": 2},
        {
            "tied": ("tied", "pipeline"),
            "bias": ("bias", "pipeline"),
            "one_kv_head": ("one_kv_head", START),
            "tied_bf16": ("tied", START),
            "bias_fp8": ("bias", START),
            "bias_fp8_again": ("bias", "tensor"),
        },
    ),
    "data": ({"data": 2}, {"tied": ("tied", "tensor")}),
    "expert": ({"data": 2, "expert": 2}, {"moe": ("moe", "pipeline")}),
    "single": (
        {},
        {
            "tied": ("tied", "data"),
            "bias": ("bias", "tensor"),
            "one_kv_head": ("one_kv_head", "tensor"),
            "moe": ("moe", "expert"),
            "bias_fp8": ("bias", "tensor"),
        },
    ),
}
TWO_RANKS = tuple(name for name, (sizes, _) in ROUNDS.items() if sizes)
DAMAGES = {
    "file missing": r"lacks optimizer-00001-of-00002\.safetensors",
    "two saves": r"holds weights files of 1 and 2 ranks",
    "twice": r"model\.norm\.weight: in two files of one checkpoint, .*00000-of-00002.* and .*00001-of-00002",
    "tensor missing": r"differ in weights: \['model\.norm\.weight'\]",
    "other shape": r"model\.norm\.weight: checkpoint \(3,\), model \(128,\)",
    "other type": r"model\.norm\.weight: checkpoint torch\.bfloat16, optimiser torch\.float32",
    "kind missing": r"layers\.1\.self_attn\.k_proj\.weight, .* optimiser state differs in kind",
    "alone without a kind": r"layers\.1\.mlp\.down_proj\.weight: the checkpoint's optimiser state is "
    r"\['exp_avg', 'step'\], this optimiser's \['exp_avg', 'exp_avg_sq', 'step'\]",
    "other moments": r"o_proj\.weight\.exp_avg: checkpoint \(2, 2\), this optimiser \(128, 256\)",
    "other steps": r"q_proj\.weight, .* updated \[8\.0, 3\.0, 3\.0\] times",
    "unknown": r"w_proj\.weight: optimiser state of a weight that the model lacks",
    "no state": r"is no checkpoint of this engine: it lacks trainer\.json",
}


def _storage(task: str) -> str:
    return next((form for form in ("bf16", "fp8") if f"_{form}" in task), "fp32")


def _damaged(saved: Saved, folder: Path) -> dict[str, str]:
    """A checkpoint of two files for each of `DAMAGES`."""
    norm, layer = "model.norm.weight", "model.layers.1.self_attn"
    down = "model.layers.1.mlp.down_proj.weight.exp_avg_sq"
    changes: dict[str, tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = {
        "tensor missing": ({norm: None}, {f"{norm}.{kind}": None for kind in ("step", "exp_avg", "exp_avg_sq")}),
        "other shape": ({norm: torch.ones(3)}, {}),
        "other type": ({norm: torch.ones(128, dtype=torch.bfloat16)}, {}),
        "kind missing": ({}, {f"{layer}.k_proj.weight.exp_avg_sq": None}),
        "alone without a kind": ({}, {down: None}),
        "other moments": ({}, {f"{layer}.o_proj.weight.exp_avg": torch.zeros(2, 2)}),
        "other steps": ({}, {f"{layer}.q_proj.weight.step": torch.tensor(8.0)}),
        "unknown": ({}, {f"{layer}.w_proj.weight.step": torch.tensor(1.0)}),
    }
    for name in DAMAGES:
        weights, state = changes.get(name, ({}, {}))
        parts = ({**saved.weights, **weights}, {**saved.state, **state})
        kept = [{key: value for key, value in part.items() if value is not None} for part in parts]
        write_saved(Saved(*kept), folder / name, files=2)
    (folder / "file missing" / "optimizer-00001-of-00002.safetensors").unlink()
    save_file(saved.weights, folder / "two saves" / "weights.safetensors")
    for file in (folder / "twice").glob("weights-*"):
        save_file(load_file(file) | {norm: saved.weights[norm]}, file)
    (folder / "no state" / "trainer.json").unlink()
    return {name: str(folder / name) for name in DAMAGES}


class Bench:
    """Models, their start checkpoints, and what each rank gave in each round."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.folders = {
            name: make_model(name, base / "models" / name) for name in ("tied", "bias", "one_kv_head", "moe")
        }
        self.saved: dict[tuple[str, str], Saved] = {}
        for _, tasks in ROUNDS.values():
            for task, (model, _) in tasks.items():
                key = model, _storage(task)
                if key not in self.saved:
                    self.saved[key] = synthetic(self.folders[model], key[1])  # type: ignore[arg-type]
                    write_saved(self.saved[key], base / START / "_".join(key))
        self.damaged = _damaged(self.saved["tied", "fp32"], base / "damaged")
        self.found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for name, (sizes, tasks) in ROUNDS.items():
            self._run(name, sizes, tasks)

    def checkpoint(self, source: str, model: str, task: str) -> Path:
        if source == START:
            return self.base / START / f"{model}_{_storage(task)}"
        return self.base / source / task.removesuffix("_again")

    def _run(self, name: str, sizes: Mapping[str, int], tasks: Mapping[str, tuple[str, str]]) -> None:
        out, ranks = self.base / name, Layout(**sizes).world
        out.mkdir()
        listed = [
            {
                "name": task,
                "folder": str(self.folders[model]),
                "checkpoint": str(self.checkpoint(source, model, task)),
                "storage": _storage(task),
                "refused": self.damaged if (name, task) == ("tensor", "tied") else {},
            }
            for task, (model, source) in tasks.items()
        ]
        job = {"layout": dict(sizes), "tasks": listed}
        run_ranks("tests.engines.megatron_state_worker", job, out, ranks)
        for task in tasks:
            self.found[name, task] = [json.loads((out / f"{task}.{rank}.json").read_text()) for rank in range(ranks)]

    def results(self, *rounds: str) -> list[tuple[str, str, str, list[dict[str, Any]]]]:
        """Round, task, model and what each rank gave; of all rounds, or of some."""
        return [
            (name, task, ROUNDS[name][1][task][0], found)
            for (name, task), found in self.found.items()
            if not rounds or name in rounds
        ]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("state"))


def _merged(folder: Path, stem: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in rank_files(folder, stem):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def _assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))), name


def test_reports_name_every_tensor_of_the_model_on_every_rank(bench: Bench) -> None:
    for _, task, model, ranks in bench.results():
        expected = fingerprints(bench.saved[model, _storage(task)].weights)
        for found in ranks:
            assert found["report"] == expected
            assert list(found["report"]) == list(found["fresh"])
            assert found["report"] != found["fresh"]
            assert (found["version"], found["updates"]) == (7, UPDATES)


def test_a_fresh_trainer_holds_the_weights_of_the_folder(bench: Bench) -> None:
    for _, _, model, ranks in bench.results():
        files = sorted(bench.folders[model].glob("*.safetensors"))
        tensors = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
        assert all(found["fresh"] == fingerprints(tensors) for found in ranks)


def test_exports_are_bitwise_those_of_whole_tensors(bench: Bench) -> None:
    compared = 0
    for _, task, model, ranks in bench.results():
        if _storage(task) != "fp32":
            continue
        saved, shape = bench.saved[model, "fp32"], folder_shape(bench.folders[model])
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in saved.weights.items()}
        for scaling, overrides in SCALINGS.items():
            recipe = recipe_of(*overrides)
            quantized = plan_linears(shape, recipe.rollout_linears).quantized
            assert bool(quantized) == (scaling != "bf16")
            expected = export_payload(recipe, 7, weights, quantized, {}).fingerprints
            first, *others = [found["exports"][scaling] for found in ranks]
            assert first == expected, scaling
            assert not any(others)
            compared += 1
    assert compared == len(SCALINGS) * 12


def test_checkpoints_hold_each_tensor_bitwise_in_one_file(bench: Bench) -> None:
    for name, task, model, _ in bench.results():
        saved, folder = bench.saved[model, _storage(task)], bench.base / name / task
        _assert_equal(_merged(folder, "weights"), saved.weights)
        if _storage(task) != "fp8":
            _assert_equal(_merged(folder, "optimizer"), saved.state)
        written, before = (
            json.loads((at / "trainer.json").read_text()) for at in (folder, bench.base / START / "moe_fp32")
        )
        assert written == before


def test_ranks_share_the_writing(bench: Bench) -> None:
    for name, task, _, _ in bench.results(*TWO_RANKS):
        for stem in ("weights", "optimizer"):
            first, second = (file.stat().st_size for file in rank_files(bench.base / name / task, stem))
            assert 0.5 < first / second < 2.0, (name, task, stem)
    names = {file.name for file in (bench.base / "single" / "tied").iterdir()}
    assert names == {"weights.safetensors", "optimizer.safetensors", "trainer.json"}


def test_the_torch_trainer_loads_checkpoints_of_two_ranks(bench: Bench, tmp_path: Path) -> None:
    for name in ("tensor", "pipeline"):
        config = trainer_config("torch", bench.folders["tied"])
        engine = build_trainer(config, bench.folders["tied"])
        engine.load(bench.base / name / "tied")
        saved, again = bench.saved["tied", "fp32"], tmp_path / name
        again.mkdir()
        engine.save(again)
        _assert_equal(load_file(again / "weights.safetensors"), saved.weights)
        _assert_equal(load_file(again / "optimizer.safetensors"), saved.state)
        assert engine.version == 7


@pytest.mark.parametrize("name", ["pipeline", "data", "expert"])
def test_scales_are_bitwise_those_of_one_rank(bench: Bench, name: str) -> None:
    for _, task, _, ranks in bench.results(name):
        expected = bench.found["single", task][0]["calibrations"]
        for found in ranks:
            assert found["calibrations"] == expected


def test_scales_of_two_tensor_ranks_are_those_of_one(bench: Bench) -> None:
    """What attention sees in the first layer is the same to the last bit; behind it sums are rounded elsewhere."""
    for task in ("tied", "bias", "one_kv_head"):
        (single,), (found, other) = bench.found["single", task], bench.found["tensor", task]
        assert found["calibrations"] == other["calibrations"]
        for name, steps in single["calibrations"].items():
            for expected, measured in zip(steps, found["calibrations"][name], strict=True):
                _assert_close(measured["scales"], expected["scales"])
                assert measured["metrics"] == pytest.approx(expected["metrics"], rel=0.1), name


def _assert_close(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, scale in expected.items():
        if key.startswith("0."):
            assert found[key] == scale
            continue
        pairs = zip(*(v if isinstance(v, list) else [v] for v in (found[key], scale)), strict=True)
        for one, other in pairs:
            assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=0.02), key


def test_damaged_checkpoints_are_refused_by_every_rank(bench: Bench) -> None:
    for found in bench.found["tensor", "tied"]:
        assert found["refused"].keys() == DAMAGES.keys()
        for name, message in DAMAGES.items():
            assert re.search(message, found["refused"][name], re.DOTALL), found["refused"][name]


def test_a_weight_that_is_not_finite_is_named_by_every_rank(bench: Bench) -> None:
    for found in bench.found["tensor", "tied"]:
        assert found["infinite"].startswith("weight model.layers.1.mlp.down_proj.weight holds inf or NaN")


def test_copies_that_differ_are_a_problem_of_the_report_on_every_rank(bench: Bench) -> None:
    expected = {
        ("data", "tied"): "model.layers.0.self_attn.q_norm.weight: ranks 0 and 1 hold different copies",
        ("expert", "moe"): "model.layers.0.self_attn.q_norm.weight: ranks 0 and 1 hold different copies",
        ("tensor", "tied"): "model.layers.0.self_attn.q_norm.weight: ranks 0 and 1 hold different copies",
        ("pipeline", "tied"): "model.embed_tokens.weight: ranks 0 and 1 hold different copies",
    }
    for key, problem in expected.items():
        assert [found["unequal"] for found in bench.found[key]] == [[problem]] * 2
    # Nothing is shared: biases on tensor ranks, an untied head, a single rank.
    for key in (("pipeline", "bias"), ("pipeline", "moe"), ("single", "tied")):
        assert not any(found["unequal"] for found in bench.found[key])


def test_a_folder_that_one_rank_lacks_is_refused_by_all(bench: Bench) -> None:
    first, second = bench.found["tensor", "tied"]
    assert first["unsaved"].endswith("somewhere: rank 1 of 2 failed, and nothing is done on the others")
    assert second["unsaved"].endswith(
        "nowhere: no such folder on rank 1; allowed: a folder on each rank, or one for all"
    )


def test_fp8_moments_are_exact_where_their_blocks_are_whole(bench: Bench) -> None:
    """Of two tensor ranks only down_proj and o_proj are cut within blocks of 256; those are quantised anew, once."""
    saved = bench.saved["bias", "fp8"].state
    first, again = (_merged(bench.base / "tensor" / task, "optimizer") for task in ("bias_fp8", "bias_fp8_again"))
    _assert_equal(again, first)
    cut = [name for name in saved if "down_proj" in name or "o_proj" in name]
    _assert_equal(
        {name: tensor for name, tensor in first.items() if name not in cut},
        {name: tensor for name, tensor in saved.items() if name not in cut},
    )
    for name in (name for name in cut if name.endswith("exp_avg_codes")):
        scales = name.replace("_codes", "_scales")
        assert first[scales].numel() > saved[scales].numel()
        values = [_decode(state[name], state[scales]) for state in (saved, first)]
        assert not torch.equal(*values)
        # A step of E4M3 of the block's largest, at most.
        assert float((values[1] - values[0]).abs().max()) <= 2**-3 * float(values[0].abs().max())


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    block = codes.numel() // scales.numel()
    return codes.float() * scales.repeat_interleave(block).view(codes.shape)
