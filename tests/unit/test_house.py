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

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# What differs by rank is decided in distributed/ and launch/; everyone else is handed an object that does the right
# thing on every rank (a Comm, a run directory).
RANK_BRANCH = re.compile(r"is_main_process\(|is_distributed\(|rank\s*==\s*0|world_size\s*>\s*1|get_rank\(")
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


def test_the_package_is_found() -> None:
    assert PACKAGE / "core" / "errors.py" in MODULES


def test_files_are_short() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = {f"{name(path)} {function}": lines for path in MODULES for function, lines in functions(path.read_text())}
    assert {function: lines for function, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_package_init_files_are_empty() -> None:
    offering = (PACKAGE, PACKAGE / "distributed")  # what users import, lazily
    inner = [path for path in MODULES if path.name == "__init__.py" and path.parent not in offering]
    assert [name(path) for path in inner if path.read_text().strip()] == []


def test_every_package_has_an_init_file() -> None:
    # Without one, a folder becomes a namespace package that the import rules do not see.
    assert [name(path) for path in MODULES if not (path.parent / "__init__.py").exists()] == []


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "common", "helpers", "misc"}
    assert [name(path) for path in MODULES if drawers & {path.stem, *path.relative_to(PACKAGE).parts}] == []


def test_no_branches_on_rank_outside_distributed_and_launch() -> None:
    others = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] not in KNOWS_RANKS]
    found = {name(path): rank_branches(path.read_text()) for path in others}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("line", ["if comm.rank == 0:", "if world_size > 1:", "if is_main_process():"])
def test_a_branch_on_rank_would_be_seen(line: str) -> None:
    assert rank_branches(f"import os\n{line}\n    pass\n") == [2]


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
