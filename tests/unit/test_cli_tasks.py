import json

import pytest

from lockstep.cli.main import main
from lockstep.recipes.catalog import TASKS
from lockstep.recipes.suites import SUITES


def test_the_table_has_a_line_for_each_task_and_needs_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    table, _, suites = capsys.readouterr().out.partition("\n\n")
    header, *lines = table.splitlines()
    assert header.split() == ["task", "algorithms", "engines", "observations", "action", "time", "limit", "description"]
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert lines[0].split()[1:7] == ["ppo,", "sac", "analytic", "4", "1", "continuous"]
    assert lines[2].split()[3:6] == ["mujoco,", "mjx", "(jax)"]
    assert [line.split()[0].partition("/")[0] for line in suites.splitlines()[1:]] == list(SUITES)


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "--json"]) == 0
    classic = json.loads(capsys.readouterr().out)[0]
    assert classic["name"] == "cartpole_classic"
    assert classic["engines"] == {"torch": ["analytic"], "jax": ["analytic"]}
    assert classic["algorithms"] == ["ppo", "sac"]
    assert classic["num_observations"]["actor"] == 4
    assert classic["action"] == {"kind": "continuous", "size": 1}
    assert classic["time_limit_s"] == pytest.approx(10.0)  # 500 steps of 0.02 s


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--jsn"], "unknown flag '--jsn'; did you mean '--json'?"),
        (["cartpole"], "unexpected 'cartpole'"),
        (["--json", "--json"], "--json is given twice"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", *argv]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "--help"]) == 0
    assert "usage: lockstep tasks [--json]" in capsys.readouterr().out
