"""A SLURM cluster of two nodes for the tests of this folder, made when the first of them needs it."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm_cluster import PROGRAMS, SlurmCluster, make_null_device


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    if sys.platform != "linux":
        pytest.skip("SLURM is for Linux")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"SLURM is not installed here, {missing[0]} for one (packages slurm-wlm and munge)")
    if os.geteuid() != 0:
        pytest.skip("starting a SLURM cluster takes root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        make_null_device(folder / "device")
    except PermissionError:
        shutil.rmtree(folder)
        pytest.skip("the GPUs of the cluster are device files, and this container may make none (CAP_MKNOD)")
    cluster = SlurmCluster(folder)
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, without jobs before and after."""
    yield slurm
    slurm.cancel_all()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep these tests on one worker of pytest-xdist, or each worker would start a cluster of its own."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("slurm"))
