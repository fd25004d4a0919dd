"""The house numbers of CONTRIBUTING.md, held by a test so that nobody has to."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# What differs by rank is decided in distributed/ and launch/; everyone else is handed an object that does the right
# thing on every rank (a Comm, a run directory).
RANK_BRANCH = re.compile(
    r"is_main_process\(|is_distributed\(|get_rank\("
    r"|(rank|world_size)\s*([=!]=|[<>]=?)\s*\d"
    r"|\d\s*([=!]=|[<>]=?)\s*(\w+\.)*\w*(rank|world_size)\b"
    r"|\b(if|elif|and|or|not|while)\s+(\w+\.)*(\w+_)?(rank|world_size)\s*(:|\)|$|\b(and|or|else)\b)"
)
DRAWER = re.compile(r"(utils?|common|helpers?|misc)$", re.IGNORECASE)
KNOWS_RANKS = ("distributed", "launch")

# Where packages come from is each user's own setting. Put together here, so that this file passes its own test.
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("conda", "anaconda", "org"),
    )
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield the name and length in lines of every function, nested ones and methods included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def is_drawer(path: Path) -> bool:
    """Return whether a file, or a folder that it is in, has a name that anything would fit."""
    return any(DRAWER.search(part) for part in path.with_suffix("").parts)


def rank_branches(source: str) -> list[int]:
    """Return the numbers of the lines that ask which rank this is."""
    return [number for number, line in enumerate(source.splitlines(), 1) if RANK_BRANCH.search(line)]


def tracked_files() -> list[Path]:
    """Return every file git has or is about to have."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for entry in listing.split("\0") if (path := ROOT / entry).is_file()]


def test_the_package_and_its_tests_are_found() -> None:
    assert PACKAGE / "core" / "errors.py" in MODULES
    assert Path(__file__) in TESTS


def test_files_are_short() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in MODULES + TESTS}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = {
        f"{name(path)} {function}": lines for path in MODULES + TESTS for function, lines in functions(path.read_text())
    }
    assert {function: lines for function, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_package_init_files_are_empty() -> None:
    offering = (PACKAGE, PACKAGE / "distributed")  # what users import, lazily
    inner = [path for path in MODULES if path.name == "__init__.py" and path.parent not in offering]
    assert [name(path) for path in inner if path.read_text().strip()] == []


def test_every_package_has_an_init_file() -> None:
    # Without one, a folder becomes a namespace package that the import rules do not see.
    assert [name(path) for path in MODULES if not (path.parent / "__init__.py").exists()] == []


def test_no_module_is_a_drawer_for_everything() -> None:
    assert [name(path) for path in MODULES if is_drawer(path.relative_to(PACKAGE))] == []


@pytest.mark.parametrize("path", ["utils/rng.py", "core/common.py", "distributed/torch_helpers.py", "sim/MathUtil.py"])
def test_a_drawer_would_be_seen(path: str) -> None:
    assert is_drawer(Path(path))


@pytest.mark.parametrize("path", ["core/errors.py", "learn/torch/uncommonness.py", "distributed/torch_moments.py"])
def test_what_is_no_drawer(path: str) -> None:
    assert not is_drawer(Path(path))


def test_no_branches_on_rank_outside_distributed_and_launch() -> None:
    others = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] not in KNOWS_RANKS]
    found = {name(path): rank_branches(path.read_text()) for path in others}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "if comm.rank == 0:",
        "if comm.rank != 0:",
        "if 0 == comm.rank:",
        "if local_rank == 0:",
        "if world_size > 1:",
        "if world_size == 1:",
        "if self.comm.world_size >= 2:",
        "if 1 < world_size:",
        "if not comm.rank:",
        "if switched_on and world_size == 1:",
        "x = 1 if comm.rank else 2",
        "if is_main_process():",
    ],
)
def test_a_branch_on_rank_would_be_seen(line: str) -> None:
    assert rank_branches(f"import os\n{line}\n    pass\n") == [2]


@pytest.mark.parametrize(
    "line",
    [
        "if rank == comm.rank:",
        "shares = total // world_size",
        "Topology(topology.rank, 1)",
        "for rank in range(world_size):",
        "if rank is None:",
        "if world_size not in seen:",
    ],
)
def test_a_number_of_ranks_is_no_branch(line: str) -> None:
    assert rank_branches(line) == []


def test_a_long_function_would_be_seen() -> None:
    body = "\n".join("        pass" for _ in range(70))
    assert dict(functions(f"class A:\n    def long(self):\n{body}\n")) == {"long": 71}


def test_no_registry_host_in_tracked_files() -> None:
    found = {}
    for path in tracked_files():
        text = path.read_bytes().decode(errors="ignore")
        if hosts := [host for host in REGISTRY_HOSTS if host in text]:
            found[name(path)] = hosts
    assert found == {}


def test_uv_and_the_lock_file_agree_on_torch() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        constraints = tomllib.load(file)["tool"]["uv"]["constraint-dependencies"]
    locked = (ROOT / "requirements.lock").read_text().splitlines()
    assert len(constraints) > 0
    assert [constraint for constraint in constraints if constraint not in locked] == []
