"""Models in Megatron Core on CPU against transformers: log-probabilities, gradients, weights back, several ranks.

The stand-in for CUDA holds for a whole process, so that models are built in processes of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.compose import compose
from tasks.engines.megatron_config import Layout
from tasks.engines.megatron_weights import checkpoint_files
from tasks.engines.protocols import EngineError
from tests.engines.megatron_models import (
    CONFIGS,
    DENSE,
    reference_logprobs,
    reference_model,
    save_model,
    token_rows,
)
from tests.engines.rank_processes import run_ranks

if find_spec("megatron") is None:
    pytest.skip("Megatron Core is not installed (extra engines-cpu)", allow_module_level=True)

MIXTURES = tuple(name for name in CONFIGS if name not in DENSE)
SINGLE: Mapping[str, int] = {}
TENSOR, PIPELINE, EXPERT = {"tensor": 2}, {"pipeline": 2}, {"expert": 2, "data": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: save_model(name, base / name) for name in CONFIGS}


Results = dict[str, list[dict[str, Tensor]]]
Run = Callable[[Mapping[str, int], str], Results]


@pytest.fixture(scope="module")
def run(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What each rank of a layout gave for each model; every layout runs once, for all tests."""
    done: dict[tuple[tuple[tuple[str, int], ...], str], Results] = {}

    def results(sizes: Mapping[str, int], dtype: str) -> Results:
        key = tuple(sizes.items()), dtype
        if key not in done:
            names = {"tensor": DENSE, "expert": MIXTURES}.get(next(iter(sizes), ""), tuple(CONFIGS))
            out, ranks = tmp_path_factory.mktemp("out"), Layout(**sizes).world
            job = {
                "folders": [str(folders[name]) for name in names],
                "layout": dict(sizes),
                "dtype": dtype,
            }
            run_ranks("tests.engines.megatron_worker", job, out, ranks)
            done[key] = {
                name: [load_file(out / f"{name}.{rank}.safetensors") for rank in range(ranks)] for name in names
            }
        return done[key]

    return results


def _logprobs(ranks: list[dict[str, Tensor]]) -> Tensor:
    (first, *others) = [found["logprobs"] for found in ranks if "logprobs" in found]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-6)
    return first


def _weights(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name.removeprefix("weights/"): tensor
        for found in ranks
        for name, tensor in found.items()
        if name.startswith("weights/")
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_those_of_transformers(folders: dict[str, Path], run: Run, name: str) -> None:
    with torch.no_grad():
        expected = reference_logprobs(reference_model(folders[name], torch.float32), token_rows())
    found = _logprobs(run(SINGLE, "float32")[name])
    assert float(expected.std()) > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_is_as_near_to_fp32_as_that_of_transformers(folders: dict[str, Path], run: Run, name: str) -> None:
    """Mean |d| to fp32, in nats: 0.008 to 0.013 here, 0.009 to 0.016 in transformers."""
    with torch.no_grad():
        exact, rounded = (
            reference_logprobs(reference_model(folders[name], dtype), token_rows())
            for dtype in (torch.float32, torch.bfloat16)
        )
    found = _logprobs(run(SINGLE, "bfloat16")[name])
    assert 0 < float((found - exact).abs().mean()) < 1.5 * float((rounded - exact).abs().mean())
    assert float((found - rounded).abs().mean()) < 0.03


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_transformers(folders: dict[str, Path], run: Run, name: str) -> None:
    """Through hidden states and an output layer that is called apart from the forward pass."""
    model = reference_model(folders[name], torch.float32)
    reference_logprobs(model, token_rows()).sum().backward()
    (found,) = run(SINGLE, "float32")[name]
    compared = 0
    for parameter, weight in model.named_parameters():
        if ".experts." not in parameter:
            torch.testing.assert_close(found[f"gradients/{parameter}"], weight.grad, rtol=1e-3, atol=1e-3)
            compared += 1
            continue
        for expert, gradient in enumerate(weight.grad):
            kinds = ("gate_proj", "up_proj") if parameter.endswith("gate_up_proj") else ("down_proj",)
            for kind, part in zip(kinds, gradient.chunk(len(kinds)), strict=True):
                place = f"gradients/{parameter.rpartition('.')[0]}.{expert}.{kind}.weight"
                torch.testing.assert_close(found[place], part, rtol=1e-3, atol=1e-3)
                compared += 1
    assert compared == sum(key.startswith("gradients/") for key in found)


@pytest.mark.parametrize(
    "sizes, dtype",
    [(SINGLE, "bfloat16"), (TENSOR, "float32"), (PIPELINE, "float32"), (EXPERT, "float32")],
    ids=["single", "tensor", "pipeline", "expert"],
)
def test_weights_come_back_bitwise(folders: dict[str, Path], run: Run, sizes: Mapping[str, int], dtype: str) -> None:
    """Checkpoints are BF16, and fp32 holds their values exactly."""
    for name, ranks in run(sizes, dtype).items():
        saved = {key: tensor for file in checkpoint_files(folders[name]) for key, tensor in load_file(file).items()}
        back = _weights(ranks)
        assert back.keys() == saved.keys()
        for key, tensor in saved.items():
            assert back[key].dtype == getattr(torch, dtype), f"{name}: {key}"
            assert torch.equal(back[key], tensor.to(back[key].dtype)), f"{name}: {key}"


@pytest.mark.parametrize("sizes", [TENSOR, PIPELINE, EXPERT], ids=["tensor", "pipeline", "expert"])
def test_two_ranks_score_as_one(run: Run, sizes: Mapping[str, int]) -> None:
    for name, ranks in run(sizes, "float32").items():
        expected = _logprobs(run(SINGLE, "float32")[name])
        torch.testing.assert_close(
            _logprobs(ranks), expected, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("kind", ["logits", "logprobs"])
def test_gradients_of_hidden_states_that_were_gathered_are_summed_once(run: Run, kind: str) -> None:
    """Both the output layer and chunked log-probabilities add up what tensor ranks have; the gather does not again."""
    for ranks in run(TENSOR, "float32").values():
        for found in ranks:
            assert float(found[f"{kind}/whole"].abs().max()) > 0.1
            torch.testing.assert_close(found[f"{kind}/share"], found[f"{kind}/whole"], rtol=1e-4, atol=1e-4)


def test_each_rank_gives_its_own_layers_and_experts(run: Run) -> None:
    def layers(found: Mapping[str, Tensor]) -> set[str]:
        return {key.split(".")[2] for key in found if key.startswith("weights/model.layers.")}

    first, last = run(PIPELINE, "float32")["qwen3_tied"]
    assert (layers(first), layers(last)) == ({"0"}, {"1"})
    assert "weights/model.embed_tokens.weight" in first and "weights/model.embed_tokens.weight" not in last
    for rank, found in enumerate(run(EXPERT, "float32")["moe"]):
        experts = {key.split(".")[5] for key in found if ".mlp.experts." in key}
        assert experts == {str(2 * rank), str(2 * rank + 1)}


def test_a_model_without_the_stand_in_is_refused(folders: dict[str, Path]) -> None:
    from tasks.engines.megatron_model import build_model

    with pytest.raises(EngineError, match=r"needs megatron_cpu\.install\(\) first"):
        build_model(folders["moe"], compose(["recipe=bf16"]).recipe, Layout(), on_gpu=False, dtype=torch.bfloat16)


def test_several_ranks_need_a_rendezvous() -> None:
    from tasks.engines.megatron_model import start_groups

    with pytest.raises(EngineError, match="rendezvous: none for 2 ranks"):
        start_groups(Layout(tensor=2), on_gpu=False, rendezvous=None, timeout_s=1.0, seed=0)


def test_the_stand_in_refuses_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.engines import megatron_cpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(EngineError, match="this machine has CUDA"):
        megatron_cpu.install()
    assert torch.cuda.current_device is before and not megatron_cpu.installed()


def test_the_stand_in_refuses_a_process_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.engines import megatron_cpu

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="vLLM is loaded in this process"):
        megatron_cpu.install()
    assert not megatron_cpu.installed()


def test_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    from tasks.engines import megatron_cpu

    monkeypatch.setattr(megatron.core, "__version__", "0.17.0")
    with pytest.raises(EngineError, match=r"Megatron Core 0\.17\.0 is installed; .* checked with 0\.16, 0\.19"):
        megatron_cpu.install()
