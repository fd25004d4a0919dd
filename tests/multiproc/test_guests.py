"""Other people's learners in general: their own exchanges on our group, and what is made of what they tell."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lockstep.core.errors import RunError, UsageError
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.observer import NonFiniteError
from lockstep.learn.torch import checkpoint
from lockstep.learn.torch.guest import GuestTraining
from lockstep.session.torch_policy import load_policy
from tests.multiproc import jobs_guests
from tests.rank_pool import RankError, RankPool

JOBS = "tests.multiproc.jobs_guests"


def test_a_library_finds_the_jobs_group_and_its_exchanges_are_counted(ranks_2: RankPool) -> None:
    results = ranks_2.run(f"{JOBS}:exchange_in_guest_group")
    for result in results:
        assert result["sum"] == [3.0, 3.0, 3.0]
        assert result["waits"] == [("all_reduce", 12), ("broadcast", 12)]
        assert result["is_as_before"] and result["backend"] == "gloo"
    assert results[0]["waited_s"] > 0.15 > results[1]["waited_s"]  # rank 1 came 0.2 s late


def test_every_rank_has_rank_0s_beginning_and_the_same_numbers(ranks_2: RankPool) -> None:
    one, other = ranks_2.run(f"{JOBS}:iterate", 3)
    assert one["first"] == other["first"]
    assert one["replicated"] == other["replicated"]
    for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert mine == pytest.approx(theirs, nan_ok=True)
    assert [metrics["iteration"] for metrics in one["metrics"]] == [1, 2, 3]
    assert [metrics["env_steps"] for metrics in one["metrics"]] == [16, 32, 48]  # 2 ranks x 2 envs x 4 steps
    assert one["metrics"][0]["kl"] == 1.0  # the mean of 0.5 and 1.5
    assert one["metrics"][0]["line/rank"] == 0.5 and one["metrics"][0]["line/nothing"] is None
    assert [metrics.get("line/late", 0.0) for metrics in one["metrics"]] == [0.0, 3.0, 3.0]  # of rank 1 alone
    tags = [tag for tag, _ in one["waits"]]
    assert tags.count("metrics") == 1 and "names of metrics" not in tags  # by the third iteration
    assert one["metrics"][2]["loss/imitation"] < one["metrics"][0]["loss/imitation"]
    assert "all_reduce" in [tag for tag, _ in one["waits"]]


def test_the_first_policy_does_not_depend_on_the_number_of_ranks(ranks_2: RankPool) -> None:
    alone = jobs_guests.iterate(SoloComm(), 1)
    assert alone["first"] == ranks_2.run(f"{JOBS}:iterate", 1)[0]["first"]


@pytest.mark.parametrize(("num_envs", "kl"), [((3, 1), 0.75), ((1, 3), 1.25), ((4, 0), 0.5), ((0, 4), 1.5)])
def test_numbers_of_ranks_count_by_their_envs(ranks_2: RankPool, num_envs: tuple[int, int], kl: float) -> None:
    alone = jobs_guests.iterate(SoloComm(), 1, num_envs=4)["metrics"][0]  # the same envs on one rank
    for rank in ranks_2.run(f"{JOBS}:iterate_with", {"num_envs": num_envs}):
        (metrics,) = rank["metrics"]
        assert metrics["loss/imitation"] == pytest.approx(alone["loss/imitation"], rel=1e-6)
        assert metrics["kl"] == kl
        assert metrics["learning_rate"] == alone["learning_rate"]  # to the last bit


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_loss_that_is_not_finite_names_its_rank_on_all(ranks_2: RankPool, bad_rank: int) -> None:
    results = ranks_2.run(f"{JOBS}:iterate_with", {"library": {"bad_rank": bad_rank}})
    assert results == [{"error": f"loss imitation on rank {bad_rank}", "iteration": 0}] * 2


def test_a_parameter_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    training: Any = jobs_guests.training_on(SoloComm())
    monkeypatch.setattr(training.learner, "merge", lambda: training.policy.layer.bias.data.fill_(torch.inf))
    with pytest.raises(NonFiniteError, match=r"^policy\.layer\.bias on rank 0$"):
        training.iterate()


def test_the_sentinel_names_what_a_library_lets_drift(ranks_2: RankPool) -> None:
    with pytest.raises(RankError, match=r"policy\.layer\.bias"):
        ranks_2.run(f"{JOBS}:train_drifting")


def test_a_training_goes_on_from_what_rank_0_alone_has_read(ranks_2: RankPool) -> None:
    content = ranks_2.run(f"{JOBS}:content_after", 2)[0]
    one, other = ranks_2.run(f"{JOBS}:go_on", content)
    assert one["loaded"] == other["loaded"]
    assert torch.tensor(one["loaded"]["policy.layer.weight"]).equal(content["state"]["policy"]["layer.weight"])
    assert one["metrics"]["iteration"] == 3 and one["metrics"]["env_steps"] == 48
    saved = content["env"]["observations"]["actor"]
    assert torch.tensor(one["observations"] + other["observations"]).equal(saved)
    alone = jobs_guests.training_on(SoloComm(), num_envs=4)  # the same envs on one rank
    alone.load_state_dict(content, "model_2.pt")
    assert alone.env.observations["actor"].equal(saved)
    learner: Any = alone.learner
    assert learner.was_given == ({"policy", "optimizer", "replay"}, 8)  # 2 iterations of 4 steps: the env was loaded


def test_of_a_checkpoint_to_begin_with_no_replay_is_sent(ranks_2: RankPool) -> None:
    content = ranks_2.run(f"{JOBS}:content_after", 2)[0]
    assert content["state"]["replay"]["seen"].shape[:2] == (4, 4)
    content["state"]["replay"]["seen"] = torch.zeros(4, 100_000)
    for given, num_bytes in ranks_2.run(f"{JOBS}:begin_with", content):
        assert given == ["optimizer", "policy"] and num_bytes < 10_000


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    content = jobs_guests.content_after(SoloComm(), 1)
    other = jobs_guests.training_on(SoloComm(), num_envs=4)
    with pytest.raises(UsageError, match="2 envs"):
        other.load_state_dict(content, "model_1.pt")
    del content["state"]
    with pytest.raises(UsageError, match="has no state, so a run can't resume"):
        jobs_guests.training_on(SoloComm()).load_state_dict(content, "model_1.pt")


@pytest.mark.parametrize("way", ["load_weights", "load_state_dict"])
def test_networks_that_do_not_fit_are_told_in_one_line(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = jobs_guests.content_after(SoloComm(), 1)
    training = jobs_guests.training_on(SoloComm())
    content["state"]["policy"]["layer.weight"] = torch.zeros(1, 9)
    with pytest.raises(
        UsageError, match=r"model_1\.pt does not fit agent\.\* .*size mismatch for layer\.weight"
    ) as error:
        getattr(training, way)(content, "model_1.pt")
    assert error.value.shared
    del content["state"]["policy"]
    with pytest.raises(UsageError, match=r"does not fit agent\.\* and library\.\* here \(KeyError: 'policy'\); use"):
        getattr(training, way)(content, "model_1.pt")
    for failure in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("you tried to allocate memory")):
        monkeypatch.setattr(training.learner, way, Mock(side_effect=failure))
        with pytest.raises(RuntimeError, match="memory"):
            getattr(training, way)(content, "model_1.pt")


def test_a_policy_that_does_not_fit_its_run_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model_1.pt"
    checkpoint.save(jobs_guests.content_after(SoloComm(), 1), path)  # that of no learner of RSL-RL
    with pytest.raises(UsageError, match=r"model_1\.pt does not fit agent\.\* .*KeyError: 'settings'"):
        load_policy(path, "cpu")


@pytest.mark.parametrize(
    ("cause", "shared"),
    [(None, True), (ValueError("no such setting"), True), (ImportError("no such module"), False), (OSError(), False)],
)
def test_what_follows_from_the_config_is_said_once_and_what_a_machine_lacks_by_whom_it_concerns(
    cause: Exception | None, shared: bool
) -> None:
    with pytest.raises(UsageError) as error:
        jobs_guests.training_on(SoloComm(), library={"refusing": cause})
    assert error.value.shared == shared


def learning_rate_of(training: GuestTraining) -> float:
    return float(training.learner.optimizer.param_groups[0]["lr"])  # type: ignore[attr-defined]


def test_a_run_that_goes_on_takes_up_a_changed_learning_rate_and_leaves_the_schedule_its_own() -> None:
    trained = jobs_guests.training_on(SoloComm())
    trained.iterate()
    trained.learner.retune(0.125)  # as a schedule would
    content = trained.state_dict()
    same = jobs_guests.training_on(SoloComm())
    same.load_state_dict(content, "model_1.pt")
    assert learning_rate_of(same) == 0.125
    changed = jobs_guests.training_on(SoloComm(), agent=trained.config.agent.model_copy(update={"learning_rate": 0.5}))
    changed.load_state_dict(content, "model_1.pt")
    assert learning_rate_of(changed) == 0.5


@pytest.mark.parametrize(("name", "value"), [("seed", 7), ("dtype", "float64")])
def test_a_run_keeps_its_seed_and_type_for_life(name: str, value: Any) -> None:
    content = jobs_guests.content_after(SoloComm(), 1)
    with pytest.raises(UsageError, match=rf"has {name} .*, not {value}; a run resumes with the {name} it had"):
        jobs_guests.training_on(SoloComm(), **{name: value}).load_state_dict(content, "model_1.pt")


def test_the_loop_saves_what_failed() -> None:
    with pytest.raises(RunError, match="not finite in iteration 1: loss imitation on rank 0"):
        jobs_guests.train_until_it_fails(SoloComm())
