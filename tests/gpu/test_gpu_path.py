"""The same training path on a GPU: it learns, agrees with the CPU, and never waits but where it says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lockstep.core.config import merge
from lockstep.core.rng import Stream
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.torch.evaluation import evaluate
from lockstep.learn.torch.rollout import collect
from lockstep.learn.torch.training import Training
from lockstep.recipes.cartpole import cartpole_classic, cartpole_swingup
from lockstep.session.make_env import build_env

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
]

KINDS = [
    pytest.param(kind, recurrent, id=f"{kind}-{recurrent}")
    for kind in ("continuous", "discrete")
    for recurrent in ("none", "gru", "lstm")
]


def make_training(device: str = "cuda", kind: str = "continuous", dtype: str = "float32", **agent: Any) -> Training:
    settings = {"num_steps_per_env": 16, "num_learning_epochs": 2, "num_mini_batches": 2, **agent}
    overrides = {"num_envs": 64, "device": device, "dtype": dtype, "agent": settings, "env": {"action_kind": kind}}
    config = merge(cartpole_classic(), overrides)
    return Training(config, build_env(config), SoloComm())


@contextmanager
def no_waiting() -> Iterator[None]:
    """Let torch raise an error where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_waiting_would_be_noticed() -> None:
    tensor = torch.ones(1, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        tensor.item()


@pytest.mark.parametrize(("kind", "recurrent"), KINDS)
def test_the_host_does_not_wait_while_it_collects_and_updates(kind: str, recurrent: str) -> None:
    training = make_training(kind=kind, recurrent=recurrent)
    for _ in range(2):
        training.iterate()
    memory, learner = training.memory, training.learner
    with no_waiting():
        noise = training.noise.draw(16)
        after = collect(training.env, training.policy, memory, noise, training.rollout)
    # Here it looks once, for the positions of truncated steps.
    samples = learner.prepare(training.rollout, training.env.observations["critic"], memory)
    with no_waiting():
        learner.update(samples, memory, training.iteration)
        learner.merge_normalizers(samples)
    assert after.actor.device.type == "cuda"


def test_everything_lives_on_the_device() -> None:
    training = make_training(recurrent="lstm")
    training.iterate()
    tensors = [*training.policy.state_dict().values(), *training.rollout, *training.memory]
    tensors += [training.learner.gradients.flat, training.learner.learning_rate, training.env.episode_length]
    assert {tensor.device.type for tensor in tensors} == {"cuda"}


def test_it_learns() -> None:
    agent: dict[str, Any] = {
        "num_steps_per_env": 64,
        "num_learning_epochs": 10,
        "num_mini_batches": 4,
        "schedule": "fixed",
        "use_clipped_value_loss": False,
    }
    training = make_training(**agent)
    evaluation_env = build_env(training.config, num_envs=32, streams="evaluation")
    for _ in range(20):
        training.iterate()
    assert evaluate(training.policy, evaluation_env).returns.mean() >= 400


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_it_does_what_the_cpu_does(recurrent: str) -> None:
    # In double precision the two differ by rounding alone, which the dynamics amplify only later.
    trainings = [make_training(device, dtype="float64", recurrent=recurrent) for device in ("cpu", "cuda")]
    for _ in range(2):
        on_cpu, on_gpu = (training.iterate() for training in trainings)
    for name in ("mean_return", "kl", "loss/surrogate", "loss/value", "loss/entropy", "learning_rate"):
        assert on_gpu[name] == pytest.approx(on_cpu[name], rel=1e-6, abs=1e-9), name
    for name, tensor in trainings[0].policy.state_dict().items():
        there = trainings[1].policy.state_dict()[name].cpu()
        assert torch.allclose(there, tensor, rtol=1e-6, atol=1e-8), name


def test_bfloat16_runs() -> None:
    training = make_training(dtype="bfloat16", recurrent="gru")
    for _ in range(3):
        metrics = training.iterate()
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values() if value is not None)
    assert {parameter.dtype for parameter in training.policy.parameters()} == {torch.float32}


def test_random_numbers_are_those_of_the_cpu() -> None:
    import array_api_compat.torch as xp

    counters, ids = (torch.arange(size, dtype=torch.int32) for size in (32, 256))
    here = Stream(3, "gpu", xp, torch.device("cpu"))
    there = Stream(3, "gpu", xp, torch.device("cuda"))
    bits = there.bits(counters.cuda(), ids.cuda(), 5)
    assert torch.equal(bits.cpu(), here.bits(counters, ids, 5))
    uniform = there.uniform(counters.cuda(), ids.cuda(), 5, torch.float32)
    assert torch.equal(uniform.cpu(), here.uniform(counters, ids, 5, torch.float32))
    normal = there.normal(counters.cuda(), ids.cuda(), 5, torch.float32)
    torch.testing.assert_close(normal.cpu(), here.normal(counters, ids, 5, torch.float32), rtol=0, atol=2e-6)


def test_a_run_goes_on_exactly(tmp_path: Any) -> None:
    at_once, first, second = (make_training(recurrent="gru") for _ in range(3))
    for _ in range(2):
        at_once.iterate()
    first.iterate()
    torch.save(first.state_dict(), tmp_path / "model_1.pt")
    second.load_state_dict(torch.load(tmp_path / "model_1.pt", map_location="cpu", weights_only=True), "model_1.pt")
    second.iterate()
    for name, tensor in at_once.policy.state_dict().items():
        torch.testing.assert_close(second.policy.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_physics_on_the_host_and_learning_on_the_device_give_what_the_cpu_gives() -> None:
    settings = {"num_envs": 16, "dtype": "float64", "agent": {"num_steps_per_env": 8, "schedule": "fixed"}}
    trainings = []
    for device in ("cpu", "cuda"):
        config = merge(cartpole_swingup(), settings | {"device": device, "env": {"max_episode_steps": 10}})
        trainings.append(Training(config, build_env(config), SoloComm()))
    for _ in range(3):
        for training in trainings:
            training.iterate()
    on_cpu, on_gpu = (training.policy.state_dict() for training in trainings)
    for name, tensor in on_cpu.items():
        torch.testing.assert_close(on_gpu[name].cpu(), tensor, rtol=1e-8, atol=1e-10)
