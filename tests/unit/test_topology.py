"""Which rank this process is, from the launcher's variables alone."""

import pytest

from lockstep.core.errors import UsageError
from lockstep.distributed.topology import (
    Topology,
    environment_apart,
    from_environment,
    require_launcher,
    require_several,
)

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


def test_torchruns_variables() -> None:
    assert from_environment(TORCHRUN) == Topology(rank=5, local_rank=1, world_size=8, local_world_size=4)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"},  # a batch job of one process is no rank
        {"LOCAL_RANK": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    ],
)
def test_without_rank_and_world_size_the_process_is_alone(environment: dict[str, str]) -> None:
    assert from_environment(environment) == Topology(rank=0, local_rank=0, world_size=1, local_world_size=1)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment() == Topology()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert from_environment().rank == 5


def test_who_asks_for_several_ranks_gets_them_or_a_word() -> None:
    require_several(2, "--distributed")
    with pytest.raises(UsageError, match=r"^--distributed needs WORLD_SIZE > 1, which torchrun sets; for one "):
        require_several(1, "--distributed")


def test_a_process_apart_is_no_rank_and_keeps_what_is_the_users_own() -> None:
    own = dict.fromkeys(("HOME", "CUDA_VISIBLE_DEVICES", "TORCH_HOME", "LOCAL_SCRATCH", "GROUP_ID", "ROLE_ARN"), "x")
    own |= dict.fromkeys(("MASTER_KEY", "RANKS", "MY_RANK", "SLURMX"), "x")
    job = dict.fromkeys(("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"), "1")
    job |= dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "LOCKSTEP_DEVICE", "SLURM_PROCID"), "1")
    assert environment_apart(TORCHRUN | job | {"PMI_RANK": "1"} | own) == own


def test_a_single_node_may_leave_out_the_local_variables() -> None:
    assert from_environment({"RANK": "1", "WORLD_SIZE": "2"}) == Topology(1, 1, 2, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": None}, ["RANK is not set", "torchrun"]),
        ({"WORLD_SIZE": None}, ["WORLD_SIZE is not set", "torchrun"]),
        ({"RANK": "five"}, ["RANK is 'five', not a whole number", "torchrun"]),
        ({"RANK": ""}, ["RANK is ''", "torchrun"]),
        ({"WORLD_SIZE": "8.0"}, ["WORLD_SIZE is '8.0'", "torchrun"]),
        ({"LOCAL_RANK": "gpu1"}, ["LOCAL_RANK is 'gpu1'", "torchrun"]),
        ({"RANK": "8"}, ["RANK is 8 but WORLD_SIZE is 8"]),
        ({"RANK": "-1"}, ["RANK is -1"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is 0"]),
        ({"LOCAL_RANK": "4"}, ["LOCAL_RANK is 4 but LOCAL_WORLD_SIZE is 4", "torchrun"]),
        ({"LOCAL_RANK": "-1"}, ["LOCAL_RANK is -1"]),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(changes: dict[str, str | None], words: list[str]) -> None:
    environment = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(UsageError) as caught:
        from_environment(environment)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words)


def test_tasks_of_srun_that_know_nothing_of_each_other_are_refused() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}
    with pytest.raises(UsageError, match=r"^srun has started 8 tasks, .* use --ntasks-per-node 1 and lockstep train_m"):
        require_launcher(step)
    require_launcher(step | {"RANK": "3", "WORLD_SIZE": "8"})  # ranks, whoever has started them
    require_launcher({"SLURM_STEP_NUM_TASKS": "1"})
    require_launcher({"SLURM_NTASKS": "8"})  # a job script, of which there is one
