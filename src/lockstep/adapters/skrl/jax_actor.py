"""The policy of skrl's agents as pure functions (JAX): evaluated, played and exported without the library."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.adapters.skrl.settings import SCALER
from lockstep.core.types import Observations, Task
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.networks import Mlp

PyTree = Any
_EPSILON, _CLIP = 1e-8, 5.0  # of the library's RunningStandardScaler


class SkrlActor:
    """A ``GuestActor``.

    Args:
        config: of the run.
        task: what it sees and does.
    """

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.config, self.space = config, task.action_space
        self._size = task.num_observations["actor"]
        default = SCALER if config.agent.normalize_observations else None
        self._is_scaled = config.library.get("observation_preprocessor", default) is not None
        scaling: Mapping[str, float] = config.library.get("observation_preprocessor_kwargs") or {}
        self._epsilon = float(scaling.get("epsilon", _EPSILON))
        self._clip = float(scaling.get("clip_threshold", _CLIP))
        self.layers = actor_layers(config, self.space)

    def shapes(self) -> PyTree:
        """Return what ``act`` needs of the learner's state."""
        inputs = jax.ShapeDtypeStruct((1, self._size), jnp.float32)
        made = jax.eval_shape(self.layers.init, jax.random.PRNGKey(0), inputs)
        layers = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), made["params"])
        needed: dict[str, Any] = {"networks": {"policy": {"params": {"layers": layers}}}}
        if self._is_scaled:
            vector = jax.ShapeDtypeStruct((self._size,), jnp.float64)
            moments = {"count": jax.ShapeDtypeStruct((), jnp.float64), "mean": vector, "m2": vector}
            needed["normalizers"] = {"observation": moments}
        return needed

    def act(self, replicated: PyTree, observations: Observations, memory: Any) -> tuple[Any, Any]:
        """Return the most likely actions ``(num_envs, size)``, discrete ``(num_envs,)``, for raw observations."""
        inputs = observations["actor"].astype(jnp.float32)
        if self._is_scaled:
            mean, variance = scale_of(replicated["normalizers"]["observation"], jnp)
            inputs = jnp.clip((inputs - mean) / (jnp.sqrt(variance) + self._epsilon), -self._clip, self._clip)
        parameters = replicated["networks"]["policy"]["params"]["layers"]
        outputs: Any = self.layers.apply({"params": parameters}, inputs)
        if self.space.kind == "discrete":
            return outputs.argmax(-1), memory
        if self.config.algorithm == "sac":
            outputs = self.space.limit * jnp.tanh(jnp.split(outputs, 2, axis=-1)[0])
        return outputs, memory

    def initial_memory(self, num_envs: int) -> Any:
        """Return the memory of a policy that has none."""
        return jnp.zeros((num_envs, 0), jnp.float32)

    def parts(self, replicated: PyTree) -> Any:
        """Return the ``PolicyParts`` of torch that compute the same."""
        # Only here is torch needed.
        import torch

        from lockstep.adapters.skrl.policy import Scaling, SkrlPolicy, head_of
        from lockstep.learn.torch.normalizer import Identity
        from lockstep.learn.torch.perceptron import Perceptron

        layers = Perceptron((self._size, *self.layers.hidden_dims, self.layers.num_outputs), self.layers.activation)
        parameters = replicated["networks"]["policy"]["params"]["layers"]
        names = [*(f"layer_{index}" for index in range(len(self.layers.hidden_dims))), "last"]
        for name, linear in zip(names, layers.linear_layers, strict=True):
            kernel, bias = (np.array(parameters[name][part]) for part in ("kernel", "bias"))
            linear.load_state_dict({"weight": torch.from_numpy(kernel.T.copy()), "bias": torch.from_numpy(bias)})
        normalizer: Any = Identity()
        if self._is_scaled:
            moments = {name: np.asarray(value) for name, value in replicated["normalizers"]["observation"].items()}
            mean, variance = scale_of(moments, np)
            normalizer = Scaling(self._size, self._epsilon, self._clip)
            state = {"running_mean": torch.from_numpy(mean), "running_variance": torch.from_numpy(variance)}
            normalizer.load_state_dict(state)
        return SkrlPolicy(normalizer, layers, head_of(self.config.algorithm, self.space), self.space).parts()


def actor_layers(config: TrainConfig, space: Any) -> Mlp:
    """Return the layers of a policy; the last has small weights, so that first actions are centred."""
    num_outputs = 2 * space.size if config.algorithm == "sac" else space.size
    return Mlp(config.agent.actor_hidden_dims, num_outputs, config.agent.activation, last_gain=0.01)


def scale_of(moments: Any, xp: Any) -> tuple[Any, Any]:
    """Return mean and variance ``(size,)`` in float32, of a module such as numpy; 0 and 1 where there is no sample."""
    has_samples = moments["count"] > 0
    variance = xp.where(has_samples, moments["m2"] / xp.maximum(moments["count"], 1), 1.0)
    return xp.where(has_samples, moments["mean"], 0.0).astype(xp.float32), variance.astype(xp.float32)
