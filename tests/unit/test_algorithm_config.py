"""Settings by algorithm: which recipe, which agent, which framework, and which numbers of envs fit."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli.main import main
from lockstep.cli.train_request import read
from lockstep.core.config import merge, settings, to_yaml
from lockstep.core.errors import UsageError
from lockstep.core.gpu_mask import Gpu
from lockstep.distributed.local_devices import count_local_devices
from lockstep.learn.config import PpoConfig, SacConfig, TrainConfig
from lockstep.recipes.catalog import TASKS, check_offered, engines_of, recipe_of
from lockstep.session.make_config import make_config

SAC = ("cartpole_swingup", "--algorithm", "sac")
JAX = ("cartpole_swingup", "--ml_framework", "jax")


@pytest.fixture(autouse=True)
def _one_cpu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX would have one device, not those that other tests need."""
    monkeypatch.delenv("XLA_FLAGS")


def refused(*argv: str, world_size: int = 1) -> str:
    with pytest.raises(UsageError) as error:
        read(argv, world_size)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def shares(*argv: str, world_size: int = 1) -> tuple[int, ...]:
    num_envs = read(argv, world_size).config.num_envs
    return (num_envs,) if isinstance(num_envs, int) else num_envs


def write_run(folder: Path, config: TrainConfig, world_size: int = 1) -> str:
    folder.mkdir()
    (folder / "run.json").write_text("{}", encoding="utf-8")
    (folder / "config.yaml").write_text(to_yaml(config) + f"world_size: {world_size}\n", encoding="utf-8")
    return str(folder)


# --- the recipe and the agent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", list(TASKS))
def test_every_recipe_is_offered_and_loads_back(task: str) -> None:
    for algorithm in TASKS.get(task).recipes:
        config = recipe_of(task, algorithm)
        assert (config.task, config.algorithm) == (task, algorithm)
        check_offered(config)
        config.envs_by_rank(1)
        assert make_config(**yaml.safe_load(to_yaml(config))) == config


def test_the_algorithm_chooses_the_settings() -> None:
    assert isinstance(read(["cartpole_swingup"]).config.agent, PpoConfig)
    config = read([*SAC, "--agent.polyak", "0.1", "--agent.target_entropy", "-0.5"]).config
    agent = config.agent_as(SacConfig)
    assert (agent.polyak, agent.target_entropy, config.ml_framework) == (0.1, -0.5, "jax")
    assert read([*SAC, "--agent.target_entropy", "none"]).config.agent_as(SacConfig).target_entropy is None
    assert "unknown flag '--agent.lam'" in refused(*SAC, "--agent.lam", "0.9")
    assert "unknown flag '--agent.polyak'" in refused("cartpole_swingup", "--agent.polyak", "0.1")
    with pytest.raises(TypeError, match="agent is a SacConfig, not a PpoConfig"):
        config.agent_as(PpoConfig)


def test_an_overlay_may_name_the_algorithm(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("algorithm: sac\nagent: {polyak: 0.3}\n", encoding="utf-8")
    assert read(["cartpole_balance", "--config", str(overlay)]).config.agent_as(SacConfig).polyak == 0.3


def test_the_help_is_that_of_the_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--task", "cartpole_swingup", "--algorithm", "sac"], ["cartpole_swingup", "--algorithm=sac"]):
        assert main(["train", *argv, "--help"]) == 0
        shown = capsys.readouterr().out
        for name in settings(recipe_of("cartpole_swingup", "sac")):
            assert f"--{name} " in shown or f"--{name}.NAME " in shown
        assert "--agent.num_mini_batches" not in shown
    assert main(["train", "--algorithm", "sac", "--help"]) == 0
    assert "--agent.polyak" in capsys.readouterr().out
    assert main(["train", "cartpole_swingup", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--agent.num_mini_batches" in shown
    assert "--agent.polyak" not in shown


def test_an_agent_is_made_by_the_algorithm_and_never_of_another() -> None:
    assert TrainConfig(task="x", algorithm="sac").agent == SacConfig()
    made = TrainConfig.model_validate({"task": "x", "algorithm": "sac", "agent": {"polyak": 0.5}})
    assert made.agent == SacConfig(polyak=0.5)
    with pytest.raises(UsageError, match="algorithm 'sac' has an agent of its own, SacConfig, not PpoConfig"):
        merge(TrainConfig(task="x"), {"algorithm": "sac"})


def test_a_run_goes_on_with_its_algorithm(tmp_path: Path) -> None:
    config = merge(recipe_of("cartpole_swingup", "sac"), {"agent": {"polyak": 0.3}})
    run = write_run(tmp_path / "run", config)
    assert read(["--resume", run]).config == config
    assert read([*SAC, "--resume", run]).config == config
    assert "the run has algorithm sac, not 'ppo'; a run resumes" in refused("--resume", run, "--algorithm", "ppo")
    before = tmp_path / "before"
    before.mkdir()
    (before / "run.json").write_text("{}", encoding="utf-8")
    (before / "config.yaml").write_text("task: cartpole_classic\n", encoding="utf-8")  # of before there was a choice
    assert isinstance(read(["--resume", str(before)]).config.agent, PpoConfig)


# --- what goes together ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((*SAC, "--ml_framework", "torch"), "'sac' is not available with ml_framework torch; use --ml_framework jax"),
        (
            (*SAC[:-1], "dqn"),
            "algorithm 'dqn' is not available (it is with --rl_library skrl): rl_library lockstep has ppo",
        ),
        ((*JAX, "--engine", "warp"), "task cartpole_swingup, with ml_framework jax, has auto, mujoco, mjx"),
        (("cartpole_swingup", "--engine", "mjx"), "engine 'mjx' is one of ml_framework jax; use --ml_framework jax"),
        (("cartpole_classic", "--engine", "mjx"), "task cartpole_classic has auto, analytic"),
        (("cartpole_swingup", "--num_devices", "2"), "num_devices 2 is a setting of ml_framework jax; leave it out"),
        (("cartpole_swingup", "--enable_jit", "no"), "enable_jit False is a setting of ml_framework jax"),
        (("cartpole_swingup", "--enable_multi_devices=no"), "enable_multi_devices False is a setting of ml_framework"),
        (
            ("cartpole_swingup", "--env.mjx.num_contacts", "8"),
            "of the engine mjx, and engine is auto; use --ml_framework",
        ),
        (
            (*JAX, "--env.mjx.num_constraints", "8"),
            "env.mjx.num_constraints 8 is a setting of the engine mjx, and engi",
        ),
        (
            (*JAX, "--engine", "mjx", "--env.mjx.num_contacts", "8", "--env.mjx.implementation", "jax"),
            "env.mjx.num_contacts 8 is a setting of implementation warp, and env.mjx.implementation is jax; leave one",
        ),
        ((*JAX, "--num_devices", "2", "--enable_multi_devices", "no"), "contradict each other; leave one out"),
    ],
)
def test_what_does_not_go_together_is_refused(argv: tuple[str, ...], words: str) -> None:
    assert words in refused(*argv)


def test_several_processes_compile() -> None:
    assert not read([*JAX, "--enable_jit", "no"], 1).config.enable_jit
    with pytest.raises(UsageError, match="enable_jit False runs operation by operation in one process, and there are"):
        read([*JAX, "--enable_jit", "no"], 2)


def test_engines_follow_framework_and_device() -> None:
    assert engines_of("cartpole_classic", "torch") == engines_of("cartpole_classic", "jax") == ("analytic",)
    assert engines_of("cartpole_balance", "torch") == ("mujoco",)
    assert engines_of("cartpole_balance", "jax") == ("mujoco", "mjx")
    assert engines_of("cartpole_balance", "jax", on_gpu=True) == ("mjx", "mujoco")
    assert read([*JAX, "--engine", "mjx"]).config.engine == "mjx"


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("jax", "optax") else find(name))
    message = refused(*JAX)
    assert "needs jax, optax, not installed here" in message
    assert "pip install 'lockstep-rl[jax]'" in message
    assert read(["cartpole_swingup"]).config.ml_framework == "torch"


# --- how many envs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num_envs", "60"], "agent.batch_size 256 is neither a multiple nor a divisor of the 60 envs of all ranks"),
        (["--num_envs", "60"], "use --agent.batch_size 240 or 300"),
        (["--num_envs", "1000"], "use --agent.batch_size 250 or 500"),
        (["--num_envs", "300"], "use --agent.batch_size 150 or 300"),
        (
            ["--num_envs", "256", "--agent.replay_size", "2047"],
            "256 envs x agent.num_steps_per_env 8; use 2048 or more",
        ),
    ],
)
def test_batches_that_do_not_fit_the_envs(argv: list[str], words: str) -> None:
    assert words in refused(*SAC, *argv)


@pytest.mark.parametrize(
    ("rl_library", "algorithm", "framework"),
    [("lockstep", "sac", "jax"), ("skrl", "sac", "torch"), ("sb3", "sac", "torch"), ("skrl", "ppo", "torch")],
)
def test_a_library_trains_with_the_framework_that_it_names_first(
    rl_library: str, algorithm: str, framework: str
) -> None:
    flags = ("--rl_library", rl_library, "--algorithm", algorithm)
    assert read(["cartpole_balance", *flags]).config.ml_framework == framework
    if rl_library == "skrl":
        assert read(["cartpole_balance", *flags, "--ml_framework", "jax"]).config.ml_framework == "jax"


def test_envs_that_share_a_sample_stay_together() -> None:
    assert "num_envs 1022 of a rank is not divisible by 4" in refused(*SAC, "--num_envs", "1022,2", world_size=2)
    assert shares(*SAC, "--num_envs", "1020,4", world_size=2) == (1020, 4)
    assert shares(*SAC, "--total_envs", "1024", world_size=3) == (344, 340, 340)
    message = refused(*SAC, "--total_envs", "1024", "--agent.batch_size", "2", world_size=3)
    assert "leaves some of 3 ranks without envs, as they come in blocks of 512 (agent.batch_size 2)" in message
    assert shares(*SAC, "--total_envs", "64", world_size=3) == (22, 21, 21)


def test_a_run_takes_its_envs_to_another_number_of_ranks(tmp_path: Path) -> None:
    config = merge(recipe_of("cartpole_swingup", "sac"), {"num_envs": [1020, 4]})
    run = write_run(tmp_path / "run", config, world_size=2)
    assert shares("--resume", run, world_size=2) == (1020, 4)
    assert shares("--resume", run, world_size=3) == (344, 340, 340)
    assert config.with_total_envs(1024, 3).envs_by_rank(3) == (344, 340, 340)


def test_ranks_are_devices_with_jax_and_processes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = (*JAX, "--device", "cpu", "--total_envs", "64")
    assert shares(*jax, "--num_devices", "4") == (16,)
    assert shares(*jax, "--num_devices", "2", world_size=2) == (16,)
    assert shares(*jax) == (64,)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    assert shares(*jax) == (32,)
    assert shares(*jax, "--enable_multi_devices", "false") == (64,)
    assert shares("cartpole_swingup", "--device", "cpu", "--total_envs", "64", world_size=2) == (32,)


@pytest.mark.parametrize(
    ("device", "num_devices", "world_size", "environment", "expected"),
    [
        ("auto", 0, 1, {}, 2),
        ("cuda", 0, 1, {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ("auto", 0, 2, {}, 1),  # each process has one to itself
        ("cuda:1", 0, 1, {}, 1),
        ("auto", 1, 1, {}, 1),
        ("auto", 0, 1, {"CUDA_VISIBLE_DEVICES": ""}, 1),
        ("auto", 0, 1, {"CUDA_VISIBLE_DEVICES": "", "JAX_NUM_CPU_DEVICES": "3"}, 3),
        ("cpu", 0, 1, {"XLA_FLAGS": "--a --xla_force_host_platform_device_count=8 --b"}, 8),
        ("cpu", 4, 1, {"JAX_NUM_CPU_DEVICES": "3"}, 4),
    ],
)
def test_devices_are_counted_before_jax_is_started(
    device: str,
    num_devices: int,
    world_size: int,
    environment: dict[str, str],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # JAX has its plugin for CUDA
    gpus = [Gpu(index, f"GPU-{index}", "H200", f"0000:0{index}:00.0", 0, "580") for index in range(2)]
    arguments: dict[str, Any] = {"environment": environment, "gpus_of_machine": lambda: gpus}
    assert count_local_devices(device, num_devices, world_size, **arguments) == expected
