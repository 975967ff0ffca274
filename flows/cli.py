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
from flows.cli_sweep import add_sweep_commands, run_sweep, show_report
from flows.environment import SERVER_START_S, embedded_prefect, prefect_api_url, prepare_environment, tracking_uri
from flows.exits import CONFIG_ERROR, FAILED, INTERRUPTED, OK, UNFINISHED, failed
from flows.form import form_fields
from flows.inputs import check_inputs, pausing_problems
from flows.planning import describe

_AFTER_INTERRUPT = {
    "train": "the same command with resume=auto goes on from the last checkpoint, and begins anew where there is none",
    "sweep": "the same command with --sweep-id and the id of this sweep goes on",
    "submit": "what was submitted goes on",
}
"""What an interrupt leaves, by command."""

_EPILOG = (
    "KEY=VALUE sets any key of the configuration (folder conf/; --dry-run prints it resolved), GROUP=OPTION chooses a "
    "file of a group: recipe, algorithm, correction, model, data, rollout, trainer, cluster, deadlines, breakers, "
    "tracking, storage, benchmark, sweep. "
    "resume=auto goes on from the newest checkpoint of the same configuration. "
    "Exit codes: 0 done, 1 failed, 2 configuration refused, 3 allocation used up (the same command goes on), 4 an "
    "engine failed, 5 an engine missed its deadline, 6 a breaker stopped the run, 7 nothing was trained, 8 all rewards "
    "were equal, 130 interrupted."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code, one of `flows.exits`."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # argparse leaves over what stands behind an option in the midst of them.
    parsed.overrides += rest
    try:
        return _run(parsed)
    except ConfigError as error:
        print(f"fp8-grpo: {error}", file=sys.stderr)
        return CONFIG_ERROR
    except KeyboardInterrupt:
        then = _AFTER_INTERRUPT.get(parsed.command)
        print(f"fp8-grpo: interrupted{f'; {then}' if then else ''}", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8-grpo", description="GRPO post-training with FP8 precision end to end.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="run GRPO training", description="Run GRPO training.", epilog=_EPILOG)
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as recipe=fp8_e2e steps=20 seed=1")
    train.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the plan, and exit")
    text = "run the deployment fp8-grpo/fp8-grpo on the configured Prefect server"
    about = f"{text[0].upper()}{text[1:]}; a worker does the work."
    sent = commands.add_parser("submit", help=text, description=about, epilog=_EPILOG)
    sent.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train")
    sent.add_argument("--deployment", default="fp8-grpo/fp8-grpo", metavar="FLOW/NAME", help="default: %(default)s")
    sent.add_argument("--watch", action="store_true", help="wait for the end; exit 1 unless it completed")
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
    text = "write a model that a Python package ships as a Hugging Face folder whose weights fill FP8 blocks"
    about = f"{text[0].upper()}{text[1:]}; its function stays."
    prepare = commands.add_parser("prepare", help=text, description=about, epilog=_EPILOG)
    prepare.add_argument("overrides", nargs="+", metavar="model=NAME [DEST]", help="DEST: model.path without it")
    prepare.add_argument("--gguf", type=Path, metavar="FILE", help="the package's GGUF file, if it lies elsewhere")
    add_sweep_commands(commands, _EPILOG)
    return parser


def _run(parsed: argparse.Namespace) -> int:
    commands = {
        "train": lambda: _train(parsed.overrides, parsed.dry_run),
        "submit": lambda: _submit(parsed),
        "sweep": lambda: run_sweep(parsed.overrides, parsed.sweep_id),
        "report": lambda: show_report(parsed.sweep_id, parsed.overrides, _wide()),
        "benchmark": lambda: _benchmark(parsed.overrides),
        "doctor": lambda: _doctor(parsed.overrides),
        "export": lambda: _export(parsed),
        "prepare": lambda: _prepare(parsed.overrides, parsed.gguf),
    }
    return commands[parsed.command]()


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
    from flows.failures import RUN_FAILURES, is_unreachable_server, run_failed
    from flows.train import fp8_grpo

    try:
        if server is not None:
            server.wait(SERVER_START_S)
        result = fp8_grpo(**form_fields(overrides))
    except RUN_FAILURES as error:
        return run_failed(error)
    except RuntimeError as error:
        if not is_unreachable_server(error):
            raise
        return failed(error)
    if "stopped_after" in result:
        return UNFINISHED
    print(f"report: {result['folder']}/report.md")
    print(f"MLflow: {_how_to_see(tracking_uri(config.tracking.uri, runs_dir))}")
    return OK


def _submit(parsed: argparse.Namespace) -> int:
    if problems := pausing_problems(compose(parsed.overrides), server=True, deployed=True):
        raise ConfigError(problems)
    prepare_environment(local_ray=False)
    if prefect_api_url() is None:
        allowed = "PREFECT_API_URL=http://HOST:4200/api, or an active profile that has it"
        raise ConfigError([f"PREFECT_API_URL: no Prefect server is configured; allowed: {allowed}"])
    # Imported here: prefect reads its settings from the environment on import.
    from flows.submit import SubmitError, submit, watch

    try:
        run = submit(parsed.overrides, parsed.deployment)
        print(f"flow run {run.name}: {run.url}", flush=True)
        return watch(run) if parsed.watch else OK
    except SubmitError as error:
        return failed(error)


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
        return failed(error)
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
        return failed(error)
    size, files = written.bytes / 1e9, "file" if len(written.files) == 1 else "files"
    print(
        f"run {parsed.run}, step {step}: {written.tensors} tensors, {size:.3f} GB in {len(written.files)} {files}: "
        f"{parsed.destination}"
    )
    return OK


def _prepare(arguments: list[str], gguf: Path | None) -> int:
    folders = [text for text in arguments if "=" not in text]
    if len(folders) > 1:
        raise ConfigError([f"destination = {', '.join(folders)}: {len(folders)} folders; allowed: one, or none"])
    model = compose([text for text in arguments if "=" in text]).model
    # Imported here: transformers takes seconds.
    from flows.prepare import prepare_model
    from tasks.engines.protocols import EngineError

    destination = Path(folders[0]) if folders else None
    try:
        made = prepare_model(model, destination, gguf)
    except (EngineError, OSError) as error:
        return failed(error)
    old, new = made.padding.before, made.padding.after
    print(
        f"{model.name}: hidden {old.hidden} -> {new.hidden}, heads {old.heads}/{old.groups} -> "
        f"{new.heads}/{new.groups} of {new.head_dim} channels, MLP {old.mlp} -> {new.mlp}; "
        f"{made.parameters:,} parameters, {made.bytes / 1e9:.3f} GB: {destination or model.path}"
    )
    return OK


def _how_to_see(uri: str) -> str:
    """The command that shows a local store; a server is only named, without a password that its URI may hold."""
    if uri.startswith(("http:", "https:")):
        parts = urlsplit(uri)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in uri:
        return "see MLFLOW_TRACKING_URI"
    return f"{Path(sys.executable).parent / 'mlflow'} ui --backend-store-uri {uri}"
