"""What ``train_multigpu`` will do: checked, refused in one line, and shown by the dry run."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli import train_multigpu
from lockstep.cli.launch_request import split, work_of
from lockstep.cli.main import main
from lockstep.core.errors import UsageError
from lockstep.core.gpu_mask import Gpu
from lockstep.launch import rendezvous
from lockstep.launch.describe import concerns, describe
from lockstep.launch.devices import GpuUse, GpuUser, place_ranks, use_of
from lockstep.launch.plan import Options, Plan, Work, check_surroundings, make_plan
from lockstep.launch.rendezvous import Nodes

GIB = 2**30
UUIDS = [f"GPU-{index}000aaaa-0000-0000-0000-000000000000" for index in range(4)]
GPUS = [Gpu(index, uuid, "H200", f"0000:0{index}:00.0", 140 * GIB, "570.1", ()) for index, uuid in enumerate(UUIDS)]
TRAIN = Work(("-m", "lockstep", "train", "cartpole_balance"))
MEETING = ("--rdzv_endpoint", "10.0.0.1:1", "--rdzv_id", "j")


@pytest.fixture(autouse=True)
def _a_network_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "is_own", lambda host: False)
    monkeypatch.setattr(rendezvous, "address_towards", lambda host: "10.0.0.2")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Runs the command on a machine with four GPUs; checks that it is refused in one line, and returns that."""
    monkeypatch.setattr(train_multigpu, "find_gpus", lambda: GPUS)
    monkeypatch.setattr(train_multigpu, "launch", lambda plan, say: pytest.fail("started"))

    def run(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(["train_multigpu", *arguments]) == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.startswith("lockstep: error: ")
        assert errors.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return errors

    return run


def planned(work: Work = TRAIN, environment: dict[str, str] | None = None, **options: Any) -> Plan:
    """Return a plan on a machine with four GPUs."""
    return make_plan(Options(**options), work, GPUS, environment or {}, job="abc")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num_gpus", "0"], ["num_gpus must be at least 1"]),
        (["--num_gpus", "-2"], ["num_gpus must be at least 1", "-2"]),
        (["--num_gpus", "two"], ["num_gpus must be a whole number", "two"]),
        (["--num_gpus"], ["--num_gpus needs a value"]),
        (["--num_gpus", "2", "--num-gpus", "2"], ["--num_gpus is given twice"]),
        (["--num_gpus", "2", "--nproc-per-node", "2"], ["--num_gpus and --nproc_per_node are the same"]),
        (["--num_gpus", "5"], ["5 ranks on this node but 4 GPUs visible", "--num_gpus 4"]),
        (["--num_gpu", "2"], ["--num_gpu'", "did you mean '--num_gpus'"]),
        (["--num_env", "2"], ["--num_env'", "did you mean '--num_envs'"]),
        (["--gpus", "2"], ["--gpus", "--num_gpus N"]),
        (["--gpu_ids", "1,3"], ["CUDA_VISIBLE_DEVICES=1,3"]),
        (["--standalone"], ["leave it out"]),
        (["--redirects", "3"], ["--log_all_ranks"]),
        (["-n", "2"], ["'-n'"]),
        (["--device", "cpu"], ["--num_gpus N"]),
        (["--device", "cuda:1"], ["cuda:1", "every rank gets its own"]),
        (["--device", "cuda:0", "--num_gpus", "1", "--nnodes", "2", *MEETING], ["every rank gets its own"]),
        (["--device", "cuda:4", "--num_gpus", "1"], ["cuda:4", "cuda:0 to cuda:3"]),
        (["--device", "tpu"], ["tpu", "cpu"]),
        (["--coordinator_address", "h:1"], ["--coordinator_address belongs to JAX", "ml_framework torch"]),
        (["--max_restarts", "-1"], ["max_restarts must be at least 0"]),
        (["--log_all_ranks", "--tee", "3"], ["keep one"]),
        (["--tee", "4"], ["tee '4'", "3 (both)"]),
        (["--tee", "0:3,4:1"], ["local rank 4", "0 to 3"]),
        (["--tee", "0:3,0:1"], ["local rank 0 twice"]),
        (["--dry_run", "perhaps"], ["unexpected 'perhaps'"]),
        (["--dry_run=perhaps"], ["dry_run must be true or false"]),
        (["--log_dir", "/dev/null/logs"], ["/dev/null", "--log_dir"]),
        (["--log_dir="], ["--log_dir needs a path"]),
        (["--log_dir", f"new/{300 * 'x'}"], ["can't be made (file name too long)"]),
        (["--num_envs", "320,192"], ["320,192", "2 ranks", "4"]),
        (["--num_envs", "10"], ["10", "num_mini_batches"]),
        (["--total_envs", "10"], ["total_envs 10"]),
        (["--agent.gama", "0.9"], ["agent.gama", "agent.gamma"]),
        (["--agent.learning_rate", "inf"], ["agent.learning_rate"]),
        (["--resume", "nowhere"], ["nowhere"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--script"], ["--script needs a value"]),
        (["--script", __file__], ["unexpected 'cartpole_balance' before --script"]),
    ],
)
def test_refused_in_one_line(arguments: list[str], words: list[str], refused: Callable[..., str]) -> None:
    line = refused("cartpole_balance", *arguments)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no task is given"]),
        (["cartpole_balance", "--nnodes", "2"], ["2 nodes must find one another"]),
        (["--script", "missing.py"], ["missing.py", "does not exist"]),
        (["--script", 300 * "x"], ["does not exist (file name too long)"]),
        (["--script", "."], ["'.' is no file"]),
        (["cartpole_balanc"], ["did you mean 'cartpole_balance'"]),
        (["--num_envs", "64", "--script", __file__], ["'--num_envs'", "follow its path"]),
        (["cartpole_balance", "cartpole_swingup"], ["unexpected 'cartpole_swingup'"]),
    ],
)
def test_what_is_to_run_is_refused_in_one_line(
    arguments: list[str], words: list[str], refused: Callable[..., str]
) -> None:
    line = refused(*arguments)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("num_ranks", "mask", "entries", "uuids"),
    [
        (None, None, ["0", "1", "2", "3"], UUIDS),
        (2, None, ["0", "1"], UUIDS[:2]),
        (None, "1,3", ["1", "3"], [UUIDS[1], UUIDS[3]]),
        (3, "3,1,2,0", ["3", "1", "2"], [UUIDS[3], UUIDS[1], UUIDS[2]]),
        (None, f"{UUIDS[2]},{UUIDS[0]}", [UUIDS[2], UUIDS[0]], [UUIDS[2], UUIDS[0]]),
        (None, "GPU-3000", ["GPU-3000"], [UUIDS[3]]),
    ],
)
def test_each_rank_gets_its_own_entry_of_the_mask(
    num_ranks: int | None, mask: str | None, entries: list[str], uuids: list[str]
) -> None:
    environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    places = place_ranks(num_ranks, "auto", False, environment, GPUS)
    assert [place.entry for place in places] == entries
    assert [place.gpu.uuid for place in places if place.gpu] == uuids


@pytest.mark.parametrize(
    ("num_ranks", "mask", "gpus", "words"),
    [
        (2, "3", GPUS, ["2 ranks on this node but 1 GPU visible", "--num_gpus 1"]),
        (1, "", GPUS, ["CUDA_VISIBLE_DEVICES= hides every GPU", "--device cpu"]),
        (1, "-1", GPUS, ["CUDA_VISIBLE_DEVICES=-1 hides every GPU"]),
        (None, None, [], ["no NVIDIA GPU", "--device cpu"]),
        (2, "0,1", [], ["no NVIDIA GPU"]),
        (1, "1,9", GPUS, ["9"]),
        (1, "1,1", GPUS, ["1"]),
        (1, "zero", GPUS, ["zero"]),
    ],
)
def test_wrong_masks_are_refused(num_ranks: int | None, mask: str | None, gpus: list[Gpu], words: list[str]) -> None:
    environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    with pytest.raises(UsageError) as caught:
        place_ranks(num_ranks, "auto", False, environment, gpus)
    assert all(word in str(caught.value) for word in words), caught.value


def test_where_no_job_can_be_started() -> None:
    check_surroundings({}, "linux")
    check_surroundings({"RANK": "0", "WORLD_SIZE": "1"}, "linux")
    with pytest.raises(UsageError, match=r"needs Linux, and this is darwin; use lockstep train"):
        check_surroundings({}, "darwin")
    with pytest.raises(UsageError, match=r"rank 1 of a job with WORLD_SIZE 2"):
        check_surroundings({"RANK": "1", "WORLD_SIZE": "2"}, "linux")


def test_the_command_runs_train_with_its_flags_as_they_were_given() -> None:
    words = split(["--num-gpus", "2", "--num_envs", "64", "--env.x", "-1", "cartpole_balance", "--dry_run", "--seed=3"])
    assert words.train == ("--num_envs", "64", "--env.x", "-1", "cartpole_balance", "--seed=3")
    plan = planned(Work(("-m", "lockstep", "train", *words.train)), num_gpus=2)
    assert plan.command[:3] == (sys.executable, "-m", "lockstep.distributed.torch_agent")
    assert plan.command[-9:] == ("-m", "lockstep", "train", *words.train)
    assert "--nproc_per_node=2" in plan.command
    assert "--redirects=0:0,1:3" in plan.command
    assert plan.world_size == 2
    assert plan.backend == "nccl"


def test_what_a_job_inherits_and_what_it_does_not() -> None:
    outer = {"RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "4", "LOCAL_DATA": "/data", "OMP_NUM_THREADS": "7"}
    plan = planned(Work(TRAIN.words, device="cpu"), environment=outer, num_gpus=2)
    assert plan.removed == ("PET_NNODES", "RANK", "WORLD_SIZE")
    assert plan.added["LOCKSTEP_DEVICE"] == "cpu"
    assert plan.added["LOCKSTEP_JOB"] == "abc"
    assert plan.added["PYTHONUNBUFFERED"] == "1"
    assert "OMP_NUM_THREADS" not in plan.added
    assert plan.backend == "gloo"


@pytest.mark.parametrize(
    ("options", "teed", "on_screen"),
    [
        ({}, (0, 0, 0), (3, 0, 0)),
        ({"log_all_ranks": True}, (3, 3, 3), (3, 3, 3)),
        ({"tee": "1"}, (1, 1, 1), (3, 1, 1)),
        ({"tee": "2:3"}, (0, 0, 3), (3, 0, 3)),
    ],
)
def test_what_is_on_the_screen(options: dict[str, Any], teed: tuple[int, ...], on_screen: tuple[int, ...]) -> None:
    plan = planned(num_gpus=3, **options)
    assert plan.teed == teed
    assert tuple(plan.streams_on_screen(rank) for rank in range(3)) == on_screen


def test_a_dry_run_shows_the_plan_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    used = GpuUse(20 * GIB, 140 * GIB, (GpuUser(77, "python", 110 * GIB),))
    monkeypatch.setattr(train_multigpu, "find_gpus", lambda: GPUS)
    monkeypatch.setattr(train_multigpu, "launch", lambda plan, say: pytest.fail("started"))
    monkeypatch.setattr(
        train_multigpu, "use_of", lambda gpu: used if gpu.index == 1 else GpuUse(139 * GIB, 140 * GIB, ())
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    arguments = ["cartpole_balance", "--num_envs", "320,192", "--run_name", "two words", "--dry-run"]
    assert main(["train-multigpu", *arguments]) == 0
    output, errors = capsys.readouterr()
    rows = dict(line.split(maxsplit=1) for line in output.splitlines() if not line.startswith(" "))
    assert "rank 0    GPU 3, H200, " + UUIDS[3] + ", 139.0 of 140.0 GiB free, 320 envs\n" in output
    assert "rank 1    GPU 1, H200, " + UUIDS[1] + ", 20.0 of 140.0 GiB free, 192 envs\n" in output
    assert rows["ranks"] == "2 on this node, 2 in all"
    assert rows["envs"] == "512 in all"
    assert rows["backend"] == "nccl"
    assert shlex.split(rows["command"])[-3:] == ["320,192", "--run_name", "two words"]
    assert "torchrun --standalone --nproc_per_node=2 --local_ranks_filter=0 -m lockstep train" in rows["by"]
    assert errors.splitlines() == [
        "lockstep: warning: GPU 1 is used by python (pid 77, 112640 MiB)",
        "lockstep: warning: GPU 1 has only 20.0 of 140.0 GiB free",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_one_of_several_nodes() -> None:
    work = Work(TRAIN.words, envs_by_rank=(8, 16, 24, 32))
    static = Nodes("2", "1", "10.0.0.1", "2345")
    text = "\n".join(describe(planned(work, num_gpus=2, nodes=static), {}))
    assert "2 on this node, 4 in all if every node has as many" in text
    assert "rank 2    GPU 0" in text
    assert "24 envs" in text
    assert "torchrun --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=2345 --nproc_per_node=2" in text
    meeting = Nodes("2", rdzv_endpoint="10.0.0.1:99", rdzv_id="job7")
    text = "\n".join(describe(planned(work, num_gpus=2, nodes=meeting), {}))
    assert "local 0   GPU 0" in text  # which rank that is shows when the nodes meet
    assert "2 nodes, at 10.0.0.1:99 (c10d), id job7" in text
    assert "--rdzv_id=job7 --rdzv_conf=is_host=0 --local_addr=10.0.0.2" in text


def test_a_plan_for_nodes_that_come_and_go() -> None:
    nodes = Nodes("1:3", rdzv_endpoint="10.0.0.1:99", rdzv_id="job7")
    options = Options(num_gpus=2, nodes=nodes, max_restarts=5)
    work = work_of(split(["cartpole_balance", "--num_envs", "16"]), options, GPUS, {})
    plan = planned(work, num_gpus=2, nodes=nodes, max_restarts=5)
    text = "\n".join(describe(plan, {}))
    assert "2 on this node, 2 to 6 in all if every node has as many" in text
    assert "32 to 96 in all, by how many nodes there are at the start" in text
    assert "1 to 3 nodes, at 10.0.0.1:99 (c10d), id job7" in text
    assert "restarts    at most 5" in text
    assert {"--nnodes=1:3", "--max_restarts=5"} <= set(plan.command)
    assert not any("--max_restarts" in line for line in plan.warnings)
    assert [line for line in planned(work, nodes=nodes).warnings if "the first node that is lost" in line]
    work = work_of(split(["cartpole_balance", "--total_envs", "48"]), options, GPUS, {})
    text = "\n".join(describe(planned(work, num_gpus=2, nodes=nodes), {}))
    assert "48 in all\n" in text
    assert "8 envs" not in text  # so it would be with all nodes, and more with fewer
    with pytest.raises(UsageError, match=r"on 2 of 1 to 3 nodes x 2 ranks: num_envs 4,4,4,4,4,4 is for 6 ranks"):
        work_of(split(["cartpole_balance", "--num_envs", "4,4,4,4,4,4"]), options, GPUS, {})


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["--num_gpus", "2"], "--num_gpus after the script's path goes to the script; "),
        (
            ["x", "--nproc-per-node=2", "--tee", "3", "--tee=1"],
            "--nproc-per-node, --tee after the script's path go to ",
        ),
        (["--lr", "2", "num_gpus"], None),
        (["--lr", "2", "--", "--num_gpus", "2"], None),  # as they are on purpose
    ],
)
def test_flags_of_the_launcher_after_the_script_are_named(words: list[str], warned: str | None) -> None:
    split_words = split(["--num_gpus", "2", "--script", __file__, *words])
    work = work_of(split_words, Options(num_gpus=2), GPUS, {})
    warnings = planned(work, num_gpus=2).warnings
    assert [line.startswith(warned or "nothing") for line in warnings] == [True] * (warned is not None)
    assert work.words == (__file__, *words)


def test_more_ranks_than_cores_is_a_warning() -> None:
    plan = planned(Work(TRAIN.words, device="cpu"), num_gpus=1000)
    (line,) = concerns(plan, {})
    assert line.startswith("1000 ranks share ")


class FakeNvml:
    """A driver that knows one GPU."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != UUIDS[0]:
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(free=5, total=9)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=1, usedGpuMemory=3), SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        raise self.NVMLError


def test_who_uses_a_gpu() -> None:
    use = use_of(GPUS[0], FakeNvml())
    assert use is not None
    assert (use.free_bytes, use.total_bytes) == (5, 9)
    assert [(user.pid, user.memory_bytes) for user in use.users] == [(1, 3), (2**22 + 1, None)]
    assert use.users[0].name == Path("/proc/1/comm").read_text().strip()
    assert use_of(GPUS[1], FakeNvml()) is None


# fmt: off
ANY_WORDS = [
    "--num_gpus", "2", "--nnodes", "--node-rank=0", "--tee", "3", "--log_all_ranks", "--dry_run", "--script", "--",
    "cartpole_balance", "--task", "--num_envs", "64", "-1", "--device", "cpu", "--config", "x", "=", "",
]
# fmt: on
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@given(st.lists(WORDS))
def test_a_scripts_arguments_reach_it_as_they_are(arguments: list[str]) -> None:
    words = split(["--num_gpus", "2", "--script", __file__, *arguments])
    assert list(words.script) == arguments
    plan = planned(Work((__file__, *words.script), is_script=True), num_gpus=2)
    line = shlex.split(shlex.join(plan.command))
    received = [Template(word).safe_substitute(local_rank="7") for word in line[line.index(__file__) + 1 :]]
    assert received == arguments  # torchrun fills in macros, which is undone beforehand


@given(st.lists(st.sampled_from(ANY_WORDS), max_size=8))
def test_any_words_are_taken_or_refused_in_one_line(words: Sequence[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(train_multigpu, "find_gpus", lambda: GPUS)
        patch.setattr(train_multigpu, "launch", lambda plan, say: 0)
        patch.setattr(train_multigpu, "use_of", lambda gpu: None)
        patch.setattr("lockstep.cli.main._say", said.append)
        code = main(["train_multigpu", *words])
    assert (code, len(said)) in ((0, 0), (2, 1))
    assert all("\n" not in line for line in said)
