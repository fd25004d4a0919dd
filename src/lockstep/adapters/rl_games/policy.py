"""The actor of an rl_games agent, as it is evaluated, played and exported (rl-games 1.6.5)."""

from collections.abc import Mapping
from typing import Any

import torch
from rl_games.algos_torch.model_builder import ModelBuilder
from rl_games.algos_torch.network_builder import A2CBuilder
from torch import nn

from lockstep.adapters.rl_games.normalizer import freeze
from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace, Observations, Task
from lockstep.learn.torch.guest import PolicyParts
from lockstep.learn.torch.networks import Memory
from lockstep.learn.torch.normalizer import Identity


class RlGamesPolicy(nn.Module):
    """Decides as rl_games' deterministic player does: by the mean, or the likeliest choice.

    Args:
        model: of rl_games, with frozen normalisers; the agent's own, or a copy of it.
        num_observations: of the group ``actor``.
        space: of the actions.
        clips: whether actions are clipped to -1 to 1 and scaled to the limit of the space (``clip_actions``).
    """

    def __init__(self, model: Any, num_observations: int, space: ActionSpace, clips: bool) -> None:
        super().__init__()
        self.model = model
        self.num_observations: Mapping[str, int] = {"actor": num_observations}
        self.action_space, self.clips = space, clips

    def initial_memory(self, num_envs: int) -> torch.Tensor:
        """Return the memories of actor and critic, one after the other, ``(num_parts, num_envs, size)``."""
        like: torch.Tensor = next(self.model.parameters())
        if not self.model.is_rnn():
            return like.new_zeros((0, num_envs, 0))
        num_parts, size = torch.cat(self.model.get_default_rnn_state()).shape[::2]
        return like.new_zeros((num_parts, num_envs, size))

    @torch.no_grad()
    def most_likely(self, observations: Observations, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions and the new memory for raw observations."""
        inputs: dict[str, Any] = {"obs": self.model.norm_obs(observations["actor"])}
        if self.model.is_rnn():
            # Not the model itself, which would draw an action, and so change those of the training.
            inputs["rnn_states"] = list(memory.split(memory.shape[0] // len(self.model.get_default_rnn_state())))
        outputs, *_, states = self.model.a2c_network(inputs)
        if states is not None:
            memory = torch.cat(tuple(states))
        if self.action_space.kind == "discrete":
            return outputs.argmax(-1), memory
        return outputs.clamp(-1.0, 1.0) * self.action_space.limit if self.clips else outputs, memory

    def parts(self) -> PolicyParts:
        """Return what it is made of.

        Raises:
            UsageError: ``library`` asked for more than a plain network with one memory before it.
        """
        network = self.model.a2c_network
        self._require_plain(network)
        continuous = self.action_space.kind == "continuous"
        layers = nn.Sequential(*network.actor_mlp, network.mu if continuous else network.logits)
        normalizer = self.model.running_mean_std if self.model.normalize_input else Identity()
        return PolicyParts(normalizer, _memory(network), layers, "mean" if continuous else "choice")

    def _require_plain(self, network: Any) -> None:
        reasons = {
            "library.network.name": type(network) is not A2CBuilder.Network,
            "library.network.cnn": getattr(network, "has_cnn", False),
            "library.network.mlp.d2rl": getattr(network, "is_d2rl", False),
            "library.config.clip_actions": self.clips,
            "library.network.space.continuous.mu_activation": not isinstance(
                getattr(network, "mu_act", nn.Identity()), nn.Identity
            ),
            "library.network.rnn": getattr(network, "has_rnn", False) and not _is_plain_memory(network),
        }
        for setting, is_special in reasons.items():
            if is_special:
                raise UsageError(f"a policy of rl_games with {setting} can't be exported; train one without it")


def build_policy(params: dict[str, Any], state: Mapping[str, torch.Tensor], task: Task) -> RlGamesPolicy:
    """Return the policy of a model's state, on the CPU.

    Args:
        params: what stands below ``params`` in the configuration that it was trained with.
        state: of the model.
        task: has the sizes.
    """
    config, space = params["config"], task.action_space
    num_observations = task.num_observations["actor"]
    model = (
        ModelBuilder()
        .load(params)
        .build(
            {
                "actions_num": space.size,
                "input_shape": (num_observations,),
                "num_seqs": 1,
                "value_size": 1,
                "normalize_value": config["normalize_value"],
                "normalize_input": config["normalize_input"],
            }
        )
    )
    freeze(model)
    model.load_state_dict(state)
    return RlGamesPolicy(model, num_observations, space, config["clip_actions"])


def _is_plain_memory(network: Any) -> bool:
    has_one_layer = network.rnn_layers == 1 and network.rnn_name in ("gru", "lstm")
    is_bare = not (network.rnn_ln or network.rnn_concat_input or network.rnn_concat_output)
    return bool(has_one_layer and network.is_rnn_before_mlp and is_bare)


def _memory(network: Any) -> Memory | None:
    """Return the actor's memory as one of ours, with the same weights; None without one."""
    if not network.has_rnn:
        return None
    layer = (network.a_rnn if network.separate else network.rnn).rnn
    memory = Memory(network.rnn_name, layer.input_size, layer.hidden_size)
    memory.layer.load_state_dict(layer.state_dict())
    return memory
