"""RSL-RL's PPO and distillation as a learner of lockstep (rsl-rl-lib 5.5)."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from rsl_rl.models import MLPModel
from rsl_rl.utils import resolve_class
from tensordict import TensorDict
from torch import nn

from lockstep.adapters.rsl_rl import normalization
from lockstep.adapters.rsl_rl.distillation import InStepDistillation
from lockstep.adapters.rsl_rl.env import RslRlEnv
from lockstep.adapters.rsl_rl.policy import RslRlPolicy
from lockstep.adapters.rsl_rl.ppo import InStepPPO, Steering
from lockstep.adapters.rsl_rl.settings import Settings, settings_of
from lockstep.adapters.rsl_rl.teacher import Teacher, read_teacher
from lockstep.core import beats
from lockstep.core.errors import UsageError
from lockstep.core.rng import stream_seed
from lockstep.core.types import Comm, Task
from lockstep.distributed.torch_state import Replicated
from lockstep.distributed.torch_statistics import Number
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.learn.torch import checkpoint, sharding
from lockstep.learn.torch.training import place_among_envs


class RslRlLearner:
    """A ``GuestLearner``: RSL-RL's algorithm is built, steps and learns as in its own runner.

    Its runner is left out: what that adds (process group, log, files) is lockstep's here. A checkpoint's
    ``state.algorithm`` is what RSL-RL's own ``save`` gives.

    The generator that actions and minibatches are drawn with is seeded for every iteration, so that a resumed training
    goes on bit for bit on as many ranks; but for the running sums of rewards by which random network distillation
    scales its own, which RSL-RL does not save.

    Args:
        config: of the run.
        env: this rank's envs.
        comm: the ranks.
    """

    def __init__(self, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        self.config, self.env, self.comm = config, env, comm
        self._iteration = 0
        _, self._first_env = place_among_envs(env, comm)
        with _refusals_in_words(config):
            self._vec_env = TrainingEnv(env, config.task)
            settings = settings_of(config)
        if isinstance(config.agent, PpoConfig):
            self._build(settings)
            return
        teacher = read_teacher(config, comm)
        self._lacking = teacher.problem
        if not teacher.problem:
            self._build(settings, teacher)

    def _build(self, settings: Settings, teacher: Teacher | None = None) -> None:
        """Build networks, storage and optimizer."""
        self._lacking = ""
        if teacher is None:
            self.settings = settings
        else:
            groups = settings["obs_groups"] | {"teacher": teacher.groups}
            self.settings = settings | {"teacher": teacher.settings, "obs_groups": groups}
        kind = InStepPPO if isinstance(self.config.agent, PpoConfig) else InStepDistillation
        # What belongs to the ranks is joined afterwards: RSL-RL copies its config.
        ranks = {"global_rank": self.comm.rank, "local_rank": self.comm.rank, "world_size": self.comm.world_size}
        config = self.settings | {
            "num_steps_per_env": self.config.agent.num_steps_per_env,
            "algorithm": self.settings["algorithm"] | {"class_name": kind},
            "multi_gpu": ranks,
        }
        with _refusals_in_words(self.config), contextlib.redirect_stdout(io.StringIO()):
            self.algorithm: Any = kind.construct_algorithm(
                self._vec_env.get_observations(), self._vec_env, config, str(self.env.device)
            )
        if teacher is not None:
            with checkpoint.misfits_in_words("of the teacher"):
                self.algorithm.load({"actor_state_dict": teacher.weights}, {"teacher": True}, True)
        self._join()
        self.policy = RslRlPolicy(self.algorithm.get_policy(), self.env.task.num_observations)

    def _join(self) -> None:
        if isinstance(self.algorithm, InStepDistillation):
            self.algorithm.join(self.comm)
        else:
            agent, own = self.config.agent_as(PpoConfig), self.settings["algorithm"]
            desired_kl = own["desired_kl"] if own["schedule"] == "adaptive" else None
            steering = Steering(desired_kl, agent.min_learning_rate, agent.max_learning_rate)
            self.algorithm.join(self.comm, steering, agent.normalize_advantages)
        for name, model in self.algorithm.models().items():
            if name != "teacher":
                normalization.put_in(model)
        self._normalizers = normalization.normalizers_of(self.algorithm.models())
        self.algorithm.train_mode()

    # --- an iteration -----------------------------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Raise UsageError if there is no teacher: it could not be read, and no checkpoint has brought it."""
        if self._lacking:
            raise UsageError(self._lacking, shared=True)

    def collect(self) -> None:
        """Step every env ``agent.num_steps_per_env`` times."""
        self.require_ready()
        torch.manual_seed(stream_seed(self.config.seed, f"rsl_rl/iteration {self._iteration}/rank {self.comm.rank}"))
        observations = self._vec_env.get_observations()
        with torch.inference_mode():
            for _ in range(self.config.agent.num_steps_per_env):
                beats.enter("rollout")
                actions = self.algorithm.act(observations)
                observations, rewards, dones, extras = self._vec_env.step(actions)
                self.algorithm.process_env_step(observations, rewards, dones, extras)
            self.algorithm.compute_returns(observations)

    def update(self) -> Mapping[str, Number]:
        """Learn from it."""
        losses: Mapping[str, Number] = self.algorithm.update()
        self._iteration += 1
        return losses

    def merge(self) -> None:
        """Merge the normalisers."""
        normalization.merge([*self._normalizers.values()], self.comm)

    # --- what is alike and what is saved ----------------------------------------------------------------------------

    def replicated(self) -> Mapping[str, Replicated]:
        """Return models, optimizers and counters; nothing as long as the teacher is lacking."""
        if self._lacking:
            return {}
        return {**self.algorithm.models(), **self.algorithm.optimizers(), "counters": _Counters(self)}

    def state_dict(self) -> dict[str, Any]:
        """Return what RSL-RL saves, and what it forgets: moments, counters, and what the envs' policies remember."""
        memory = self._memory()
        return {
            "settings": self.settings,
            "algorithm": self.algorithm.save(),
            "moments": {name: normalizer.moments for name, normalizer in self._normalizers.items()},
            "counters": _Counters(self).state_dict(),
            "memory": sharding.gather(memory, self.comm, self.env.device) if memory else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; a teacher comes from there too."""
        self._take_teacher(state)
        self.algorithm.load(state["algorithm"], None, True)
        self._load_moments(state)
        _Counters(self).load_state_dict(state["counters"])
        self._remember(state["memory"])

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Begin with the networks and normalisers; a teacher comes from there if there is none."""
        if self._lacking:
            self._take_teacher(state)
        is_ppo = isinstance(self.algorithm, InStepPPO)
        parts = dict.fromkeys(("actor", "critic") if is_ppo else ("student",), True)
        self.algorithm.load(state["algorithm"], parts, True)
        self._load_moments(state)

    def retune(self, learning_rate: float) -> None:
        """Take up another learning rate than the state's, unless ``library`` has one."""
        if "learning_rate" not in (self.config.library.get("algorithm") or {}):
            self.algorithm.learning_rate = learning_rate
            for group in self.algorithm.optimizer.param_groups:
                group["lr"] = learning_rate

    def _take_teacher(self, state: Mapping[str, Any]) -> None:
        """Build everything for the teacher of a checkpoint, if there is one."""
        saved = state["settings"]
        if "teacher" in saved:
            weights = state["algorithm"]["teacher_state_dict"]
            teacher = Teacher(saved["teacher"], saved["obs_groups"]["teacher"], weights)
            self._build(settings_of(self.config), teacher)

    def _load_moments(self, state: Mapping[str, Any]) -> None:
        for name, normalizer in self._normalizers.items():
            if name in state["moments"]:
                normalizer.load(state["moments"][name])

    def _memory(self) -> dict[str, torch.Tensor]:
        """Return by model what it remembers of each env, ``(num_envs, num_parts, size)``; zeros before a rollout."""
        models = {name: model for name, model in self.algorithm.models().items() if getattr(model, "is_recurrent", 0)}
        found: dict[str, torch.Tensor] = {}
        for name, model in models.items():
            hidden = model.get_hidden_state()
            if hidden is None:
                like = RslRlPolicy(model, self.env.task.num_observations).initial_memory(self.env.num_envs)
                found[name] = like.transpose(0, 1)
            else:
                found[name] = torch.cat(hidden if isinstance(hidden, tuple) else (hidden,)).detach().transpose(0, 1)
        return found

    def _remember(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Give models what ``_memory`` of all ranks has said, but for envs at the begin of an episode."""
        models, has_begun = self.algorithm.models(), (self.env.episode_length > 0).reshape(-1, 1, 1)
        for name, rows in memory.items():
            own = rows[self._first_env : self._first_env + self.env.num_envs].to(self.env.device)
            own = torch.where(has_begun, own, 0.0).transpose(0, 1)
            is_pair = isinstance(models[name].rnn.rnn, nn.LSTM)
            hidden = tuple(part.contiguous() for part in own.chunk(2)) if is_pair else own.contiguous()
            models[name].reset(hidden_state=hidden)
            if name == "student":
                self.algorithm.last_hidden_states = (hidden, None)

    @staticmethod
    def load_policy(config: TrainConfig, state: Mapping[str, Any], task: Task) -> RslRlPolicy:
        """Return the actor, or the student, of a state."""
        name = "actor" if isinstance(config.agent, PpoConfig) else "student"
        kind, arguments = resolve_class(state["settings"][name])
        observations = {group: torch.zeros(1, size) for group, size in task.num_observations.items()}
        with contextlib.redirect_stdout(io.StringIO()):
            model: MLPModel = kind(
                TensorDict(observations, batch_size=[1]),
                state["settings"]["obs_groups"],
                name,
                task.action_space.size,
                **arguments,
            )
        model.load_state_dict(state["algorithm"][f"{name}_state_dict"])
        return RslRlPolicy(model, task.num_observations)


class TrainingEnv(RslRlEnv):
    """The envs as the learner steps them: lockstep keeps the statistics of episodes itself."""

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Apply one action per env; ``extras`` has ``time_outs`` and ``final_observations``."""
        with torch.inference_mode(False), torch.no_grad():
            transition = self.env.step(actions.clone())  # no tensor of inference mode, which could not be written to
            extras = {"time_outs": transition.truncated, "final_observations": transition.final_observations}
            return self._grouped(transition.observations), transition.reward, transition.done, extras


class _Counters:
    """The numbers of a learner that are the same on all ranks."""

    def __init__(self, learner: RslRlLearner) -> None:
        self._learner = learner

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self._learner._iteration, **self._learner.algorithm.counters()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learner._iteration = state["iteration"]
        self._learner.algorithm.load_counters(state)


@contextlib.contextmanager
def _refusals_in_words(config: TrainConfig) -> Iterator[None]:
    """Turn what RSL-RL says of a setting into one line."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        if not config.library:
            raise
        raise UsageError(f"rsl_rl refuses what library says: {' '.join(str(error).split())}") from error
