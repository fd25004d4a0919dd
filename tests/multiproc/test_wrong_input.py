"""Whatever is wrong is said in one line, with the mend, before anything is written."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from lockstep.cli.main import main
from tests.multiproc.commands import SMALL, train_small


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command in this process; return its one line of error after checking that nothing was written."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()  # what a training before has printed
    code = main(list(arguments))
    output, errors = capsys.readouterr()
    assert code == 2, (output, errors)
    assert output == ""
    assert errors.startswith("lockstep: error: ")
    assert errors.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return errors


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["cartpole_balanc"], ["cartpole_balanc", "did you mean 'cartpole_balance'"]),
        (["cartpole_balance", "--num_env", "8"], ["--num_env", "num_envs"]),
        (["cartpole_balance", "--num_envs", "0"], ["num_envs", "0"]),
        (["cartpole_balance", "--num_envs", "10"], ["10", "num_mini_batches 4", "--num_envs 8 or 12"]),
        (["cartpole_balance", "--agent.learning_rate", "inf"], ["agent.learning_rate", "inf"]),
        (["cartpole_balance", "--agent.actor_hidden_dims", "64,-5"], ["actor_hidden_dims", "-5"]),
        (["cartpole_balance", "--num_envs", str(2**64)], ["num_envs"]),
        (["cartpole_balance", "--device", "cuda"], ["cuda", "--device cpu"]),
        (["cartpole_balance", "--device", "tpu"], ["tpu", "cpu"]),
        (["cartpole_balance", "--checkpoint", "nothing.pt"], ["nothing.pt", "does not exist"]),
        (["cartpole_balance", "--checkpoint", "."], ["is a folder"]),
        (["cartpole_balance", "--resume", "nowhere"], ["nowhere"]),
        (["cartpole_balance", "--resume"], ["cartpole_balance", "no run"]),
        (["cartpole_balance", "--engine", "analytic"], ["analytic", "mujoco"]),
        (["cartpole_balance", "--logger", "wandb"], ["lockstep-rl[wandb]"]),
        (["cartpole_balance", "--run_name", "a/b"], ["a/b"]),
        (["cartpole_balance", "--log_root", "/dev/null/logs"], ["/dev/null", "--log_root"]),
        (["cartpole_balance", "--log_root", "/proc/logs"], ["/proc", "--log_root"]),
    ],
)
def test_one_line_and_nothing_written(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    line = refused(capsys, "train", *arguments)
    assert all(part in line for part in parts), line


def test_an_overlay_with_an_unknown_key_names_file_key_and_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    Path("overlay.yaml").write_text("agent:\n  gama: 0.9\n")
    line = refused(capsys, "train", "cartpole_balance", "--config", "overlay.yaml")
    assert "overlay.yaml" in line
    assert "agent.gama" in line
    assert "agent.gamma" in line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(folder)
    try:
        run = train_small("cartpole_classic", "--max_iterations", "1")
    finally:
        os.chdir(before)
    return folder / run / "checkpoints" / "model_1.pt"


def test_a_checkpoint_of_another_task_is_refused_by_name(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "train", "cartpole_balance", *SMALL, "--checkpoint", str(checkpoint))
    assert "cartpole_classic" in line
    assert "cartpole_balance" in line


def test_a_checkpoint_of_other_networks_names_the_first_that_differs(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [word if word != "16" else "24" for word in SMALL]
    line = refused(capsys, "train", "cartpole_classic", *arguments, "--checkpoint", str(checkpoint))
    assert "actor.perceptron.0.weight" in line
    assert "(16, 4)" in line
    assert "(24, 4)" in line


@pytest.mark.parametrize("length", [0, 10, 5000])
def test_a_truncated_checkpoint_is_refused_for_training_and_playing(
    length: int, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("short.pt").write_bytes(checkpoint.read_bytes()[:length])
    assert "short.pt" in refused(capsys, "train", "cartpole_classic", *SMALL, "--checkpoint", "short.pt")
    assert "short.pt" in refused(capsys, "play", "--checkpoint", "short.pt")


def test_a_run_resumes_with_the_number_of_envs_it_had(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(checkpoint.parent.parent)
    line = refused(capsys, "train", "--resume", run, "--num_envs", "32", "--max_iterations", "2")
    assert "16 envs, not 32" in line


def contents(run: Path) -> dict[Path, bytes]:
    """Return every file of a run but the lock, which names whoever looked last."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "9"], "has seed 1, not 9"),
        (["--dtype", "float64"], "has dtype float32, not float64"),
        (["--agent.recurrent", "gru"], "lacks actor.memory"),
        (["--env.action_kind", "discrete"], "the config asks for (2, 16)"),
    ],
)
def test_a_run_resumes_as_what_it_was(
    arguments: list[str], words: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = checkpoint.parent.parent
    before = contents(run)
    assert words in refused(capsys, "train", "--resume", str(run), "--max_iterations", "2", *arguments)
    assert contents(run) == before


def test_a_run_whose_checkpoints_are_all_gone_is_not_begun_anew(capsys: pytest.CaptureFixture[str]) -> None:
    run = train_small("cartpole_classic", "--max_iterations", "2")
    (checkpoint,) = (run / "checkpoints").glob("model_*.pt")
    whole = checkpoint.read_bytes()
    for damage in (lambda: checkpoint.write_bytes(whole[:1000]), checkpoint.unlink):
        damage()
        before = contents(run)
        assert main(["train", "--resume", str(run), "--max_iterations", "3"]) == 2
        assert "put one back, or start a new run" in capsys.readouterr().err
        assert contents(run) == before


def test_a_checkpoint_with_a_number_that_is_none_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["policy"]["critic.perceptron.0.bias"][3] = torch.nan
    torch.save(content, "bad.pt")
    assert "critic.perceptron.0.bias" in refused(capsys, "play", "--checkpoint", "bad.pt")
    assert "critic.perceptron.0.bias" in refused(capsys, "train", "cartpole_classic", *SMALL, "--checkpoint", "bad.pt")


@pytest.mark.parametrize("name", ["config", "env", "optimizer", "wall_s", "memory"])
def test_a_checkpoint_that_somebody_changed_is_refused(
    name: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint.parent.parent, "run")
    path = Path("run/checkpoints/model_1.pt")
    values: tuple[object, ...] = ({}, None, 5)
    for value in values:
        content = torch.load(checkpoint, weights_only=True)
        content[name] = value
        torch.save(content, path)
        if name == "wall_s" and value == 5:
            continue  # as good as any
        assert main(["train", "--resume", "run", "--max_iterations", "2"]) == 2, value
        errors = capsys.readouterr().err
        assert "Traceback" not in errors
        assert "model_1.pt" in errors


def test_a_total_that_is_already_passed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run = train_small("cartpole_classic", "--max_iterations", "2")
    assert "past max_iterations 1" in refused(capsys, "train", "--resume", str(run), "--max_iterations", "1")


def test_more_envs_than_memory_holds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "train", "cartpole_classic", "--num_envs", "2000000000")
    assert "GiB" in line
    assert "use fewer" in line


def test_under_several_ranks_training_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "WORLD_SIZE" in refused(capsys, "train", "cartpole_classic", *SMALL)
