"""The command `fp8-grpo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conf.compose import compose
from conf.problems import ConfigError
from flows.environment import prepare_environment, tracking_uri
from flows.inputs import check_inputs
from flows.planning import describe
from tasks.data.examples import DataError

OK, FAILED, CONFIG_ERROR, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 the run failed, 2 the configuration was refused, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(prog="fp8-grpo", description="GRPO post-training with FP8 precision end to end.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="run GRPO training", description="Run GRPO training.")
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as recipe=fp8_e2e steps=20 seed=1")
    train.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the plan, and exit")
    parsed = parser.parse_args(arguments)
    try:
        return _train(parsed.overrides, parsed.dry_run)
    except ConfigError as error:
        print(f"fp8-grpo: the configuration is refused:\n{error}", file=sys.stderr)
        return CONFIG_ERROR
    except KeyboardInterrupt:
        print("fp8-grpo: interrupted; resume=auto continues from the last checkpoint", file=sys.stderr)
        return INTERRUPTED


def _train(overrides: list[str], dry_run: bool) -> int:
    config = compose(overrides)
    plan = check_inputs(config)
    if dry_run:
        print(describe(config, plan))
        return OK
    runs_dir = Path(config.runs_dir)
    prepare_environment(runs_dir, local_ray=config.cluster.kind == "local")
    # Imported here: prefect, ray and mlflow read their settings from the environment on import.
    from flows.failures import RUN_FAILURES
    from flows.train import fp8_grpo

    try:
        result = fp8_grpo(overrides)
    except RUN_FAILURES as error:
        print(f"fp8-grpo: {type(error).__name__}: {error}", file=sys.stderr)
        return CONFIG_ERROR if isinstance(error, DataError) else FAILED
    print(f"report: {result['folder']}/report.md")
    mlflow, uri = Path(sys.executable).parent / "mlflow", tracking_uri(config.tracking.uri, runs_dir)
    print(f"MLflow: {mlflow} ui --backend-store-uri {uri}")
    return OK
