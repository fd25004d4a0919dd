"""Envs in torch: resets, time limits, diverged envs, streams, and continuing from a saved state."""

import math
from typing import Any

import pytest
import torch

from lockstep.core.types import ActionSpace, Array, Namespace, State
from lockstep.envs.torch_env import TorchEnv, Transition
from lockstep.session.make_env import make_env
from tests.unit.learner_fixtures import Line, build_own_env, differences, round_trip, small_config, toy_env
from tests.unit.watched_fixtures import watched

NAN = math.nan


def step(env: TorchEnv, *actions: float) -> Transition:
    return env.step(torch.tensor(actions, dtype=env.dtype).unsqueeze(1))


def positions(env: TorchEnv) -> list[float]:
    found: list[float] = env.observations["actor"].flatten().tolist()
    return found


# --- episodes ------------------------------------------------------------------------------------------------------


def test_rewards_and_observations_of_steps_by_hand() -> None:
    env = toy_env(Line(), 2)
    assert positions(env) == [0.0, 0.0]
    transition = step(env, 1.0, -2.0)
    assert transition.reward.tolist() == [2.0, -1.0]
    assert transition.terms.tolist() == [[1.0, 1.0], [-2.0, 1.0]]
    assert transition.done.tolist() == [False, False]
    assert positions(env) == [1.0, -2.0]
    step(env, 1.0, 1.0)
    assert positions(env) == [2.0, -1.0]
    # The critic sees position, last action, age and noise.
    assert env.observations["critic"][:, :3].tolist() == [[2.0, 1.0, 2.0], [-1.0, 1.0, 2.0]]


def test_a_failed_episode_ends_and_the_next_begins() -> None:
    env = toy_env(Line(), 2)
    step(env, 2.0, 0.5)
    transition = step(env, 1.5, 0.5)
    assert transition.terminated.tolist() == [True, False]
    assert transition.truncated.tolist() == [False, False]
    assert transition.done.tolist() == [True, False]
    # The step's own observation is kept beside that of the new episode, which has forgotten action and age.
    assert transition.final_observations["actor"].flatten().tolist() == [3.5, 1.0]
    assert transition.final_observations["critic"][:, :3].tolist() == [[3.5, 1.5, 2.0], [1.0, 0.5, 2.0]]
    assert transition.observations["actor"].flatten().tolist() == [0.0, 1.0]
    assert transition.observations["critic"][:, :3].tolist() == [[0.0, 0.0, 0.0], [1.0, 0.5, 2.0]]
    assert transition.observations is env.observations
    step(env, 1.0, 1.0)
    assert positions(env) == [1.0, 2.0]
    assert env.episode_length.tolist() == [1, 3]


def test_the_time_limit_truncates() -> None:
    env = toy_env(Line(), 3, max_episode_steps=3)
    step(env, 0.0, 0.0, 0.0)
    step(env, 0.0, 3.0, 0.0)  # the second fails early and begins anew
    transition = step(env, 0.5, 0.5, 3.0)  # the third fails in the very step of its limit: that is a failure
    assert transition.truncated.tolist() == [True, False, False]
    assert transition.terminated.tolist() == [False, False, True]
    assert transition.final_observations["actor"].flatten().tolist() == [0.5, 0.5, 3.0]
    assert positions(env) == [0.0, 0.5, 0.0]
    transition = step(env, 0.0, 0.0, 0.0)
    assert transition.done.tolist() == [False] * 3
    transition = step(env, 0.0, 0.0, 0.0)
    assert transition.truncated.tolist() == [False, True, False]


@pytest.mark.parametrize("task", ["cartpole_classic", "cartpole_balance"])
def test_an_episode_ends_for_one_reason_only(task: str) -> None:
    env = make_env(task, 64, device="cpu", max_episode_steps=7)
    generator = torch.Generator().manual_seed(0)
    seen = {"terminated": 0, "truncated": 0}
    for _ in range(60):
        transition = env.step(3 * torch.randn((64, 1), generator=generator))
        assert not (transition.terminated & transition.truncated).any()
        assert (env.episode_length < 7).all()
        assert torch.equal(env.episode_length == 0, transition.done)
        seen["terminated"] += int(transition.terminated.sum())
        seen["truncated"] += int(transition.truncated.sum())
    env.close()
    # An episode of 7 steps is too short to fall in.
    assert seen["truncated"] > 500


def test_episode_statistics_by_hand() -> None:
    env = toy_env(Line(), 2, max_episode_steps=3)
    for first, second in ((1.0, 4.0), (1.0, 0.5), (0.5, 0.5), (3.0, 0.5), (0.0, 0.0)):
        step(env, first, second)
    # First env: 1 + 1 + 0.5 in 3 steps, then 3 in 1; the second: 4 in 1, 1.5 in 3.
    sums = env.episodes.take().tolist()
    assert sums == [11.0, 8.0, 8.0, 4.0]
    assert env.summarise(sums) == {
        "mean_return": 4.75,
        "mean_episode_length": 2.0,
        "num_episodes": 4,
        "reward/progress": 2.75,
        "reward/alive": 2.0,
    }


def test_metrics_are_no_part_of_the_return() -> None:
    with watched(Line):
        env = toy_env(Line(), 1, max_episode_steps=2)
        step(env, 1.0)
        step(env, 0.5)
        found = env.summarise(env.episodes.take().tolist())
        nothing = env.summarise(env.episodes.take().tolist())
    # In two steps the point is at 1 and at 1.5.
    assert (found["mean_return"], found["metric/distance"], found["metric/is_step"]) == (3.5, 1.25, 1.0)
    assert nothing == dict.fromkeys(found) | {"num_episodes": 0}


def test_first_episodes_end_at_different_times_and_count_only_if_whole() -> None:
    env = toy_env(Line(), 1000, max_episode_steps=10, randomize=True)
    lengths = env.episode_length.clone()
    assert lengths.bincount(minlength=10).shape == (10,)
    assert (lengths.bincount() > 50).all()  # about 100 each
    ends = torch.zeros(1000, dtype=torch.int64)
    for number in range(1, 11):
        transition = step(env, *[0.0] * 1000)
        ends = torch.where(transition.done, number, ends)
    assert torch.equal(ends, 10 - lengths)
    # Only those that began at 0 were whole: ten steps each.
    num_whole = int((lengths == 0).sum())
    assert env.episodes.take().tolist() == [0.0, 10.0 * num_whole, 10.0 * num_whole, num_whole]


def test_an_evaluation_starts_every_episode_at_its_beginning() -> None:
    env = build_own_env(small_config(), num_envs=16, streams="evaluation")
    assert env.num_envs == 16
    assert env.episode_length.tolist() == [0] * 16
    assert differences(env.observations, build_own_env(small_config(), num_envs=16).observations) != []


def test_reset_starts_the_streams_anew() -> None:
    env = toy_env(Line(spread=1.0), 4, noise_block=3)
    start = {name: tensor.clone() for name, tensor in env.observations.items()}
    first = [step(env, 0.1, 0.2, 4.0, -1.0) for _ in range(7)]
    again = env.reset()
    assert differences(start, again) == []
    assert differences(first, [step(env, 0.1, 0.2, 4.0, -1.0) for _ in range(7)]) == []
    assert env.episodes.take()[-1] == 7  # the third env fails in each of its seven steps


def test_every_reset_draws_anew() -> None:
    env = toy_env(Line(spread=1.0), 8)
    starts = [positions(env)]
    for _ in range(10):
        step(env, *[3.0] * 8)
        starts.append(positions(env))
    assert len({value for row in starts for value in row}) == 88
    assert all(0 <= value < 1 for row in starts for value in row)


# --- envs whose physics fail ---------------------------------------------------------------------------------------


def test_a_diverged_env_is_reset_and_counted_and_infects_nobody() -> None:
    env, healthy = toy_env(Line(), 3), toy_env(Line(), 3)
    step(env, 1.0, 1.0, 1.0)
    step(healthy, 1.0, 1.0, 1.0)
    transition = step(env, 0.5, NAN, 0.5)
    other = step(healthy, 0.5, 0.5, 0.5)
    assert transition.terminated.tolist() == [False, True, False]
    assert transition.truncated.tolist() == [False, False, False]
    # No reward at all in the step that failed, not even that for being alive.
    assert transition.reward.tolist() == [1.5, 0.0, 1.5]
    assert transition.terms[1].tolist() == [0.0, 0.0]
    assert env.num_diverged.item() == 1
    for name in ("actor", "critic"):
        assert transition.observations[name].isfinite().all()
        assert torch.equal(transition.observations[name][::2], other.observations[name][::2])
    assert positions(env) == [1.5, 0.0, 1.5]
    # It goes on as a new episode: 2 to its end, in one step.
    step(env, 0.0, 3.0, 0.0)
    # Its failed episode counts with what it had until then: 1 in the first step, and 2 steps.
    assert env.episodes.take().tolist() == [1.0 + 3.0, 1.0 + 1.0, 2.0 + 1.0, 2.0]
    env.reset()
    assert env.num_diverged.item() == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_diverged_env_in_mujoco_infects_nobody(dtype: str) -> None:
    config = small_config(dtype=dtype)
    config = config.model_copy(update={"task": "cartpole_balance", "env": make_balance()})
    env, healthy = build_own_env(config), build_own_env(config)
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        action = torch.randn((8, 1), generator=generator, dtype=env.dtype)
        other = healthy.step(action)
        action = action.clone()
        action[3] = NAN if number == 5 else action[3]
        transition = env.step(action)
        if number == 5:
            assert transition.terminated[3]
            assert transition.reward[3] == 0
        assert transition.reward.isfinite().all()
        for name, tensor in transition.observations.items():
            assert tensor.isfinite().all()
            rest = [0, 1, 2, 4, 5, 6, 7]
            assert torch.equal(tensor[rest], other.observations[name][rest])
    assert env.num_diverged.item() == 1
    assert env.episodes.take().isfinite().all()
    env.close()
    healthy.close()


def make_balance() -> Any:
    from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig

    return CartpoleBalanceConfig(observation_noise=0.01)


# --- streams -------------------------------------------------------------------------------------------------------


def play(env: TorchEnv, num_steps: int, first_env: int = 0, first_step: int = 0) -> list[Transition]:
    """Random actions that depend on the step and the global env alone."""
    transitions = []
    for number in range(first_step, first_step + num_steps):
        generator = torch.Generator().manual_seed(number)
        everyone = 2 * torch.randn((16, 1), generator=generator, dtype=torch.float64)
        action = everyone[first_env : first_env + env.num_envs].to(env.dtype)
        if env.task.action_space == ActionSpace("discrete", 2):
            action = (action[:, 0] > 0).long()
        transitions.append(env.step(action))
    return transitions


@pytest.mark.parametrize("noise_block", [2, 5, 24, 1000])
def test_how_much_noise_is_drawn_at_once_makes_no_difference(noise_block: int) -> None:
    one_by_one = play(toy_env(Line(spread=1.0), 8, max_episode_steps=6, randomize=True), 30)
    in_blocks = play(toy_env(Line(spread=1.0), 8, max_episode_steps=6, randomize=True, noise_block=noise_block), 30)
    assert differences(one_by_one, in_blocks) == []
    assert sum(int(transition.done.sum()) for transition in one_by_one) > 20


def config_of(task: str, dtype: str = "float32") -> Any:
    if task == "cartpole_balance":
        return small_config(dtype=dtype).model_copy(update={"task": task, "env": make_balance()})
    return small_config(dtype=dtype, env={"action_kind": task, "max_episode_steps": 20})


def rebuilt(env: TorchEnv, first_env: int, num_envs: int, config: Any) -> TorchEnv:
    """The same envs as one process of several would have them."""
    source = build_own_env(config, num_envs=num_envs)
    return TorchEnv(
        source.task,
        source.engine,
        config.env,
        seed=config.seed,
        device=env.device,
        dtype=env.dtype,
        first_env_id=first_env,
        noise_block=env.noise_block,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("task", ["continuous", "discrete", "cartpole_balance"])
def test_what_an_env_goes_through_does_not_depend_on_the_split_into_processes(task: str, dtype: str) -> None:
    config = config_of(task, dtype)
    whole = build_own_env(config)
    halves = [rebuilt(whole, first, 4, config) for first in (0, 4)]
    together = play(whole, 40)
    apart = [play(half, 40, first) for half, first in zip(halves, (0, 4), strict=True)]
    for transition, one, two in zip(together, *apart, strict=True):
        for name in ("reward", "terms", "terminated", "truncated"):
            joined = torch.cat((getattr(one, name), getattr(two, name)))
            assert torch.equal(joined, getattr(transition, name))
        for group in ("observations", "final_observations"):
            for name, tensor in getattr(transition, group).items():
                assert torch.equal(torch.cat((getattr(one, group)[name], getattr(two, group)[name])), tensor)
    assert sum(int(transition.done.sum()) for transition in together) > 5


def test_seeds_and_streams_give_other_envs() -> None:
    starts = [
        toy_env(Line(spread=1.0), 4, **arguments).observations["actor"]
        for arguments in ({"seed": 1}, {"seed": 2}, {"seed": 1, "streams": "evaluation"}, {"first_env_id": 4})
    ]
    assert len(torch.cat(starts).unique()) == 16


# --- saving and continuing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("task", ["continuous", "discrete", "cartpole_balance"])
def test_a_saved_state_continues_bit_for_bit(task: str, dtype: str) -> None:
    config = config_of(task, dtype)
    env, other = build_own_env(config), build_own_env(config)
    play(env, 15)
    saved = round_trip(env.state_dict())
    ahead = play(env, 25, first_step=15)
    play(other, 4)
    other.load_state_dict(saved)
    assert differences(ahead, play(other, 25, first_step=15)) == []
    assert differences(env.state_dict(), other.state_dict()) == []
    assert torch.equal(env.episodes.take()[-1:] > 0, other.episodes.take()[-1:] > 0)
    assert sum(int(transition.done.sum()) for transition in ahead) > 2
    env.close()
    other.close()


def test_a_saved_state_is_a_copy_and_can_be_taken_up_again_and_again() -> None:
    env = toy_env(Line(spread=1.0), 4, max_episode_steps=6, randomize=True)
    play(env, 4)
    saved = env.state_dict()
    kept = round_trip(saved)
    first = play(env, 9, first_step=4)
    assert differences(saved, kept) == []
    for _ in range(2):
        env.load_state_dict(saved)
        assert differences(first, play(env, 9, first_step=4)) == []
        assert differences(saved, kept) == []


def test_the_episodes_under_way_are_counted_after_continuing() -> None:
    env = toy_env(Line(), 1)
    step(env, 1.0)
    saved = round_trip(env.state_dict())
    other = toy_env(Line(), 1)
    other.load_state_dict(saved)
    step(other, 2.0)
    assert other.episodes.take().tolist() == [3.0, 2.0, 2.0, 1.0]


# --- what is handed out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_and_shapes(dtype: torch.dtype) -> None:
    env = toy_env(Line(spread=1.0), 5, dtype=dtype)
    transition = step(env, *[1.0] * 5)
    for tensor, shape in (
        (transition.reward, (5,)),
        (transition.terms, (5, 2)),
        (transition.observations["actor"], (5, 1)),
        (transition.final_observations["critic"], (5, 4)),
    ):
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
    assert transition.terminated.dtype == transition.truncated.dtype == transition.done.dtype == torch.bool
    assert env.env_ids.dtype == torch.int32


def test_what_was_handed_out_stays_as_it_is() -> None:
    env = make_env("cartpole_balance", 4, device="cpu")
    kept = env.step(torch.ones(4, 1))
    copy = round_trip(dict(kept._asdict()))
    for _ in range(5):
        env.step(-torch.ones(4, 1))
    assert differences(dict(kept._asdict()), copy) == []
    env.close()


class Mislabelled(Line):
    """Says of its observations what is not so."""

    num_observations = {"actor": 2, "critic": 4}  # noqa: RUF012


def test_observations_of_another_shape_than_promised_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'actor' of shape \(4, 1\), not \(4, 2\)"):
        toy_env(Mislabelled(), 4)


class Stubborn(Line):
    """Looks at what it was given before it returns the state."""

    seen: list[tuple[int, ...]]

    def __init__(self) -> None:
        super().__init__(spread=1.0)
        self.seen = []

    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        self.seen.append((*action.shape, *noise.shape))
        assert state.ctrl is action
        return super().advance(xp, state, action, noise)


def test_a_task_is_given_its_action_and_noise() -> None:
    task = Stubborn()
    env = toy_env(task, 3, noise_block=4)
    noises = []
    for _ in range(3):
        noises.append(step(env, 0.0, 0.0, 0.0).observations["critic"][:, 3])
    assert task.seen == [(3, 1, 3, 1)] * 3
    assert len(torch.cat(noises).unique()) == 9
