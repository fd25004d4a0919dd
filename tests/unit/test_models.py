"""Pools of variants of a model and pushes in the engine mujoco, and in envs in torch."""

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from torch.overrides import TorchFunctionMode

from lockstep.core.errors import UsageError
from lockstep.core.types import Array, Namespace, State, StepInfo
from lockstep.envs import torch_env
from lockstep.envs.config import EnvConfig
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.torch.training import Training
from lockstep.sim.models import load_models, model_indices
from lockstep.sim.mujoco_c import MujocoEngine, make_engine
from tests.unit.learner_fixtures import make_training, round_trip, small_config
from tests.unit.pool_fixtures import MODEL, Puck

NUM_ENVS, NUM_STEPS, DECIMATION, SEED = 12, 30, 3, 7
NOBODY = np.zeros(NUM_ENVS, dtype=bool)


@pytest.fixture
def task(tmp_path: Path) -> Puck:
    return Puck(tmp_path)


def engine(task: Puck, first_env_id: int = 0, num_envs: int = NUM_ENVS, seed: int = SEED) -> MujocoEngine:
    """Return envs with these global ids, all at the start."""
    made = make_engine(
        task, num_envs=num_envs, decimation=DECIMATION, num_threads=1, seed=seed, first_env_id=first_env_id
    )
    qpos, qvel = (array[first_env_id : first_env_id + num_envs] for array in start())
    made.reset(np.ones(num_envs, dtype=bool), qpos, qvel)
    return made


def start() -> tuple[np.ndarray, np.ndarray]:
    """Return states of twice as many envs as most tests have: on the floor, sliding either way."""
    speeds = np.random.default_rng(1).normal(size=2 * NUM_ENVS)
    return np.zeros((2 * NUM_ENVS, 2)), np.stack((speeds, np.zeros_like(speeds)), axis=1)


def controls(num_steps: int = NUM_STEPS, num_envs: int = NUM_ENVS) -> np.ndarray:
    return np.random.default_rng(2).uniform(-3, 3, (num_steps, num_envs, 1))


def path(engine: MujocoEngine, ctrl: np.ndarray) -> np.ndarray:
    return np.array([flat(engine.step(step_ctrl)) for step_ctrl in ctrl])


def flat(info: StepInfo) -> np.ndarray:
    return np.concatenate((info.qpos, info.qvel, info.sensordata), axis=1)


# --- the pool ------------------------------------------------------------------------------------------------------


def test_variants_are_drawn_by_the_seed_and_what_follows_from_masses_follows(task: Puck, tmp_path: Path) -> None:
    models, again, others = (load_models(Puck(tmp_path), seed) for seed in (SEED, SEED, SEED + 1))
    masses, same, different = ([model.body("puck").mass[0] for model in each] for each in (models, again, others))
    assert masses == same
    assert len(set(masses + different)) == 2 * task.num_models
    for model, mass in zip(models, masses, strict=True):
        assert 0.5 <= mass < 1.5
        # All there is beside the world, and what a slide joint moves along either axis.
        assert model.body("world").subtreemass[0] == mass
        assert model.dof_M0.tolist() == [mass, mass]
        assert model.actuator_acc0[0] == pytest.approx(1 / mass)  # m/s^2 of 1 N
    assert len({model.geom("puck").friction[0] for model in models}) == task.num_models


def test_a_variant_does_not_depend_on_how_many_there_are(task: Puck) -> None:
    few = load_models(task, SEED)
    task.num_models = 9
    many = load_models(task, SEED)
    assert len(many) == 9
    for one, other in zip(few, many, strict=False):
        np.testing.assert_array_equal(one.body_mass, other.body_mass)


def test_a_task_with_one_model_has_it_as_it_is(task: Puck) -> None:
    task.num_models = 1
    (model,) = load_models(task, SEED)
    assert model.body("puck").mass[0] == 1.0
    assert "model" not in engine(task).state_dict()


def test_variants_without_noise_to_draw_them_by_are_refused(task: Puck) -> None:
    task.num_model_noise = 0
    with pytest.raises(UsageError, match="Puck has 5 variants of its model and no noise to draw them by"):
        load_models(task, SEED)


def test_all_engines_of_a_task_share_its_models(tmp_path: Path) -> None:
    task = Puck(tmp_path)
    models = load_models(task, SEED)
    assert load_models(task, SEED) is models
    assert load_models(task, SEED + 1) is not models
    assert load_models(Puck(tmp_path), SEED) is not models
    kept = weakref.ref(models[0])
    made = engine(task)
    del models, task
    gc.collect()
    assert kept() is not None  # which the engine steps
    made.close()
    del made
    gc.collect()
    assert kept() is None


class Shifted(Puck):
    """A puck whose centre of mass is elsewhere in every variant."""

    def vary_model(self, model: Any, noise: Array) -> None:
        model.body("puck").ipos[0] += 0.1 * noise[0]


def test_a_variant_that_mujoco_does_not_take_is_told_in_one_line(tmp_path: Path) -> None:
    task = Shifted(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_models(task, SEED)
    message = str(caught.value)
    assert f"MuJoCo does not take variant 0 of {task.model_path}: " in message
    assert "compiled as simple" in message
    assert "\n" not in message
    assert task.model_path is not None
    task.model_path.write_text(MODEL.replace('name="puck" pos', 'name="puck" simple="false" pos'))
    assert len({model.body("puck").ipos[0] for model in load_models(task, SEED)}) == 5


def test_envs_have_variants_by_turns() -> None:
    assert model_indices(np.array([0, 1, 2, 3, 7, -1], dtype=np.int32), 3).tolist() == [0, 1, 2, 0, 1, 2]


# --- stepping it ---------------------------------------------------------------------------------------------------


def test_steps_are_those_of_a_plain_loop_over_each_envs_own_model(task: Puck) -> None:
    ctrl = controls()
    measured = path(engine(task), ctrl)
    models = load_models(task, SEED)
    qpos, qvel = start()
    for env in range(NUM_ENVS):
        model = models[env % 5]
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:] = qpos[env], qvel[env]
        mujoco.mj_forward(model, data)
        for step in range(NUM_STEPS):
            data.ctrl[:] = ctrl[step, env]
            for _ in range(DECIMATION):
                mujoco.mj_step(model, data)
            np.testing.assert_array_equal(measured[step, env], np.concatenate((data.qpos, data.qvel, data.sensordata)))
    # Each goes its own way, and back to the start it finds its own model again.
    alike = engine(task)
    alike.reset(np.ones(NUM_ENVS, dtype=bool), np.zeros((NUM_ENVS, 2)), np.zeros((NUM_ENVS, 2)))
    ends = path(alike, np.ones((NUM_STEPS, NUM_ENVS, 1)))[-1]
    assert len({row.tobytes() for row in ends}) == 5
    np.testing.assert_array_equal(ends[:7], ends[5:])


def test_an_env_has_its_model_wherever_it_is_simulated(task: Puck) -> None:
    ctrl = controls()
    whole = path(engine(task), ctrl)
    for split in ((0, 4, 12), (0, 1, 8, 12)):
        parts = [
            path(engine(task, first, last - first), ctrl[:, first:last]) for first, last in itertools.pairwise(split)
        ]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_another_seed_is_another_pool(task: Puck) -> None:
    ctrl = controls(3)
    assert (path(engine(task), ctrl) != path(engine(task, seed=SEED + 1), ctrl)).any(axis=(0, 2)).all()


def test_a_saved_state_brings_its_models_along(task: Puck) -> None:
    ctrl = controls()
    one = engine(task)
    path(one, ctrl[:10])
    saved = one.state_dict()
    expected = path(one, ctrl[10:])
    # Of other envs, and so with the models in another order; and twice, so that it finds its own again.
    other = engine(task, first_env_id=3)
    own = other.state_dict()
    assert own["model"].tolist() != saved["model"].tolist()
    elsewhere = path(other, ctrl[:5])
    for state, rest, wanted in ((saved, ctrl[10:], expected), (own, ctrl[:5], elsewhere)):
        other.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
        np.testing.assert_array_equal(other.reset(NOBODY, None, None), state["sensordata"])
        np.testing.assert_array_equal(path(other, rest), wanted)
        assert other.state_dict()["model"].tolist() == state["model"].tolist()


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (64, 8, "saved envs have other variants of the model than the 8 of this engine"),
        (64, 1, "saved envs have other variants of the model than the 1 of this engine"),
        (1, 64, "saved envs have other variants of the model than the 64 of this engine"),
    ],
)
def test_a_saved_state_of_other_variants_is_refused(task: Puck, before: int, now: int, words: str) -> None:
    task.num_models = before
    saved = engine(task, num_envs=2 * NUM_ENVS).state_dict()
    task.num_models = now
    other = engine(task, num_envs=2 * NUM_ENVS)
    own = other.state_dict()
    with pytest.raises(UsageError, match=words):
        other.load_state_dict(saved)
    for name, array in own.items():  # nothing was taken up
        np.testing.assert_array_equal(other.state_dict()[name], array)


def training(task: Puck, num_models: int) -> Training:
    task.num_models = num_models
    env = TorchEnv(task, engine(task, num_envs=8), EnvConfig(), seed=SEED, device=torch.device("cpu"))
    return make_training(small_config(), env)


@pytest.mark.parametrize(("before", "now"), [(64, 8), (64, 1), (1, 64), (8, 64)])
def test_a_run_goes_on_with_as_many_variants_as_it_had(task: Puck, before: int, now: int) -> None:
    saved = round_trip(training(task, before).state_dict())
    other = training(task, now)
    with pytest.raises(UsageError) as caught:
        other.load_state_dict(saved, "model_0.pt")
    assert f"model_0.pt has {before} variants of the task's model, not {now}; a run resumes" in str(caught.value)
    training(task, before).load_state_dict(saved, "model_0.pt")


def test_what_was_saved_does_not_change_with_the_engine(task: Puck) -> None:
    one = engine(task)
    saved = one.state_dict()
    kept = {name: array.copy() for name, array in saved.items()}
    one.load_state_dict(engine(task, first_env_id=3).state_dict())
    path(one, controls(2))
    for name, array in saved.items():
        np.testing.assert_array_equal(array, kept[name])


def test_a_rank_without_envs_steps_none(task: Puck) -> None:
    nobody = engine(task, first_env_id=4, num_envs=0)
    info = nobody.step(np.zeros((0, 1)), np.zeros((0, 2)))
    assert (info.qpos.shape, info.qvel.shape, info.diverged.shape) == ((0, 2), (0, 2), (0,))
    nobody.load_state_dict(nobody.state_dict())
    assert nobody.state_dict()["model"].shape == (0,)


# --- pushes --------------------------------------------------------------------------------------------------------


def test_a_push_is_added_to_the_velocities_before_the_physics(task: Puck) -> None:
    pushed, faster, untouched = engine(task), engine(task), engine(task)
    qpos, qvel = start()
    push = np.zeros((NUM_ENVS, 2))
    push[2], push[7] = (0.5, 0.25), (-1.0, 0.0)
    faster.reset(np.ones(NUM_ENVS, dtype=bool), qpos[:NUM_ENVS], qvel[:NUM_ENVS] + push)
    ctrl = controls(4)
    measured = [flat(pushed.step(ctrl[0], push)), *path(pushed, ctrl[1:])]
    np.testing.assert_array_equal(measured, path(faster, ctrl))
    others = np.setdiff1d(np.arange(NUM_ENVS), (2, 7))
    unpushed = path(untouched, ctrl)
    np.testing.assert_array_equal(np.array(measured)[:, others], unpushed[:, others])
    assert (measured[0][[2, 7]] != unpushed[0, [2, 7]]).any(axis=1).all()


def test_a_failed_env_goes_back_to_before_the_push(task: Puck) -> None:
    one = engine(task)
    before = flat(one.step(controls(1)[0])).copy()
    ctrl, push = controls(1)[0], np.zeros((NUM_ENVS, 2))
    ctrl[3], push[3], push[5] = np.nan, 1.0, np.inf
    info = one.step(ctrl, push)
    assert np.flatnonzero(info.diverged).tolist() == [3, 5]
    np.testing.assert_array_equal(flat(info)[[3, 5]], before[[3, 5]])


class Spy(MujocoEngine):
    """Keeps what pushes it was handed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pushes: list[Any] = []

    def step(self, ctrl: ArrayLike, push: ArrayLike | None = None) -> StepInfo:
        self.pushes.append(None if push is None else np.array(push))
        return super().step(ctrl, push)


class Calm(Puck):
    """A puck that nobody pushes."""

    def push(self, xp: Namespace, state: State, noise: Array) -> None:
        return None


class Copies(TorchFunctionMode):
    """Counts what is brought to the host."""

    num_copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += getattr(func, "__name__", "") == "cpu"
        return func(*args, **(kwargs or {}))


def test_a_step_brings_controls_and_pushes_to_the_host_together(task: Puck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_env, "looking_is_free", lambda device: False)  # as on a GPU
    config = EnvConfig(max_episode_steps=3, randomize_initial_episode_length=False)
    env = TorchEnv(task, engine(task), config, seed=SEED, device=torch.device("cpu"))
    num_copies = []
    for _ in range(3):
        with Copies() as copies:
            env.step(torch.zeros((NUM_ENVS, 1)))
        num_copies.append(copies.num_copies)
    # The mask of ended episodes makes two, and where any has ended new states make three.
    assert num_copies[-1] == 3
    assert set(num_copies) <= {2, 3}


@pytest.mark.parametrize("kind", [Puck, Calm])
def test_a_torch_env_hands_on_the_pushes_of_the_step_it_makes(kind: type[Puck], tmp_path: Path) -> None:
    task = kind(tmp_path)
    spy = Spy(load_models(task, SEED)[0], NUM_ENVS, DECIMATION, 1)
    env = TorchEnv(task, spy, EnvConfig(), seed=SEED, device=torch.device("cpu"), dtype=torch.float64)
    noises = []
    for _ in range(4):
        transition = env.step(torch.zeros((NUM_ENVS, 1), dtype=torch.float64))
        noises.append(transition.final_observations["critic"][:, 4:].numpy())
    if kind is Calm:
        assert spy.pushes == [None] * 4
        return
    noise, pushes = np.array(noises), np.array(spy.pushes)
    is_pushed = noise[..., 0] < 0.25
    assert 0 < is_pushed.sum() < is_pushed.size
    np.testing.assert_array_equal(pushes[..., 0] != 0, is_pushed)
    np.testing.assert_array_equal(np.sign(pushes[is_pushed][:, 0]), np.sign(noise[is_pushed][:, 1] - 0.5))
    assert not pushes[..., 1].any()
