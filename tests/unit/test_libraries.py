"""What is asked of other people's learners: found or refused in one line, before anything of them is imported."""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from lockstep.core import distributions
from lockstep.core.errors import UsageError
from lockstep.learn.config import TrainConfig
from lockstep.recipes.catalog import check_distributed, check_offered, recipe_of
from lockstep.recipes.libraries import LIBRARIES, algorithms_of

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS: dict[str, list[str]] = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]


def config_with(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate({"task": "cartpole_balance", **settings})


def refusal(**settings: Any) -> str:
    with pytest.raises(UsageError) as error:
        check_offered(config_with(**settings))
    return str(error.value)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions by distribution that are found instead of what is really installed; what is left out is missing."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(distributions, "version", version)
    return versions


@pytest.mark.parametrize(
    ("name", "distribution", "extra"),
    [
        ("rsl_rl", "rsl-rl-lib", "rsl-rl"),
        ("rl_games", "rl-games", "rl-games"),
        ("skrl", "skrl", "skrl"),
        ("sb3", "stable-baselines3", "sb3"),
    ],
)
def test_a_missing_library_is_told_with_the_extra_that_installs_it(
    name: str, distribution: str, extra: str, installed: dict[str, str]
) -> None:
    assert refusal(rl_library=name) == (
        f"rl_library {name} needs {distribution}, not installed here; install it with: pip install "
        f"'lockstep-rl[{extra}]'"
    )
    assert extra in [extra.replace("_", "-") for extra in EXTRAS]


@pytest.mark.parametrize(
    ("found", "is_right"),
    [("5.4.2", False), ("5.5.0", False), ("5.5.1", True), ("5.10", True), ("6.0.0rc1", False), ("7", False)],
)
def test_another_version_is_told_before_the_start(found: str, is_right: bool, installed: dict[str, str]) -> None:
    installed["rsl-rl-lib"] = found
    if is_right:
        check_offered(config_with(rl_library="rsl_rl"))
        return
    assert refusal(rl_library="rsl_rl") == (
        f"rl_library rsl_rl needs rsl-rl-lib from 5.5.1 on, below 6, and {found} is here; install it with: pip install "
        "'lockstep-rl[rsl-rl]'"
    )


def test_the_ranges_are_those_that_the_extras_install() -> None:
    for name in LIBRARIES:
        needed = LIBRARIES.get(name).distribution
        if needed is not None:
            extra = next(wanted for own, wanted in EXTRAS.items() if own.replace("_", "-") == needed.extra)
            assert f"{needed.name}{needed.range}" in extra


def test_nothing_of_a_library_is_imported_to_check_it() -> None:
    before = set(sys.modules)
    for name in LIBRARIES:
        for framework, algorithms in algorithms_of(name).items():
            for algorithm in algorithms:
                config = recipe_of("cartpole_balance", algorithm)
                check_offered(config.model_copy(update={"rl_library": name, "ml_framework": framework}))
    loaded = {module.partition(".")[0] for module in set(sys.modules) - before}
    assert not loaded & {"rsl_rl", "rl_games", "skrl", "stable_baselines3", "gymnasium"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rl_library": "rsl-rl"}, "unknown rl_library 'rsl-rl'; did you mean 'rsl_rl'?"),
        ({"algorithm": "dqn"}, "algorithm 'dqn' is not available (it is with --rl_library skrl): rl_library lockstep"),
        ({"rl_library": "rsl_rl", "algorithm": "sac"}, "rl_library rsl_rl has ppo, distillation"),
        (
            {"rl_library": "rl_games", "ml_framework": "jax"},
            "ml_framework jax is not available with rl_library rl_games",
        ),
        (
            {"library": {"algorithm": {}}},
            "library.algorithm is a setting of another library, and rl_library is lockstep",
        ),
        ({"rl_library": "skrl", "runner": "my.own:Runner"}, "exclude each other"),
    ],
)
def test_what_a_library_does_not_have_is_refused(settings: dict[str, Any], words: str) -> None:
    assert words in refusal(**settings)


@pytest.mark.parametrize(("ml_framework", "others"), [("torch", "skrl or sb3"), ("jax", "lockstep or skrl")])
def test_what_is_never_in_step_is_refused_on_one_rank_too(ml_framework: str, others: str) -> None:
    assert refusal(rl_library="rl_games", algorithm="sac", ml_framework=ml_framework) == (
        "algorithm 'sac' of rl_library rl_games is not offered: its SAC exchanges nothing between ranks, each of which "
        f"would train its own policy; use --rl_library {others}"
    )


@pytest.mark.parametrize("algorithm", ["q_learning", "sarsa"])
def test_tabular_learners_are_refused_by_name(algorithm: str) -> None:
    with pytest.raises(UsageError, match=f"algorithm {algorithm} .* has a table of states"):
        recipe_of("cartpole_balance", algorithm)


@pytest.mark.parametrize(
    ("library", "algorithm", "reason"),
    [
        ("skrl", "trpo", "its TRPO computes the policy's step on each rank from that rank's samples alone"),
        ("skrl", "cem", "its CEM picks the best episodes of each rank alone and shares nothing"),
        ("sb3", "ppo", "Stable-Baselines3 is made for one process and exchanges nothing"),
        ("sb3", "td3", "Stable-Baselines3 is made for one process and exchanges nothing"),
    ],
)
def test_what_can_not_be_kept_in_step_is_refused_on_several_ranks_with_the_reason(
    library: str, algorithm: str, reason: str
) -> None:
    config = recipe_of("cartpole_balance", algorithm).model_copy(update={"rl_library": library})
    check_distributed(config, 1)
    with pytest.raises(UsageError) as error:
        check_distributed(config, 2)
    assert str(error.value) == (
        f"algorithm {algorithm} of rl_library {library} can't train on 2 ranks: {reason}; run it with one process"
    )


def test_an_algorithm_of_others_alone_has_the_tasks_recipe_with_its_own_defaults() -> None:
    ppo, td3 = recipe_of("cartpole_swingup"), recipe_of("cartpole_swingup", "td3")
    assert (td3.env, td3.num_envs, td3.algorithm) == (ppo.env, ppo.num_envs, "td3")
    assert type(td3.agent).__name__ == "ReplayConfig"
