"""The command `fp8-grpo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from conf.compose import compose
from conf.problems import ConfigError
from flows.environment import embedded_prefect, prepare_environment, tracking_uri
from flows.inputs import check_inputs
from flows.planning import describe
from tasks.data.examples import DataError

OK, FAILED, CONFIG_ERROR, INTERRUPTED = 0, 1, 2, 130
_SERVER_START_S = 120.0

_EPILOG = (
    "KEY=VALUE sets any key of the configuration (folder conf/; --dry-run prints it resolved), GROUP=OPTION chooses a "
    "file of a group: recipe, algorithm, correction, model, data, rollout, trainer, cluster, tracking, storage, "
    "benchmark. "
    "resume=auto goes on from the newest checkpoint of the same configuration. "
    "Exit codes: 0 done, 1 failed, 2 configuration refused, 130 interrupted."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 the run failed, 2 the configuration was refused, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(prog="fp8-grpo", description="GRPO post-training with FP8 precision end to end.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="run GRPO training", description="Run GRPO training.", epilog=_EPILOG)
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as recipe=fp8_e2e steps=20 seed=1")
    train.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the plan, and exit")
    for name, text in (
        ("benchmark", "measure the rollout engine: BF16, FP8 linear layers, FP8 linear layers and KV cache"),
        ("doctor", "print what this machine can do and which recipes it can run"),
    ):
        other = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EPILOG)
        other.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as model=qwen3_8b_base")
    text = "write a checkpoint of a run as a plain Hugging Face folder, weights in BF16"
    export = commands.add_parser("export", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EPILOG)
    export.add_argument("run", metavar="RUN", help="name of the run, as its folder and its checkpoints have it")
    export.add_argument("destination", metavar="DEST", type=Path, help="folder to write: empty, or not there yet")
    export.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="where the run's store is: storage.url=...")
    export.add_argument("--step", type=int, help="step of the checkpoint; the newest without it")
    export.add_argument("--model", type=Path, help="folder of the model that the run began with, if it has moved")
    parsed, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # argparse leaves over what stands behind an option in the midst of them.
    parsed.overrides += rest
    try:
        if parsed.command == "benchmark":
            return _benchmark(parsed.overrides)
        if parsed.command == "doctor":
            return _doctor(parsed.overrides)
        if parsed.command == "export":
            return _export(parsed)
        return _train(parsed.overrides, parsed.dry_run)
    except ConfigError as error:
        print(f"fp8-grpo: {error}", file=sys.stderr)
        return CONFIG_ERROR
    except KeyboardInterrupt:
        print(
            "fp8-grpo: interrupted; the same command with resume=auto goes on from the last checkpoint", file=sys.stderr
        )
        return INTERRUPTED


def _train(overrides: list[str], dry_run: bool) -> int:
    config = compose(overrides)
    plan = check_inputs(config, starts=not dry_run)
    if dry_run:
        print(describe(config, plan))
        return OK
    runs_dir = Path(config.runs_dir)
    prepare_environment(local_ray=config.cluster.kind == "local")
    server = embedded_prefect(runs_dir)
    # Imported here: prefect, ray and mlflow read their settings from the environment on import.
    from flows.failures import RUN_FAILURES
    from flows.train import fp8_grpo

    try:
        if server is not None:
            server.wait(_SERVER_START_S)
        result = fp8_grpo(overrides)
    except RuntimeError as error:
        # Prefect has no type of its own for a server that does not answer.
        if not isinstance(error, RUN_FAILURES) and "Failed to reach API" not in str(error):
            raise
        return _failed(error)
    except RUN_FAILURES as error:
        return _failed(error)
    print(f"report: {result['folder']}/report.md")
    print(f"MLflow: {_how_to_see(tracking_uri(config.tracking.uri, runs_dir))}")
    return OK


def _wide() -> Console:
    """A console for tables: as wide as the terminal, 140 columns where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def _benchmark(overrides: list[str]) -> int:
    # Imported here: matplotlib and mlflow take seconds.
    from flows.benchmark import run_benchmark
    from tasks.engines.protocols import EngineError

    try:
        folder = run_benchmark(overrides, _wide())
    except EngineError as error:
        return _failed(error)
    print(f"rows and picture: {folder}")
    return OK


def _doctor(overrides: list[str]) -> int:
    prepare_environment(local_ray=False)
    # Imported here: ray reads its settings from the environment on import.
    from flows.doctor import doctor

    return OK if doctor(overrides, _wide()) else FAILED


def _export(parsed: argparse.Namespace) -> int:
    from flows.export import export_run
    from infra.store import CheckpointStore, StoreError
    from infra.store_files import absolute_url
    from tasks.engines.protocols import EngineError

    storage = compose(parsed.overrides).storage
    try:
        store = CheckpointStore(absolute_url(storage.url), dict(storage.options))
        step, written = export_run(store, parsed.run, parsed.destination.absolute(), parsed.step, parsed.model)
    except (EngineError, StoreError, OSError) as error:
        return _failed(error)
    size, files = written.bytes / 1e9, "file" if len(written.files) == 1 else "files"
    print(
        f"run {parsed.run}, step {step}: {written.tensors} tensors, {size:.3f} GB in {len(written.files)} {files}: "
        f"{parsed.destination}"
    )
    return OK


def _failed(error: Exception) -> int:
    print(f"fp8-grpo: {type(error).__name__}: {error}", file=sys.stderr)
    return CONFIG_ERROR if isinstance(error, DataError) else FAILED


def _how_to_see(uri: str) -> str:
    """The command that shows a local store; a server is only named, without a password that its URI may hold."""
    if uri.startswith(("http:", "https:")):
        parts = urlsplit(uri)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in uri:
        return "see MLFLOW_TRACKING_URI"
    return f"{Path(sys.executable).parent / 'mlflow'} ui --backend-store-uri {uri}"
