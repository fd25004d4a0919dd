"""Gymnasium's envs that break their interface: named in one line, or dealt with as what they meant."""

import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from lockstep.adapters.gymnasium import specs
from lockstep.cli.main import main
from lockstep.core.errors import RunError, UsageError
from lockstep.envs.guest_env import GuestEnv
from lockstep.recipes.catalog import make_task
from lockstep.session.make_config import make_config
from lockstep.session.make_env import build_env, make_env

Odd = Callable[[str], str]
SMALL = ["--num_envs", "4", "--max_iterations", "1", "--agent.num_mini_batches", "1", "--device", "cpu"]
STILL = torch.zeros((2, 1))


@pytest.fixture
def odd() -> Iterator[Odd]:
    """Registers an env of ``odd_envs`` and returns the name of its task."""
    ids = []

    def register(kind: str) -> str:
        ids.append(f"{kind}-v0")
        gymnasium.register(ids[-1], entry_point=f"tests.unit.odd_envs:{kind}", max_episode_steps=50)
        return f"gymnasium/{ids[-1]}"

    specs._facts_of.cache_clear()
    yield register
    specs._facts_of.cache_clear()
    for env_id in ids:
        del gymnasium.registry[env_id]


def make(task: str, **settings: Any) -> GuestEnv:
    env = make_env(task, 2, device="cpu", **settings)
    assert isinstance(env, GuestEnv)
    return env


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("NoReward", "gave None as reward, which is not one number"),
        ("WordAsReward", "gave '1.0' as reward"),
        ("TwoRewards", "gave ndarray of shape (2,) as reward"),
        ("Grows", "gave ndarray of shape (4,) as observation, and its space has 3 numbers"),
        ("NoObservation", "gave None as observation"),
        ("TwoEnds", "gave [True, False] as terminated"),
        ("NanAtSecondReset", "begins an episode with an observation that is not finite in float32: entry 0 is nan"),
    ],
)
def test_what_an_env_gives_wrongly_in_a_step_is_named(kind: str, said: str, odd: Odd) -> None:
    env = make(odd(kind))
    with pytest.raises(RunError, match=f"env 0 of gymnasium/{kind}-v0 {re.escape(said)}"):
        env.step(STILL)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Wider", "gave ndarray of shape (5,) as observation, and its space has 3 numbers"),
        ("BareReset", "gave ndarray of shape (3,) at a reset; return (observation, info)"),
        ("NanAtReset", "begins an episode with an observation that is not finite in float32: entry 1 is nan"),
        ("HugeAtReset", "is not finite in float32: entry 2 is 1e+300; use --dtype float64"),
    ],
)
def test_what_an_env_gives_wrongly_at_a_reset_is_named_with_its_global_id(kind: str, said: str, odd: Odd) -> None:
    config = make_config(odd(kind), num_envs=4, device="cpu", agent={"num_mini_batches": 1})
    with pytest.raises(RunError, match=rf"env 3 of gymnasium/{kind}-v0 .*{re.escape(said)}"):
        build_env(config, num_envs=1, first_env_id=3)


def test_arrays_of_one_entry_are_that_entry(odd: Odd) -> None:
    transition = make(odd("Arrays")).step(STILL)
    assert transition.reward.tolist() == [2.0, 2.0]
    assert not transition.done.any()


@pytest.mark.parametrize("kind", ["HugeReward", "HugeObservation"])
def test_what_is_too_large_for_the_dtype_ends_the_episode(kind: str, odd: Odd) -> None:
    task = odd(kind)
    env = make(task)
    transition = env.step(STILL)
    assert transition.terminated.all()
    assert env.num_diverged == 2
    assert transition.reward.tolist() == [0.0, 0.0]
    assert transition.final_observations["actor"].tolist() == [[0.0] * 3] * 2
    wide = build_env(make_config(task, num_envs=2, device="cpu", dtype="float64", agent={"num_mini_batches": 1}))
    assert not wide.step(STILL.double()).done.any()


@pytest.mark.parametrize(
    ("kind", "said"), [("NoSpaces", "AttributeError: .* 'observation_space'"), ("ExitsWhenMade", "SystemExit: 0")]
)
def test_an_env_that_can_not_be_looked_at_is_refused(kind: str, said: str, odd: Odd) -> None:
    with pytest.raises(UsageError, match=f"can't make env '{kind}-v0': {said}"):
        make_task(make_config(odd(kind)))


def test_a_close_that_fails_is_a_warning(odd: Odd) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of the env that is only looked at, nobody needs to know
        env = make(odd("CloseFails"))
    with pytest.warns(UserWarning, match="an env of gymnasium/CloseFails-v0 failed to close: RuntimeError: stuck"):
        env.close()


def test_an_exit_inside_a_training_is_a_failure(
    odd: Odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", odd("Exits"), *SMALL]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"lockstep: error: sys\.exit\(0\) was called \(.*odd_envs\.py:\d+\) before .*", line)
    (progress,) = tmp_path.rglob("progress.json")
    assert '"failed"' in progress.read_text()


@pytest.mark.parametrize(("kind", "said"), [("Dies", "ended with exit code 3"), ("NoReward", "gave None as reward")])
def test_an_env_in_a_process_of_its_own_is_named_too(kind: str, said: str, odd: Odd) -> None:
    env = make(f"gymnasium/tests.unit.odd_ids:{odd(kind).partition('/')[2]}", vectorization="async")
    with (
        warnings.catch_warnings(),
        pytest.raises(RunError, match=rf"env \d of gymnasium/tests.unit.odd_ids:{kind}-v0 {said}"),
    ):
        warnings.simplefilter("ignore")  # Gymnasium's own words
        env.step(STILL)
    env.close()
    env.close()


def test_what_the_process_of_an_env_imports_loads_no_learner() -> None:
    code = "import sys, lockstep.adapters.gymnasium.checked; print([n for n in ('torch', 'jax') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
