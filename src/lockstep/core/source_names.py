"""Names that an installed package lists in its source, read without importing it."""

import ast
import importlib.util
from pathlib import Path


def package_folder(package: str) -> Path | None:
    """Return the folder of a top-level package, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def listed_names(path: Path, variable: str) -> tuple[str, ...]:
    """Return the strings in a module's list of that name, or the keys of a dict of that name.

    To import a library can take seconds and occupy a device before it is time to, only to find that a name is wrong.
    What is no plain list or dict of strings, or not there, gives none: then nobody knows before the library is asked.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _names(statement.targets) == [variable]:
            return _strings(statement.value)
        if isinstance(statement, ast.AnnAssign) and _names([statement.target]) == [variable]:
            return _strings(statement.value)
    return ()


def _names(targets: list[ast.expr]) -> list[str]:
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _strings(value: ast.expr | None) -> tuple[str, ...]:
    found = value.keys if isinstance(value, ast.Dict) else value.elts if isinstance(value, ast.List) else []
    return tuple(each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str))
