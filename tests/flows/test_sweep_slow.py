"""A sweep as a person runs it: one recipe fails for real, the other is reported; going on repeats only what failed."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from conf.compose import compose
from flows.notify import notify
from flows.sweep_report import stored_plan
from infra.mlflow_read import sweep_runs
from tests.flows.runs import Finished, fp8_grpo, succeeded
from tests.flows.servers import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TWO = ("smoke", "sweep.recipes=[bf16,fp8_rollout_kv]", "sweep.seeds=[0]", "sweep.registry=fp8-grpo")
NO_MODEL_MEETS = ("rollout.kv_preflight.warn=1e-9", "rollout.kv_preflight.refuse=1e-9")


def _sweep(folder: Path, *arguments: str) -> Finished:
    places = (f"runs_dir={folder}/runs", f"storage.url={folder}/checkpoints")
    return fp8_grpo(["sweep", *TWO, *places, "--sweep-id", "night", *arguments])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """The pre-flight refuses the FP8 cache, as it would on a model that cannot bear one."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, _sweep(folder, *NO_MODEL_MEETS)


def _client(folder: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{folder}/runs/mlflow.db")


def test_one_failing_child_loses_no_other_and_fails_the_sweep(sweep: tuple[Path, Finished]) -> None:
    folder, done = sweep
    assert done.code == 1, done.out
    assert "1/2 night-bf16-s0: done" in done.out
    assert "2/2 night-fp8_rollout_kv-s0: failed" in done.out
    assert "SweepError: sweep night: run night-fp8_rollout_kv-s0: exit code 2" in done.out
    log = folder / "runs" / "sweeps" / "night" / "logs" / "night-fp8_rollout_kv-s0.log"
    assert "rollout.kv_preflight.refuse" in log.read_text()
    figures = json.loads((folder / "runs" / "sweeps" / "night" / "comparison.json").read_text())
    assert [variant["variant"] for variant in figures["variants"]] == ["bf16"]
    assert figures["lost"] == {"night-fp8_rollout_kv-s0": "FAILED"}
    assert figures["corridors"]["fp8_rollout_kv"][0]["place"] == "missing"


def test_its_runs_are_flat_and_tagged_in_mlflow(sweep: tuple[Path, Finished]) -> None:
    folder, _ = sweep
    client = _client(folder)
    (run, _failed) = sweep_runs(client, "fp8-grpo", "night")
    expected = {"sweep_id": "night", "sweep": "smoke", "recipe": "bf16", "seed": "0", "axes": "{}", "gpus": "0"}
    assert expected.items() <= run.tags.items()
    assert len(run.tags["parent_flow_run_id"]) == 36 and len(run.tags["config_digest"]) == 64
    assert run.latest["speedup/step_vs_bf16"] == run.latest["speedup/rollout_vs_bf16"] == 1.0
    assert not any(name.startswith("sweep.") for name in run.params)
    plan = stored_plan(client, "fp8-grpo", "night")
    assert plan is not None and plan[0] == compose(["sweep=smoke", *TWO[1:]]).sweep
    assert [child.name for child in plan[1]] == ["night-bf16-s0", "night-fp8_rollout_kv-s0"]


def test_going_on_runs_what_failed_and_nothing_else(sweep: tuple[Path, Finished]) -> None:
    folder, _ = sweep
    before = (folder / "runs" / "night-bf16-s0" / "journal.jsonl").read_bytes()
    other = _sweep(folder, "steps=3")
    assert other.code == 2 and "had another configuration in it" in other.out
    done = succeeded(_sweep(folder))
    assert "2 runs, 1 of them done before" in done.out
    assert (folder / "runs" / "night-bf16-s0" / "journal.jsonl").read_bytes() == before
    figures = json.loads((folder / "runs" / "sweeps" / "night" / "comparison.json").read_text())
    bf16, fp8 = figures["variants"]
    assert (bf16["recipe"], fp8["recipe"]) == ("bf16", "fp8_rollout_kv") and not figures["lost"]
    assert fp8["difference"]["seeds"] == 1 and fp8["accuracy"]["low"] is not None
    assert fp8["rollout_speedup"]["value"] > 0 and fp8["rollout_speedup"]["low"] is None
    assert set(fp8["curves"]["scales"]) == {f"layer {layer} {part}" for layer in (0, 1) for part in "qkv"}
    assert len(fp8["curves"]["scales"]["layer 0 q"]) == 4
    assert fp8["by_position"] and fp8["curves"]["mismatch"]["0"]
    client = _client(folder)
    champion = client.get_model_version_by_alias("fp8-grpo-tiny_qwen3-fp8_rollout_kv", "champion")
    manifest = Path(champion.tags["manifest"])
    assert manifest.is_file() and json.loads(manifest.read_text())["step"] == 4
    rebuilt = fp8_grpo(["report", "night", f"runs_dir={folder}/runs"])
    assert rebuilt.code == 0 and "not enough data" in rebuilt.out, rebuilt.out


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """A web hook: its url, and what it was told."""
    told: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", told
    server.shutdown()


def test_a_notification_block_is_told(listener: tuple[str, list[str]], tmp_path: Path) -> None:
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.testing.utilities import prefect_test_harness

    url, told = listener
    with prefect_test_harness(server_startup_timeout=120):
        body = {"text": "{{subject}}: {{body}}"}
        block = CustomWebhookNotificationBlock(name="w", url=url, json_data=body, allow_private_urls=True)
        block.save("nightly")
        assert notify("custom-webhook/nightly", "sweep x failed", "bf16: accuracy below")
        assert not notify("custom-webhook/missing", "s", "b")
    assert [json.loads(text) for text in told] == [{"text": "sweep x failed: bf16: accuracy below"}]


def test_mlflow_that_does_not_answer_is_told_with_the_way_on(tmp_path: Path) -> None:
    done = _sweep(tmp_path, f"tracking.uri=http://127.0.0.1:{free_port()}")
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if "SweepError" in line]
    assert "sweep night: MLflow: " in line and "--sweep-id night goes on" in line and "Traceback" not in done.out
