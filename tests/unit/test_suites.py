"""Tasks that are not lockstep's own: suites of envs, named by prefix, and what installed packages register."""

import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from lockstep.cli.arguments import is_mapping
from lockstep.cli.main import main
from lockstep.cli.train_request import read
from lockstep.core import distributions, plugins
from lockstep.core.config import settings
from lockstep.core.distributions import Distribution
from lockstep.core.errors import UsageError
from lockstep.learn.agent_config import AGENTS
from lockstep.recipes.catalog import TASKS, make_task, recipe_of, require_model
from lockstep.recipes.libraries import LIBRARIES, OWN, algorithms_of
from lockstep.recipes.task_registry import GROUP as TASKS_GROUP
from lockstep.session.make_config import make_config
from lockstep.session.runner import GROUP as RUNNERS_GROUP
from lockstep.session.runner import load_runner
from tests.unit.cli_train_fixtures import refused

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Returns what puts a package on the path: its name, its entry points by group, and the code of its module."""

    def install(name: str, points: dict[str, str], code: str = "") -> None:
        folder = tmp_path / name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("".join(f"[{group}]\n{line}\n" for group, line in points.items()))
        (folder / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(str(folder))
        plugins.registered.cache_clear()

    yield install
    plugins.registered.cache_clear()


ENTRY = """
from lockstep.recipes.catalog import TaskEntry

def kite():
    return TaskEntry(
        name="kite",
        description="fly",
        task="lockstep.tasks.cartpole_classic.task:CartpoleClassic",
        recipe="{module}:recipe",
        engines=("analytic",),
    )

def recipe():
    from lockstep.recipes.cartpole import cartpole_classic
    return cartpole_classic().model_copy(update={{"task": "kite"}})
"""


def version_is(here: str | None) -> Callable[[str], str]:
    """Return what tells the version of any distribution; None: it is not installed."""

    def version(name: str) -> str:
        if here is None:
            raise PackageNotFoundError(name)
        return here

    return version


def wrong(name: str) -> str:
    with pytest.raises(UsageError) as error:
        TASKS.get(name)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- suites ------------------------------------------------------------------------------------------------------


def test_an_env_of_a_suite_is_a_task_by_its_prefix() -> None:
    entry = TASKS.get("gymnasium/CartPole-v1")
    assert (entry.env_id, entry.engines) == ("CartPole-v1", ("gymnasium",))
    config = make_config("gymnasium/CartPole-v1")
    assert (config.task, config.env.max_episode_steps) == ("gymnasium/CartPole-v1", 500)
    task = make_task(config)
    assert (task.action_space.kind, task.action_space.size, task.num_observations["actor"]) == ("discrete", 2, 4)
    assert task.step_duration_s == 0.02


def test_names_are_told_from_flags_values_without_asking_any_library() -> None:
    assert "brax/anything" in TASKS
    assert "gymnasium/" not in TASKS
    assert "nothing/ant" not in TASKS
    assert 3 not in TASKS
    assert not any("/" in name for name in TASKS)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("gymnasium/HalfCheetah-v99", "HalfCheetah-v5"),
        ("gymnasium/CartPoll-v1", "CartPole-v1"),
        ("envpool/CartPoll-v1", "CartPole-v1"),
        ("gymnasum/CartPole-v1", "gymnax/CartPole-v1"),
        ("HalfCheetah-v5", "gymnasium/HalfCheetah-v5"),
    ],
)
def test_an_unknown_env_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    assert f"did you mean '{nearest}'?" in wrong(name)


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (None, "t needs gymnasium, not installed here; install it with: pip install 'lockstep-rl[gymnasium]'"),
        ("1.0.9", "t needs gymnasium from 1.1 on, below 2, and 1.0.9 is here; install it"),
        ("2.0rc1", "t needs gymnasium from 1.1 on, below 2, and 2.0rc1 is here; install it"),
        ("1.1.0+local", ""),
        ("1.10", ""),
    ],
)
def test_a_library_must_be_there_in_a_version_that_will_do(
    here: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributions, "version", version_is(here))
    library = Distribution("gymnasium", "gymnasium", at_least="1.1", below="2")
    if words:
        with pytest.raises(UsageError, match=re.escape(words)):
            library.require("t")
    else:
        library.require("t")


def test_an_env_whose_library_is_missing_is_refused_before_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions, "version", version_is(None))
    assert wrong("envpool/NotLookedUp-v1") == (
        "task envpool/NotLookedUp-v1 needs envpool, not installed here; install it with: pip install "
        "'lockstep-rl[envpool]'"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ml_framework", "jax"], "is for ml_framework torch, not jax; use --ml_framework torch"),
        (["--engine", "mujoco"], "has physics of its own; leave --engine out"),
        (["--video"], "is an env of another library, and films are of lockstep's own tasks; leave --video and"),
        (["--env.decimation", "4"], "env: decimation 4 is not to be had: the env has physics of its own"),
        (
            ["--algorithm", "sac"],
            "(it is with --rl_library skrl or sb3): task gymnasium/CartPole-v1 has recipes for ppo",
        ),
        (["--env.kwargs", "4"], "is a mapping: write --env.kwargs.NAME VALUE"),
        (["--env.num_physics_threads", "2"], "env: num_physics_threads 2 is not to be had: envs are stepped one after"),
        (["--env.kwargs.max_episode_steps", "9"], "is not Gymnasium's to be told here; give --env.max_episode_steps N"),
        (["--env.kwargs.id", "9"], "env.kwargs.id is not Gymnasium's to be told here; name another task"),
        (["--env.kwargs.colour", "red"], "Gymnasium can't make env 'CartPole-v1': TypeError"),
    ],
)
def test_what_an_env_of_a_suite_can_not_be_is_said_in_one_line(flags: list[str], words: str) -> None:
    assert words in refused("gymnasium/CartPole-v1", *flags)


@pytest.mark.parametrize("task", ["brax/ant", "gymnax/Pendulum-v1", "playground/CartpoleBalance"])
def test_threads_are_refused_where_nothing_takes_them(task: str) -> None:
    assert "num_physics_threads 2 is not to be had" in refused(task, "--env.num_physics_threads", "2")
    assert read(["envpool/CartPole-v1", "--env.num_physics_threads", "2"]).config.env.num_physics_threads == 2


# --- suites and libraries of learners ----------------------------------------------------------------------------

OTHERS = [name for name in LIBRARIES if name != OWN]


@pytest.mark.parametrize("library", OTHERS)
@pytest.mark.parametrize("task", ["gymnasium/Pendulum-v1", "envpool/Pendulum-v1", "quadruped_velocity_flat"])
def test_a_library_may_train_any_task_by_any_algorithm_that_it_has(task: str, library: str) -> None:
    basis = recipe_of(task)
    for framework in ("torch",) if "/" in task else algorithms_of(library):
        for algorithm in algorithms_of(library)[framework]:
            flags = ["--rl_library", library, "--algorithm", algorithm, "--ml_framework", framework]
            config = read([task, *flags, "--num_envs", "64"]).config
            assert (config.rl_library, config.algorithm, type(config.agent)) == (library, algorithm, AGENTS[algorithm])
            assert (config.task, config.env, config.max_iterations) == (task, basis.env, basis.max_iterations)
            again = make_config(**config.model_dump(mode="json"))  # as from a checkpoint
            assert again == config


def test_the_library_may_stand_in_an_overlay_file_and_in_the_config_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = tmp_path / "sac.yaml"
    overlay.write_text("rl_library: sb3\nalgorithm: sac\n")
    assert read(["gymnasium/Pendulum-v1", "--config", str(overlay)]).config.agent == AGENTS["sac"]()
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("task: gymnasium/Pendulum-v1\nrl_library: sb3\nalgorithm: sac\n")
    (run / "run.json").write_text("{}")
    assert read(["--resume", str(run)]).config.algorithm == "sac"
    assert main(["train", "gymnasium/Pendulum-v1", "--rl_library", "sb3", "--algorithm", "sac", "--help"]) == 0
    assert "temperature_learning_rate" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["gymnasium/CartPole-v1", "envpool/CartPole-v1", "brax/ant"])
def test_the_help_shows_how_keyword_arguments_are_given(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", task, "--help"]) == 0
    shown = capsys.readouterr().out
    for name, setting in settings(recipe_of(task)).items():
        assert f"--{name}{'.NAME' if is_mapping(setting) else ''} " in shown
    assert "--env.kwargs.NAME VALUE" in shown


@pytest.mark.parametrize("more", [[], ["--ml_framework", "torch"], ["--ml_framework", "jax"]])
@pytest.mark.parametrize("task", ["brax/ant", "gymnax/CartPole-v1", "playground/CartpoleBalance"])
def test_a_mend_leads_to_a_training(task: str, more: list[str]) -> None:
    wanting = [name for name in OTHERS if "jax" not in algorithms_of(name)]
    assert len(wanting) >= 3
    for library in wanting:
        said = refused(task, "--rl_library", library, *more)
        assert said == (
            f"task {task} is for ml_framework jax, which rl_library {library} has no learners for; use --rl_library "
            "lockstep or skrl"
        )
    for library in ("lockstep", "skrl"):
        assert read([task, "--rl_library", library, "--ml_framework", "jax"]).config.rl_library == library
    assert refused(task, "--rl_library", "skrl", "--algorithm", "td3", *more) == (
        f"algorithm 'td3' is not available: task {task} is for ml_framework jax, for which rl_library skrl has ppo, sac"
    )


def test_a_task_of_our_own_needs_no_suite() -> None:
    assert require_model(recipe_of("cartpole_balance")).name == "model.xml"


# --- packages ----------------------------------------------------------------------------------------------------


def test_a_package_registers_a_task_that_is_loaded_when_it_is_asked_for(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("kite_package", {TASKS_GROUP: "kite = kite_package:kite"}, ENTRY.format(module="kite_package"))
    assert "kite" in TASKS
    assert list(TASKS)[-1] == "kite"
    assert make_config("kite").env.max_episode_steps == 500
    assert main(["tasks"]) == 0
    assert "kite" in [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]


def test_a_broken_package_is_a_warning_and_hides_nothing(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("torn", {TASKS_GROUP: "torn = torn:entry"}, "raise RuntimeError('no wind\\ntoday')")
    install("vain", {TASKS_GROUP: "cartpole_balance = vain:entry"})
    assert wrong("torn") == (
        "task 'torn' of torn can't be loaded: RuntimeError: no wind; mend or uninstall that package"
    )
    assert main(["tasks"]) == 0
    printed = capsys.readouterr()
    assert "quadruped_velocity_flat" in printed.out
    (hidden,) = TASKS.hidden()
    assert printed.err.splitlines() == [
        f"lockstep: warning: {wrong('torn')}",
        f"lockstep: warning: {hidden}",
    ]
    assert hidden.startswith("task 'cartpole_balance' of vain is not to be had")
    assert TASKS.get("cartpole_balance").task.startswith("lockstep.")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def recipe(): raise RuntimeError('no wind\\ntoday')", "RuntimeError: no wind"),
        ("def recipe(): raise SystemExit('no wind')", "SystemExit: no wind"),
        ("def recipe(): return 5", "AttributeError: 'int' object has no attribute"),
        ("import no_such_module", "cannot import 'torn_recipe:recipe': it needs 'no_such_module', which is not"),
        (
            "recipe = cartpole_classic",
            "the recipe of task torn is for task 'cartpole_classic'; give its config the name",
        ),
        ("recipe = right\nclass Task:\n  def __init__(self, c): 1 / 0", "ZeroDivisionError"),
        ("recipe = right\nclass Task:\n  def __init__(self, c): pass", "AttributeError"),
        (
            "recipe = right\ndef Task(c): c = CartpoleClassic(c); c.num_observations = {'actor': 'x'}; return c",
            "ValueError",
        ),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_task_of_a_package_that_can_not_be_made_is_a_warning_and_hides_nothing(
    code: str, words: str, flags: list[str], install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    imports = (
        "from lockstep.recipes.cartpole import cartpole_classic\n"
        "from lockstep.tasks.cartpole_classic.task import CartpoleClassic\n"
        "right = lambda: cartpole_classic().model_copy(update={'task': 'torn'})\n"
    )
    entry = (
        "from lockstep.recipes.entries import TaskEntry\n"
        "torn = TaskEntry('torn', 'fly', '{0}:Task', '{0}:recipe', ('analytic',))\n"
    )
    name = f"torn_recipe_{abs(hash((code, *flags)))}"  # a module is imported once
    install(name, {}, imports + code)
    install(f"{name}_entry", {TASKS_GROUP: f"torn = {name}_entry:torn"}, entry.format(name))
    assert main(["tasks", *flags]) == 0
    printed = capsys.readouterr()
    assert "quadruped_velocity_flat" in printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("lockstep: warning: ")
    assert words.replace("torn_recipe", name) in line
    if "Error: " in words or "Exit: " in words:
        assert f"task 'torn' of {name}_entry can't be shown: " in line
        assert line.endswith("; mend or uninstall that package")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("odd_number", "entry = 5", "can't be loaded: TypeError"),
        ("odd_result", "def entry(): return 5", "is of type int, not TaskEntry"),
        ("odd_module", "", "has no 'entry'"),
        (
            "odd_name",
            ENTRY.format(module="odd_name") + "entry = kite",
            "calls itself 'kite'; give its",
        ),
    ],
)
def test_what_is_no_task_is_named(name: str, code: str, words: str, install: Install) -> None:
    install(name, {TASKS_GROUP: f"{name} = {name}:entry"}, code)
    assert words in wrong(name)


def test_two_packages_of_one_name_are_both_named(install: Install) -> None:
    install("left", {TASKS_GROUP: "kite = left:kite"}, ENTRY.format(module="left"))
    install("right", {TASKS_GROUP: "kite = right:kite"}, ENTRY.format(module="right"))
    assert wrong("kite") == "task 'kite' is registered by left and right; uninstall all but one of them"


def test_a_package_registers_a_runner(install: Install) -> None:
    code = """
class Walker:
    def __init__(self, config, env, comm): ...
    def train(self, observer, evaluation_env): ...
"""
    install("walkers", {RUNNERS_GROUP: "walker = walkers:Walker"}, code)
    assert load_runner("walker").__name__ == "Walker"
    with pytest.raises(UsageError, match="runner 'walkr' is not registered; did you mean 'walker'"):
        load_runner("walkr")
