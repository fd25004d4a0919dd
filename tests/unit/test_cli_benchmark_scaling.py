"""What ``lockstep benchmark scaling`` takes, and refuses before anything runs."""

from pathlib import Path

import pytest

from lockstep.cli.benchmark_scaling import check_jobs, equal_threads, main, read
from lockstep.cli.train_request import read as read_training
from lockstep.core.errors import UsageError

TASK = "cartpole_balance"
ON_CPU = [TASK, "--device", "cpu"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_words_of_each_job_are_what_is_left() -> None:
    sweep, words, output = read([*ON_CPU, "--num-gpus", "4,1,2", "--rounds", "5", "--seed", "3", "--output", "there"])
    assert (sweep.counts, sweep.rounds, sweep.is_strong) == ((1, 2, 4), 5, False)
    assert words == [*ON_CPU, "--seed", "3"]
    assert output == Path("there")
    assert read([*ON_CPU, "--nproc_per_node=1,2"])[0].rounds == 3


def test_all_jobs_are_checked_as_their_launcher_would() -> None:
    sweep, words, _ = read([*ON_CPU, "--num_gpus", "1,2", "--num_envs", "64", "--iterations", "3", "--warm_up", "1"])
    config, _ = check_jobs(sweep, words, {})
    assert (config.task, config.num_envs) == (TASK, 64)


def test_strong_scaling_deals_the_envs_of_the_whole_job() -> None:
    sweep, words, _ = read([*ON_CPU, "--num_gpus", "1,2,3", "--strong", "--total_envs", "192"])
    assert sweep.is_strong
    assert check_jobs(sweep, words, {})[0].num_envs == 192  # of the job with one rank


def test_ranks_that_are_more_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launch.plan.allowed_cores", lambda: 2)
    sweep, words, _ = read([*ON_CPU, "--num_gpus", "2,4"])
    assert check_jobs(sweep, words, {})[1] == ("4 ranks share 2 cores; they will wait for one another",)


@pytest.mark.parametrize(
    ("task", "takes_them"), [(TASK, True), ("envpool/CartPole-v1", True), ("gymnasium/CartPole-v1", False)]
)
def test_threads_are_shared_out_where_the_env_takes_any(
    task: str, takes_them: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.core.environment.allowed_cores", lambda: 6)
    given = [task, "--device", "cpu"]
    words = equal_threads(read_training(given).config, 2)
    assert "--num_torch_threads" in words
    assert read_training([*given, *words]).config.env.num_physics_threads == (3 if takes_them else 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give --num_gpus 1,2,4"),
        (["--num_gpus", "2"], "one number of ranks, and a sweep compares two or more"),
        (["--num_gpus", "1,1,2"], "names a number twice; for more measurements of each use --rounds R"),
        (["--num_gpus", "1,two"], "num_gpus must be a whole number, not 'two'"),
        (["--num_gpus", "0,1"], "num_gpus must be at least 1"),
        (["--num_gpus", "1,2", "--nproc_per_node", "1,2"], "are the same; keep one"),
        (["--num_gpus", "1,2", "--rounds", "0"], "rounds must be at least 1"),
        (["--num_gpus", "1,2", "--num_envs", "320,192"], "'320,192' differs by rank"),
        (["--num_gpus", "1,2", "--total_envs", "512"], "give --num_envs N for every rank, or add --strong"),
        (["--num_gpus", "1,2", "--strong"], "--strong needs the envs of the whole job: add --total_envs T"),
        (["--num_gpus", "1,2", "--strong", "--num_envs=64"], "give --total_envs T and leave --num_envs out"),
        (["--num_gpus", "1,2", "--nnodes", "2"], "--nnodes: a sweep stays on one node"),
        (["--num_gpus", "1,2", "--rdzv_endpoint=a:1"], "run lockstep benchmark training_multigpu with each number"),
        (["--num_gpus", "1,2", "--dry_run"], "training_multigpu --num_gpus N --dry_run"),
        (["--num_gpus", "1,2", "--repetitions", "3"], "--rounds R"),
    ],
)
def test_what_a_sweep_does_not_take(flags: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read([*ON_CPU, *flags])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_gpus", "1,2", "--num_envs", "63"], "num_envs 63 is not divisible by agent.num_mini_batches 4"),
        (["--num_gpus", "1,2", "--strong", "--total_envs", "62"], "total_envs 62 is not divisible by"),
        (["--num_gpus", "1,8", "--strong", "--total_envs", "16"], "leaves some of 8 ranks without envs"),
        (["--num_gpus", "1,2", "--surprise", "3"], "unknown flag '--surprise'"),
        (["--num_gpus", "1,2", "--resume"], "a benchmark starts anew"),
        (["--num_gpus", "1,2", "--warm_up", "0"], "warm_up must be at least 1"),
        (["--num_gpus", "1,2", "--check_success"], "--check_success can't be had with training_multigpu"),
    ],
)
def test_what_no_job_of_it_could_do_is_refused_before_the_first(flags: list[str], words: str) -> None:
    sweep, left, _ = read([*ON_CPU, *flags])
    with pytest.raises(UsageError) as caught:
        check_jobs(sweep, left, {})
    assert words in str(caught.value)


def test_a_config_file_may_not_name_envs_by_rank() -> None:
    Path("two.yaml").write_text("num_envs: [64, 32]\n")
    sweep, words, _ = read([*ON_CPU, "--num_gpus", "1,2", "--config", "two.yaml"])
    with pytest.raises(UsageError, match="num_envs 64,32 is for 2 ranks"):
        check_jobs(sweep, words, {})


def test_a_folder_with_something_in_it_is_no_place() -> None:
    Path("there").mkdir()
    (Path("there") / "scaling.json").write_text("{}")
    with pytest.raises(UsageError, match="output there is not empty"):
        main([*ON_CPU, "--num_gpus", "1,2", "--output", "there"])
    Path("file").touch()
    with pytest.raises(UsageError, match="is no folder"):
        main([*ON_CPU, "--num_gpus", "1,2", "--output", "file"])


def test_help_names_every_flag_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for flag in ("--num_gpus", "--strong", "--total_envs", "--rounds", "--output", "--warm_up", "--iterations"):
        assert flag in shown
