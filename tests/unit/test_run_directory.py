"""The run directory: whole at any instant, one process at a time, found again."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.core.errors import LockstepError, RunError, UsageError
from lockstep.core.null_run_directory import NullRunDirectory
from lockstep.core.run_directory import RunDirectory, check_run_directory, latest_checkpoint
from lockstep.core.runs import newest_run

CONFIG = "task: cartpole\nseed: 7\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    run = create(tmp_path)
    yield run
    run.close()


def create(log_root: Path, run_name: str = "", task: str = "cartpole") -> RunDirectory:
    return RunDirectory.create(log_root, task, run_name, CONFIG, {"seed": 7}, max_iterations=10)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


class TestCreate:
    def test_everything_is_there(self, tmp_path: Path) -> None:
        run = create(tmp_path, "first_try")
        assert run.path.parent == tmp_path / "cartpole"
        assert time.strptime(run.path.name[:19], "%Y-%m-%d_%H-%M-%S")
        assert run.path.name[19:] == "_first_try"
        assert yaml.safe_load(run.config_path.read_text()) == {"task": "cartpole", "seed": 7}
        assert load(run.path / "progress.json") == {
            "iteration": 0,
            "max_iterations": 10,
            "env_steps": 0,
            "wall_s": 0.0,
            "status": "running",
            "reason": None,
            "checkpoint": None,
        }
        info = load(run.path / "run.json")
        assert info["seed"] == 7
        assert [attempt["pid"] for attempt in info["attempts"]] == [os.getpid()]

    def test_runs_of_the_same_second_get_two_directories(self, tmp_path: Path) -> None:
        code = (
            "import sys\nfrom lockstep.core.run_directory import RunDirectory\n"
            "for _ in range(10): print(RunDirectory.create(sys.argv[1], 't', 'x', 'a: 1', {}).path)"
        )
        processes = [python(code, str(tmp_path)) for _ in range(3)]
        outputs = [process.communicate()[0].split() for process in processes]
        paths = [Path(path) for output in outputs for path in output]
        assert len(set(paths)) == 30
        seconds = Counter(path.name[:19] for path in paths)
        assert max(seconds.values()) > 1, "the test was too slow to have two runs in one second"
        assert all((path / "run.json").is_file() for path in paths)
        assert {path.name for path in (tmp_path / "t").iterdir()} == {path.name for path in paths}

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("a/b", "must not contain"),
            ("..", "must not contain"),
            ("a\\b", "must not contain"),
            ("a\nb", "unprintable"),
            ("x" * 101, "longer than 100 bytes"),
        ],
    )
    def test_a_bad_run_name_is_refused_before_anything_is_made(self, tmp_path: Path, name: str, reason: str) -> None:
        with pytest.raises(UsageError, match=reason):
            create(tmp_path, name)
        assert everything(tmp_path) == []

    def test_a_log_root_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "logs").write_text("")
        with pytest.raises(UsageError, match="--log_root"):
            create(tmp_path / "logs")
        assert everything(tmp_path) == ["logs"]

    def test_a_read_only_log_root(self, mounted: Path) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
        with pytest.raises(UsageError, match=r"read-only file system; .* --log_root") as caught:
            create(mounted / "logs")
        assert "\n" not in str(caught.value)
        assert everything(mounted) == []

    def test_a_full_log_root(self, mounted: Path) -> None:
        (mounted / "ballast").write_bytes(bytes(56 * 1024))  # leaves two blocks, too little for a run
        with pytest.raises(UsageError, match=r"no space left on device; .* --log_root") as caught:
            RunDirectory.create(mounted / "logs", "cartpole", "", "x: 1\n" * 10_000, {})
        assert ".new-" not in str(caught.value)
        assert everything(mounted) == ["ballast"]

    def test_a_file_size_limit(self, tmp_path: Path) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(UsageError, match="file too large"):
                RunDirectory.create(tmp_path / "logs", "cartpole", "", "x: 1\n" * 100, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert everything(tmp_path) == []

    def test_what_a_killed_process_left_is_removed_once_it_is_old(self, tmp_path: Path) -> None:
        abandoned, young = (tmp_path / "cartpole" / f".new-{name}" for name in ("abandoned", "young"))
        for folder in (abandoned, young):
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_text("x")
        os.utime(abandoned, (0, 0))
        create(tmp_path)
        assert not abandoned.exists()
        assert young.exists()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class TestOpen:
    def test_an_attempt_is_noted(self, run: RunDirectory) -> None:
        run.close()
        again = RunDirectory.open(run.path)
        assert len(load(again.path / "run.json")["attempts"]) == 1
        again.begin_attempt("seed: 7\nmax_iterations: 9\n")
        assert again.config_path.read_text() == "seed: 7\nmax_iterations: 9\n"
        info = load(again.path / "run.json")
        assert info["seed"] == 7
        assert len(info["attempts"]) == 2
        assert set(info["attempts"][1]) == {"start_time", "host", "pid", "command", "world_size", "ranks"}

    def test_leftovers_are_removed(self, run: RunDirectory) -> None:
        run.close()
        leftovers = [run.path / ".tmp-1-progress.json", run.path / "checkpoints" / ".tmp-2-model_5.pt"]
        for leftover in leftovers:
            leftover.write_text("half")
        RunDirectory.open(run.path)
        assert not any(leftover.exists() for leftover in leftovers)

    def test_two_processes_do_not_train_in_one_directory(self, run: RunDirectory) -> None:
        before = load(run.path / "run.json")
        with pytest.raises(UsageError, match=f"in use by pid {os.getpid()} on ") as caught:
            RunDirectory.open(run.path)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 2
        assert load(run.path / "run.json") == before

    def test_the_lock_dies_with_its_process(self, run: RunDirectory) -> None:
        run.close()
        code = (
            "import sys, time\nfrom lockstep.core.run_directory import RunDirectory\n"
            "run = RunDirectory.open(sys.argv[1]); print('locked', flush=True); time.sleep(60)"
        )
        with python(code, str(run.path)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            with pytest.raises(UsageError, match=f"pid {process.pid} "):
                RunDirectory.open(run.path)
            process.kill()
            process.wait()
        RunDirectory.open(run.path).close()

    def test_what_is_no_run_directory_is_one_line(self, tmp_path: Path, run: RunDirectory) -> None:
        checkpoint = tmp_path / "model_1.pt"
        checkpoint.write_text("x")
        damaged = create(tmp_path, "damaged")
        damaged.close()
        (damaged.path / "run.json").write_text('{"seed"')
        cases = {
            tmp_path / "nowhere": "there is no run directory",
            checkpoint: "given with --checkpoint",
            tmp_path: "has no config.yaml",
            damaged.path: "run.json is damaged",
        }
        for path, message in cases.items():
            with pytest.raises(UsageError, match=message) as caught:
                RunDirectory.open(path)
            assert "\n" not in str(caught.value)
        assert check_run_directory(run.path) == run.path


class TestCheckpoints:
    def test_the_newest_is_the_latest_and_only_some_are_kept(self, run: RunDirectory) -> None:
        for iteration in (9, 10, 11, 100):
            path = run.save_checkpoint(iteration, lambda temporary: temporary.write_text("weights"), keep=3)
            assert path == run.path / "checkpoints" / f"model_{iteration}.pt"
            assert latest_checkpoint(run.path) == path
        assert [path.name for path in run.checkpoints()] == ["model_100.pt", "model_11.pt", "model_10.pt"]
        assert (run.path / "checkpoints" / "latest").readlink() == Path("model_100.pt")

    def test_the_latest_is_never_pruned(self, run: RunDirectory) -> None:
        for iteration in (50, 60, 20):  # an earlier iteration, saved last
            run.save_checkpoint(iteration, lambda temporary: temporary.write_text("weights"), keep=1)
        assert [path.name for path in run.checkpoints()] == ["model_20.pt"]
        assert latest_checkpoint(run.path).name == "model_20.pt"

    def test_a_failed_save_leaves_the_one_before(self, run: RunDirectory) -> None:
        run.save_checkpoint(1, lambda temporary: temporary.write_text("whole"))
        before = everything(run.path)

        def fail(temporary: Path) -> None:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

        with pytest.raises(RunError, match=r"model_2\.pt: no space left on device"):
            run.save_checkpoint(2, fail)
        assert everything(run.path) == before
        assert latest_checkpoint(run.path).read_text() == "whole"

    def test_what_a_failed_save_wrote_too_late_goes_with_the_next(self, run: RunDirectory) -> None:
        late: list[Path] = []

        def fail(temporary: Path) -> None:
            late.append(temporary / "arrays")
            raise OSError(28, "No space left on device")

        with pytest.raises(RunError):
            run.save_checkpoint(1, fail)
        late[0].mkdir(parents=True)  # as threads of orbax do that nobody waits for
        run.save_checkpoint(2, lambda temporary: temporary.write_text("whole"))
        assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["latest", "model_2.pt"]

    @pytest.mark.parametrize("damage", ["missing", "dangling"])
    def test_without_the_link_the_newest_counts(self, run: RunDirectory, damage: str) -> None:
        for iteration in (9, 10):
            run.save_checkpoint(iteration, lambda temporary: temporary.write_text("weights"))
        link = run.path / "checkpoints" / "latest"
        link.unlink()
        if damage == "dangling":
            link.symlink_to("model_11.pt")
        assert latest_checkpoint(run.path).name == "model_10.pt"

    def test_the_run_can_be_moved(self, run: RunDirectory, tmp_path: Path) -> None:
        run.save_checkpoint(1, lambda temporary: temporary.write_text("weights"))
        moved = run.path.rename(tmp_path / "elsewhere")
        assert latest_checkpoint(moved).read_text() == "weights"

    def test_none_yet_is_one_line(self, run: RunDirectory) -> None:
        assert run.checkpoints() == []
        with pytest.raises(UsageError, match="holds no checkpoint yet"):
            latest_checkpoint(run.path)


class TestNewestRun:
    def test_the_newest_by_time_whatever_its_name(self, tmp_path: Path) -> None:
        for name in ("2026-01-01_00-00-00_zebra", "2026-03-01_00-00-00", "2026-02-01_00-00-00_2"):
            folder = tmp_path / "t" / name
            folder.mkdir(parents=True)
            (folder / "run.json").write_text("{}")
        (tmp_path / "t" / "2027-01-01_00-00-00").mkdir()  # not a run
        (tmp_path / "t" / ".new-zzz").mkdir()
        assert newest_run(tmp_path, "t").name == "2026-03-01_00-00-00"

    def test_the_last_of_one_second(self, tmp_path: Path) -> None:
        paths = []
        for _ in range(12):  # _10 to _12 sort before _2
            run = create(tmp_path, "x")
            run.close()
            paths.append(run.path)
            assert newest_run(tmp_path, "cartpole") == paths[-1]

    def test_none_is_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no run of cartpole"):
            newest_run(tmp_path / "logs", "cartpole")


def test_progress_names_the_newest_checkpoint(run: RunDirectory) -> None:
    run.save_checkpoint(5, lambda temporary: temporary.write_text("weights"))
    run.write_progress(6, 10, 6000, 1.5, "failed", "NaN in the value loss")
    progress = load(run.path / "progress.json")
    assert progress["checkpoint"] == "checkpoints/model_5.pt"
    assert (progress["iteration"], progress["env_steps"], progress["wall_s"]) == (6, 6000, 1.5)
    assert (progress["status"], progress["reason"]) == ("failed", "NaN in the value loss")
    run.close()
    again = RunDirectory.open(run.path)
    again.write_progress(7, 10, 7000, 2.0)
    assert load(run.path / "progress.json")["checkpoint"] == "checkpoints/model_5.pt"


def test_metrics_go_on_after_the_checkpoint(run: RunDirectory) -> None:
    writer = run.open_metrics("none")
    for iteration in (1, 2, 3):
        writer.record({"iteration": iteration, "env_steps": 10 * iteration, "mean_return": 1.0})
    writer.close()
    run.open_metrics("none", iteration=2).record({"iteration": 3, "env_steps": 30, "mean_return": 9.0})
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["iteration"], record["mean_return"]) for record in records] == [(1, 1.0), (2, 1.0), (3, 9.0)]


def test_the_null_run_directory_has_the_same_interface_and_writes_nothing(tmp_path: Path) -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(RunDirectory) - public(NullRunDirectory) == {"create", "open"}
    null = NullRunDirectory(tmp_path / "run")
    null.save_checkpoint(1, lambda temporary: pytest.fail("wrote a checkpoint"))
    null.write_progress(1, 2, 3, 4.0, "finished")
    null.truncate_metrics(1)
    null.draw_curve()
    with null.rank_log(3):
        null.open_metrics("tensorboard").record({"iteration": 1})
    assert null.checkpoints() == []
    null.close()
    assert everything(tmp_path) == ["run", "run/ranks", "run/ranks/rank_3.log"]


# Creates runs, trains a little in each and goes on with it in a second attempt, without end.
VICTIM = """
import json, sys
from lockstep.core.run_directory import RunDirectory
from lockstep.core.runs import newest_run
def train(run, iteration):
    metrics = run.open_metrics("tensorboard", iteration)
    for iteration in range(iteration + 1, iteration + 9):
        metrics.record({"iteration": iteration, "mean_return": 1.0})
        run.write_progress(iteration, 100, iteration, 1.0)
        if iteration % 2 == 0:
            run.save_checkpoint(iteration, lambda path: path.write_text(json.dumps(["x" * 50000, iteration])), keep=2)
    run.write_progress(iteration, 100, iteration, 1.0, "finished")
    metrics.close()
    run.close()
print("ready", flush=True)
while True:
    train(RunDirectory.create(sys.argv[1], "t", "", "a: 1", {"seed": 1}), 0)
    train(RunDirectory.open(newest_run(sys.argv[1], "t")), 8)
"""


def test_a_kill_at_any_instant_leaves_only_whole_runs(tmp_path: Path) -> None:
    chance = random.Random(5)
    for _ in range(12):
        with python(VICTIM, str(tmp_path)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0.0, 0.15))
            assert process.poll() is None
            process.send_signal(signal.SIGKILL)
    visible = [path for path in (tmp_path / "t").iterdir() if not path.name.startswith(".")]
    assert visible
    for path in visible:
        assert path.joinpath("config.yaml").read_text() == "a: 1"
        progress = load(path / "progress.json")
        run = RunDirectory.open(path)
        for checkpoint in run.checkpoints():
            assert load(checkpoint)[1] == int(checkpoint.stem.removeprefix("model_"))
        if progress["checkpoint"] is not None:
            iteration = load(latest_checkpoint(path))[1]
            assert iteration >= int(progress["checkpoint"].removeprefix("checkpoints/model_").removesuffix(".pt"))
            run.truncate_metrics(iteration)
            lines = (path / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line)["iteration"] for line in lines] == list(range(1, iteration + 1))
        assert not list(path.rglob(".tmp-*"))
        run.close()


def test_errors_are_of_the_kinds_the_command_line_knows() -> None:
    assert issubclass(UsageError, LockstepError)
    assert issubclass(RunError, LockstepError)
