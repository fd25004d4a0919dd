"""What follows a training and keeps its times: warm-up apart, and nothing beyond the measured iterations."""

from typing import Any

import pytest

from lockstep.benchmark.assemble import Job, assemble, number_nodes
from lockstep.benchmark.measuring import Meter, _exchanges
from lockstep.benchmark.options import Options, check_options, config_for
from lockstep.benchmark.resources import Sampler
from lockstep.benchmark.work import work_of
from lockstep.core.config import merge
from lockstep.core.errors import UsageError
from lockstep.core.types import Wait
from lockstep.learn.observer import OwnTimes
from lockstep.recipes.cartpole import cartpole_balance, cartpole_classic
from lockstep.recipes.catalog import make_task
from lockstep.session.make_env import build_env
from tests.unit.report_fixtures import interval, report


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def metered(warm_up: int, iterations: int, seconds: list[float], meeting_s: float = 50.0) -> tuple[Meter, list[Any]]:
    """Return a meter that has followed iterations of so many seconds, and what it has done."""
    clock = Clock()
    done: list[Any] = []

    def meet() -> None:
        done.append("met")
        clock.now += meeting_s

    times = OwnTimes({"rollout": 0.25, "update": 0.5}, (Wait("gradients", 0.125, 64),))
    keep = lambda iteration, content: done.append((iteration, content))  # noqa: E731
    meter = Meter(lambda: times, meet, Sampler(None), warm_up, iterations, keep, clock)
    for number, duration in enumerate(seconds):
        clock.now += duration
        meter.record(
            {"iteration": number + 1, "env_steps": 10 * (number + 1), "time/compile": 2.0 if number == 0 else None}
        )
    meter.save(len(seconds), {"a": 1})
    return meter, done


def test_the_warm_up_and_the_meeting_are_in_no_figure() -> None:
    meter, done = metered(2, 3, [7.0, 1.0, 2.0, 3.0, 4.0])
    assert (meter.warm_up_s, meter.warm_up_steps, meter.num_warm_up) == (8.0, 20, 2)
    assert meter.compile_s == 2.0
    assert meter.iteration_s == [2.0, 3.0, 4.0]
    assert (meter.wall_s, meter.env_steps) == (9.0, 30)
    assert done == ["met", (5, {"a": 1})]


def test_iterations_after_the_measured_ones_do_not_count() -> None:
    meter, _ = metered(1, 2, [7.0, 1.0, 2.0, 90.0])
    assert (meter.iteration_s, meter.wall_s, meter.env_steps) == ([1.0, 2.0], 3.0, 20)
    assert len(meter.recorded) == 4
    assert len(meter.intervals()) >= 1


def test_iterations_that_exchange_differently_are_not_taken_for_alike() -> None:
    one = OwnTimes({}, (Wait("gradients", 0.1, 8),))
    other = OwnTimes({}, (Wait("gradients", 0.1, 8), Wait("gradients", 0.1, 8)))
    exchanges, waits_s = _exchanges([one, one])
    assert ([each.tag for each in exchanges], waits_s) == (["gradients"], ((0.1,), (0.1,)))
    assert _exchanges([one, other]) == ((), ())


# --- from reports to a bundle --------------------------------------------------------------------------------------


def job(num_envs: int | tuple[int, ...] = 4) -> Job:
    return Job("training", merge(cartpole_classic(), {"num_envs": num_envs, "agent": {"num_mini_batches": 1}}), ("x",))


def test_throughput_is_work_over_the_time_of_the_slowest_process() -> None:
    bundle = assemble(job(), [report(0, [1.0, 2.0], env_steps=60), report(1, [1.5, 1.0], env_steps=60)])
    assert bundle.runtime is not None
    assert (bundle.runtime.wall_s, bundle.runtime.env_steps, bundle.runtime.steps_per_s) == (3.0, 60, 20.0)
    assert (bundle.runtime.iteration_s.least, bundle.runtime.iteration_s.most) == (1.5, 2.0)  # each its slowest
    assert bundle.runtime.warm_up.wall_s == 0.5
    assert bundle.total_envs == 8


def test_nodes_are_numbered_as_torchrun_does_or_by_their_names() -> None:
    by_number = [report(0, [1.0], node=1), report(1, [1.0], node=0), report(2, [1.0], node=1)]
    assert number_nodes(by_number) == {0: 0, 1: 1, 2: 0}
    by_name = [report(0, [1.0], node=None, host="a"), report(1, [1.0], node=None, host="b")]
    assert number_nodes(by_name) == {0: 0, 1: 1}
    assert number_nodes([report(0, [1.0], node=0), report(1, [1.0], node=1)]) == {0: 0, 1: 1}  # of one name


def test_devices_of_one_process_share_its_figures() -> None:
    bundle = assemble(job(), [report(0, [1.0], ranks=[0, 1]), report(1, [2.0], ranks=[2, 3])])
    assert [(each.rank, each.process, each.wall_s) for each in bundle.ranks] == [
        (0, 0, 1.0), (1, 0, 1.0), (2, 1, 2.0), (3, 1, 2.0),
    ]  # fmt: skip
    assert (bundle.world_size, bundle.num_processes, bundle.slowest_rank) == (4, 2, 2)


def test_what_was_busy_beside_the_job() -> None:
    # Three cores' worth was busy on the cores that both ranks may use; they used 0.5 and 1.5 of it.
    shared = (0, 1, 2, 3)
    reports = [
        report(0, [1.0], intervals=[interval(1.0, cpu_s=0.5, busy_s=3.0)], cores=shared),
        report(1, [1.0], intervals=[interval(1.0, cpu_s=1.5, busy_s=3.0)], cores=shared),
    ]
    found = [each.others_cpu_percent for each in assemble(job(), reports).ranks]
    assert [each.mean for each in found if each is not None] == pytest.approx([100.0, 100.0])
    pinned = [report(0, [1.0], intervals=[interval(1.0, cpu_s=0.5, busy_s=0.75)], cores=(0,)),
              report(1, [1.0], intervals=[interval(1.0, cpu_s=1.0, busy_s=1.0)], cores=(1,))]  # fmt: skip
    found = [each.others_cpu_percent for each in assemble(job(), pinned).ranks]
    assert [each.mean for each in found if each is not None] == pytest.approx([25.0, 0.0])


# --- the work of an iteration --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_parameters_are_as_many_as_the_policy_has(recurrent: str, kind: str) -> None:
    from lockstep.learn.torch.training import make_policy

    changes = {"num_envs": 4, "device": "cpu", "env": {"action_kind": kind}, "agent": {"recurrent": recurrent}}
    config = merge(cartpole_classic(), changes)
    task = make_task(config)
    work = work_of(config, task)
    policy = make_policy(config, build_env(config))
    assert work is not None
    assert work.num_parameters == sum(parameter.numel() for parameter in policy.parameters())


def test_operations_of_small_networks() -> None:
    agent = {"actor_hidden_dims": [3], "critic_hidden_dims": [2], "recurrent": "none"}
    config = merge(cartpole_classic(), {"agent": agent})
    work = work_of(config, make_task(config))  # 4 observations, 1 action
    assert work is not None
    assert work.flops_per_action == 2 * (4 * 3 + 3 * 1)
    assert work.flops_per_sample == 2 * (4 * 3 + 3 * 1) + 2 * (4 * 2 + 2 * 1)


def test_other_peoples_learners_do_not_tell_their_work() -> None:
    config = merge(cartpole_classic(), {"runner": "my.module:Runner"})
    assert work_of(config, make_task(config)) is None


# --- options -------------------------------------------------------------------------------------------------------


def test_a_benchmark_saves_and_evaluates_nothing() -> None:
    config = config_for(cartpole_balance(), Options("training", warm_up=2, iterations=5))
    assert (config.max_iterations, config.evaluation.interval, config.logger) == (7, 0, "none")
    assert config.agent == cartpole_balance().agent
    judged = config_for(cartpole_balance(), Options("training", warm_up=2, iterations=5, check_success=True))
    assert (judged.max_iterations, judged.evaluation.interval) == (8, 8)


@pytest.mark.parametrize("name", ["video", "capture_env_sensors", "check_success"])
def test_what_several_ranks_can_not_do_is_refused_by_name(name: str) -> None:
    options = Options("training", **{name: True})  # type: ignore[arg-type]
    check_options(options, 1)
    with pytest.raises(UsageError, match=f"^--{name} can't be had with training_multigpu: "):
        check_options(options, 2)
    with pytest.raises(UsageError, match=f"^--{name} belongs to lockstep benchmark training"):
        check_options(Options("runtime", **{name: True}), 1)  # type: ignore[arg-type]
