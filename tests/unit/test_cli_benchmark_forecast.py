import json
from pathlib import Path

import pytest

from lockstep.benchmark.bundle import write_bundle
from lockstep.cli.benchmark_forecast import main
from lockstep.core.errors import UsageError
from tests.unit.bundle_fixtures import make_bundle
from tests.unit.forecast_fixtures import World, grid

NETWORK = ["--bandwidth", "100Gb/s", "--latency", "5us"]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = []
    for name, bundle in grid(World(), device="cuda"):
        write_bundle(bundle, tmp_path / name)
        found.append(str(tmp_path / name))
    return found


def test_the_table_has_a_line_for_each_size_and_then_come_words(
    paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*paths, "--nodes", "16", "--gpus_per_node", "8", *NETWORK]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "500 envs per rank, 10 steps each per iteration, networks of 5,000 parameters"
    assert lines[2].split()[:4] == ["ranks", "nodes", "env", "steps/s"]
    assert [line.split()[:2] for line in lines[3:11]] == [
        ["1", "1"], ["2", "1"], ["4", "1"], ["8", "1"], ["16", "2"], ["32", "4"], ["64", "8"], ["128", "16"]
    ]  # fmt: skip
    assert "\nScaling " in printed
    assert "\nerror: each of 8 measured settings foretold from all others: median error" in printed
    assert "\nwarning: the network between nodes was never measured" in printed


def test_json_is_one_object_with_the_same(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*paths, "--nodes=2", "--ranks-per-node", "2", "--num_envs", "1000", "--json", *NETWORK]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["num_ranks"] for row in result["rows"]] == [1, 2, 4]
    assert result["num_envs"] == 1000
    parts = ("compute_s", "shared_memory_s", "turns_s", "straggler_s", "lagging_s", "latency_s", "bandwidth_s")
    for row in result["rows"]:
        assert row["iteration_s"] == pytest.approx(sum(row[part] for part in parts))
        assert row["steps_per_s"] == pytest.approx(row["num_ranks"] * 1000 * 10 / row["iteration_s"])
    assert len(result["held_back"]["points"]) == 8
    assert result["held_back"]["worst_error"] == max(abs(each["error"]) for each in result["held_back"]["points"])
    assert result["words"].startswith("Scaling goes on up to 4 ranks")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "a forecast needs bundles of trainings"),
        (["x.json", "--nodes", "0"], "nodes must be at least 1, not 0"),
        (["x.json", "--gpus_per_node", "eight"], "gpus_per_node must be a whole number, not 'eight'"),
        (["x.json", "--gpus_per_node", "8", "--ranks_per_node", "8"], "are the same; keep one"),
        (["x.json", "--bandwidth", "100Gb/s"], "--bandwidth alone does not describe a network; give --latency 5us too"),
        (["x.json", "--latency", "5us"], "--latency alone does not describe a network; give --bandwidth 100Gb/s too"),
        (["x.json", "--bandwidth", "fast", "--latency", "5us"], "bandwidth must be as 100Gb/s (bits)"),
        (["x.json", "--bandwidth", "1Gb/s", "--latency", "5"], "latency must be as 5us, 800ns or 0.1ms, not '5'"),
        (["x.json", "--num_envs", "-1"], "num_envs must be at least 1, not -1"),
        (["x.json", "--node", "2"], "unknown flag '--node'; did you mean '--nodes'?"),
        (["x.json"], "bundle x.json: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        main(argv)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_bundle_of_another_benchmark_is_named_by_its_path(paths: list[str], tmp_path: Path) -> None:
    write_bundle(make_bundle("startup"), tmp_path / "startup.json")
    with pytest.raises(UsageError, match=r"startup\.json is of lockstep benchmark startup"):
        main([*paths, str(tmp_path / "startup.json")])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "usage: lockstep benchmark forecast BUNDLE..." in capsys.readouterr().out
