"""skrl's agents on JAX, in this process alone: what they are told, learn, remember and refuse."""

import copy
import json
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep
from lockstep.adapters.skrl.jax_agent import make_agent
from lockstep.adapters.skrl.jax_learner import SkrlLearner
from lockstep.adapters.skrl.jax_memory import OwnMemory
from lockstep.adapters.skrl.jax_models import SquashedNetwork, start
from lockstep.adapters.skrl.jax_parts import PooledKl, SharedScaler, merge_scalers
from lockstep.adapters.skrl.tracking import take_numbers
from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace
from lockstep.distributed.jax_guests import Exchange
from lockstep.distributed.jax_mesh import make_mesh
from lockstep.learn.jax import checkpoint
from lockstep.learn.jax.guest_reporting import first_nonfinite
from lockstep.learn.jax.networks import Mlp
from lockstep.session.deployed import deploy
from lockstep.session.jax_session import JAX
from tests.unit.skrl_jax_fixtures import PPO, SAC, config_with, training_of

OBSERVATIONS = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of PPO with discrete actions, as a user starts it, and what its rank said."""
    root = tmp_path_factory.mktemp("learned")
    before = Path.cwd()
    os.chdir(root)
    agent = {"num_steps_per_env": 16, "actor_hidden_dims": (16,), "critic_hidden_dims": (16,), "entropy_coef": 0.001}
    config = config_with(
        num_envs=64, max_iterations=14, agent=agent | {"num_learning_epochs": 4}, run_name="here",
        env={"action_kind": "discrete"}, evaluation={"interval": 14, "num_episodes": 8},
    )  # fmt: skip
    run = lockstep.train(config).run_path.absolute()
    assert [path.name for path in root.iterdir()] == ["logs"]  # the library has written nothing
    os.chdir(before)
    return run, (run / "ranks" / "rank_0.log").read_text()


def test_it_learns(learned: tuple[Path, str]) -> None:
    _, second, *_, last = records_of(learned[0])
    assert second["mean_return"] < 25.0
    assert last["eval/mean_return"] > 3.0 * second["mean_return"]
    assert {"loss/policy", "loss/value", "loss/entropy", "kl", "learning_rate", "time/wait_max"} <= last.keys()
    assert last["env_steps"] == 14 * 16 * 64
    assert last["loss/entropy"] < 0.0  # of a choice between two, which the library by itself takes for NaN
    assert not any("standard_deviation" in name for name in last)  # which a choice has not


def test_one_device_of_several_is_used_and_that_is_said(learned: tuple[Path, str]) -> None:
    assert "64 envs on 1 rank (one of the 4 devices of this process: skrl computes on one)" in learned[1]
    assert "[skrl" not in learned[1]


def test_it_is_played_and_exported_as_the_library_decides(learned: tuple[Path, str]) -> None:
    path = learned[0] / "checkpoints" / "model_14"
    policy: Any = lockstep.load_policy(path)
    chosen = policy(OBSERVATIONS)
    assert chosen.shape == (5,) and set(chosen.tolist()) <= {0, 1}
    # The library's own network, with the parameters and the normaliser of the checkpoint.
    content = checkpoint.load(path)
    with jax.enable_x64(True), ExitStack() as resources:
        training = training_of(policy.config, resources)
        training.load_state_dict(content, path)
        agent: Any = training.learner.agent  # type: ignore[attr-defined]
        with jax.enable_x64(False):
            inputs = agent._observation_preprocessor(jax.device_put(OBSERVATIONS, agent.device))
            _, outputs = agent.policy.act({"observations": inputs}, role="policy")
    assert np.array_equal(np.asarray(outputs["net_output"]).argmax(-1), chosen)
    exported = deploy(policy)
    import torch

    assert np.array_equal(exported(torch.from_numpy(OBSERVATIONS)).numpy(), chosen)


def test_time_limits_are_bootstrapped_by_what_was_seen_before_the_reset() -> None:
    with jax.enable_x64(True), ExitStack() as resources:
        training = training_of(config_with(**PPO, num_envs=4, env={"max_episode_steps": 6}), resources)
        told: list[dict[str, Any]] = []
        agent: Any = training.learner.agent  # type: ignore[attr-defined]
        record = agent.record_transition

        def record_and_tell(**named: Any) -> None:
            told.append(named)
            record(**named)

        agent.record_transition = record_and_tell
        training.iterate()
        training.iterate()
    over = [bool(np.asarray(step["truncated"]).any()) for step in told]
    assert any(over)
    for step, after, is_over in zip(told, told[1:], over, strict=False):
        assert np.array_equal(step["next_observations"], after["observations"]) != is_over
    # The library adds what is worth going on from there, and nothing elsewhere.
    kept = np.asarray(agent.memory.tensors["rewards"])
    given, truncated = (np.stack([np.asarray(step[name]) for step in told[4:]]) for name in ("rewards", "truncated"))
    assert np.array_equal(kept != given, truncated)


def test_advantages_of_one_process_are_normalised_as_the_library_does() -> None:
    with jax.enable_x64(True), ExitStack() as resources:
        settings = PPO | {"library": {"value_preprocessor": "RunningStandardScaler"}}
        training = training_of(config_with(**settings), resources)
        agent: Any = training.learner.agent  # type: ignore[attr-defined]
        told: list[np.ndarray] = []
        put = agent.memory.set_tensor_by_name

        def put_and_tell(name: str, tensor: jax.Array) -> None:
            put(name, tensor)
            if name == "advantages":
                told.extend((np.asarray(tensor), np.asarray(agent.memory.tensors[name])))

        agent.memory.set_tensor_by_name = put_and_tell
        training.iterate()
    expected, found = told
    assert found.shape == (4, 16, 1)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_learning_rate_that_was_changed_is_the_new_one_to_start_from() -> None:
    for schedule in ("adaptive", "fixed"):
        agent = PPO["agent"] | {"schedule": schedule}
        with jax.enable_x64(True), ExitStack() as resources:
            training = training_of(config_with(agent=agent), resources)
            lowered = [training.iterate()["learning_rate"] for _ in range(2)][-1]
            content = training.state_dict()
            assert (lowered == 1e-3) == (schedule == "fixed")
            # Steps of the optimizer are as large as the metrics say: 0.3 is far from where the schedule goes in one.
            rates, steps = [], []
            for changes in ({}, {"learning_rate": 0.3, "max_learning_rate": 0.3}):
                training = training_of(config_with(agent=agent | changes), resources)
                training.load_state_dict(content, "content")
                rates.append(training.learner.state()["rates"]["policy"])
                training.iterate()
                before, after = (each["networks"]["policy"]["params"]["log_std"] for each in (
                    content["replicated"], training.learner.state()
                ))  # fmt: skip
                steps.append(float(np.abs(np.asarray(after) - before).max()))
        assert rates == [lowered, 0.3]
        assert steps[1] > 20.0 * steps[0]


def test_a_schedule_of_the_librarys_own_is_told_nothing_of_ours() -> None:
    schedule = {"init_value": 1.0, "decay_steps": 100}
    library = {"learning_rate_scheduler": "cosine_decay_schedule", "learning_rate_scheduler_kwargs": schedule}
    with jax.enable_x64(True), ExitStack() as resources:
        training = training_of(config_with(**PPO, library=library), resources)
        metrics = training.iterate()
    assert 0 < metrics["learning_rate"] < 1e-3  # type: ignore[operator]  # of a number


def test_what_is_no_loss_may_be_no_number_and_has_the_same_names_on_every_rank() -> None:
    class Agent:
        tracking_data: ClassVar[dict[str, list[float]]] = {}

    def noted(is_discrete: bool) -> dict[str, float]:
        numbers = {"Loss / Policy loss": math.inf, "Policy / Standard deviation": math.nan, "Target / Target (mean)": 1}
        Agent.tracking_data = {name: [number] for name, number in numbers.items()}
        return take_numbers(Agent(), is_discrete=is_discrete)

    assert list(noted(False)) == ["policy", "skrl/standard_deviation", "skrl/target"]
    assert list(noted(True)) == ["policy", "skrl/target"]
    state = {"rates": np.ones(2)}
    assert first_nonfinite({"policy": 1.0, "skrl/target": math.nan}, state) == ""
    assert first_nonfinite({"skrl/target": math.nan, "policy": math.inf}, state) == "loss policy"
    with jax.enable_x64(True), ExitStack() as resources:
        training = training_of(config_with(**PPO), resources)
        agent: Any = training.learner.agent  # type: ignore[attr-defined]
        agent.track_data("Target / Target (mean)", math.nan)
        metrics = training.iterate()
    assert metrics["skrl/target"] is None and metrics["loss/policy"] is not None


def test_shapes_of_a_replay_are_told_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True), ExitStack() as resources:
        training = training_of(config_with(**SAC), resources)
        shapes = training.learner.row_shapes()
        assert shapes == jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), training.learner.rows()
        )
        assert shapes["rewards"].shape == (16, 1024 // 16, 1)
        content = training.state_dict()

        def refuse(self: Any) -> Any:
            raise AssertionError("copied")

        monkeypatch.setattr(SkrlLearner, "rows", refuse)
        again = training_of(config_with(**SAC), resources)
        again.load_weights(content, "content")
        again.load_state_dict(content, "content")


@pytest.fixture(scope="module")
def by_sac() -> Any:
    """A training by SAC after 6 iterations, and its content after 4."""
    with jax.enable_x64(True), ExitStack() as resources:
        training = training_of(config_with(**SAC), resources)
        metrics = [training.iterate() for _ in range(4)]
        content = training.state_dict()
        whole = copy.deepcopy(content)
        metrics += [training.iterate() for _ in range(2)]
        jax.tree.map(np.testing.assert_array_equal, content, whole)  # nothing is written into what was saved
        yield training, content, metrics


def test_sac_goes_on_bit_for_bit_with_its_replay(by_sac: Any) -> None:
    training, content, metrics = by_sac
    # 100 env steps of 16 envs are 2 iterations of 4 steps: then it learns, the temperature too.
    assert ["loss/critic" in record for record in metrics] == [False, False, True, True, True, True]
    assert len({record["skrl/entropy_coefficient"] for record in metrics[2:]}) == 4
    assert content["sharded"]["learner"]["rewards"].shape == (16, 1024 // 16, 1)
    assert int(content["replicated"]["replay"]["index"]) == 16
    with jax.enable_x64(True), ExitStack() as resources:
        again = training_of(config_with(**SAC), resources)
        again.load_state_dict(content, "content")
        assert again.iteration == 4
        again.iterate()
        again.iterate()
        for part in ("replicated", "sharded"):
            one, other = training.state_dict()[part], again.state_dict()[part]
            jax.tree.map(np.testing.assert_array_equal, one, other)


def test_sac_is_played_and_exported_as_the_library_decides(by_sac: Any, tmp_path: Path) -> None:
    _, content, _ = by_sac
    checkpoint.save(content, tmp_path / "model_4")
    policy: Any = lockstep.load_policy(tmp_path / "model_4")
    with jax.enable_x64(True), ExitStack() as resources:
        fresh = training_of(config_with(**SAC), resources)
        fresh.load_weights(content, "content")
        agent: Any = fresh.learner.agent  # type: ignore[attr-defined]
        agent.policy.reseed(jax.random.PRNGKey(0))
        with jax.enable_x64(False):
            inputs = agent._observation_preprocessor(jax.device_put(OBSERVATIONS, agent.device))
            _, outputs = agent.policy.act({"observations": inputs}, role="policy")
        assert fresh.iteration == 0 and int(fresh.learner.state()["replay"]["index"]) == 0
    actions = policy(OBSERVATIONS)
    assert actions == pytest.approx(np.asarray(outputs["mean_actions"]), abs=1e-6)
    exported = deploy(policy)
    import torch

    assert exported(torch.from_numpy(OBSERVATIONS)).numpy() == pytest.approx(actions, abs=1e-6)


def test_a_program_that_is_compiled_once_draws_other_noise_for_another_batch() -> None:
    space = ActionSpace("continuous", 2)
    network = SquashedNetwork(
        # Of gain 0: whatever is seen, the mean is 0 and the standard deviation 1.
        layers=Mlp((4,), 4, last_gain=0.0),
        space=space,
        device=jax.local_devices()[0],
        compiled_key=jax.random.PRNGKey(1),
    )
    start(network, jax.random.PRNGKey(0), {"observations": 3}, "policy")

    @jax.jit
    def draw(observations: jax.Array) -> jax.Array:
        return jnp.arctanh(network.act({"observations": observations}, role="policy")[0])

    batch = jnp.linspace(-1.0, 1.0, 6, dtype=jnp.float32).reshape(2, 3)
    one, again, other = draw(batch), draw(batch), draw(batch + 0.5)
    assert np.array_equal(one, again)
    assert np.abs(one - other).min() > 1e-3


def test_a_normaliser_has_the_moments_of_all_it_was_given() -> None:
    exchange = Exchange(make_mesh(jax.local_devices()[:1]), 1.0)
    scaler: Any = SharedScaler(3, exchange=exchange, device=exchange.device)
    samples = np.random.default_rng(0).normal(5.0, 2.0, (7, 4, 3)).astype(np.float32)
    assert np.array_equal(scaler(samples[0]), np.clip(samples[0], -5.0, 5.0))  # of no sample yet: as it is, clipped
    for batch in samples:
        merge_scalers([scaler], [jnp.asarray(batch)], exchange, "moments")
        scaler(batch, train=True)  # which counts nothing twice
    flat = samples.reshape(-1, 3).astype(np.float64)
    moments = scaler.moments()
    assert moments["count"] == 28
    assert moments["mean"] == pytest.approx(flat.mean(0), rel=1e-12)
    assert moments["m2"] / 28 == pytest.approx(flat.var(0), rel=1e-12)
    scaled = np.asarray(scaler(samples.reshape(-1, 3)))
    assert scaled.mean(0) == pytest.approx(np.zeros(3), abs=1e-6) and scaled.std(0) == pytest.approx(np.ones(3), 1e-5)


def test_a_memory_gives_no_sample_twice_and_overwrites_the_oldest() -> None:
    memory = OwnMemory(memory_size=3, num_envs=2, device=jax.local_devices()[0])
    memory.create_tensor("rewards", size=1, dtype=jnp.float32)
    memory.reseed((1, 2))
    for step in range(4):
        memory.add_samples(rewards=jnp.full((2, 1), step, jnp.float32), unknown=jnp.zeros((2, 1)))
    assert (len(memory), memory.memory_index, memory.filled) == (6, 1, True)
    first, second = (np.asarray(batch[0]) for batch in memory.sample(["rewards"], batch_size=6, mini_batches=2))
    assert sorted([*first[:, 0].tolist(), *second[:, 0].tolist()]) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"num_devices": 2},
            "computes on one device of each process, and num_devices is 2; use lockstep train_multigpu",
        ),
        ({"enable_jit": False}, "enable_jit False is not available with rl_library skrl"),
    ],
)
def test_settings_that_it_has_no_use_for_are_refused_before_the_start(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        JAX.check(config_with(**settings), 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"library": {"learning_rate_scheduler": "KLAdaptivLR"}}, "'KLAdaptivLR' is not known; did you mean"),
        ({"library": {"observation_preprocessor": "Scaler"}}, "library.observation_preprocessor 'Scaler' is not known"),
        ({"library": {"learning_rate_scheduler_kwargs": {"kl_treshold": 1.0}}}, "library has something that skrl"),
        ({"library": {"mini_batches": 1.5}}, "library.mini_batches must be a whole number from 1 to 64, .*, not 1.5"),
        ({"library": {"mini_batches": 65}}, "library.mini_batches must be .* as many as a rank has samples, not 65"),
    ],
)
def test_what_the_library_does_not_know_is_refused(settings: dict[str, Any], words: str) -> None:
    config = config_with(**PPO, **settings)
    exchange = Exchange(make_mesh(jax.local_devices()[:1]), 1.0)
    with ExitStack() as resources, jax.enable_x64(True):
        task = training_task(config, resources)
        with pytest.raises(UsageError, match=words), jax.enable_x64(False):
            make_agent(config, task, exchange, (16,), PooledKl(exchange))


def training_task(config: Any, resources: ExitStack) -> Any:
    from lockstep.session.jax_envs import build_env

    return build_env(config, "cpu", resources).task
