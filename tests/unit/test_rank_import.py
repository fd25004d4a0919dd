"""``import lockstep`` as one rank of several, in processes of their own."""

import os
from pathlib import Path

import pytest

from tests.unit.gpu_fixtures import answer, python, rank_environment, with_fake_pynvml

REPORT = """
import json, os, sys
names = ("CUDA_VISIBLE_DEVICES", "LOCKSTEP_DEVICE", "QD_VISIBLE_DEVICE", "TI_VISIBLE_DEVICE", "WARP_CACHE_PATH")
print(json.dumps({name: os.environ.get(name) for name in names} | {"torch": "torch" in sys.modules}))
"""


def test_it_isolates_and_loads_no_torch(tmp_path: Path) -> None:
    variables = rank_environment(tmp_path) | with_fake_pynvml(tmp_path) | {"CUDA_VISIBLE_DEVICES": "3,1,2,0"}
    assert answer("import lockstep" + REPORT, variables | {"LOCAL_RANK": "2", "RANK": "6"}) == {
        "CUDA_VISIBLE_DEVICES": "2",
        "LOCKSTEP_DEVICE": "2",
        "QD_VISIBLE_DEVICE": "2",
        "TI_VISIBLE_DEVICE": "2",
        "WARP_CACHE_PATH": str(tmp_path / "cache/lockstep/kernels" / os.uname().nodename / "rank_2/warp"),
        "torch": False,
    }


def test_a_child_of_a_rank_is_that_rank(tmp_path: Path) -> None:
    variables = rank_environment(tmp_path) | with_fake_pynvml(tmp_path) | {"CUDA_VISIBLE_DEVICES": "3,1,2,0"}
    child = f"import lockstep{REPORT}"
    spawn = f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    result = python(f"import subprocess\nimport lockstep{REPORT}sys.stdout.flush()\n{spawn}", variables)
    assert result.returncode == 0, result.stderr
    own, childs = result.stdout.splitlines()
    assert childs == own
    assert '"CUDA_VISIBLE_DEVICES": "1"' in own


def test_one_process_pays_nothing(tmp_path: Path) -> None:
    code = 'import json, sys, lockstep\nprint(json.dumps([n for n in sys.modules if n.startswith("lockstep.")]))'
    for variables in ({}, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert answer(code, variables) == []


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_bad_placement_is_one_line_of_the_command(tmp_path: Path, device: str) -> None:
    variables = rank_environment(tmp_path) | with_fake_pynvml(tmp_path) | {"CUDA_VISIBLE_DEVICES": "0,1"}
    code = f"""
import lockstep
from lockstep.core.errors import UsageError
from lockstep.session.make_env import resolve_device
try:
    resolve_device({device!r})
except UsageError as error:
    print(error)
"""
    result = python(code, variables)
    assert result.stdout == (
        "4 ranks on this node but 2 GPUs visible (CUDA_VISIBLE_DEVICES=0,1); use --num_gpus 2 or --device cpu\n"
    ), result.stderr


def test_variables_that_make_no_sense_wait_until_somebody_asks(tmp_path: Path) -> None:
    variables = {"WORLD_SIZE": "2", "XDG_CACHE_HOME": str(tmp_path)}
    code = """
import json, os, lockstep
from lockstep.distributed.isolation import placement_problem
print(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], placement_problem()]))
"""
    mask, problem = answer(code, variables)
    assert mask == ""
    assert "RANK is not set" in problem


def test_the_wrong_order_ends_in_one_line_and_the_mend(tmp_path: Path) -> None:
    variables = rank_environment(tmp_path) | with_fake_pynvml(tmp_path)
    (tmp_path / "fakes/torch.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: True)\n")
    result = python("import torch\nimport lockstep", variables)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("lockstep.core.errors.UsageError: torch has initialised CUDA")


def test_the_warning_points_at_the_users_line(tmp_path: Path) -> None:
    variables = rank_environment(tmp_path) | with_fake_pynvml(tmp_path)
    (tmp_path / "fakes/torch.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: False)\n")
    script = tmp_path / "my_train.py"
    script.write_text("import torch\n\nimport lockstep\n")
    result = python(f"import runpy; runpy.run_path({str(script)!r})", variables)
    assert result.returncode == 0
    first, *rest = result.stderr.splitlines()
    assert first.startswith(f"{script}:3: UserWarning: torch imported before lockstep")
    assert [line.strip() for line in rest] == ["import lockstep"]
