"""An iteration of PPO asks the device for next to nothing, and copies nothing to it: the host would have to wait."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.envs import torch_env
from lockstep.learn.torch import ppo
from lockstep.learn.torch.rollout import collect
from lockstep.learn.torch.training import Training
from tests.unit.learner_fixtures import make_training
from tests.unit.ppo_fixtures import KINDS, config_of

WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2", "unique_dim")
"""Operations of torch that make the host wait for the device."""


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device, were the tensors on one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.calls[name] += 1
        # An index of booleans is turned into positions, whose number the host must know.
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            self.calls[f"{name} by booleans"] += 1
        return func(*args, **(kwargs or {}))


TO_HOST = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
TO_DEVICE = ("tensor", "as_tensor", "asarray", "from_numpy")


class Transfers(TorchFunctionMode):
    """Counts calls that bring values to the host, or from the host to a device (a copy that waits as well)."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: Counter[str] = Counter()
        self.to_device: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in TO_HOST:
            self.to_host[name] += 1
        if name in TO_DEVICE and not isinstance(args[0], torch.Tensor):
            self.to_device[name] += 1
        return func(*args, **(kwargs or {}))


def phases(training: Training) -> dict[str, Callable[[], Any]]:
    """The parts of an iteration, to be called in order; the same ones that ``iterate`` calls."""
    made: dict[str, Any] = {}
    learner, memory = training.learner, training.memory

    def prepare() -> None:
        made["samples"] = learner.prepare(training.rollout, training.env.observations["critic"], memory)

    return {
        "draw": lambda: made.update(noise=training.noise.draw(training.config.agent.num_steps_per_env)),
        "collect": lambda: collect(training.env, training.policy, memory, made["noise"], training.rollout),
        "prepare": prepare,
        "update": lambda: learner.update(made["samples"], memory, training.iteration),
        "merge": lambda: learner.merge_normalizers(made["samples"]),
    }


def test_the_counters_do_count() -> None:
    values = torch.tensor([1.0, 2.0])
    with Waits() as waits, Transfers() as transfers:
        assert values[0] > 0
        values[values > 1].tolist()
        float(values[1])
        torch.tensor([1.0])
    assert waits.calls == {"_local_scalar_dense": 2, "index by booleans": 1}
    assert transfers.to_host == {"__bool__": 1, "tolist": 1, "__float__": 1}
    assert transfers.to_device == {"tensor": 1}


def as_on_a_gpu(kind: str, recurrent: str, monkeypatch: pytest.MonkeyPatch) -> Training:
    """A training after its first iteration that takes no way which is for CPUs alone."""
    monkeypatch.setattr(ppo, "are_spelled_out", lambda policy, autocast: False)
    monkeypatch.setattr(torch_env, "looking_is_free", lambda device: False)
    training = make_training(config_of(kind, recurrent))
    training.iterate()
    return training


@pytest.mark.parametrize(("kind", "recurrent"), KINDS)
def test_the_host_waits_once_per_iteration(kind: str, recurrent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = as_on_a_gpu(kind, recurrent, monkeypatch)
    waited = {}
    for name, phase in phases(training).items():
        with Waits() as waits, Transfers() as transfers:
            phase()
        waited[name] = dict(waits.calls + transfers.to_host)
    # The positions of truncated steps are the one thing the host has to know before it goes on.
    assert waited == {"draw": {}, "collect": {}, "prepare": {"nonzero": 1}, "update": {}, "merge": {}}


@pytest.mark.parametrize(("kind", "recurrent"), KINDS)
def test_nothing_is_copied_from_the_host_once_training_goes_on(
    kind: str, recurrent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such a copy waits for all work that the device was given before it.
    training = as_on_a_gpu(kind, recurrent, monkeypatch)
    copied = {}
    for name, phase in phases(training).items():
        with Transfers() as transfers:
            phase()
        copied[name] = dict(transfers.to_device)
    assert copied == {"draw": {}, "collect": {}, "prepare": {}, "update": {}, "merge": {}}
