"""A session with torch: a rank is a process, and computes on one device."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.distributed.torch_exchange import gather_json
from lockstep.distributed.torch_group import join
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.config import split_evenly
from lockstep.learn.torch import checkpoint
from lockstep.learn.torch.evaluation import evaluate
from lockstep.session.framework import Content, Episodes, Frame, Learner, Stepper, Team
from lockstep.session.make_env import build_env, build_share, resolve_device
from lockstep.session.placement import compare, describe_rank
from lockstep.session.process import prepare, seed_generators
from lockstep.session.runner import check_learner, check_runner, make_runner
from lockstep.session.torch_policy import TorchPolicy, load_policy
from lockstep.session.torch_random import TorchStepper

if TYPE_CHECKING:
    from lockstep.core.types import Comm
    from lockstep.learn.config import TrainConfig
    from lockstep.session.policy import Policy


class TorchFramework:
    """The ``Framework`` torch."""

    name = "torch"

    def count_ranks(self, config: TrainConfig, num_processes: int) -> int:
        """Return the number of processes, each of which is a rank."""
        return num_processes

    def check(self, config: TrainConfig, num_processes: int) -> None:
        """Check lockstep's own learner."""
        check_learner(config, num_processes)

    def check_runner(self, config: TrainConfig, world_size: int, *, starts_from: str = "") -> None:
        """Check the config's runner."""
        check_runner(config, world_size, starts_from=starts_from)

    def running(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def join(self, config: TrainConfig) -> Team:
        """Join the process group."""
        device = resolve_device(config.device)
        comm = join(device)
        try:
            ranks = gather_json(describe_rank(config, device), comm, "placement")
            compare(ranks)
        except BaseException as error:
            if getattr(error, "shared", False):
                comm.close()
            raise
        without_config = [{name: value for name, value in rank.items() if name != "config"} for rank in ranks]
        count = comm.num_ranks
        return Team(comm, without_config, f"{count} rank{'s' if count != 1 else ''}", str(device))

    def prepare(self, config: TrainConfig, rank: int) -> None:
        """Set up threads, allocator and generators."""
        prepare(config, rank)

    def seed(self, seed: int, rank: int, iteration: int) -> None:
        """Seed the generators of Python, numpy and torch."""
        seed_generators(seed, rank, iteration)

    def make_learner(self, config: TrainConfig, team: Team, resources: ExitStack) -> Learner:
        """Build this rank's share of the envs, and of those that evaluations run in, and the learner."""
        comm: Comm = team.comm  # type: ignore[assignment]  # that this framework has made
        shares = config.envs_by_rank(comm.world_size)
        env = resources.enter_context(closing(build_share(config, shares, comm.rank)))
        evaluation_env = None
        if config.evaluation.interval:
            shares = split_evenly(config.evaluation.num_episodes, comm.world_size)
            share = build_share(config, shares, comm.rank, "evaluation", env.task)
            evaluation_env = resources.enter_context(closing(share))
        return Learner(make_runner(config, env, comm), env.engine, evaluation_env)

    def make_stepper(self, config: TrainConfig, team: Team, resources: ExitStack) -> Stepper:
        """Build this rank's share of the envs."""
        shares = config.envs_by_rank(team.comm.world_size)
        env = resources.enter_context(closing(build_share(config, shares, team.comm.rank)))
        return TorchStepper(env, team.comm.rank, config.seed)

    def make_apart(self, config: TrainConfig, team: Team, resources: ExitStack) -> None:
        """Return None: exchanges are timed one by one."""

    def load(self, path: Path) -> Content:
        """Read a checkpoint file."""
        return checkpoint.load(path)

    def save(self, content: Content, path: Path) -> None:
        """Write a checkpoint file."""
        checkpoint.save(content, path)

    def snapshot(self, content: Content) -> Callable[[Path], None]:
        """Copy a checkpoint's content to the CPU and return what writes it."""
        return checkpoint.snapshot(content)

    def load_policy(self, path: Path, device: str) -> Policy:
        """Return the policy of a checkpoint file."""
        return load_policy(path, device)

    def evaluate(self, policy: Policy, config: TrainConfig, num_episodes: int) -> Episodes:
        """Run whole episodes in envs of their own."""
        assert isinstance(policy, TorchPolicy)
        with closing(build_env(config, num_envs=num_episodes, streams="evaluation")) as env:
            episodes = evaluate(policy.network, env)
        terms = {name: values.numpy() for name, values in episodes.term_returns.items()}
        metrics = {name: values.numpy() for name, values in episodes.metric_sums.items()}
        return Episodes(episodes.returns.numpy(), episodes.lengths.double().numpy(), terms, metrics)

    def frames(self, policy: Policy, config: TrainConfig) -> Generator[Frame]:
        """Step one env of its own."""
        policy.reset()
        with closing(build_env(config, num_envs=1, streams="evaluation")) as env:
            assert isinstance(env, TorchEnv)  # only tasks with a model are shown
            starts_episode = True
            while True:
                qpos, qvel = (array[0].double().cpu().numpy() for array in (env.state.qpos, env.state.qvel))
                yield Frame(qpos, qvel, starts_episode)
                done = env.step(policy(env.observations)).done
                policy.reset(done)
                starts_episode = bool(done)


TORCH = TorchFramework()
