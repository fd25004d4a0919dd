import enum
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import Field, SerializeAsAny

from lockstep.core.config import (
    MAX_OVERLAY_BYTES,
    Config,
    check_names,
    combine,
    groups,
    load_overlay,
    merge,
    settings,
    to_yaml,
)
from lockstep.core.errors import UsageError
from lockstep.envs.config import EnvConfig
from lockstep.learn.config import PpoConfig, TrainConfig


class PendulumConfig(EnvConfig):
    """Settings only this task has."""

    length: float = Field(0.5, gt=0)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Everything(Config):
    """A setting of every kind that a config may have."""

    number: float = 0.0
    count: int = 0
    text: str = ""
    flag: bool = False
    sizes: tuple[int, ...] = ()
    span: tuple[float, float] = (0.0, 1.0)
    names: tuple[str, ...] = ()
    maybe: str | None = None
    limit: int | None = None
    color: Color = Color.RED
    mode: Literal["on", "off", "none"] = "on"
    level: Literal[1, 2] = 1
    env: SerializeAsAny[EnvConfig] = EnvConfig()


BASE = TrainConfig(task="pendulum", env=PendulumConfig(length=2.0))
finite = st.floats(allow_nan=False, allow_infinity=False)
everything = st.builds(
    Everything,
    number=finite,
    count=st.integers(),
    text=st.text(),
    flag=st.booleans(),
    sizes=st.lists(st.integers()).map(tuple),
    span=st.tuples(finite, finite),
    names=st.lists(st.text()).map(tuple),
    maybe=st.none() | st.text(),
    limit=st.none() | st.integers(),
    color=st.sampled_from(Color),
    mode=st.sampled_from(["on", "off", "none"]),
    level=st.sampled_from([1, 2]),
    env=st.builds(
        PendulumConfig, length=st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
    ),
)


def line_of(error: pytest.ExceptionInfo[UsageError]) -> str:
    """Return the message, having made sure that it is one line."""
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def refused(overrides: dict[str, Any], config: Config = BASE) -> str:
    with pytest.raises(UsageError) as error:
        merge(config, overrides)
    return line_of(error)


def overlay_error(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "overlay.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as error:
        load_overlay(path)
    assert str(path) in str(error.value)
    return line_of(error)


def test_merge_changes_what_is_given_and_keeps_the_rest() -> None:
    merged = merge(BASE, {"num_envs": 64, "agent": {"gamma": 0.9}, "env": {"max_episode_steps": 7}})
    assert (merged.num_envs, merged.agent.gamma, merged.env.max_episode_steps) == (64, 0.9, 7)
    assert merged.agent.learning_rate == BASE.agent.learning_rate
    assert BASE.num_envs == 512


def test_merge_keeps_the_type_of_a_group() -> None:
    env = merge(BASE, {"env": {"decimation": 3}}).env
    assert isinstance(env, PendulumConfig)
    assert env.length == 2.0
    assert merge(BASE, {"env": {"length": "0.25"}}).env == PendulumConfig(length=0.25)


def test_merge_reads_text_as_the_setting_has_it() -> None:
    overrides = {"agent": {"learning_rate": "1e-5", "actor_hidden_dims": ["32", "16"], "normalize_observations": "no"}}
    agent = merge(BASE, overrides).agent
    assert (agent.learning_rate, agent.actor_hidden_dims, agent.normalize_observations) == (1e-5, (32, 16), False)


def test_a_whole_group_can_be_given_as_a_config() -> None:
    assert merge(BASE, {"agent": PpoConfig(gamma=0.5)}).agent.gamma == 0.5


def test_an_empty_group_changes_nothing() -> None:
    assert merge(BASE, {"agent": None}) == BASE
    assert combine({"agent": {"gamma": 0.9}}, {"agent": None}) == {"agent": {"gamma": 0.9}}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_envz": 3}, ["'num_envz'", "3", "did you mean 'num_envs'"]),
        ({"agent": {"lerning_rate": 0.1}}, ["'agent.lerning_rate'", "0.1", "did you mean 'agent.learning_rate'"]),
        ({"gamma": 0.9}, ["'gamma'", "did you mean 'agent.gamma'"]),
        ({"interval": 5}, ["'evaluation.interval' or 'checkpoints.interval'"]),
        ({"env": {"lenght": 1}}, ["did you mean 'env.length'"]),
        ({"agnet": {"gamma": 1}}, ["did you mean 'agent'"]),
        ({"agent.gamma": 0.9}, ["nested", "agent: {gamma: 0.9}"]),
        ({"zzz": "a\nb"}, ["'zzz'", r"'a\nb'"]),
        ({"a\nb": 1}, [r"'a\nb'"]),
        ({3: 1}, ["'3'"]),
        ({"num_envs": 0}, ["num_envs must be greater than or equal to 1, not 0"]),
        ({"num_envs": "many"}, ["num_envs must be a whole number, not 'many'"]),
        ({"num_envs": 1.5}, ["num_envs must be a whole number, not 1.5"]),
        ({"num_envs": True}, ["num_envs must be a number, not True"]),
        ({"num_envs": None}, ["num_envs must be a whole number, not None"]),
        ({"agent": {"gamma": "x"}}, ["agent.gamma must be a number, not 'x'"]),
        ({"agent": {"gamma": 2}}, ["agent.gamma must be less than or equal to 1, not 2"]),
        ({"agent": {"schedule": "cosine"}}, ["agent.schedule must be 'adaptive' or 'fixed', not 'cosine'"]),
        ({"agent": {"normalize_observations": "maybe"}}, ["true or false", "'maybe'"]),
        ({"agent": {"actor_hidden_dims": 64}}, ["agent.actor_hidden_dims must be a list such as [64, 64], not 64"]),
        ({"agent": {"actor_hidden_dims": [64, "x"]}}, ["agent.actor_hidden_dims[1] must be a whole number, not 'x'"]),
        ({"agent": 5}, ["agent is a group of settings such as agent.num_steps_per_env, not 5"]),
        ({"run_name": 5}, ["run_name must be text", "quotes", "not 5"]),
        ({"num_envs": "x" * 300}, ["num_envs must be", "(302 characters)"]),
        ({"run_name": 16**5000}, ["run_name must be text", "thousands of digits"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(overrides: dict[str, Any], words: list[str]) -> None:
    message = refused(overrides)
    for word in words:
        assert word in message
    assert len(message) < 250


def test_the_words_of_a_validator_of_ours_reach_the_user_as_they_are() -> None:
    assert refused({"num_envs": 510}) == (
        "num_envs 510 is not divisible by agent.num_mini_batches 4; use --num_envs 508 or 512, or "
        "--agent.num_mini_batches 2"
    )


@pytest.mark.parametrize("value", [[], [1.0], [1.0, 2.0, 3.0], 1.0, "wide", None])
def test_a_range_of_another_length_is_told_how_many_values_it_has(value: object) -> None:
    assert refused({"span": value}, Everything()) == f"span must be a list of 2 such as [0.0, 1.0], not {value!r}"


def test_other_wordings_name_the_setting_too() -> None:
    assert refused({"color": "green"}, Everything()) == "color must be 'red' or 'blue', not 'green'"


def test_check_names_looks_at_names_only() -> None:
    check_names(BASE, {"num_envs": "many", "env": {"length": -1}})
    with pytest.raises(UsageError):
        check_names(BASE, {"env": {"weight": 1}})


def test_settings_and_groups_are_listed_by_dotted_name() -> None:
    assert list(settings(BASE))[:2] == ["task", "ml_framework"]
    assert "env.length" in settings(BASE)
    assert "env" not in settings(BASE)
    assert list(groups(BASE)) == ["env", "env.mjx", "agent", "evaluation", "checkpoints"]


@hypothesis_settings(deadline=None)
@given(everything)
def test_yaml_brings_back_an_equal_config(tmp_path_factory: pytest.TempPathFactory, config: Everything) -> None:
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_bytes(to_yaml(config).encode("utf-8", "surrogatepass"))
    back = merge(Everything(env=PendulumConfig()), load_overlay(path))
    assert back == config
    assert math.copysign(1, back.number) == math.copysign(1, config.number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1e-5",
        "-1",
        "null",
        "none",
        "~",
        "yes",
        "off",
        "0o7",
        "12:30",
        "2020-01-01",
        "=",
        "<<",
        "#",
        "ü",
        "a\n b\u2028c\x85",
    ],
)
def test_texts_that_yaml_could_take_for_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(Everything(text=text, maybe=text, names=(text,))), encoding="utf-8", newline="")
    back = merge(Everything(), load_overlay(path))
    assert (back.text, back.maybe, back.names) == (text, text, (text,))


def test_yaml_is_made_for_people() -> None:
    lines = to_yaml(BASE).splitlines()
    assert lines[0] == "task: pendulum"
    assert "  actor_hidden_dims: [64, 64]" in lines
    assert "  length: 2.0" in lines


def test_numbers_in_an_overlay(tmp_path: Path) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text("a: 1e-5\nb: -2E3\nc: 1.5e+2\nd: 7\ne: '1e-5'\nf: e5\ng: 2020-01-01\n", encoding="utf-8")
    values = load_overlay(path)
    assert values == {"a": 1e-5, "b": -2000.0, "c": 150.0, "d": 7, "e": "1e-5", "f": "e5", "g": "2020-01-01"}


def test_an_empty_overlay_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text("# agent:\n#   gamma: 0.9\n", encoding="utf-8")
    assert load_overlay(path) == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("num_envs: 1\nnum_envs: 2\n", ["line 2, column 1", "'num_envs' is set twice"]),
        ("agent:\n  gamma: 1\n  gamma: 1\n", ["line 3, column 3", "'gamma' is set twice"]),
        ("1: 2\n", ["line 1, column 1", "a key must be text, not '1'"]),
        ("? [a]\n: 2\n", ["a key must be text, not a list or mapping"]),
        ("a: &x 1\nb: *x\n", ["line 2, column 4", "aliases"]),
        ("<<: {a: 1}\n", ["a key must be text"]),
        ("a: [1, 2\n", ["line 2"]),
        ("a: b: c\n", ["line 1, column 5"]),
        ("- 1\n", ["expected settings", "[1]"]),
        ("hello\n", ["expected settings", "'hello'"]),
        ("a: 1\n---\nb: 1\n", ["line 2"]),
        ('max_iterations: !!float ""\n', ["does not fit the tag"]),
        ("max_iterations: !!bool maybe\n", ["does not fit the tag"]),
        ("max_iterations: !!timestamp soon\n", ["does not fit the tag"]),
        ("a: !!python/object/apply:os.system ['true']\n", ["line 1", "python"]),
        ("a: 0b_\n", ["not valid YAML"]),
        ("a: \x07\n", ["line 1", "not allowed"]),
        (b"a: \xff\n", ["not UTF-8", "byte 3"]),
        ("a: " + "[" * 5000, ["too deeply"]),
        ("a: " + "x" * MAX_OVERLAY_BYTES, ["larger than 256 KiB"]),
    ],
)
def test_a_bad_overlay_is_one_line_with_file_and_place(tmp_path: Path, content: str | bytes, words: list[str]) -> None:
    message = overlay_error(tmp_path, content)
    for word in words:
        assert word in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path, Path("a\0b")):
        with pytest.raises(UsageError) as error:
            load_overlay(path)
        assert "config file" in line_of(error)


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.binary() | st.text(alphabet="ab:-[]{}&*!|>'\"#%@,?=<~ \n\t01eE.").map(str.encode) | st.text().map(str.encode))
def test_any_file_gives_settings_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "overlay.yaml"
    path.write_bytes(content)
    try:
        merge(BASE, load_overlay(path))
    except UsageError as error:
        assert len(str(error).splitlines()) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@hypothesis_settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([*TrainConfig.model_fields, "x"]), json_values),
    st.sampled_from([*settings(BASE)]),
    json_values,
)
def test_any_values_give_a_config_or_one_line(values: dict[str, Any], setting: str, value: Any) -> None:
    group, dot, leaf = setting.partition(".")
    for overrides in (values, {group: {leaf: value} if dot else value}):
        try:
            assert isinstance(merge(BASE, overrides), TrainConfig)
        except UsageError as error:
            assert len(str(error).splitlines()) == 1
