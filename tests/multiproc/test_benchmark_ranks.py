"""Benchmarks with real ranks: every rank steps its own envs, and processes of JAX train alone beside one another."""

import json
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import lockstep
from tests.multiproc.commands import OF_TESTS, free_port, started_together
from tests.multiproc.jobs_apart import NUM_ITERATIONS, STEP_S
from tests.rank_pool import RankPool

TIMEOUT_S = 280.0  # of which a tenth is needed on a machine that is free
ENV = {"max_episode_steps": 25}
AGENT = {
    "num_steps_per_env": 4, "num_learning_epochs": 1, "actor_hidden_dims": [16], "critic_hidden_dims": [16],
    "schedule": "fixed",
}  # fmt: skip


def test_every_rank_of_torch_measures_its_own_envs(ranks_2: RankPool) -> None:
    settings = {"num_envs": [16, 8], "env": ENV | {"num_physics_threads": 1}, "agent": {"num_steps_per_env": 4}}
    found = ranks_2.run("tests.multiproc.jobs_benchmark:runtime", settings, "cartpole_swingup")
    for rank, (measured, states) in enumerate(found):
        (own,) = measured["ranks"]
        num_envs = (16, 8)[rank]
        assert (own["rank"], own["num_envs"], own["env_steps"]) == (rank, num_envs, num_envs * 4 * 4)
        assert len(own["iteration_s"]) == 4
        assert min(own["iteration_s"]) > 0
        assert states["env_ids"].tolist() == [list(range(16)), list(range(16, 24))][rank]
    assert len(np.unique(np.concatenate([states["qpos"] for _, states in found]), axis=0)) == 24


@pytest.mark.parametrize("num_envs", [(16, 8), (16, 8, 8, 0)], ids=["one device each", "two devices each"])
def test_processes_of_jax_step_and_train_apart(num_envs: tuple[int, ...]) -> None:
    num_devices = len(num_envs) // 2
    settings: dict[str, Any] = {
        "task": "cartpole_classic", "ml_framework": "jax", "device": "cpu", "dtype": "float64", "env": ENV,
        "agent": AGENT, "num_envs": num_envs, "num_devices": num_devices, "evaluation": {"interval": 0},
    }  # fmt: skip
    address = f"127.0.0.1:{free_port()}"
    commands = [
        ["-m", "tests.multiproc.jobs_apart", address, str(process), json.dumps(settings)] for process in range(2)
    ]
    with started_together(commands, [OF_TESTS] * 2) as processes:
        expected = on_one_device(settings | {"num_envs": sum(num_envs), "num_devices": 1})
        ends = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors for _, errors in ends)
    found: list[dict[str, Any]] = [json.loads(output.splitlines()[-1]) for output, _ in ends]
    check_runtime([each["runtime"] for each in found], num_envs)
    for name in ("env_ids", "qpos"):
        np.testing.assert_allclose(found[0][name] + found[1][name], expected[name], rtol=0, atol=1e-12)

    # What was done alone in between has left the common training as it was.
    assert found[0]["curve"] == found[1]["curve"]
    for own, reference in zip(found[0]["curve"], expected["curve"], strict=True):
        assert own == pytest.approx(reference, rel=1e-9, abs=1e-9)

    # Process 1 was slow, and process 0 did not have to wait for it.
    own_envs = [sum(num_envs[:num_devices]), sum(num_envs[num_devices:])]
    num_iterations = 2 * NUM_ITERATIONS
    assert [each["alone"] for each in found] == [[num_devices, envs, num_iterations + 2] for envs in own_envs]
    assert found[0]["held"] == []
    assert found[1]["held"] == [True] * len(found[1]["held"])
    assert len(found[1]["held"]) == num_devices * AGENT["num_steps_per_env"] * num_iterations  # type: ignore[operator]
    assert [[len(block) for block in each["apart_s"]] for each in found] == [[NUM_ITERATIONS] * 2] * 2
    assert min(seconds for block in found[1]["apart_s"] for seconds in block) > STEP_S * 4


def on_one_device(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the envs after 20 steps, and a training of as many iterations, in this process."""
    from lockstep.session.jax_session import JAX
    from tests.multiproc.jobs_apart import numbers_of

    config = lockstep.make_config(**settings)
    with ExitStack() as resources:
        resources.enter_context(JAX.running())
        team = JAX.join(config)
        stepper = JAX.make_stepper(config, team, resources)
        stepper.step(20)
        states = stepper.states()
        training: Any = JAX.make_learner(config, team, resources).runner
        curve = [numbers_of(training.iterate()) for _ in range(5)]
    return {"env_ids": states["env_ids"], "qpos": states["qpos"], "curve": curve}


def check_runtime(measured: list[dict[str, Any]], num_envs: tuple[int, ...]) -> None:
    ranks = [rank for each in measured for rank in each["ranks"]]
    assert [(rank["rank"], rank["num_envs"], rank["env_steps"]) for rank in ranks] == [
        (rank, envs, envs * 4 * 4) for rank, envs in enumerate(num_envs)
    ]
    assert all(len(rank["iteration_s"]) == 4 and min(rank["iteration_s"]) > 0 for rank in ranks)
    assert all(0 < each["compile_s"] < each["warm_up_s"] for each in measured)
