"""Variants of the model, pushes and metrics: envs of JAX and mujoco are those of torch, whoever simulates them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lockstep.core.errors import UsageError
from lockstep.distributed.jax import make_mesh
from lockstep.distributed.jax_comm import JaxComm, OwnStore
from lockstep.envs.config import EnvConfig
from lockstep.envs.jax_env import JaxEnv
from lockstep.learn.jax.loop import JaxRunner
from tests.parity.jax_env_pairs import Case, make_pair
from tests.parity.test_jax_env import assert_same, per_env, program_of
from tests.unit.jax_env_fixtures import random_actions
from tests.unit.jax_ppo_fixtures import padded_ids
from tests.unit.jax_training_fixtures import Drift, array_differences, drift_config, untimed
from tests.unit.pool_fixtures import Puck

pytestmark = pytest.mark.usefixtures("double_precision")

SHARES = (5, 3, 0, 6)  # of five variants: every rank begins with another one
NUM_ENVS = sum(SHARES)
SEED = 3
CONFIG = EnvConfig(max_episode_steps=12, decimation=2)


def pair(task: Puck, dtype: str) -> tuple[Any, JaxEnv]:
    return make_pair(Case("puck", "mujoco", {}), task, dtype, NUM_ENVS, CONFIG, seed=SEED)


class Counted(Puck):
    """Counts the variants that are made of it."""

    num_varied = 0

    def vary_model(self, model: Any, noise: Any) -> None:
        self.num_varied += 1
        super().vary_model(model, noise)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_envs_on_devices_are_those_in_torch(dtype: str, tmp_path: Path) -> None:
    task = Counted(tmp_path)
    in_torch, in_jax = pair(task, dtype)
    actions = random_actions(task, 40, NUM_ENVS).astype(dtype)
    ids = padded_ids(SHARES)
    is_real = ids >= 0
    # What padding does must not matter, nor that devices take engine objects from one store at the same time.
    padded = np.full((40, len(ids), 1), np.nan, dtype)
    padded[:, is_real] = actions
    program = per_env(program_of(in_jax), jax.sharding.Mesh(np.array(jax.devices()[:4]), ("ranks",)))
    start, end, transitions = program(jnp.asarray(ids), jnp.asarray(padded))

    steps = [in_torch.step(action) for action in torch.from_numpy(actions)]
    saved = in_torch.state_dict()
    tolerance = {"float64": 1e-12, "float32": 1e-5}[dtype]
    for name in ("reward", "terms", "terminated", "truncated"):
        assert_same(
            np.asarray(getattr(transitions, name))[is_real],
            torch.stack([getattr(step, name) for step in steps], dim=1),
            tolerance,
            name,
        )
    assert transitions.terms.shape[2] == 4
    assert int(transitions.terminated[is_real].sum()) > 0
    assert_same(np.asarray(end.running)[is_real], saved["episodes"]["running"], tolerance, "running")
    # Bits: the physics, and which variant an env has.
    for physics in (start.physics, end.physics):
        np.testing.assert_array_equal(np.asarray(physics["model"])[is_real, 0], saved["engine"]["model"].numpy())
    assert task.num_varied == task.num_models  # once for all engine objects
    rows = np.asarray(end.physics["integration_state"])[is_real]
    assert rows.tobytes() == saved["engine"]["integration_state"].numpy().tobytes()
    in_torch.close()
    in_jax.close()


class Sums(Drift):
    """Moves every puck alike, and adds up what its episodes were."""

    CHECKS = ()

    def step(self, state: Any) -> Any:
        state, metrics = super().step(state)
        return state, {name: value for name, value in metrics.items() if name != "nonfinite"}


def runner(task: Puck, shares: tuple[int, ...]) -> JaxRunner:
    """Return a training of all pucks on as many devices as there are shares."""
    env = pair(task, "float64")[1]
    config = drift_config(num_envs=list(shares), max_iterations=9, evaluation={"interval": 0})
    ranks = make_mesh(jax.devices()[: len(shares)])
    return JaxRunner(config, Sums, env, None, ranks, JaxComm(0, 1, len(shares), OwnStore()))


def test_a_run_goes_on_with_its_models_on_other_ranks(tmp_path: Path) -> None:
    task = Puck(tmp_path)
    whole, split = runner(task, (NUM_ENVS,)), runner(task, SHARES)
    for _ in range(2):
        whole.iterate()
    content = whole.state_dict()
    split.load_state_dict(content, "model_2")
    assert array_differences(untimed(split.state_dict()), untimed(content)) == []
    for _ in range(2):
        whole.iterate()
        split.iterate()
    expected, found = (each.state_dict()["sharded"]["env"] for each in (whole, split))
    assert array_differences(found["physics"], expected["physics"]) == []
    assert expected["physics"]["model"][:, 0].tolist() == [env_id % 5 for env_id in range(NUM_ENVS)]


def test_a_run_goes_on_with_as_many_variants_as_it_had(tmp_path: Path) -> None:
    made, contents = {}, {}
    for num_models in (1, 8):
        task = Puck(tmp_path)
        task.num_models = num_models
        made[num_models] = runner(task, (NUM_ENVS,))
        contents[num_models] = made[num_models].state_dict()
    contents[64] = contents[8] | {"num_models": 64}
    for before, now in ((64, 8), (64, 1), (1, 8), (8, 1)):
        with pytest.raises(UsageError) as caught:
            made[now].load_state_dict(contents[before], "model_0")
        assert f"model_0 has {before} variants of the task's model, not {now}; a run resumes" in str(caught.value)
    made[8].load_state_dict(contents[8], "model_0")
