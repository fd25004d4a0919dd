"""What a run notes about the machine."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

import pytest

from lockstep.core import environment
from lockstep.core.environment import allowed_cores, git_state


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def cores(tmp_path: Path, membership: str, tree: dict[str, str]) -> int:
    """Return the cores allowed to a process of that membership by a made-up cgroup tree (content by path)."""
    for name, content in tree.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (tmp_path / "membership").write_text(membership)
    return allowed_cores(tmp_path / "cgroup", tmp_path / "membership")


@pytest.mark.usefixtures("eight_cores")
class TestAllowedCores:
    def test_affinity_counts_without_cgroups(self, tmp_path: Path) -> None:
        assert allowed_cores(tmp_path / "nothing", tmp_path / "nothing") == 8

    @pytest.mark.parametrize(
        ("quota", "expected"),
        [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 3), ("20000 100000", 1), ("6400000 100000", 8)],
    )
    def test_version_2(self, tmp_path: Path, quota: str, expected: int) -> None:
        assert cores(tmp_path, "0::/job\n", {"job/cpu.max": quota}) == expected

    def test_version_2_a_limit_above_counts_too(self, tmp_path: Path) -> None:
        tree = {"slurm/cpu.max": "300000 100000", "slurm/job/cpu.max": "max 100000"}
        assert cores(tmp_path, "0::/slurm/job/step\n", tree) == 3

    def test_version_2_in_a_container_that_sees_only_its_own_top(self, tmp_path: Path) -> None:
        assert cores(tmp_path, "0::/docker/abc\n", {"cpu.max": "150000 100000"}) == 2

    def test_version_1(self, tmp_path: Path) -> None:
        tree = {
            "cpu,cpuacct/job/cpu.cfs_quota_us": "400000",
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
        }
        assert cores(tmp_path, "12:cpuset:/\n4:cpu,cpuacct:/job\n1:name=systemd:/x\n", tree) == 4

    def test_an_unreadable_tree_does_not_limit(self, tmp_path: Path) -> None:
        assert cores(tmp_path, "0::/job\n", {"job/cpu.max": "nonsense"}) == 8


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_names_commit_and_changes(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a.txt").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("x")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "a.txt").write_text("2")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}


def test_nothing_fails_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
    assert environment.describe()["git"] == {"lockstep": None, "working_folder": None}


def test_the_description_is_json_with_what_matters() -> None:
    described = json.loads(json.dumps(environment.describe()))
    assert {"python", "lockstep", "torch", "jax", "mujoco", "numpy"} <= set(described["versions"])
    assert described["versions"]["numpy"] is not None
    assert 1 <= described["hardware"]["num_allowed_cores"] <= described["hardware"]["num_cores"]
    assert described["hardware"]["memory_bytes"] > 2**20


def test_a_package_that_is_not_installed_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment._DISTRIBUTIONS, "jax", "surely-not-installed")
    assert environment.versions()["jax"] is None


def test_versions_of_other_peoples_libraries_are_told_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"lockstep-rl": "0.1", "skrl": "2.1.1", "gymnasium": "1.3.0"}

    def version(distribution: str) -> str:
        if distribution not in installed:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return installed[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = environment.versions()
    assert {name: each for name, each in found.items() if each is not None} == {
        "lockstep": "0.1",
        "skrl": "2.1.1",
        "gymnasium": "1.3.0",
    }
    assert "brax" not in found
