"""Policies as files that run without lockstep: the same actions in onnxruntime and TorchScript, or no file at all."""

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.cli.main import main
from lockstep.core.errors import RunError
from lockstep.session.deployed import DeployedPolicy, deploy
from lockstep.session.export_check import Check
from tests.unit.export_fixtures import observations, run_onnx, run_torchscript, torch_checkpoint

CASES: dict[str, dict[str, Any]] = {
    "plain": {"agent": {"activation": "silu"}},
    "discrete gru": {"env": {"action_kind": "discrete"}, "agent": {"recurrent": "gru", "activation": "relu"}},
    "lstm in float64": {"dtype": "float64", "agent": {"recurrent": "lstm", "activation": "tanh"}},
    "discrete, no normaliser": {"env": {"action_kind": "discrete"}, "agent": {"normalize_observations": False}},
}


@pytest.mark.parametrize("case", CASES)
def test_the_files_do_what_the_policy_does(case: str, tmp_path: Path) -> None:
    path = torch_checkpoint(tmp_path / "model_7.pt", **CASES[case])
    exported = lockstep.export(path, tmp_path / "out")
    assert exported.files == ("policy.onnx", "policy.pt", "policy.json")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(exported.files)
    assert exported.largest_difference < 1e-5
    sources = str(Path(lockstep.__file__).parents[1]).encode()
    for name in exported.files:  # they go to others, whom it does not concern where they were made
        assert sources not in (tmp_path / "out" / name).read_bytes()
    told = json.loads((tmp_path / "out" / "policy.json").read_text())
    steps, policy = observations(5, 4), lockstep.load_policy(path, "cpu")
    own = [np.asarray(policy(each)) for each in steps]
    assert np.ptp(np.concatenate(own)) > 0  # not one action for everything
    state_shape = told["state"] and told["state"]["shape"]
    for found in (
        run_onnx(tmp_path / "out" / "policy.onnx", steps),
        run_torchscript(tmp_path / "out" / "policy.pt", steps, state_shape),
    ):
        for mine, theirs in zip(own, found, strict=True):
            assert theirs.dtype == told["actions"]["dtype"]
            np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-5)
    spoiled = steps[0].copy()
    spoiled[1, 2] = np.nan
    (action,) = run_onnx(tmp_path / "out" / "policy.onnx", [spoiled])
    assert (action[1] == 0) if told["actions"]["kind"] == "discrete" else np.isnan(action[1]).all()
    assert np.isfinite(action[[0, 2, 3, 4]]).all()


def test_a_run_is_exported_into_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    path = torch_checkpoint(run / "checkpoints" / "model_7.pt")
    (run / "config.yaml").write_text("task: cartpole_classic\n", encoding="utf-8")
    (run / "run.json").write_text("{}", encoding="utf-8")
    assert main(["export", "--run", str(run)]) == 0
    folder = run / "export"
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"{folder}/policy.onnx", f"{folder}/policy.pt", f"{folder}/policy.json"]
    assert "the same actions as the policy's own" in lines[3]
    told = json.loads((folder / "policy.json").read_text())
    assert (told["task"], told["checkpoint"], told["iteration"]) == ("cartpole_classic", str(path), 7)
    assert (told["observations"]["shape"], told["actions"]["shape"]) == (["batch", 4], ["batch", 1])
    assert told["step_duration_s"] == 0.02
    assert told["files"] == ["policy.onnx", "policy.pt"]
    assert told["state"] is None
    assert told["check"]["largest_difference"] <= told["check"]["tolerance"] == 1e-5
    import onnx

    model = onnx.load(folder / "policy.onnx")
    inside = {entry.key: entry.value for entry in model.metadata_props}
    assert inside["task"] == "cartpole_classic"
    assert json.loads(inside["actions"]) == told["actions"]
    assert [entry.version for entry in model.opset_import if not entry.domain] == [20]
    extra = {"policy.json": ""}
    torch.jit.load(str(folder / "policy.pt"), _extra_files=extra)
    assert json.loads(extra["policy.json"])["task"] == "cartpole_classic"


def test_a_file_that_does_something_else_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, decide = torch_checkpoint(tmp_path / "model_7.pt"), DeployedPolicy.decide
    monkeypatch.setattr(DeployedPolicy, "decide", lambda *arguments: decide(*arguments) * 1.0001)
    with pytest.raises(RunError, match=r"policy.pt does not do what the policy does: for the observation \["):
        lockstep.export(path, tmp_path / "new" / "out", ["torchscript"])
    assert [file.name for file in tmp_path.iterdir()] == ["model_7.pt"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "policy.pt").write_bytes(b"old")
    with pytest.raises(RunError, match="nothing is exported"):
        lockstep.export(path, tmp_path / "old", ["torchscript"])
    assert [file.name for file in (tmp_path / "old").iterdir()] == ["policy.pt"]
    assert (tmp_path / "old" / "policy.pt").read_bytes() == b"old"


@pytest.mark.parametrize(("form", "other"), [("onnx", "policy.pt"), ("torchscript", "policy.onnx")])
def test_no_file_of_another_policy_stays(
    form: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_checkpoint(tmp_path / "model_7.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / other).write_bytes(b"old")
    export = ["export", "--checkpoint", "model_7.pt", "--output", "out"]
    assert main([*export, "--format", form]) == 2
    error = capsys.readouterr().err
    assert f"out/{other} is there already and would stay" in error
    assert len(error.splitlines()) == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == [other]
    assert main(export) == 0
    assert (tmp_path / "out" / other).read_bytes() != b"old"


@pytest.mark.parametrize("name", ["policy.onnx", "policy.pt", "policy.json"])
def test_a_folder_in_a_files_place_is_found_before_anything_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_checkpoint(tmp_path / "model_7.pt")
    (tmp_path / "out" / name).mkdir(parents=True)
    assert main(["export", "--checkpoint", "model_7.pt", "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert f"out/{name} is a folder" in error
    assert len(error.splitlines()) == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == [name]


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("form", ["onnx", "torchscript"])
def test_a_disk_that_refuses_gets_nothing(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    torch_checkpoint(tmp_path / "model_7.pt")
    request.getfixturevalue("file_size_limit")
    assert main(["export", "--checkpoint", "model_7.pt", "--output", "a/b", "--format", form]) == 1
    error = capsys.readouterr().err
    assert "can't write a/b: file too large; raise the limit on file sizes" in error
    assert len(error.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["model_7.pt"]


Actions = tuple[np.ndarray, np.ndarray]
FAULTS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], Actions]] = {
    "an offset": lambda actions, state, before: (actions + np.float32(1e-4), state),
    "a state that stands still": lambda actions, state, before: (actions, before),
    "a NaN that is lost": lambda actions, state, before: (np.nan_to_num(actions), state),
    "a NaN too many": lambda actions, state, before: (np.where(np.abs(actions) > 2.0, np.nan, actions), state),
    "a shape": lambda actions, state, before: (actions[:, 0], state),
    "another env's": lambda actions, state, before: (actions[::-1], state),
    "few envs": lambda actions, state, before: (actions + (len(actions) < 3), state),
}


@pytest.mark.parametrize("fault", [*FAULTS, "none"])
def test_what_the_check_finds(fault: str, tmp_path: Path) -> None:
    policy = lockstep.load_policy(torch_checkpoint(tmp_path / "model_7.pt", agent={"recurrent": "gru"}), "cpu")
    network: Any = deploy(policy)

    def run(given: np.ndarray, state: np.ndarray) -> Actions:
        with torch.no_grad():
            actions, after = (tensor.numpy() for tensor in network(*map(torch.from_numpy, (given, state))))
        return FAULTS[fault](actions, after, state) if fault in FAULTS else (actions, after)

    check = Check(policy, network)
    if fault == "none":
        assert check.compare("a file", run) < 1e-6
    else:
        with pytest.raises(RunError, match="a file"):
            check.compare("a file", run)


@pytest.mark.parametrize("worse", [False, True])
def test_a_choice_that_is_as_good_is_right(worse: bool, tmp_path: Path) -> None:
    """Runtimes add up in another order, and need not agree on which of two equal numbers is larger."""
    env = {"action_kind": "discrete"}
    policy = lockstep.load_policy(torch_checkpoint(tmp_path / "model_7.pt", env=env), "cpu")
    network: Any = policy.network  # type: ignore[attr-defined]
    network.actor.perceptron[-1].weight.data[:] = 0.0
    network.actor.perceptron[-1].bias.data[:] = torch.tensor([1.0, 0.9 if worse else 1.0])
    check = Check(policy, deploy(policy))

    def run(given: np.ndarray, state: np.ndarray) -> Actions:
        return np.where(np.isnan(given).any(1), 0, 1), state

    if worse:
        with pytest.raises(RunError, match=r"it gives 1, the policy 0"):
            check.compare("a file", run)
    else:
        assert check.compare("a file", run) == 0.0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "what to export? Give --run RUN_DIR or --checkpoint PATH"),
        (["--run", "a", "--checkpoint", "b"], "keep one"),
        (["--checkpoint", "nowhere.pt"], "nowhere.pt does not exist"),
        (["--checkpoint", "model_7.pt", "--format", "tflite"], "format 'tflite' is unknown; use onnx or torchscript"),
        (["--checkpoint", "model_7.pt", "--format", "onnx,onnx"], "must name each format once"),
        (["--checkpoint", "model_7.pt", "--output", "model_7.pt"], "is no folder; choose another --output"),
        (["--checkpoint", "model_7.pt", "--output", "model_7.pt/x"], "is no folder; choose another --output"),
        (["--checkpoint", "model_7.pt", "--output", ""], "--output needs a path"),
        (["--checkpoint", "model_7.pt", "--onnx"], "the formats are --format"),
        (["--checkpoint", "model_7.pt", "--otput", "x"], "did you mean '--output'?"),
        (["--checkpoint", "runner.pt"], "of runner a.b:C"),
        (["model_7.pt"], "unexpected 'model_7.pt'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_checkpoint(tmp_path / "model_7.pt")
    torch_checkpoint(tmp_path / "runner.pt", runner="a.b:C")
    assert main(["export", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model_7.pt", "runner.pt"]


def test_onnx_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch_checkpoint(tmp_path / "model_7.pt")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", "--checkpoint", "model_7.pt"]) == 2
    error = capsys.readouterr().err
    assert "needs onnxruntime, not installed here" in error
    assert "pip install 'lockstep-rl[onnx]'" in error
    assert not (tmp_path / "export").exists()
    assert main(["export", "--checkpoint", "model_7.pt", "--format", "TorchScript"]) == 0
    assert sorted(os.listdir("export")) == ["policy.json", "policy.pt"]  # noqa: PTH208
    assert json.loads((tmp_path / "export" / "policy.json").read_text())["files"] == ["policy.pt"]


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_package_that_cannot_be_imported_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_checkpoint(tmp_path / "model_7.pt")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / f"{package}.py").write_text("raise OSError('no libgone.so.1\\nsought everywhere')")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert main(["export", "--checkpoint", "model_7.pt"]) == 2
    error = capsys.readouterr().err
    assert f"needs {package}, which is installed but can't be imported (OSError: no libgone.so.1)" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "export").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--help"]) == 0
    assert "--output DIR" in capsys.readouterr().out
