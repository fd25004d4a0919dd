"""Checkpoints of policies that nobody has trained, with weights and moments that are anything but those of a start."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

import lockstep
from lockstep.distributed.torch_moments import Moments
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.learn.torch import checkpoint
from lockstep.learn.torch.networks import ActorCritic
from lockstep.recipes.catalog import make_task


def config_of(task: str = "cartpole_classic", **settings: Any) -> TrainConfig:
    return lockstep.make_config(task, num_envs=4, device="cpu", logger="none", **settings)


def torch_checkpoint(path: Path, spread: float = 0.3, **settings: Any) -> Path:
    """Write a checkpoint at ``path`` and return it; ``spread`` is how far weights are off those of a start."""
    config = config_of(**settings)
    task = make_task(config)
    torch.manual_seed(0)
    network = ActorCritic(config.agent_as(PpoConfig), dict(task.num_observations), task.action_space)
    for parameter in network.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    network.actor_normalizer.merge_(Moments.of(torch.randn(32, task.num_observations["actor"]) * 3.0 + 1.0))
    content = {
        "format": checkpoint.FORMAT,
        "ml_framework": "torch",
        "task": config.task,
        "config": config.model_dump(mode="json"),
        "iteration": 7,
        "env_steps": 0,
        "policy": network.state_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(content, path)
    return path


def run_onnx(path: Path, steps: list[np.ndarray]) -> list[np.ndarray]:
    """Return the actions of ``policy.onnx`` for observations one after another."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    _, *states = session.get_inputs()
    kept = {each.name: np.zeros([len(steps[0]) if size == "batch" else size for size in each.shape], np.float32)
            for each in states}  # fmt: skip
    actions = []
    for observations in steps:
        action, *after = session.run(None, {"observations": observations, **kept})
        actions.append(action)
        kept = dict(zip(kept, after, strict=True))
    return actions


def run_torchscript(path: Path, steps: list[np.ndarray], state_shape: list[int | str] | None) -> list[np.ndarray]:
    """Return the actions of ``policy.pt`` for observations one after another."""
    module: Any = torch.jit.load(str(path))
    state = None
    if state_shape is not None:
        state = torch.zeros([len(steps[0]) if size == "batch" else int(size) for size in state_shape])
    actions = []
    for observations in map(torch.from_numpy, steps):
        if state is None:
            actions.append(module(observations).numpy())
        else:
            action, state = module(observations, state)
            actions.append(action.numpy())
    return actions


def observations(num_envs: int, size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(5)
    return [(3.0 * generator.normal(size=(num_envs, size))).astype(np.float32) for _ in range(3)]
