"""PPO in the harness: two iterations, saved to a folder, taken up again and one more are three in one go."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lockstep.core.config import merge
from lockstep.core.errors import UsageError
from lockstep.distributed.jax import make_mesh
from lockstep.distributed.jax_comm import JaxComm, OwnStore
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax import checkpoint
from lockstep.learn.jax.fitting import require_fitting
from lockstep.learn.jax.loop import JaxRunner
from lockstep.learn.jax.nests import from_nest, plain_shapes
from lockstep.learn.jax.ppo import Ppo
from tests.unit.jax_ppo_fixtures import jax_env
from tests.unit.jax_training_fixtures import array_differences, untimed
from tests.unit.learner_fixtures import small_config

pytestmark = pytest.mark.usefixtures("double_precision")


def ppo_config(**overrides: Any) -> TrainConfig:
    base = small_config(agent={"desired_kl": 1e-9})
    return merge(base, {"ml_framework": "jax", "num_envs": [2, 6], "evaluation": {"interval": 0}, **overrides})


def make_ppo(**overrides: Any) -> JaxRunner:
    config = ppo_config(**overrides)
    num_ranks = 1 if isinstance(config.num_envs, int) else len(config.num_envs)
    ranks = make_mesh(jax.devices()[:num_ranks])
    return JaxRunner(config, Ppo, jax_env(config), None, ranks, JaxComm(0, 1, num_ranks, OwnStore()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """What a folder gives back after two iterations, and the state after three."""
    path = tmp_path_factory.mktemp("checkpoint") / "model_2"
    with jax.enable_x64(True):
        training = make_ppo()
        training.iterate()
        training.iterate()
        checkpoint.save(training.state_dict(), path)
        training.iterate()
        return checkpoint.load(path), training.state_dict(), path


@pytest.fixture(scope="module")
def training() -> JaxRunner:
    with jax.enable_x64(True):
        return make_ppo()


def test_it_resumes_exactly(saved: Any, training: JaxRunner) -> None:
    content, three, path = saved
    training.load_state_dict(content, path)
    assert array_differences(untimed(training.state_dict()), untimed(content)) == []
    training.iterate()
    assert array_differences(untimed(training.state_dict()), untimed(three)) == []
    assert training.so_far["env_steps"] == 3 * 6 * 8
    changed = array_differences(content["replicated"], three["replicated"])
    assert any(name.startswith(".weights.parameters.actor") for name in changed)


def test_a_learning_rate_that_was_changed_is_the_new_one_to_start_from(saved: Any, training: JaxRunner) -> None:
    content = saved[0]
    lowered = content["replicated"]["learning_rate"]
    assert lowered < 1e-3  # by the schedule
    replicated = from_nest(content["replicated"], training.state.replicated)

    def rate(**agent: float) -> Any:
        config = ppo_config(agent=agent)
        return Ppo(config, jax_env(config), None).retuned(replicated, content["config"]).learning_rate

    assert rate() == lowered
    assert rate(learning_rate=5e-3) == np.float32(5e-3)


def test_weights_alone_start_a_new_run(saved: Any) -> None:
    content, _, path = saved
    training = make_ppo(num_envs=4, dtype="float64")
    training.load_weights(content, path)
    found = training.state_dict()["replicated"]
    name = "actor_normalizer"
    assert array_differences(found["weights"][name], content["replicated"]["weights"][name]) == []
    assert found["learning_rate"] == np.float32(1e-3)
    kernel = found["weights"]["parameters"]["log_std"]
    assert kernel.dtype == np.float64
    np.testing.assert_array_equal(kernel, content["replicated"]["weights"]["parameters"]["log_std"])
    assert not any(array.any() for array in jax.tree.leaves(found["optimizer"]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_envs": [2, 4]}, "has 8 envs, not 6; a run resumes with as many as it had"),
        ({"seed": 2}, "has seed 1, not 2; a run resumes with the seed it had"),
        ({"dtype": "float64"}, "has dtype float32, not float64"),
        ({"max_iterations": 1}, "is of iteration 2, past max_iterations 1"),
        ({"agent": {"init_std": 2.0}}, "has agent.init_std 1.0, not 2.0"),
    ],
    ids=str,
)
def test_other_settings_are_refused(saved: Any, training: JaxRunner, overrides: dict[str, Any], words: str) -> None:
    config = ppo_config(**overrides)
    num_envs = sum(config.envs_by_rank(2))
    shapes = plain_shapes(training.state)
    with pytest.raises(UsageError) as caught:
        require_fitting(saved[0], training.algorithm, shapes, num_envs, 1, config, "model_2")
    assert words in str(caught.value)


def test_other_networks_are_refused(saved: Any) -> None:
    with pytest.raises(UsageError) as caught:
        make_ppo(agent={"actor_hidden_dims": [9]}).load_state_dict(saved[0], "model_2")
    assert "perceptron.last.kernel of shape (8, 1), the config asks for (9, 1); use the agent settings" in str(
        caught.value
    )


def test_another_task_and_missing_parts_are_refused(saved: Any, training: JaxRunner) -> None:
    content = saved[0]
    iteration = training.iteration

    def says(changed: dict[str, Any]) -> str:
        with pytest.raises(UsageError) as caught:
            training.load_state_dict(changed, "model_2")
        return str(caught.value)

    assert "is of task 'cartpole_swingup', not 'cartpole_classic'" in says(content | {"task": "cartpole_swingup"})
    assert "has no wall_s" in says({name: value for name, value in content.items() if name != "wall_s"})
    sharded = content["sharded"]
    assert "lacks sharded.env.physics" in says(content | {"sharded": sharded | {"env": {}}}).replace(
        "env_ids", "physics"
    )
    assert "has sharded.more, which the config has no place for" in says(
        content | {"sharded": sharded | {"more": np.zeros((8, 1))}}
    )
    counter = content["replicated"] | {"iteration": np.zeros((), np.int32)}
    assert "has replicated.iteration as () of int32, not () of int64" in says(content | {"replicated": counter})
    assert "is incomplete or was changed (KeyError" in says(content | {"config": {}})
    weights = content["replicated"]["weights"]
    broken = weights["parameters"] | {"log_std": weights["parameters"]["log_std"] * np.nan}
    broken = content["replicated"] | {"weights": weights | {"parameters": broken}}
    assert "log_std that is no tensor of finite numbers" in says(content | {"replicated": broken})
    assert training.iteration == iteration
