"""The envs of gymnax, Brax and MuJoCo Playground in ours, against their libraries' own steps; and trainings in them."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.adapters.playground import guest as playground
from lockstep.core.errors import UsageError
from lockstep.distributed.jax_comm import JaxComm, OwnStore
from lockstep.envs.jax_env import EnvState, Transition
from lockstep.envs.jax_guest_env import JaxGuestEnv
from lockstep.learn.jax.loop import JaxRunner
from lockstep.learn.jax.ppo import Ppo
from lockstep.learn.jax.sac import Sac
from lockstep.recipes.catalog import make_task
from lockstep.session.jax_envs import build_env
from lockstep.session.make_config import make_config
from tests.unit.jax_fixtures import ranks_of
from tests.unit.jax_training_fixtures import array_differences, untimed

# Imported in the tests, since that takes seconds.
needs_gymnax, needs_brax, needs_playground = (
    pytest.mark.skipif(find_spec(module) is None, reason=f"needs {module}: pip install 'lockstep-rl[{extra}]'")
    for module, extra in (("gymnax", "gymnax"), ("brax", "brax"), ("mujoco_playground", "playground"))
)

NUM_ENVS = 4


def guests(task: str, **env: Any) -> tuple[Any, EnvState, Callable[..., tuple[EnvState, Transition]]]:
    """Return the task, the start of some envs of it, and their compiled step of ``(state, action, number)``."""
    config = make_config(task, env={"randomize_initial_episode_length": False, **env})
    made: Any = make_task(config)
    envs = JaxGuestEnv(made, config.env, seed=3, dtype=jnp.float32)  # type: ignore[arg-type]  # of the recipe

    def step(state: EnvState, action: jax.Array, number: jax.Array) -> tuple[EnvState, Transition]:
        return envs.step(state, action, jax.tree.map(lambda rows: rows[0], envs.noise(state.env_ids, number, 1)))

    return made, jax.jit(envs.reset)(jnp.arange(NUM_ENVS, dtype=jnp.int32)), jax.jit(step)


@needs_gymnax
@pytest.mark.usefixtures("double_precision")
def test_cartpole_of_gymnax_goes_on_and_ends_as_its_own_step_says() -> None:
    import gymnax

    library, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=14)
    own_step = jax.jit(jax.vmap(library.step, in_axes=(0, 0, 0, None)))
    task, state, step = guests("gymnax/CartPole-v1", max_episode_steps=14)
    assert (task.action_space.kind, task.action_space.size, task.max_episode_steps) == ("discrete", 2, 14)
    random, ends = np.random.default_rng(1), np.zeros(2, int)
    for number in range(1, 41):
        # The first env fails early; the last, pushed to and fro, lives until its time is up.
        actions = np.array([1, *random.integers(0, 2, NUM_ENVS - 2), number % 2], np.int32)
        with jax.enable_x64(False):
            before = type(library.reset(jax.random.PRNGKey(0), params)[1])(**state.physics)
            _, _, reward, terminated, truncated, info = own_step(
                jnp.zeros((NUM_ENVS, 2), jnp.uint32), before, actions, params
            )
        state, transition = step(state, actions, np.int32(number))
        np.testing.assert_allclose(
            transition.final_observations["actor"], info["final_observation"], rtol=1e-5, atol=1e-6
        )
        assert transition.reward.tolist() == reward.tolist()
        assert transition.terminated.tolist() == terminated.tolist()
        assert transition.truncated.tolist() == (truncated & ~terminated).tolist()
        assert (np.abs(transition.observations["actor"])[transition.done] < 0.05).all()  # where an episode begins
        ends += int(transition.terminated.sum()), int(transition.truncated.sum())
    assert (ends > 1).all()


@needs_gymnax
@pytest.mark.usefixtures("double_precision")
def test_actions_are_stretched_to_the_bounds_of_gymnax_and_clipped_to_them() -> None:
    import gymnax

    library, params = gymnax.make("Pendulum-v1")
    task, state, step = guests("gymnax/Pendulum-v1")
    assert (task.action_space.size, task.max_episode_steps) == (1, 200)
    actions = np.array([[0.25], [-1.0], [7.0], [0.0]], np.float32)
    with jax.enable_x64(False):
        before = type(library.reset(jax.random.PRNGKey(0), params)[1])(**state.physics)
        torques = jnp.array([[0.5], [-2.0], [2.0], [0.0]])
        observed, _, reward, *_ = jax.vmap(library.step_env, in_axes=(0, 0, 0, None))(
            jnp.zeros((NUM_ENVS, 2), jnp.uint32), before, torques, params
        )
    _, transition = step(state, actions, np.int32(1))
    np.testing.assert_allclose(transition.observations["critic"], observed, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(transition.reward, reward.reshape(-1), rtol=1e-5)


@needs_gymnax
@pytest.mark.parametrize(("low", "high", "limit"), [(-2.0, 2.0, 1.0), (-np.inf, 2.0, np.inf), (0.0, np.inf, np.inf)])
def test_actions_of_gymnax_have_a_limit_where_every_entry_has_two_bounds(low: float, high: float, limit: float) -> None:
    from gymnax.environments import spaces

    from lockstep.adapters.gymnax import world

    for bounds in ((low, high), (jnp.array([-1.0, low]), jnp.array([1.0, high]))):
        space = world._action_space(spaces.Box(*bounds, (2,), jnp.float32), "t")
        assert (space.size, space.limit) == (2, limit)


@needs_brax
@pytest.mark.usefixtures("double_precision")
def test_brax_is_limited_and_repeats_actions_as_its_own_wrapper_does() -> None:
    from brax import envs
    from brax.envs.wrappers.training import EpisodeWrapper

    kwargs = {"asymmetric_obs": True, "obs_mode": "dict_state"}
    task, state, step = guests("brax/fast", max_episode_steps=3, action_repeat=2, kwargs=kwargs)
    assert dict(task.num_observations) == {"actor": 2, "critic": 4}
    with jax.enable_x64(False):
        own = EpisodeWrapper(envs.get_environment("fast", **kwargs), episode_length=6, action_repeat=2)
        expected = own.reset(jax.random.PRNGKey(0))
        for number in range(1, 4):
            expected = own.step(expected, jnp.ones(1))
            with jax.enable_x64(True):
                state, transition = step(state, np.full((NUM_ENVS, 1), 5.0, np.float32), np.int32(number))
            seen = transition.final_observations["actor"][0]
            np.testing.assert_allclose(seen, expected.obs["state"], rtol=1e-6)
            assert float(transition.reward[0]) == pytest.approx(float(expected.reward))
            assert bool(transition.truncated[0]) == bool(expected.info["truncation"]) == (number == 3)
    assert not transition.terminated.any()
    assert (np.asarray(state.observations["actor"]) == 0).all()  # at its start again


@needs_playground
def test_facts_of_playground_come_from_its_own_config() -> None:
    config = make_config("playground/CartpoleBalance", env={"kwargs": {"sim_dt": 0.005}, "action_repeat": 2})
    task = make_task(config)
    assert (dict(task.num_observations), task.max_episode_steps) == ({"actor": 5, "critic": 5}, 500)
    assert task.step_duration_s == pytest.approx(0.02)
    assert "reward/upright" in task.metric_terms
    assert task.reward_terms == ("reward",)
    with pytest.raises(UsageError, match=r"playground does not make 'CartpoleBalance' with env.kwargs {'sim': 1}: "):
        make_task(make_config("playground/CartpoleBalance", env={"kwargs": {"sim": 1}}))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        pytest.param("gymnax/CartPole-v0", "gymnax has no env .* did you mean 'CartPole-v1'", marks=needs_gymnax),
        pytest.param("brax/antt", "brax has no env 'antt'; did you mean 'ant'", marks=needs_brax),
        pytest.param("playground/CheetaRun", "playground has no .* did you mean 'CheetahRun'", marks=needs_playground),
    ],
)
def test_what_a_library_does_not_have(task: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_config(task)


def test_robots_of_playground_need_their_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground, "package_folder", lambda package: tmp_path)
    for part, source in (
        ("dm_control_suite", "_envs = {'Hop': 1}"),
        ("locomotion", "_envs: dict = {'Trot': len, **{}}"),
        ("manipulation", "_envs = make()"),
    ):
        (tmp_path / "_src" / part).mkdir(parents=True)
        (tmp_path / "_src" / part / "__init__.py").write_text(source)
    playground.check("Hop")
    with pytest.raises(UsageError, match=r"playground has no env 'Trott'; did you mean 'Trot'\? \(known: Hop, Trot\)"):
        playground.check("Trott")
    with pytest.raises(UsageError, match=r"playground/Trot needs the models of MuJoCo Menagerie, which are not in /.*"):
        playground.check("Trot")
    (tmp_path / "external_deps" / "mujoco_menagerie").mkdir(parents=True)
    playground.check("Trot")


@needs_gymnax
@needs_brax
@needs_playground
def test_a_config_is_made_without_the_library_which_would_occupy_devices() -> None:
    code = (
        "import sys; from lockstep.session.make_config import make_config\n"
        "for task in ('gymnax/CartPole-v1', 'brax/ant', 'playground/CartpoleBalance'): make_config(task)\n"
        "print([name for name in ('jax', 'gymnax', 'brax', 'mujoco_playground') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@needs_gymnax
@pytest.mark.usefixtures("double_precision")
def test_ppo_learns_cartpole_of_gymnax_on_two_devices_and_goes_on_from_a_checkpoint_bit_for_bit() -> None:
    config = make_config("gymnax/CartPole-v1", num_envs=32, device="cpu", evaluation={"interval": 0})
    with ExitStack() as resources:
        envs = build_env(config, "cpu", resources)
        training = JaxRunner(config, Ppo, envs, None, ranks_of(2), JaxComm(0, 1, 2, OwnStore()))
        first = training.iterate()
        saved = training.state_dict()
        training.iterate()
        two = training.state_dict()
        training.load_state_dict(saved, "checkpoint")
        training.iterate()
        assert array_differences(untimed(training.state_dict()), untimed(two)) == []
        assert saved["sharded"]["env"]["physics"]["theta"].shape == (64,)
        for _ in range(43):
            last = training.iterate()
    assert first["mean_return"] is not None
    assert first["mean_return"] < 25 < 120 < (last["mean_return"] or 0)


@needs_brax
@pytest.mark.usefixtures("double_precision")
def test_sac_trains_on_what_brax_gives() -> None:
    small = {"learning_starts": 64, "num_updates": 2, "batch_size": 8, "replay_size": 1024}
    widths = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,)}
    config = make_config("brax/fast", algorithm="sac", num_envs=8, device="cpu", agent={**small, **widths})
    with ExitStack() as resources:
        envs = build_env(config, "cpu", resources)
        training = JaxRunner(config, Sac, envs, None, ranks_of(1), JaxComm(0, 1, 1, OwnStore()))
        metrics = training.iterate()
    assert (metrics["num_updates"], metrics["env_steps"], metrics["num_diverged"]) == (2, 64, 0)
    # Position and velocity of the last step of all are those that the next observation has been remembered as.
    algorithm = training.algorithm
    assert isinstance(algorithm, Sac)
    steps = algorithm.layout.unpack(training.state.sharded.replay[:, 7])
    np.testing.assert_array_equal(steps.next_actor_observations, training.state.sharded.env.observations["actor"])
