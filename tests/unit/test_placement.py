"""Which differences between ranks are refused, and what is compared."""

import json
import re
from typing import Any

import pytest
import torch

from lockstep.core.errors import UsageError
from lockstep.session import placement
from lockstep.session.placement import compare, describe_rank
from tests.unit.learner_fixtures import small_config

CPU = torch.device("cpu")
COMPARED = ("lockstep", "torch", "library", "git", "config")


def ranks_of(**of_rank_2: Any) -> list[dict[str, Any]]:
    """Return what three ranks of one job say, with some of it changed on the last."""
    alike = {"lockstep": "1.2", "torch": "2.13", "git": "abc", "config": {"seed": 1, "agent": {"gamma": 0.9}}}
    alike["library"] = "skrl is version 2.1.1"
    made = [{"rank": rank, "host": f"node{rank}", "pid": 40 + rank, "cores": [rank], **alike} for rank in range(3)]
    made[2] |= of_rank_2
    return made


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lockstep", "there lockstep is version other, here 1.2"),
        ("torch", "there torch is version other, here 2.13"),
        ("library", "there other, here skrl is version 2.1.1"),
        ("git", "there lockstep's checkout is at other, here abc"),
    ],
)
def test_the_first_rank_that_differs_is_named_with_its_host(name: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        compare(ranks_of(**{name: "other"}))
    assert str(caught.value).startswith(f"rank 2 on node2 differs from rank 0 on node0: {words}; start all ranks")
    assert caught.value.shared


def test_ranks_may_be_elsewhere() -> None:
    compare(ranks_of())
    compare(ranks_of(host="node9", pid=1, device="cuda:0", cores=None, working_folder="/elsewhere"))
    compare(ranks_of()[:1])
    compare(ranks_of(git=None))  # its git did not answer in time


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"seed": 2, "agent": {"gamma": 0.9}}, "there seed is 2, here 1; start all"),
        ({"seed": 1, "agent": {"gamma": 0.5}}, "there agent.gamma is 0.5, here 0.9; start all"),
        ({"seed": 1, "agent": {"gamma": 0.9}, "new": "x"}, "there new is 'x', here None; start all"),
        ({"seed": 1}, "there agent is None, here {'gamma': 0.9}; start all"),
    ],
)
def test_the_setting_that_differs_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        compare(ranks_of(config=config))


def test_any_setting_makes_another_config() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"seed": 2},
        {"num_envs": 16},
        {"agent": {"gamma": 0.5}},
        {"env": {"max_episode_steps": 7}},
    ]
    configs = [json.dumps(describe_rank(small_config(**changes), CPU)["config"]) for changes in settings]
    assert len(set(configs)) == len(settings)
    assert json.dumps(describe_rank(small_config(), CPU)["config"]) == configs[0]


def test_a_script_has_no_config_to_differ_in() -> None:
    assert describe_rank(None, CPU)["config"] == describe_rank(None, CPU)["config"]


def test_versions_and_checkout_are_those_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(lockstep: str, torch_version: str, git: dict[str, Any] | None) -> dict[str, Any]:
        monkeypatch.setattr(placement, "versions", lambda: {"lockstep": lockstep, "torch": torch_version})
        monkeypatch.setattr(placement, "git_of_lockstep", lambda: git)
        found = describe_rank(None, CPU)
        return {name: found[name] for name in COMPARED if name != "config"}

    clean, dirty = ({"commit": "abc", "dirty": changes} for changes in (False, True))
    first = described("1.2", "2.13", clean)
    others = [
        described("1.3", "2.13", clean),
        described("1.2", "2.11", clean),
        described("1.2", "2.13", dirty),
        described("1.2", "2.13", {"commit": "def", "dirty": False}),
        described("1.2", "2.13", None),
    ]
    differing = [[name for name in first if other[name] != first[name]] for other in others]
    assert differing == [["lockstep"], ["torch"], ["git"], ["git"], ["git"]]
    assert described("1.2", "2.13", dict(clean)) == first
