"""Random steps with JAX on devices of one process: each device's own time, and what is refused."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
import pytest

import lockstep
from lockstep.core.errors import UsageError
from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv, Transition
from lockstep.session import jax_session
from lockstep.session.framework import Team
from lockstep.session.jax_random import JaxStepper
from tests.unit.jax_fixtures import ranks_of

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def config_with(**settings: Any) -> Any:
    return lockstep.make_config(
        "cartpole_classic", **({"ml_framework": "jax", "device": "cpu", "num_envs": 8} | settings)
    )


def stepper_on(num_ranks: int, resources: ExitStack, **settings: Any) -> JaxStepper:
    comm: Any = None
    team = Team(comm, [], "", "cpu", ranks_of(num_ranks))
    made = jax_session.JAX.make_stepper(config_with(**settings), team, resources)
    assert isinstance(made, JaxStepper)
    return made


def test_a_program_is_compiled_once_for_each_number_of_steps(resources: ExitStack) -> None:
    stepper = stepper_on(1, resources)
    assert stepper.compile_s == 0.0
    stepper.step(2)
    first = stepper.compile_s
    assert first > 0
    stepper.step(2)
    assert stepper.compile_s == first
    stepper.step(3)
    assert stepper.compile_s > first


def test_a_rank_may_have_fewer_envs_than_another_or_none(resources: ExitStack) -> None:
    stepper = stepper_on(3, resources, num_envs=(8, 0, 4))
    assert stepper.num_envs == {0: 8, 1: 0, 2: 4}
    assert list(stepper.step(2)) == [0, 1, 2]
    states = stepper.states()
    assert states["env_ids"].tolist() == list(range(12))
    assert states["observations/actor"].shape == (12, 4)


def test_without_compiling_there_is_nothing_to_time(resources: ExitStack) -> None:
    with pytest.raises(UsageError, match="enable_jit false is there to look into a program") as caught:
        stepper_on(1, resources, enable_jit=False)
    assert "\n" not in str(caught.value)


def test_a_device_does_not_wait_for_a_slower_one(resources: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device can't go on before the first has been seen to be done."""
    first_is_done, found = threading.Event(), list[bool]()
    own_step, own_wait = JaxEnv.step, JaxStepper._wait_for

    def hold(env_ids: Any) -> None:
        if np.asarray(env_ids)[0] > 0:
            found.append(first_is_done.wait(60))

    def step(self: JaxEnv, state: EnvState, action: jax.Array, noise: EnvNoise) -> tuple[EnvState, Transition]:
        jax.debug.callback(hold, state.env_ids)
        return own_step(self, state, action, noise)

    def wait_for(self: JaxStepper, index: int) -> float:
        done = own_wait(self, index)
        if not index:
            first_is_done.set()
        return done

    monkeypatch.setattr(JaxEnv, "step", step)
    monkeypatch.setattr(JaxStepper, "_wait_for", wait_for)
    seconds = stepper_on(2, resources).step(1)
    assert found == [True]
    assert seconds[0] < seconds[1]
