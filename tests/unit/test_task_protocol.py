"""A task that forgets a method is told which when it is made, and not by what comes of it."""

from pathlib import Path

import pytest

from lockstep.core.types import AnalyticTask, Task
from tests.unit.learner_fixtures import Line
from tests.unit.pool_fixtures import Puck


@pytest.mark.parametrize("name", ["reset", "control", "advance", "observations", "rewards", "terminations"])
def test_a_task_that_lacks_a_method_is_not_made(name: str, tmp_path: Path) -> None:
    forgetful = type("Forgetful", (Puck,), {name: getattr(Task, name)})
    with pytest.raises(TypeError, match=f"abstract class Forgetful .*{name}"):
        forgetful(tmp_path)


def test_nor_is_one_that_lacks_its_equations_of_motion() -> None:
    forgetful = type("Forgetful", (Line, AnalyticTask), {"dynamics": AnalyticTask.dynamics})
    with pytest.raises(TypeError, match=r"abstract class Forgetful .*dynamics"):
        forgetful()


def test_what_has_a_body_may_be_left_as_it_is(tmp_path: Path) -> None:
    plain = type("Plain", (Puck,), {name: getattr(Task, name) for name in ("vary_model", "push", "metrics")})
    plain(tmp_path)
