"""Gymnasium's envs in ours: every episode ends with its own last observation, and no step is dead."""

import json
import re
import signal
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lockstep.adapters.gymnasium import specs
from lockstep.cli.main import main
from lockstep.cli.train_request import read
from lockstep.core.errors import UsageError
from lockstep.distributed.torch_comm import SoloComm
from lockstep.envs.batch_env import BatchEnv
from lockstep.envs.guest_actions import decoder, policy_space
from lockstep.envs.guest_env import GuestEnv
from lockstep.recipes.catalog import make_task, note_of
from lockstep.session.make_config import make_config
from lockstep.session.make_env import build_env, make_env
from lockstep.session.runner import make_runner
from tests.unit.cli_train_fixtures import refused
from tests.unit.guest_fixtures import INF, Counting, counting, played

__all__ = ["counting"]


@pytest.fixture(autouse=True)
def forget_facts() -> Iterator[None]:
    specs._facts_of.cache_clear()
    yield
    specs._facts_of.cache_clear()


def make(task: str, num_envs: int = 2, **settings: Any) -> GuestEnv:
    env = make_env(task, num_envs, device="cpu", **settings)
    assert isinstance(env, GuestEnv)
    return env


def still(env: BatchEnv) -> torch.Tensor:
    space = env.task.action_space
    continuous = space.kind == "continuous"
    return torch.zeros((env.num_envs, space.size)) if continuous else torch.zeros(env.num_envs, dtype=torch.int64)


def numbers(env: BatchEnv) -> list[float]:
    found: list[float] = env.observations["actor"][:, 1].tolist()
    return found


# --- episodes ----------------------------------------------------------------------------------------------------


def test_an_episode_ends_with_its_own_last_observation_and_the_next_begins_in_the_same_step(counting: str) -> None:
    env = make(counting, 3)
    counts, lengths = [0, 0, 0], [0, 0, 0]
    seen_numbers = numbers(env)
    ended = 0
    for _ in range(20):
        before = numbers(env)
        transition = env.step(still(env))
        final, now = transition.final_observations["actor"], transition.observations["critic"]
        for row in range(3):
            counts[row] += 1
            assert final[row].tolist() == [counts[row], pytest.approx(before[row])]
            assert transition.reward[row] == counts[row]
            assert not transition.truncated[row]
            if transition.terminated[row]:
                ended += 1
                lengths[row] = counts[row]
                assert 2 <= lengths[row] <= 5
                assert now[row, 0] == 0
                assert now[row, 1] not in seen_numbers
                seen_numbers.append(float(now[row, 1]))
                counts[row] = 0
            else:
                assert torch.equal(now[row], final[row])
    assert ended >= 12
    assert len(Counting.actions) == 60  # a step of each env each time, and none is lost to a reset
    *_, length_sum, count = env.episodes.take().tolist()
    assert count == ended
    assert length_sum == 60 - sum(counts)


def test_the_time_limit_cuts_and_an_end_at_the_limit_is_an_end(counting: str) -> None:
    env = make(counting, 8, max_episode_steps=3)
    lengths = [played(seed)[1] for seed in env._seeds(np.arange(8)).tolist()]
    assert {2, 3} & set(lengths)
    assert max(lengths) > 3
    env.step(still(env))
    second, third = env.step(still(env)), env.step(still(env))
    for row, length in enumerate(lengths):
        assert second.terminated[row] == (length == 2)
        if length > 2:
            assert third.terminated[row] == (length == 3)
            assert third.truncated[row] == (length > 3)
            assert third.final_observations["critic"][row, 0] == 3


def test_first_episodes_may_be_cut_shorter_and_are_not_counted(counting: str) -> None:
    env = make(counting, 64, max_episode_steps=2, randomize_initial_episode_length=True)
    first = env.step(still(env))
    assert 0 < first.truncated.sum() < 64
    assert env.episodes.take()[-1] == 0


def test_an_envs_episodes_depend_on_seed_streams_and_global_id_alone(counting: str) -> None:
    whole = make_config(counting, num_envs=4, device="cpu", agent={"num_mini_batches": 1})
    together = build_env(whole)
    last = build_env(whole, num_envs=1, first_env_id=3)
    evaluation = build_env(whole, streams="evaluation")
    assert len({*numbers(together), *numbers(evaluation)}) == 8
    begun = numbers(together)
    for _ in range(12):
        for env in (together, last):
            env.step(still(env))
        assert torch.equal(together.observations["actor"][3:], last.observations["actor"])
    together.reset()
    assert numbers(together) == begun


def test_a_rank_may_have_no_envs(counting: str) -> None:
    config = make_config(counting, num_envs=4, device="cpu", agent={"num_mini_batches": 1})
    env = build_env(config, num_envs=0)
    transition = env.step(torch.zeros((0, 4)))
    assert transition.final_observations["critic"].shape == (0, 2)
    assert env.reset()["actor"].shape == (0, 2)


def test_what_is_not_finite_ends_the_episode_and_reaches_nobody(counting: str) -> None:
    env = make(counting, 8, kwargs={"breaks_at": 2})
    env.step(still(env))
    before = env.observations["actor"]
    broken = env.step(still(env))
    assert broken.terminated.all()
    assert env.num_diverged == 8
    assert broken.reward.tolist() == [0.0] * 8
    assert torch.equal(broken.final_observations["actor"], before)
    assert broken.observations["actor"][:, 0].tolist() == [0.0] * 8


def test_a_run_that_goes_on_meets_new_episodes(counting: str) -> None:
    env, other = make(counting, 3), make(counting, 3)
    had = set(numbers(env))
    for _ in range(6):
        env.step(still(env))
        had |= set(numbers(env))
    other.load_state_dict(env.state_dict())
    assert other.num_steps == 6
    assert not had & set(numbers(other))
    assert other.observations["actor"][:, 0].tolist() == [0.0] * 3


def test_episodes_may_be_moved_on_as_in_our_own_envs(counting: str) -> None:
    env = make(counting, 3, max_episode_steps=50)
    env.step(still(env))
    env.episode_length = torch.tensor([49, 1, 0])
    assert env.step(still(env)).truncated.tolist() == [True, False, False]
    assert env.episode_length.tolist() == [0, 2, 1]


def test_envs_in_processes_of_their_own_do_the_same() -> None:
    runs, heard_by = [], signal.getsignal(signal.SIGINT)
    for vectorization in ("sync", "async"):
        env = make("gymnasium/Pendulum-v1", 2, vectorization=vectorization, max_episode_steps=3)
        seen = [env.observations["actor"]]
        for step in range(5):
            transition = env.step(torch.full((2, 1), 0.1 * step))
            seen += [transition.final_observations["actor"], transition.observations["actor"]]
            seen += [transition.reward.unsqueeze(1).expand(2, 3), transition.truncated.unsqueeze(1).expand(2, 3)]
        # The envs' processes leave an interrupt to the training, which must still hear of it.
        assert signal.getsignal(signal.SIGINT) is heard_by
        env.close()
        runs.append(torch.cat(seen))
    assert torch.equal(*runs)


# --- spaces ------------------------------------------------------------------------------------------------------


def test_continuous_actions_are_laid_over_the_bounds_and_clipped(counting: str) -> None:
    env = make(counting, 1)
    env.step(torch.tensor([[0.25, 0.5, 7.0, -3.0]]))
    env.step(torch.tensor([[-4.0, 9.0, -7.0, 3.0]]))
    # Bounds: -2..2, 0..1, none, 0 and above.
    assert [action.tolist() for action in Counting.actions] == [[0.5, 0.75, 7.0, 0.0], [-2.0, 1.0, -7.0, 3.0]]


@pytest.mark.parametrize(
    ("low", "high", "limit"),
    [
        ([-1, -1], [1, 1], 1.0),
        ([-3, 0], [5, 1e6], 1.0),
        ([-1, -INF], [1, INF], INF),
        ([-1, 0], [1, INF], INF),
        ([-INF, -INF], [0, 1], INF),
        ([[-1], [-INF]], [[1], [1]], INF),
    ],
)
def test_actions_have_a_limit_where_every_entry_has_two_bounds(low: list[Any], high: list[Any], limit: float) -> None:
    box = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    space = policy_space(box, "t")
    assert (space.kind, space.size, space.limit) == ("continuous", 2, limit)
    decode, rng = decoder(box), np.random.default_rng(1)
    actions = rng.uniform(-9, 9, (50, 2))
    inside = np.clip(actions, -space.limit, space.limit)
    # What the limit promises: beyond it nothing changes.
    assert np.array_equal(decode(actions), decode(inside))
    if limit == INF:
        assert not np.array_equal(decode(actions), decode(np.clip(actions, -1, 1)))


def test_a_learner_of_bounded_actions_refuses_an_env_without_bounds(counting: str) -> None:
    assert make_task(make_config(counting)).action_space.limit == INF
    for library, algorithm in (("sb3", "sac"), ("sb3", "td3"), ("skrl", "sac"), ("skrl", "td3"), ("skrl", "ddpg")):
        config = make_config(counting, rl_library=library, algorithm=algorithm, num_envs=4, device="cpu")
        with pytest.raises(UsageError, match=f"{algorithm}.* bound") as said:
            make_runner(config, build_env(config), SoloComm())
        assert "\n" not in str(said.value)


def test_choices_begin_where_the_env_lets_them_begin(counting: str) -> None:
    env = make(counting, 2, kwargs={"action": "discrete"})
    env.step(torch.tensor([0, 2]))
    assert Counting.actions == [5, 7]


def test_observations_of_several_parts_become_one_flat_array(counting: str) -> None:
    env = make(counting, 1, kwargs={"observation": "nested"})
    env.step(still(env))
    # In the order of the names: on (two of them), where, which (one number for each of 1, 2, 3).
    assert env.observations["actor"].tolist() == [[1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"action": "several"},
            "has actions of kind MultiDiscrete; a policy here gives real numbers (Box) or one",
        ),
        ({"action": "whole"}, "has actions of kind Box of int64; a policy here gives real numbers"),
        ({"observation": "text"}, "has observations of kind Text; a policy here takes a fixed number"),
        ({"colour": "red"}, "Gymnasium can't make env 'LockstepTest-v0': TypeError"),
    ],
)
def test_what_no_policy_here_deals_with_is_refused_by_name(kwargs: dict[str, str], words: str, counting: str) -> None:
    with pytest.raises(UsageError) as error:
        make_task(make_config(counting, env={"kwargs": kwargs}))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_an_array_of_no_numbers_is_no_action(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=re.escape(f"task t has actions of kind Box of shape {shape}; a policy here")):
        policy_space(spaces.Box(-1.0, 1.0, shape), "t")


# --- keyword arguments, time limits ------------------------------------------------------------------------------


@pytest.fixture
def sized() -> Iterator[str]:
    """The name of the task of envs that are not to be had without a size, and have no time limit."""
    gymnasium.register("LockstepSized-v0", entry_point="tests.unit.guest_fixtures:Sized")
    yield "gymnasium/LockstepSized-v0"
    del gymnasium.registry["LockstepSized-v0"]


def test_an_env_may_need_keyword_arguments(sized: str) -> None:
    config = read([sized, "--env.kwargs.size", "3", "--env.kwargs.action", "discrete"]).config
    task = make_task(config)
    assert (task.num_observations["actor"], task.action_space.kind) == (3, "discrete")
    assert make(sized, 2, kwargs={"size": 4}).observations["actor"].shape == (2, 4)
    for words in ([], ["--env.kwargs.action", "discrete"], ["--env.kwargs.size", "-1"]):
        said = refused(sized, *words)
        assert "Gymnasium can't make env 'LockstepSized-v0': " in said
        assert said.endswith("--env.kwargs.NAME VALUE") != bool(words)
    assert main(["train", sized, "--help"]) == 0


@pytest.mark.parametrize("value", [{"start": date(2026, 1, 1)}, {"f": print}])
def test_keyword_arguments_are_what_a_config_can_hold(value: dict[str, Any], counting: str) -> None:
    with pytest.raises(UsageError, match=r"env\.kwargs are numbers, words, lists"):
        make(counting, 2, kwargs=value)


def test_a_time_limit_that_is_a_guess_is_said_and_can_be_changed(
    sized: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", sized, "--env.kwargs.size", "2", "--device", "cpu", "--max_iterations", "1", "--num_envs", "32"]
    words += ["--evaluation.interval", "0"]
    said = f"{sized} has no time limit of its own, so an episode is cut after 1000 steps; --env.max_episode_steps N"
    assert main(words) == 0
    assert capsys.readouterr().out.count(said) == 1
    assert main([*words, "--env.max_episode_steps", "70"]) == 0
    assert "time limit" not in capsys.readouterr().out
    assert make(sized, 2, kwargs={"size": 2}, max_episode_steps=70).config.max_episode_steps == 70


@pytest.mark.parametrize("task", ["gymnasium/HalfCheetah-v5", "envpool/HalfCheetah-v4", "gymnasium/CartPole-v1"])
def test_nothing_is_said_of_a_time_limit_that_the_library_gives(task: str) -> None:
    assert note_of(make_config(task)) == ""


@pytest.mark.parametrize("task", ["gymnasium/Blackjack-v1", "envpool/Blackjack-v1"])
def test_of_any_env_without_a_limit_it_is_said(task: str) -> None:
    config = make_config(task)
    assert config.env.max_episode_steps == 1000
    assert note_of(config).startswith(f"{task} has no time limit of its own")


# --- training ----------------------------------------------------------------------------------------------------


def test_a_training_learns_is_resumed_and_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task = "gymnasium/CartPole-v1"
    assert main(["train", task, "--device", "cpu", "--max_iterations", "15", "--agent.num_steps_per_env", "24"]) == 0
    (run,) = (tmp_path / "logs" / "gymnasium" / "CartPole-v1").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["mean_return"] < 30
    assert lines[-1]["eval/mean_return"] > 60
    capsys.readouterr()
    assert main(["train", task, "--device", "cpu", "--max_iterations", "16", "--resume"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("gymnasium can't save its envs, so each of them begins a new episode here") == 1
    assert json.loads((run / "progress.json").read_text())["iteration"] == 16
    assert main(["play", "--run", str(run), "--num_episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == task


def test_an_env_may_be_named_with_the_module_that_registers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("nowhere")  # so that what is put on the path is taken off again
    code = "import gymnasium\nfrom tests.unit import guest_fixtures\nclass Counting(guest_fixtures.Counting): ...\n"
    code += "gymnasium.register('OfAModule-v3', entry_point=Counting, max_episode_steps=7)\n"
    Path("registers_envs.py").write_text(code)
    config = make_config("gymnasium/registers_envs:OfAModule-v3", device="cpu")
    env = build_env(config, num_envs=4)
    assert env.config.max_episode_steps == 7
    assert env.observations["actor"].shape == (4, 2)
    with pytest.raises(UsageError, match="is in no module 'no_module'; run lockstep in the folder of no_module, or"):
        specs.check("no_module:OfAModule-v3")
    with pytest.raises(UsageError, match="no env 'OfAModul-v3'; did you mean 'OfAModule-v3'"):
        specs.check("registers_envs:OfAModul-v3")
    with pytest.raises(UsageError, match=r"no env 'Hopper-v9'; registers_envs registers .*OfAModule-v3"):
        specs.check("registers_envs:Hopper-v9")
    with pytest.raises(UsageError, match="knows no env 'Elsewhere/Thing-v0'; one that a module registers"):
        specs.check("Elsewhere/Thing-v0")


def test_mujocos_warnings_go_to_the_runs_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = make("gymnasium/InvertedPendulum-v5", 16)
    for number, path in enumerate(("one.txt", "other.txt")):  # MuJoCo warns once of each simulation
        env.engine.log_to(tmp_path / path)
        env.engine._envs[number].unwrapped.data.qpos[:] = np.nan  # type: ignore[attr-defined]
        transition = env.step(still(env))
        assert "Nan, Inf or huge value in QPOS" in Path(path).read_text()
        assert torch.isfinite(transition.final_observations["actor"]).all()
    assert not Path("MUJOCO_LOG.TXT").exists()
