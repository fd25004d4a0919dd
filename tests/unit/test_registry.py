from pathlib import Path

import pytest

from lockstep.core.errors import UsageError
from lockstep.core.registry import Registry, load
from lockstep.learn.config import TrainConfig
from lockstep.recipes.catalog import TASKS, check_offered


@pytest.fixture
def fruits() -> Registry[int]:
    registry: Registry[int] = Registry("fruit")
    for name, number in (("pear", 3), ("apple", 1), ("banana", 2)):
        registry.register(name, number)
    return registry


def test_entries_come_back_by_name_and_in_order(fruits: Registry[int]) -> None:
    assert fruits.get("apple") == 1
    assert list(fruits) == ["pear", "apple", "banana"]
    assert len(fruits) == 3
    assert "pear" in fruits
    assert "plum" not in fruits


def test_an_unknown_name_offers_the_nearest_and_all(fruits: Registry[int]) -> None:
    with pytest.raises(UsageError) as error:
        fruits.get("bananna")
    assert str(error.value) == "unknown fruit 'bananna'; did you mean 'banana'? (known: pear, apple, banana)"


def test_a_name_is_taken_once(fruits: Registry[int]) -> None:
    with pytest.raises(UsageError, match="fruit 'apple' is registered already"):
        fruits.register("apple", 9)
    assert fruits.get("apple") == 1


def test_load_returns_what_the_string_names() -> None:
    assert load("pathlib:Path") is Path


@pytest.mark.parametrize("text", ["", "pathlib", "pathlib:", ":Path", "path lib:Path", "pathlib:Path.cwd", ".x:y"])
def test_what_is_no_import_string(text: str) -> None:
    with pytest.raises(UsageError, match=r"not of the form 'package.module:name'"):
        load(text)


def test_load_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="there is no module 'not_there_at_all'"):
        load("not_there_at_all.inside:thing")
    with pytest.raises(UsageError, match=r"there is no module 'pathlib.inside'"):
        load("pathlib.inside:thing")
    with pytest.raises(UsageError, match="it needs 'not_there_at_all', which is not installed"):
        load("needs_more:thing")
    with pytest.raises(UsageError, match=r"module 'pathlib' has no 'Paht'; did you mean 'Path'"):
        load("pathlib:Paht")
    with pytest.raises(ZeroDivisionError):
        load("broken:thing")


def test_the_catalog_lists_the_tasks_without_loading_them() -> None:
    assert {"cartpole_classic", "cartpole_balance", "cartpole_swingup"} <= set(TASKS)
    for name in TASKS:
        assert TASKS.get(name).name == name
    assert TASKS.get("cartpole_classic").engines == ("analytic",)
    assert TASKS.get("cartpole_balance").engines == TASKS.get("cartpole_swingup").engines == ("mujoco",)


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("engine", "warp", "task cartpole_balance has auto, mujoco"),
    ],
)
def test_what_this_version_does_not_offer_is_refused(setting: str, value: str, words: str) -> None:
    config = TrainConfig.model_validate({"task": "cartpole_balance", setting: value})
    with pytest.raises(UsageError) as error:
        check_offered(config)
    assert str(error.value) == f"{setting} {value!r} is not available: {words}"
    check_offered(TrainConfig(task="cartpole_balance", engine="mujoco"))
