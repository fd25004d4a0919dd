"""What a killed launcher left is removed by a later one, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.core.leases import Lease
from lockstep.core.outcome import forget_start, read_pid, write_pid
from lockstep.launch.kept import Kept
from lockstep.launch.logs import read_attempt_logs
from lockstep.launch.plan import JOB
from lockstep.launch.processes import remove_leftovers

DAY_S = 24 * 3600


def leftover(name: str, age_s: float, *inside: str) -> Path:
    folder = Path(name)
    for path in inside:
        (folder / path).mkdir(parents=True)
    when_s = time.time() - age_s
    for each in (*folder.rglob("*"), folder):
        os.utime(each, (when_s, when_s))
    return folder


def test_only_old_folders_of_jobs_that_are_gone_are_removed() -> None:
    job = {letter: letter * 32 for letter in "abcde"}
    gone = leftover(f"lockstep-{job['a']}", DAY_S + 60, "attempt", "logs")
    kept = [
        leftover(f"lockstep-{job['b']}", DAY_S - 60, "attempt"),  # perhaps its launcher is just starting
        leftover(f"lockstep-{job['c']}", DAY_S + 60, "logs"),  # the user was sent to these
        leftover(f"lockstep-{job['d']}", DAY_S + 60, "attempt"),  # still runs
        leftover("lockstep-kernels-1000", DAY_S + 60, "attempt"),
        leftover(f"other-{job['e']}", DAY_S + 60, "attempt"),
    ]
    Path(f"lockstep-{job['e']}").symlink_to(kept[-1])
    running = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={JOB: job["d"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert running.stdout is not None
    running.stdout.readline()
    try:
        remove_leftovers(Path())
        assert not gone.exists()
        assert all(folder.is_dir() for folder in kept)
        assert Path(f"lockstep-{job['e']}").is_symlink()
    finally:
        running.communicate()
    remove_leftovers(Path())
    assert [folder.exists() for folder in kept] == [True, True, False, True, True]


def test_a_folder_that_its_launcher_touches_stays() -> None:
    folder = leftover(f"lockstep-{'a' * 32}", DAY_S + 60, "attempt", "attempt/beat_0")
    Lease(folder / "attempt").renew(time.monotonic())
    assert time.time() - (folder / "attempt" / "beat_0").stat().st_mtime < DAY_S  # systems tidy up file by file
    remove_leftovers(Path())
    assert folder.is_dir()  # though none of its processes is seen, as if they were on another host


@pytest.mark.parametrize("whole", [True, False])
def test_what_somebody_has_tidied_up_in_mid_run_is_put_back(whole: bool) -> None:
    folder = Path("lockstep-abc/attempt")
    folder.mkdir(parents=True)
    said: list[str] = []
    kept = Kept(folder, lambda line, to_stderr: said.append(line))
    kept.look()
    assert said == []  # nothing has started yet
    ranks = [{"local_rank": 0, "rank": 0, "stdout": "", "stderr": ""}]
    (folder / "logs.json").write_text(json.dumps({"restart": 2, "ranks": ranks}))
    write_pid(folder, 0, 77)
    before = read_attempt_logs(folder)
    for _ in range(2):
        kept.look()
        if whole:
            shutil.rmtree(folder.parent)
        else:
            (folder / "logs.json").unlink()
        kept.look()
        assert read_attempt_logs(folder) == before
        assert read_pid(folder, 0) == 77
    assert len(said) == 1
    assert said[0].startswith(f"lockstep: warning: somebody has tidied up {folder}, which this job uses; ")
    forget_start(folder, 2)  # as torchrun's agent does before other ranks take their place
    kept.look()
    assert read_pid(folder, 0) is None


def test_a_place_that_is_not_there_has_no_leftovers() -> None:
    remove_leftovers(Path("nowhere"))
