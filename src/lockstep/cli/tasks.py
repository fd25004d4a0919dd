"""``lockstep tasks``: what there is to train."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from lockstep.cli.arguments import Takes, asks_for_help, parse, switched_on
from lockstep.cli.usage import TASKS_HELP, unexpected_word, unknown_flag
from lockstep.core.errors import UsageError, in_one_line
from lockstep.recipes.catalog import ALGORITHMS, TASKS, engines_of, make_task, recipe_of
from lockstep.recipes.suites import SUITES


def main(argv: Sequence[str]) -> int:
    """Print the tasks and return the exit code."""
    if asks_for_help(argv):
        print(TASKS_HELP, end="")
        return 0
    arguments = parse(argv, _lookup)
    for word in arguments.positionals:
        raise unexpected_word(word)
    as_json = switched_on(arguments, "json")
    rows, problems = _rows()
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
        print("\nEnvs of other libraries are tasks too, named by prefix and id:")
        for suite in map(SUITES.get, SUITES):
            print(f"  {suite.example:<26} {suite.description} ({suite.framework})")
    for problem in (*problems, *TASKS.hidden()):
        print(f"lockstep: warning: {problem}", file=sys.stderr)
    return 0


def _rows() -> tuple[list[dict[str, Any]], list[str]]:
    """Return what there is to know of each task, and why others can't be had: a package's must not hide the rest."""
    rows, problems = [], []
    for name in TASKS:
        try:
            rows.append(describe(name))
        except UsageError as error:
            problems.append(str(error))
        except (Exception, SystemExit) as error:
            problems.append(
                f"{TASKS.origin(name)} can't be shown: {in_one_line(error)}; mend or uninstall that package"
            )
    return rows, problems


def describe(name: str) -> dict[str, Any]:
    """Return what there is to know of a task before training it; sizes are numbers of floats or of choices."""
    entry = TASKS.get(name)
    config = recipe_of(name)
    task = make_task(config)
    return {
        "name": name,
        "engines": {framework: list(engines_of(name, framework)) for framework in ALGORITHMS},
        "algorithms": list(entry.recipes),
        "num_observations": {group: int(size) for group, size in task.num_observations.items()},
        "action": {"kind": str(task.action_space.kind), "size": int(task.action_space.size)},
        "max_episode_steps": config.env.max_episode_steps,
        "time_limit_s": float(config.env.max_episode_steps * task.step_duration_s),
        "description": str(entry.description),
    }


def _lookup(name: str) -> Takes:
    if name != "json":
        raise unknown_flag(name, ["json"])
    return Takes.SWITCH


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    for column in ("task", "algorithms", "engines", "observations", "action", "time limit", "description"):
        table.add_column(column, no_wrap=not terminal)
    for row in rows:
        action = row["action"]
        table.add_row(
            row["name"],
            ", ".join(row["algorithms"]),
            _shown(row["engines"]),
            str(row["num_observations"].get("actor", 0)),
            f"{action['size']} {action['kind']}",
            f"{row['time_limit_s']:g} s",
            row["description"],
        )
    # A pipe or file has no width: let the rows be as long as they are.
    Console(markup=False, highlight=False, width=None if terminal else 500).print(table)


def _shown(engines: dict[str, list[str]]) -> str:
    """Return the engines of all frameworks, and of those that one alone has, which."""
    names = dict.fromkeys(name for known in engines.values() for name in known)
    where = {name: [framework for framework, known in engines.items() if name in known] for name in names}
    return ", ".join(name if len(where[name]) == len(engines) else f"{name} ({where[name][0]})" for name in names)
