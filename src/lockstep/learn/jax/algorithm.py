"""What a learning algorithm is to lockstep: a protocol for the learners that come with it, and for users' own.

An algorithm is written once for any number of devices. Its methods are pure functions that the harness
(``learn/jax/training.py``) compiles, together with the envs, into one program for all ranks at once. Each of them runs
inside ``jax.shard_map`` over the axis ``lockstep.distributed.jax.AXIS_NAME``, also on one device, and sees this rank's
part. What is to be the same on all ranks is reduced with the functions of ``lockstep.distributed.jax`` (``psum``,
``pmean``, ``gradient_update``), and JAX refuses at compile time what is called replicated and is not.

``examples/own_jax_algorithm.py`` is a whole one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from lockstep.core.types import Array

if TYPE_CHECKING:
    from lockstep.envs.jax_env import JaxEnv
    from lockstep.learn.config import TrainConfig

PyTree = Any
Metrics = dict[str, Array]
"""Replicated scalars by name, of any dtype; NaN where there is no value, as the mean over no episodes."""

NONFINITE = "nonfinite"
"""Of the metrics of ``step``: ``(num_ranks, len(CHECKS))`` booleans, replicated, instead of a scalar."""


class TrainState(NamedTuple):
    """Everything that goes on from one iteration to the next, and all that a checkpoint keeps of an algorithm."""

    replicated: PyTree
    """The same on every rank, bit for bit: parameters, optimizer, normalisers, counters."""
    sharded: PyTree
    """This rank's own: every array leads with this rank's envs, one row for each entry of ``env_ids``."""


class Algorithm(Protocol):
    """A learning algorithm, for ``lockstep train --ml_framework jax``.

    A rank may have fewer envs than another one. Those that it lacks are padding, with the id -1: they are stepped as
    the others are, and must count nowhere, neither in losses and moments nor in numbers that are shown.

    Optional are:

    * ``CHECKS: tuple[str, ...]``, the words for the columns of ``metrics["nonfinite"]``, in the order in which data
      flow. Where one is set the training ends, with the state saved, and the message names the check and the rank.
      ``step`` should then have changed nothing that the bad numbers could have spoiled.
    * ``weights(replicated) -> PyTree`` and ``with_weights(replicated, weights) -> PyTree``: select what
      ``--checkpoint`` takes over into a new run, without computing anything, and put it in place. Both are called on
      the host.
    * ``retuned(replicated, before) -> PyTree``: of a run that goes on from a checkpoint, the replicated state with what
      the user has set anew since. ``before`` is the checkpoint's config as plain values; called on the host.
    * ``act(replicated, observations, memory) -> (actions, memory)`` and ``initial_memory(num_envs)``: the policy's most
      likely actions ``(num_envs, size)``, discrete ``(num_envs,)``, for ``lockstep play`` and ``load_policy``.
    """

    def __init__(self, config: TrainConfig, env: JaxEnv, evaluation_env: JaxEnv | None) -> None:
        """Build networks and optimizers, none of which holds a number yet.

        Args:
            config: of the run; ``config.agent`` has the settings of the algorithm that is chosen by name.
            env: makes and steps this rank's envs, as pure functions.
            evaluation_env: the same for evaluations, with random streams of its own; None if the config wants none.
        """

    def setup(self, key: Array, env_ids: Array) -> TrainState:
        """Return the state before the first iteration: this rank's part.

        Args:
            key: a key of ``jax.random`` that follows from the run's seed: the same on all ranks, so that what is
                drawn from it is replicated.
            env_ids: ``(num_envs,)`` int32, global ids of this rank's envs; -1 is padding.
        """

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Run one iteration: collect, learn.

        Returns:
            The state, in which no array has changed its shape or dtype, and the metrics over all ranks. Needed among
            them is ``num_steps``, the env steps of this iteration over the real envs of all ranks, or ``env_steps``,
            all of them so far. Known to the display are ``mean_return``, ``mean_episode_length``, ``kl``,
            ``learning_rate`` and ``num_diverged``; any other name is recorded too.
        """

    def evaluate(self, state: TrainState, env_ids: Array) -> Metrics:
        """Run whole episodes with the most likely actions; return means over those of all ranks.

        Args:
            state: this rank's part; it goes on unchanged.
            env_ids: ``(num_episodes,)`` int32, this rank's share of the episodes, one per env; -1 is padding. How many
                there are over all ranks does not depend on the number of ranks.

        Returns:
            ``mean_return``, ``mean_episode_length`` and the like; the harness records them under ``eval/``.
        """


@runtime_checkable
class HasWeights(Protocol):
    """The part of an algorithm that ``--checkpoint`` needs."""

    def weights(self, replicated: PyTree) -> PyTree:
        """Return what a new run takes over, selected from the replicated state."""

    def with_weights(self, replicated: PyTree, weights: PyTree) -> PyTree:
        """Return the replicated state with other weights in it."""
