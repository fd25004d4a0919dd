"""What follows a training and keeps its times: warm-up apart, and nothing beyond the measured iterations."""

from typing import Any

import pytest

from lockstep.benchmark.assemble import Job, assemble, number_nodes
from lockstep.benchmark.options import Options, check_options, config_for
from lockstep.benchmark.resources import Sample, Sampler
from lockstep.benchmark.training.exchanges import exchanges_of
from lockstep.benchmark.training.meter import Iteration, Meter
from lockstep.benchmark.training.work import work_of
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


class Samples(Sampler):
    """A sampler whose clock is set by hand."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(None)
        self._clock = clock

    def sample(self) -> Sample:
        return Sample(self._clock(), 0.0, 0.0, 0.0, 0.0, 1, ())


def metered(
    warm_up: int, iterations: int, seconds: list[float], meeting_s: float = 50.0, other_s: float = 0.0
) -> tuple[Meter, list[Any]]:
    """Return a meter that has followed iterations of so many seconds, and what it has done."""
    clock = Clock()
    done: list[Any] = []

    def take(what: str) -> None:
        done.append(what)
        clock.now += meeting_s

    times = OwnTimes({"rollout": 0.25, "update": 0.5}, (Wait("gradients", 0.125, 64),))
    meter = Meter(
        lambda: times,
        lambda: [Wait("sentinel", other_s, 8)] if other_s else [],
        lambda: take("met"),
        Samples(clock),
        warm_up=warm_up,
        iterations=iterations,
        prepare=lambda: take("prepared"),
        keep=lambda iteration, content: done.append((iteration, content)),
        clock=clock,
    )
    for number, duration in enumerate(seconds):
        clock.now += duration
        compile_s = 2.0 if number == 0 else None
        meter.record({"iteration": number + 1, "env_steps": 10 * (number + 1), "time/compile": compile_s})
    meter.save(len(seconds), {"a": 1})
    return meter, done


def test_the_warm_up_and_the_meeting_are_in_no_figure() -> None:
    meter, done = metered(2, 3, [7.0, 1.0, 2.0, 3.0, 4.0])
    assert (meter.warm_up_s, meter.warm_up_steps, meter.num_warm_up) == (8.0, 20, 2)
    assert meter.compile_s == 2.0
    assert [each.seconds for each in meter.iterations] == [2.0, 3.0, 4.0]
    assert (meter.wall_s, meter.env_steps) == (9.0, 30)
    assert done == ["prepared", "met", "met", (5, {"a": 1})]


def test_resources_are_those_of_the_measured_iterations() -> None:
    meter, _ = metered(2, 3, [7.0, 1.0, 2.0, 3.0, 4.0, 80.0])
    # What comes before the last meeting is no part of them, however long it takes.
    assert sum(each.seconds for each in meter.intervals()) == pytest.approx(9.0 + 50.0)
    meter, _ = metered(2, 3, [7.0, 1.0, 2.0, 3.0, 4.0, 80.0], meeting_s=0.0)
    assert sum(each.seconds for each in meter.intervals()) == pytest.approx(9.0)


def test_iterations_after_the_measured_ones_do_not_count() -> None:
    meter, _ = metered(1, 2, [7.0, 1.0, 2.0, 90.0])
    assert [each.seconds for each in meter.iterations] == [1.0, 2.0]
    assert (meter.wall_s, meter.env_steps, len(meter.recorded)) == (3.0, 20, 4)


def test_iterations_that_exchange_differently_are_not_taken_for_alike() -> None:
    one = OwnTimes({}, (Wait("gradients", 0.1, 8),))
    other = OwnTimes({}, (Wait("gradients", 0.1, 8), Wait("gradients", 0.1, 8)))
    exchanges, waits_s = exchanges_of([Iteration(1.0, one, 0.0)] * 2)
    assert ([each.tag for each in exchanges], waits_s) == (["gradients"], ((0.1,), (0.1,)))
    assert exchanges_of([Iteration(1.0, one, 0.0), Iteration(1.0, other, 0.0)]) == ((), ())
    assert exchanges_of([Iteration(1.0, OwnTimes({}, ()), 0.5)]) == ((), ())
    assert exchanges_of([Iteration(1.0, None, 0.0)]) == ((), ())


def test_exchanges_between_iterations_have_a_column_of_their_own() -> None:
    one = OwnTimes({}, (Wait("gradients", 0.1, 8),))
    exchanges, waits_s = exchanges_of([Iteration(1.0, one, 0.0), Iteration(1.0, one, 0.25)])
    assert [each.tag for each in exchanges] == ["gradients", "others"]
    assert waits_s == ((0.1, 0.0), (0.1, 0.25))
    meter, _ = metered(1, 2, [7.0, 1.0, 2.0], other_s=0.5)
    assert [each.other_waits_s for each in meter.iterations] == [0.5, 0.5]


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


def test_ranks_of_a_runtime_benchmark_are_not_in_step() -> None:
    about = Job("runtime", job().config, ("x",))
    bundle = assemble(about, [report(0, [1.0, 3.0], env_steps=60), report(1, [3.0, 2.0], env_steps=60)])
    assert bundle.runtime is not None
    # The slowest rank's iterations, not the slowest of each.
    assert (bundle.runtime.iteration_s.least, bundle.runtime.iteration_s.most) == (2.0, 3.0)
    assert bundle.slowest_rank == 1


def test_where_the_time_goes_can_not_always_be_told() -> None:
    bundle = assemble(job(), [report(0, [1.0], ranks=[0, 1])])
    assert (bundle.slowest_rank, bundle.compute_spread) == (None, None)
    (finding,) = bundle.findings
    assert finding.reason == "unknown"
    assert "devices of one process" in finding.words


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
    assert (bundle.world_size, bundle.num_processes, bundle.slowest_rank) == (4, 2, None)


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
