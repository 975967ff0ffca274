"""The commands `sweep` and `report`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conf.compose import compose
from conf.overrides import override_key
from conf.problems import ConfigError
from conf.schema.base import counted
from flows.environment import SERVER_START_S, embedded_prefect, prepare_environment, tracking_uri
from flows.exits import OK, UNFINISHED, failed
from flows.sweep_plan import plan_sweep


def add_sweep_commands(commands: Any, epilog: str) -> None:
    """Add both to the parsers of `fp8-grpo`."""
    text = "run recipes x seeds and compare them"
    sweep = commands.add_parser("sweep", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog)
    sweep.add_argument(
        "overrides",
        nargs="*",
        metavar="[SWEEP] KEY=VALUE",
        help="option of the group sweep (nightly without one), then such as steps=20 'sweep.seeds=[0,1]'",
    )
    sweep.add_argument("--sweep-id", metavar="ID", help="go on with this sweep: its finished runs are not repeated")
    text = "compare the runs of a sweep from MLflow alone, and store report.html there"
    report = commands.add_parser("report", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog)
    report.add_argument("sweep_id", metavar="SWEEP_ID", help="value of the tag sweep_id of the runs")
    report.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="where MLflow is; sweep.* for other gates")


def run_sweep(arguments: Sequence[str], sweep_id: str | None) -> int:
    """Run a sweep to its end; 1 when a run failed or the corridor was left, 3 when its allocation was used up."""
    named = [text for text in arguments if "=" not in text and not text.startswith("~")]
    if len(named) > 1:
        raise ConfigError([f"{' '.join(named)}: more than one sweep; allowed: one option of the group sweep"])
    overrides = [text for text in arguments if text not in named]
    sweep = named[0] if named else "nightly"
    # For exit code 2; the flow plans again, as it must from a deployment.
    config, _ = plan_sweep(sweep, overrides, "new" if sweep_id is None else sweep_id, None)
    prepare_environment(local_ray=False)
    server = embedded_prefect(Path(config.runs_dir))
    # Imported here: prefect and mlflow read their settings from the environment on import.
    from mlflow.exceptions import MlflowException

    from flows.failures import RUN_FAILURES, is_unreachable_server
    from flows.sweep import SweepError, precision_sweep
    from flows.sweep_children import ChildError
    from infra.mlflow_read import MlflowReadError

    try:
        if server is not None:
            server.wait(SERVER_START_S)
        result = precision_sweep(sweep, overrides, sweep_id)
    except (SweepError, ChildError, MlflowReadError, MlflowException, *RUN_FAILURES) as error:
        return failed(error)
    except RuntimeError as error:
        if not is_unreachable_server(error):
            raise
        return failed(error)
    if result["unfinished"]:
        if result["failed"]:
            print(
                f"{counted(len(result['failed']), 'run')} failed, to be tried again last: {', '.join(result['failed'])}"
            )
        again = shlex.join(["fp8-grpo", "sweep", sweep, *overrides, "--sweep-id", result["sweep_id"]])
        print(f"{counted(len(result['unfinished']), 'run')} not finished; this goes on: {again}")
        return UNFINISHED
    return OK


def show_report(sweep_id: str, overrides: Sequence[str], console: Console) -> int:
    """Rebuild and print the report of a sweep."""
    config = compose(list(overrides))
    prepare_environment(local_ray=False)
    from mlflow.exceptions import MlflowException

    from flows.comparison_tables import headline, judgement_rows, recipe_rows
    from flows.sweep_report import make_report, sweep_folder
    from infra.mlflow_read import MlflowReadError

    uri = tracking_uri(config.tracking.uri, Path(config.runs_dir))
    own = any(override_key(text).partition(".")[0] == "sweep" for text in overrides)
    try:
        written = make_report(uri, config, sweep_id, own, sweep_folder(config, sweep_id))
    except (MlflowReadError, MlflowException) as error:
        return failed(error)
    if rows := recipe_rows(written.comparison):
        console.print(_table(rows, f"sweep {sweep_id}"))
    for row in judgement_rows(written.comparison):
        console.print(f"{row['recipe']}: {row['outcome']}: {row['gate']}: {row['why']}", markup=False, soft_wrap=True)
    for line in (*written.comparison.regressions, *written.comparison.notes, headline(written.comparison)):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"report: {written.folder / 'report.html'}", markup=False, soft_wrap=True)
    return OK


def _table(rows: list[dict[str, str]], title: str) -> Table:
    """Recipes as columns: there are more figures than a terminal has room for side by side."""
    # As plain text: what others call a recipe is no markup.
    table = Table(title=Text(title), title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(Text(row["recipe"]), justify="right")
    for name in list(rows[0])[1:]:
        table.add_row(name, *(Text(row[name]) for row in rows))
    return table
