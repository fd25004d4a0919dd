"""The weights of a torch policy as those of a JAX policy, and back: arrays by the names of torch's ``state_dict``."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.learn.jax.ppo import Weights
from lockstep.learn.jax.statistics import Moments

Arrays = Mapping[str, np.ndarray]
MOMENTS = ("count", "mean", "m2")
MEMORY_NAMES = {
    "input_kernel": "weight_ih_l0",
    "hidden_kernel": "weight_hh_l0",
    "input_bias": "bias_ih_l0",
    "hidden_bias": "bias_hh_l0",
}


def from_torch(state: Arrays) -> Weights:
    """Take over every array; a matrix is transposed, since torch writes its outputs first."""
    parameters: dict[str, Any] = {part: _backbone(_below(state, part)) for part in ("actor", "critic")}
    if "log_std" in state:
        parameters["log_std"] = jnp.asarray(state["log_std"])
    normalizers = [_normalizer(state, f"{part}_normalizer", parameters[part]) for part in ("actor", "critic")]
    return Weights(parameters, *normalizers)


def to_torch(weights: Weights) -> dict[str, np.ndarray]:
    """Undo ``from_torch``."""
    state: dict[str, np.ndarray] = {}
    for part in ("actor", "critic"):
        tree = weights.parameters[part]
        if "memory" in tree:
            for name, torch_name in MEMORY_NAMES.items():
                state[f"{part}.memory.layer.{torch_name}"] = np.asarray(tree["memory"][name]).T
        layers = [tree["perceptron"][f"layer_{index}"] for index in range(len(tree["perceptron"]) - 1)]
        for index, layer in enumerate([*layers, tree["perceptron"]["last"]]):
            # Every other module of torch's perceptron is an activation.
            state[f"{part}.perceptron.{2 * index}.weight"] = np.asarray(layer["kernel"]).T
            state[f"{part}.perceptron.{2 * index}.bias"] = np.asarray(layer["bias"])
        normalizer: Moments = getattr(weights, f"{part}_normalizer")
        state |= {f"{part}_normalizer.{name}": np.asarray(getattr(normalizer, name)) for name in MOMENTS}
    if "log_std" in weights.parameters:
        state["log_std"] = np.asarray(weights.parameters["log_std"])
    return state


def _below(state: Arrays, prefix: str) -> dict[str, np.ndarray]:
    start = f"{prefix}."
    return {name.removeprefix(start): array for name, array in state.items() if name.startswith(start)}


def _backbone(state: Arrays) -> dict[str, Any]:
    perceptron = _below(state, "perceptron")
    numbers = sorted({int(name.partition(".")[0]) for name in perceptron})
    layers = {
        "last" if number == numbers[-1] else f"layer_{number // 2}": {
            "kernel": jnp.asarray(perceptron[f"{number}.weight"].T),
            "bias": jnp.asarray(perceptron[f"{number}.bias"]),
        }
        for number in numbers
    }
    memory = {name: jnp.asarray(state[f"memory.layer.{torch_name}"].T) for name, torch_name in MEMORY_NAMES.items()
              if f"memory.layer.{torch_name}" in state}  # fmt: skip
    return {"perceptron": layers} | ({"memory": memory} if memory else {})


def _normalizer(state: Arrays, name: str, backbone: dict[str, Any]) -> Moments:
    if f"{name}.count" in state:
        return Moments(*(jnp.asarray(state[f"{name}.{field}"], jnp.float64) for field in MOMENTS))
    first = backbone["memory"]["input_kernel"] if "memory" in backbone else jax.tree.leaves(backbone)[1]
    zeros = jnp.zeros(first.shape[0], jnp.float64)
    return Moments(jnp.zeros((), jnp.float64), zeros, zeros)
