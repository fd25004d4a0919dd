"""skrl's agents on JAX in two processes, one with fewer envs that are seen otherwise: one policy, bit for bit."""

import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.multiproc.commands import free_port, own_environment
from tests.rank_pool import ROOT

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each of the two processes found."""
    port = str(free_port())
    # The library would join a job of its own where it sees two of these.
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "JAX_WORLD_SIZE"), "2")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multiproc.jobs_skrl_jax", port, str(process)],
            cwd=ROOT,
            # With these seeds a set of the names of normalisers comes in another order in each process.
            env=own_environment(sizes | dict.fromkeys(("RANK", "LOCAL_RANK", "PYTHONHASHSEED"), str(process))),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    ended = [process.communicate(timeout=300.0) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert "skrl" not in "".join(said for _, said in ended)
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_all_that_is_replicated_is_equal(found: list[dict[str, Any]], algorithm: str) -> None:
    one, other = (process[algorithm] for process in found)
    assert one["state"] == other["state"]
    expected = {"networks", "optimizers", "rates", "normalizers"}
    assert one["state"].keys() == (expected if algorithm == "ppo" else expected | {"log_temperature", "replay"})
    assert one["metrics"] == other["metrics"]
    assert [record["env_steps"] for record in one["metrics"]] == [64, 128, 192, 256, 320]


def test_the_learning_rate_goes_by_the_divergence_of_all(found: list[dict[str, Any]]) -> None:
    metrics = found[0]["ppo"]["metrics"]
    assert len({record["learning_rate"] for record in metrics}) > 1
    own = np.array([process["ppo"]["own kl"] for process in found]).reshape(2, 5, -1)  # several per iteration
    pooled = (12 * own[0, :, -1] + 4 * own[1, :, -1]) / 16
    assert [record["kl"] for record in metrics] == pytest.approx(pooled, rel=1e-5)
    assert np.abs(own[:, :, -1].mean(0) / pooled - 1).max() > 1e-3  # ranks do not count alike


@pytest.mark.parametrize("group", ["observation", "state"])
@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_normalisers_are_those_of_all_samples(found: list[dict[str, Any]], algorithm: str, group: str) -> None:
    seen = np.concatenate([np.array(process[algorithm]["seen"][group]) for process in found])
    assert seen.shape == (5 * 4 * 16, {"observation": 4, "state": 5}[group])
    moments = found[0][algorithm]["moments"][group]
    assert moments["count"] == len(seen)
    assert np.array(moments["mean"]) == pytest.approx(seen.mean(0), rel=1e-6, abs=1e-6)
    assert np.array(moments["m2"]) / len(seen) == pytest.approx(seen.var(0), rel=1e-6)
    # What one rank saw is far from it: 4 of 16 envs are 3 higher.
    own = np.array(found[0][algorithm]["seen"][group]).mean(0)
    assert np.abs(own - seen.mean(0))[:4] == pytest.approx([0.75] * 4, abs=0.2)


@pytest.mark.parametrize("index", [0, 1], ids=["plain", "values scaled"])
def test_an_update_of_two_ranks_is_that_of_one_process_with_all_samples(
    found: list[dict[str, Any]], index: int
) -> None:
    """With one minibatch per pass, since the library deals samples to minibatches at random, and a fixed rate."""
    one, other = (process["updates"][index] for process in found)
    assert one["together"] == other["together"]
    assert one["together"].keys() == one["alone"].keys()
    for name, values in one["together"].items():
        assert values == pytest.approx(one["alone"][name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a loss", r"not finite in iteration 5: loss policy on rank 1; "),
        ("rewards", r"not finite in iteration 5: moments of advantages on rank 1; "),
        ("a parameter", r"policy.params.log_std differs on rank 1 \(of 2\)"),
    ],
)
def test_what_one_rank_has_to_itself_ends_all_with_its_name(found: list[dict[str, Any]], what: str, words: str) -> None:
    told = [process["ppo"]["bad"][what] for process in found]
    assert told[0] == told[1] and "\n" not in told[0]
    assert re.search(words, told[0])


def test_what_is_no_loss_ends_nothing(found: list[dict[str, Any]]) -> None:
    assert [process["ppo"]["bad"]["a number"] for process in found] == [None, None]


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_what_rank_0_alone_has_read_goes_on_as_before(found: list[dict[str, Any]], algorithm: str) -> None:
    for process in found:
        assert process[algorithm]["again"] == process[algorithm]["state"]
        assert process[algorithm]["rows"][0] == process[algorithm]["rows"][1]


def test_exchanges_are_told(found: list[dict[str, Any]]) -> None:
    for process in found:
        tags = process["ppo"]["waits"]
        assert tags.count("gradient of policy") == tags.count("gradient of value") == 4  # 2 epochs of 2 minibatches
        assert tags.count("kl") == 2 and tags.count("metrics") == 1
        assert tags.count("moments of observations") == tags.count("moments of advantages") == 1
        assert process["sac"]["waits"].count("gradient of entropy") == 2


def test_ranks_count_by_their_samples(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["means"]["mean"] == {"a": [2.0], "b": [[3.0, 3.0], [3.0, 3.0]]}
        assert process["means"]["of one"] == 1.0
        assert process["means"]["rows"] == [[1.0, 0.1], [2.0, 0.1]]
        assert process["means"]["bad"] == ["", "", "numbers on rank 1", ""]


def test_a_rank_without_envs_is_refused(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["refusal"] == "rl_library skrl can't train on a rank without envs, as rank 1 is; give it some"
