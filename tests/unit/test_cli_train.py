"""``lockstep train`` from the command line to what the session is asked for, in one process."""

import sys
import types
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lockstep.cli.arguments import is_mapping
from lockstep.cli.main import main
from lockstep.cli.train_request import Request, read
from lockstep.core.config import settings
from lockstep.core.errors import UsageError
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.session.train import Outcome
from tests.unit.cli_train_fixtures import RECIPE, add_pendulum, config_of, refused, settings_of, write_run


@pytest.fixture(autouse=True)
def _pendulum(monkeypatch: pytest.MonkeyPatch) -> None:
    add_pendulum(monkeypatch)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the session was asked to train."""
    requests: list[Request] = []
    module = types.ModuleType("lockstep.session.train")

    def train(config: TrainConfig, checkpoint: Path | None, resume: Path | None) -> Outcome:
        requests.append(Request(config, checkpoint, resume))
        return Outcome(Path("run"), "finished")

    vars(module)["train"] = train
    monkeypatch.setitem(sys.modules, "lockstep.session.train", module)
    return requests


def test_without_flags_it_is_the_recipe() -> None:
    assert read(["pendulum"]) == Request(RECIPE, None, None)


@pytest.mark.parametrize(
    "argv",
    [
        ["pendulum", "--num_envs", "64"],
        ["--task", "pendulum", "--num_envs=64"],
        ["--task=pendulum", "--num-envs", "64"],
        ["--num_envs", "64", "pendulum"],
        ["pendulum", "--task", "pendulum", "--num-envs=64"],
        ["pendulum", "--total_envs", "64"],
        ["pendulum", "--total-envs=64", "--num_envs", "64"],
    ],
)
def test_ways_to_say_the_same(argv: list[str]) -> None:
    assert read(argv).config == RECIPE.model_copy(update={"num_envs": 64})


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--env.length", "-2.5"], -2.5),
        (["--env.length=-2.5"], -2.5),
        (["--env.length", "-.5"], -0.5),
        (["--env.length", "-1e-3"], -1e-3),
        (["--env.length", "3"], 3.0),
    ],
)
def test_numbers_may_be_negative(argv: list[str], expected: float) -> None:
    assert settings_of(config_of(*argv))["length"] == expected


@pytest.mark.parametrize(
    "words", [["-1,2"], ["[-1,2]"], ["(-1, 2)"], ["-1", "2"], ["-1,", "2"], ["[-1, 2]"], ["-1 2"], ["[-1,", "2]"]]
)
def test_ways_to_write_a_list(words: list[str]) -> None:
    assert settings_of(config_of("--env.start", *words))["start"] == (-1.0, 2.0)
    if len(words) == 1:
        assert settings_of(config_of(f"--env.start={words[0]}"))["start"] == (-1.0, 2.0)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--env.wind"], True),
        (["--env.wind", "true"], True),
        (["--env.wind=True"], True),
        (["--env.wind", "false"], False),
        (["--env.wind=no"], False),
        (["--env.wind", "--seed", "3"], True),
    ],
)
def test_ways_to_write_a_switch(argv: list[str], expected: bool) -> None:
    assert settings_of(config_of(*argv))["wind"] is expected


def test_a_bare_switch_or_a_list_before_the_task() -> None:
    assert settings_of(read(["--env.wind", "pendulum"]).config)["wind"] is True
    assert settings_of(read(["--env.start", "1", "2", "pendulum"]).config)["start"] == (1.0, 2.0)
    assert read(["--agent.actor-hidden-dims", "32", "16", "pendulum"]).config.agent.actor_hidden_dims == (32, 16)


def test_every_group_has_flags() -> None:
    config = config_of(
        "--agent.learning-rate", "1e-5", "--agent.critic_hidden_dims", "8", "--evaluation.num-episodes=3",
        "--checkpoints.keep", "2", "--env.seed_of_wind", "7", "--run_name", "-1", "--logger", "none",
    )  # fmt: skip
    assert config.agent.learning_rate == 1e-5
    assert config.agent.critic_hidden_dims == (8,)
    assert (config.evaluation.num_episodes, config.checkpoints.keep) == (3, 2)
    assert (config.run_name, config.logger) == ("-1", "none")
    assert settings_of(config)["seed_of_wind"] == 7
    assert settings_of(config_of("--env.seed_of_wind", "none"))["seed_of_wind"] is None


def test_recipe_below_overlays_below_flags(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("num_envs: 32\nseed: 5\nagent:\n  gamma: 0.5\n  lam: 0.5\n", encoding="utf-8")
    second.write_text("seed: 6\nagent: {lam: 0.6}\nenv: {length: 3}\n", encoding="utf-8")
    config = config_of("--config", str(first), f"--config={second}", "--num_envs", "16")
    agent = config.agent_as(PpoConfig)
    assert (config.num_envs, config.seed, agent.gamma, agent.lam) == (16, 6, 0.5, 0.6)
    assert settings_of(config)["length"] == 3.0
    assert config.max_iterations == RECIPE.max_iterations
    assert config_of("--config", str(first), "--config", str(second), "--config", str(first)).seed == 5


def test_only_the_final_config_is_validated(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("num_envs: 510\n", encoding="utf-8")  # not divisible by the recipe's 4 minibatches
    assert config_of("--config", str(overlay), "--agent.num_mini_batches", "5").num_envs == 510


def test_the_config_of_a_run_is_an_overlay_that_names_the_task(tmp_path: Path) -> None:
    saved = RECIPE.model_copy(update={"seed": 9, "run_name": "1e-5"})
    overlay = write_run(tmp_path, "2026-01-01_00-00-00", saved) / "config.yaml"
    assert read(["--config", str(overlay)]) == Request(saved, None, None)


def test_a_wrong_overlay_is_named(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("agent: {lerning_rate: 1}\n", encoding="utf-8")
    message = refused("pendulum", "--config", str(overlay))
    assert str(overlay) in message
    assert "'agent.lerning_rate' with value 1; did you mean 'agent.learning_rate'?" in message
    assert "No such file" in refused("pendulum", "--config", str(tmp_path / "missing.yaml"))


def test_resume_goes_on_with_the_config_of_the_run(tmp_path: Path) -> None:
    saved = RECIPE.model_copy(update={"seed": 9, "num_envs": 64})
    run = write_run(tmp_path, "2026-01-01_00-00-00", saved)
    assert read(["--resume", str(run)]) == Request(saved, None, run)
    request = read(["pendulum", f"--resume={run}", "--max_iterations", "7"])
    assert request == Request(saved.model_copy(update={"max_iterations": 7}), None, run)


@pytest.mark.parametrize("argv", [["pendulum", "--resume"], ["--resume", "pendulum"], ["--task=pendulum", "--resume"]])
def test_a_bare_resume_takes_the_newest_run_of_the_task(tmp_path: Path, argv: list[str]) -> None:
    write_run(tmp_path, "2026-01-01_00-00-00", RECIPE.model_copy(update={"seed": 1}))
    newest = write_run(tmp_path, "2026-01-02_00-00-00", RECIPE.model_copy(update={"seed": 2}))
    request = read([*argv, "--log_root", str(tmp_path)])
    assert (request.resume, request.config.seed) == (newest, 2)


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    run = write_run(tmp_path, "2026-01-01_00-00-00", RECIPE)
    assert "is a run of task 'pendulum', not of 'cartpole_balance'" in refused("cartpole_balance", "--resume", str(run))
    assert "keep one" in refused("--resume", str(run), "--checkpoint", "x.pt")
    assert "no task is given" in refused("--resume")
    assert "needs a path" in refused("pendulum", "--resume=")
    assert "no run" in refused("pendulum", "--resume", "--log_root", str(tmp_path / "elsewhere"))
    (run / "config.yaml").write_text("", encoding="utf-8")
    assert "names no task" in refused("--resume", str(run))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no task is given; write lockstep train TASK, one of cartpole_classic"),
        (["pendulun"], "unknown task 'pendulun'; did you mean 'pendulum'?"),
        (["pendulum", "--task", "cartpole_balance"], "two tasks are given, 'pendulum' and --task 'cartpole_balance'"),
        (["--task", "pendulum", "surplus"], "unexpected 'surplus'"),
        (["pendulum", "--env.length", "1", "2"], "unexpected '2'"),
        (["--task", "pendulum", "--env.length", "1", "2"], "unexpected '2'"),
        (["pendulum", "surplus"], "unexpected 'surplus'"),
        (["pendulum", "agent.gamma=0.9"], "--agent.gamma 0.9"),
        (["task=pendulum"], "--task pendulum"),
        (["pendulum", "+env.length=1"], "--env.length 1"),
        (["pendulum", "--num_env", "3"], "unknown flag '--num_env'; did you mean '--num_envs'?"),
        (["pendulum", "--learning_rate", "3"], "did you mean '--agent.learning_rate'?"),
        (["pendulum", "--env.lenght", "3"], "did you mean '--env.length'?"),
        (["pendulum", "--qqqqqq"], "--help lists all flags"),
        (["pendulum", "-n", "5"], "unknown flag '-n'; flags are written in full"),
        (["pendulum", "--"], "unknown flag '--'"),
        (["pendulum", "--num_envs"], "--num_envs needs a value"),
        (["pendulum", "--run_name", "-x"], "'--run_name=-x'"),
        (["pendulum", "--seed", "1", "--seed", "1"], "--seed is given twice"),
        (["pendulum", "--num-envs", "8", "--num_envs=8"], "--num_envs is given twice"),
        (["pendulum", "--env.no_wind"], "write --env.wind false"),
        (["pendulum", "--env.wind=perhaps"], "env.wind must be true or false, not 'perhaps'"),
        (["pendulum", "--num_envs", "0"], "num_envs must be greater than or equal to 1, not '0'"),
        (["pendulum", "--num_envs", "1e3"], "num_envs must be a whole number, not '1e3'"),
        (["pendulum", "--num_envs", "510"], "use --num_envs 508 or 512"),
        (["pendulum", "--total_envs", "0"], "total_envs must be at least 1, not 0"),
        (["pendulum", "--total_envs", "64", "--num_envs", "32"], "keep one of them"),
        (["pendulum", "--agent.actor_hidden_dims", "64,x"], "agent.actor_hidden_dims[1] must be a whole number"),
        (["pendulum", "--env", "windy"], "--env is a group of settings: write --env.FIELD VALUE; the task is --task T"),
        (["cartpole_classic", "--video"], "task cartpole_classic has no MuJoCo model"),
        (["cartpole_balance", "--video", "--runner", "a:B"], "video is not available with runner a:B"),
        (["pendulum", "--runner", "nowhere.to_be:Found"], "there is no module 'nowhere'"),
        (["pendulum", "--num_gpus", "2"], "lockstep train_multigpu TASK --num_gpus N"),
        (["pendulum", "--rl_library", "skr"], "unknown rl_library 'skr'; did you mean 'skrl'?"),
        (["pendulum", "--algorithm", "sac"], "algorithm 'sac' is not available"),
        (["pendulum", "--engine", "mjx"], "engine 'mjx' is one of ml_framework jax; use --ml_framework jax"),
        (["pendulum", "--checkpoint="], "--checkpoint needs a path"),
        (["pendulum", "--headless"], "leave it out"),
        (["pendulum", "--load_run", "x"], "--resume RUN_DIR"),
        (["pendulum", "--experiment_name", "x"], "--run_name R"),
        (["pendulum", "--logdir", "x"], "--log_root DIR"),
        (["pendulum", "--num-iterations", "9"], "--max_iterations K"),
        (["pendulum", "--lr=1"], "--agent.learning_rate"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(argv: list[str], words: str) -> None:
    assert words in refused(*argv)


def test_the_session_gets_what_was_asked_for(trained: list[Request]) -> None:
    assert main(["train", "pendulum", "--checkpoint", "model.pt", "--seed", "3"]) == 0
    assert trained == [Request(RECIPE.model_copy(update={"seed": 3}), Path("model.pt"), None)]


def test_nothing_is_trained_when_the_command_line_is_wrong(
    trained: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "pendulum", "--num_envs", "0"]) == 2
    assert capsys.readouterr().err == "lockstep: error: num_envs must be greater than or equal to 1, not '0'\n"
    assert trained == []


def test_help_shows_every_setting_of_the_task_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["pendulum", "--help"], ["--task", "pendulum", "-h"], ["--num_envs", "--help", "--task=pendulum"]):
        assert main(["train", *argv]) == 0
        shown = capsys.readouterr().out
        known = settings(RECIPE)
        for name in [*known, "checkpoint", "resume", "config", "total_envs"]:
            of_names = ".NAME" if name in known and is_mapping(known[name]) else ""
            assert f"--{name}{of_names} " in shown
        assert "of the rod in m (default: 1.0)" in shown
        assert "swing" in shown


def test_help_without_a_task_is_general(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--agent.learning_rate" in shown
    assert "cartpole_swingup" in shown
    assert "--env.length" not in shown
    assert main(["train", "--task", "pendulun", "--help"]) == 2


flags = st.sampled_from([f"--{name}" for name in settings(RECIPE)] + ["--config", "--checkpoint", "--resume", "--task"])
values = st.sampled_from(
    ["", "1", "-1", "0.5", "true", "none", "64,64", "[", "pendulum", "x=y", "-", "--", "\0", "é\n"]
)
words = flags | values | st.text() | st.tuples(flags, values | st.text()).map("=".join) | st.text().map("--{}".format)


@hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(words, max_size=6), st.booleans())
def test_any_command_line_gives_a_config_or_one_line(argv: list[str], with_task: bool) -> None:
    try:
        assert isinstance(read(["pendulum", *argv] if with_task else argv), Request)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
