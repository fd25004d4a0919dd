"""What ``lockstep slurm`` finds out before a job waits in the queue for it."""

from pathlib import Path

import pytest

from lockstep.cli.main import main
from tests.unit.slurm_fixtures import TRAIN, call, make_run, written


@pytest.mark.parametrize("line", ["if [ x", "echo it's", "cat <<END", "true &&"])
def test_a_line_of_setup_that_bash_can_not_read(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--setup", line, *TRAIN)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "--setup is no shell that bash can read (line " in err
    assert written() == []
    whole = ["--setup=if [ x ]; then", "--setup", "cat <<END", "--setup=it's", "--setup=END", "--setup=fi"]
    assert call(capsys, *whole, *TRAIN)[0] == 0


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--ranks_per_node", "8", "--cpus_per_task", "2"], "8 ranks of each node share 2 cores"),
        (["--ranks_per_node", "2"], "a single core, and MuJoCo's physics are computed on CPU cores; give it 2 or more"),
        (["--gpus_per_node", "4"], "without --cpus_per_task C"),
        (["--gpus_per_node", "4", "--cpus_per_task", "4"], None),
    ],
)
def test_too_few_cores_are_said(flags: list[str], warned: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, *flags, *TRAIN)
    assert (code, err.count("\n")) == (0, 0 if warned is None else 1)
    assert (warned or "") in err


def test_a_run_on_cpu_cores_is_named_where_it_needs_other_flags(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("preempted")
    (run / "config.yaml").write_text("task: cartpole_swingup\ndevice: cpu\n")
    code, _, err = call(capsys, "--", "train", "--resume", str(run))
    assert (code, "has device cpu: give --ranks_per_node N" in err) == (2, True), err
    assert main(["train_multigpu", "--resume", str(run), "--dry_run"]) == 2
    assert f"the run {run} has device cpu, where the number of ranks must be given: add" in capsys.readouterr().err


def test_the_script_explains_what_sbatch_and_srun_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--gpus_per_node", "4", *TRAIN)[0] == 0
    lines = Path("slurm/cartpole_swingup.sh").read_text().splitlines()
    for option in ("#SBATCH --gres=", "#SBATCH --ntasks-per-node=", "#SBATCH --signal=", "#SBATCH --open-mode="):
        number = next(number for number, line in enumerate(lines) if line.startswith(option))
        assert lines[number - 1].startswith("# "), option
    number = next(number for number, line in enumerate(lines) if line.startswith("srun "))
    above = " ".join(lines[number - 3 : number])
    assert "whose launcher fails ends the others" in above  # --kill-on-bad-exit=1
    assert "environment" in above  # --export=ALL
