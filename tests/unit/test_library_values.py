"""Values below ``library`` that can't be: one line with the setting, before anything is written or a library fails."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cli.main import main
from lockstep.core.config import load_overlay
from lockstep.core.errors import RunError, UsageError
from lockstep.learn import guest_settings
from lockstep.learn.guest_settings import breakdown_in_words, refused_in_words, require_values, rules_of
from tests.unit.rsl_rl_fixtures import config_with, training_of

CASES = {
    "rsl_rl": [
        *(("algorithm.clip_param", value) for value in ("abc", "null", ".nan")),
        ("algorithm.gamma", "[1,2]"),
        ("algorithm.gamma", "2"),
        ("algorithm.num_mini_batches", "0"),
        ("algorithm.num_mini_batches", "100000"),
        ("algorithm.num_learning_epochs", "0"),
        ("algorithm.learning_rate", "1e400"),
        ("algorithm.schedule", "foo"),
        ("algorithm.rnd_cfg", "3"),
        ("algorithm.rnd_cfg.weight", "1"),
        ("actor.hidden_dims", "[-3]"),
        ("actor.hidden_dims", "[]"),
        ("actor.activation", "foo"),
        ("actor.distribution_cfg.init_std", "-1"),
        ("actor.distribution_cfg.std_range", "[1, 0]"),
        ("actor.class_name", "os:system"),
        ("critic.distribution_cfg.init_std", "1"),
        ("obs_groups.actor", "3"),
        ("torch_compile_mode", "foo"),
    ],
    "rl_games": [
        ("config.learning_rate", "abc"),
        ("config.e_clip", "[1]"),
        ("config.mini_epochs", "0"),
        ("config.minibatch_size", "abc"),
        ("config.lr_schedule", "foo"),
        ("config.reward_shaper.scale_value", "abc"),
        ("config.reward_shaper", "3"),
        ("config.reward_shaper.foo", "3"),
        ("config.central_value_config.mini_epochs", "0"),
        ("config.central_value_config.network.foo", "3"),
        ("network.mlp.units", "abc"),
        ("network.mlp.activation", "foo"),
        ("network.mlp.foo", "3"),
        ("network.foo", "3"),
        ("network.rnn.name", "gru"),
        ("network.space.continuous.sigma_init.val", "abc"),
        ("algo", "foo"),
    ],
    "sb3": [
        ("n_epochs", "0"),
        ("n_epochs", "abc"),
        ("batch_size", "1"),
        ("clip_range", "null"),
        ("learning_rate", "abc"),
        ("target_kl", "abc"),
        ("vec_normalize", "3"),
        ("vec_normalize.clip_obs", "-1"),
        ("policy_kwargs.net_arch", "abc"),
        ("policy_kwargs.net_arch.pi", "[0]"),
        ("policy_kwargs.net_arch.qf", "[3]"),
        ("policy_kwargs.foo", "3"),
        ("policy_kwargs.optimizer_class", "Adam"),
        ("policy_kwargs.activation_fn", "Linear"),
    ],
    "sb3 --algorithm td3": [("action_noise", "abc"), ("gradient_steps", "-1")],
    "sb3 --algorithm sac": [("ent_coef", "autox"), ("target_entropy", "abc"), ("learning_starts", "abc")],
    "skrl": [
        ("learning_epochs", "0"),
        ("ratio_clip", "1" + "0" * 39),
        ("mini_batches", "1.5"),
        ("mini_batches", "100000"),
        ("learning_rate", "[1e-3, abc]"),
        ("learning_rate", "[1e-3, 1e-3, 1e-3]"),
        ("learning_rate_scheduler_kwargs.kl_threshold", "abc"),
        ("learning_rate_scheduler_kwargs.step_size", "0"),
        ("observation_preprocessor_kwargs", "3"),
        ("discount_factor", "2"),
        ("kl_threshold", "-1"),
    ],
    "skrl --algorithm sac": [("gradient_steps", "0"), ("initial_entropy_value", "0"), ("target_entropy", "abc")],
    "skrl --algorithm td3": [("policy_delay", "0"), ("exploration_noise", "foo")],
}
IN_WORDS_OF_THE_LIBRARY = {
    "config.reward_shaper.foo": "library.config",
    "network.rnn.name": "library.network.rnn needs units, layers as well",
    "policy_kwargs.activation_fn": "library.policy_kwargs",
    "algorithm.rnd_cfg.weight": "library.algorithm.rnd_cfg needs num_outputs",
    "critic.distribution_cfg.init_std": "library.critic.distribution_cfg needs class_name as well",
}
"""Settings whose line has more to say than their own name, or less."""


@pytest.mark.parametrize(
    ("library", "name", "value"), [(library, *case) for library, cases in CASES.items() for case in cases]
)
def test_a_value_that_can_t_be_is_one_line_and_nothing_is_written(
    library: str,
    name: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--num_envs", "8", "--max_iterations", "1", "--rl_library", *library.split(), f"--library.{name}", value)
    assert main(["train", "cartpole_balance", *flags]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("lockstep: error: ")
    assert IN_WORDS_OF_THE_LIBRARY.get(name, f"library.{name}") in line
    assert list(tmp_path.iterdir()) == []


def test_a_list_without_hidden_layers_is_refused_where_there_must_be_one() -> None:
    with pytest.raises(UsageError, match=r"agent.critic_hidden_dims \[\] is not available with rl_library rsl_rl"):
        training_of(config_with({"critic_hidden_dims": ()}))


def test_a_group_is_checked_by_the_defaults_of_what_it_goes_to(tmp_path: Path) -> None:
    def made(count: int = 3, share: float = 0.5, bound: float = 1, is_on: bool = True, name: str = "x") -> None: ...

    rules = {"group": rules_of(made), "widths": guest_settings.widths(special=-1)}
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("group: {count: 1, share: 0, bound: 0.5, is_on: false, name: y}\nwidths: [3, -1]\n")
    require_values("library", load_overlay(overlay), rules)
    require_values("library", {"group": None, "other": {"anything": [1.0, "text", None]}}, rules)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("library.group must be a mapping, not 3", {"group": 3}),
        ("library.group.count must be a whole number from 1 to 2147483647, not True", {"group": {"count": True}}),
        ("library.group.share must be a number from 0 to 1e.09, not -1", {"group": {"share": -1}}),
        ("library.group.name must be text, not None", {"group": {"name": None}}),
        (r"library.widths must be .* such as \[64, 64\], or -1, not \[0\]", {"widths": [0]}),
        (r"library.other.deep\[1\] must be a number that is finite", {"other": {"deep": [1, float("inf")]}}),
        ("library.other must be a number that is finite.* not a number of thousands of digits", {"other": 10**5000}),
    ]
    for words, given in wrong:
        with pytest.raises(UsageError, match=words):
            require_values("library", given, rules)


# --- what no check foresees ------------------------------------------------------------------------------------------


def test_what_a_library_raises_over_its_settings_is_one_line_with_the_cause() -> None:
    config = config_with(library={"algorithm": {}})
    words = r"rl_library rsl_rl does not take its settings \(library.algorithm\): ZeroDivisionError: division by zero"
    with pytest.raises(UsageError, match=words) as caught, refused_in_words(config):
        print(1 / 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError), refused_in_words(config_with()):
        print(1 / 0)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("no such module"),
        torch.OutOfMemoryError("out of memory"),
        RuntimeError("can't allocate memory: you tried to allocate 1 byte"),
        torch.distributed.DistBackendError("a rank is lost"),
        RunError("a rank is lost"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_no_setting_is_to_blame_for_is_left_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, refused_in_words(config_with(library={"algorithm": {}})):
        raise error
    assert caught.value is error


def test_a_library_that_breaks_down_over_numbers_that_are_not_finite_says_what_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = training_of(config_with())

    def breaks_down() -> dict[str, float]:
        raise ValueError("Expected parameter loc to be finite\nin many lines")

    monkeypatch.setattr(training.learner, "update", breaks_down)
    with pytest.raises(ValueError, match="Expected parameter"):
        training.iterate()
    with torch.no_grad():
        next(training.learner.policy.parameters()).fill_(torch.nan)
    words = r"not finite in iteration 1: actor\.\S+ on rank 0, of which the library says RuntimeError: normal expects"
    with pytest.raises(RunError, match=words):
        training.iterate()


def test_an_error_is_the_first_one_where_nothing_can_be_looked_at_any_more() -> None:
    def fails() -> str:
        raise RuntimeError("the device is lost")

    with pytest.raises(ValueError, match="first"), breakdown_in_words(1, fails, 0):
        raise ValueError("first")
