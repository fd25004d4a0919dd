"""Compiled kernels of ranks and jobs never share a folder."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.distributed import kernel_caches

HOST = socket.gethostname()
HOLD = """
import sys
from pathlib import Path
from lockstep.distributed.kernel_caches import claim
print(claim(Path(sys.argv[1]), int(sys.argv[2])), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    held: list[int] = []
    monkeypatch.setattr(kernel_caches, "_held", held)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield
    for descriptor in held:
        os.close(descriptor)


@pytest.fixture
def hold() -> Iterator[Callable[[Path, int], tuple[subprocess.Popen[str], str]]]:
    """Start processes that hold a rank's folder until their stdin is closed; return each with its folder's name."""
    with contextlib.ExitStack() as processes:

        def start(base: Path, local_rank: int) -> tuple[subprocess.Popen[str], str]:
            command = [sys.executable, "-c", HOLD, str(base), str(local_rank)]
            process = processes.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            processes.callback(process.kill)
            assert process.stdout is not None
            folder = Path(process.stdout.readline().strip())
            assert folder.parent == base / HOST
            return process, folder.name

        yield start


def test_jobs_on_one_host_never_share_a_rank_folder_and_a_free_one_is_used_again(
    tmp_path: Path, hold: Callable[[Path, int], tuple[subprocess.Popen[str], str]]
) -> None:
    first, name = hold(tmp_path, 0)
    assert name == "rank_0"
    second, name = hold(tmp_path, 0)
    assert name == "rank_0_2"
    assert hold(tmp_path, 1)[1] == "rank_1"  # the other rank of the first job
    first.kill()  # even a process that could not clean up lets go
    first.wait()
    assert hold(tmp_path, 0)[1] == "rank_0"
    assert hold(tmp_path, 0)[1] == "rank_0_3"
    second.communicate()
    assert hold(tmp_path, 0)[1] == "rank_0_2"


def test_every_compiler_has_its_folder_in_the_ranks(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    kernel_caches.assign(environment, 3)
    folder = tmp_path / "lockstep" / "kernels" / HOST / "rank_3"
    assert environment == {
        "XDG_CACHE_HOME": str(tmp_path),
        "WARP_CACHE_PATH": str(folder / "warp"),
        "QD_OFFLINE_CACHE_FILE_PATH": str(folder / "quadrants"),
        "TI_OFFLINE_CACHE_FILE_PATH": str(folder / "taichi"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        "warp",
        "quadrants",
        "taichi",
        "inductor",
        "triton",
    }


def test_the_users_own_folders_are_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    environment = {
        "WARP_CACHE_PATH": str(tmp_path / "shared"),
        "TRITON_CACHE_DIR": str(tmp_path / "shared"),
        "TORCHINDUCTOR_CACHE_DIR": "~/own",
        "QD_OFFLINE_CACHE_FILE_PATH": "relative",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
    }
    kernel_caches.assign(environment, 0)
    assert environment == {
        "WARP_CACHE_PATH": str(tmp_path / "shared" / HOST / "rank_0" / "warp"),
        "TRITON_CACHE_DIR": str(tmp_path / "shared" / HOST / "rank_0" / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "own" / HOST / "rank_0" / "inductor"),
        "QD_OFFLINE_CACHE_FILE_PATH": str(Path.cwd() / "relative" / HOST / "rank_0" / "quadrants"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),  # JAX lets one process write what all read
        "TI_OFFLINE_CACHE_FILE_PATH": str(tmp_path / ".cache/lockstep/kernels" / HOST / "rank_0" / "taichi"),
    }


def test_processes_that_are_alone_get_folders_of_their_own(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    kernels = tmp_path / "lockstep/kernels" / HOST
    assert kernel_caches.folder_of("jax", environment) == kernels / "rank_0/jax"
    assert kernel_caches.folder_of("jax", environment) == kernels / "rank_0_2/jax"


def test_a_home_that_cannot_be_written_is_replaced_by_a_private_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # no folder can be made in a file, not even by root
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    kernel_caches.assign(environment, 0)
    private = tmp_path / "tmp" / f"lockstep-kernels-{os.getuid()}"
    assert environment["WARP_CACHE_PATH"] == str(private / HOST / "rank_0" / "warp")
    assert private.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    public = tmp_path / "tmp" / f"lockstep-kernels-{os.getuid()}"
    public.mkdir()
    public.chmod(0o777)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    kernel_caches.assign(environment, 0)
    assert Path(environment["WARP_CACHE_PATH"]).is_relative_to(tmp_path / "tmp")
    assert not Path(environment["WARP_CACHE_PATH"]).is_relative_to(public)


def test_where_nothing_can_be_written_the_rank_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    with pytest.warns(UserWarning, match="ranks share their caches") as caught:
        kernel_caches.assign(environment, 0)
    assert len(caught) == 1
    assert environment == {"XDG_CACHE_HOME": str(tmp_path / "file")}
