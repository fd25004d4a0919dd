"""Comparing bundles: ratios computed by hand, what is refused, what is flagged, and how it reads in a terminal."""

import json
from pathlib import Path

import pytest

from lockstep.benchmark.bundle import write_bundle
from lockstep.benchmark.comparison.compare import compare
from lockstep.benchmark.schema import Bundle
from lockstep.cli.benchmark_compare import main, short_names
from lockstep.core.errors import UsageError
from tests.unit.bundle_fixtures import make_bundle


def written(folder: Path, **bundles: Bundle) -> list[str]:
    for name, bundle in bundles.items():
        write_bundle(bundle, folder / f"{name}.json")
    return [str(folder / f"{name}.json") for name in bundles]


def test_throughput_is_compared_with_the_first() -> None:
    # The slowest rank works for 12 ms and then for 9 ms; the exchanges add 2 ms to either.
    comparison = compare([make_bundle(compute_s=[0.010, 0.012]), make_bundle(compute_s=[0.008, 0.009])], ["a", "b"])
    first, second = comparison.entries
    assert first.steps_per_s == pytest.approx(2 * 256 * 24 / 0.014)
    assert first.ratio is not None and second.ratio is not None
    assert (first.ratio.value, first.ratio.low, first.ratio.high) == (1, 1, 1)
    assert second.ratio.value == pytest.approx(14 / 11)
    # Slow iterations take 3 % longer than the mean one, fast ones 2 % less.
    assert second.ratio.low == pytest.approx(14 / 11 * 0.98 / 1.03)
    assert second.ratio.high == pytest.approx(14 / 11 * 1.03 / 0.98)
    assert second.ratio.clear
    assert second.iteration_s is not None
    assert second.iteration_s.p10 == pytest.approx(0.011 * 0.98)
    assert second.iteration_s.p90 == pytest.approx(0.011 * 1.03)


def test_a_difference_within_the_spread_is_not_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundles = {"a": make_bundle(compute_s=[0.010, 0.0120]), "b": make_bundle(compute_s=[0.010, 0.0122])}
    assert main(written(tmp_path, **bundles)) == 0
    assert "0.94 to 1.04, unclear" in capsys.readouterr().out


def test_shares_are_those_of_a_mean_iteration() -> None:
    comparison = compare([make_bundle(compute_s=[0.010, 0.012])] * 2, ["a", "b"])
    shares = comparison.entries[0].shares
    assert shares is not None
    # 11 ms of work by the mean rank, of which a tenth is contention; it waits 1 ms; 2 ms go into exchanges.
    assert shares == pytest.approx(
        {"compute": 9.9 / 14, "contention": 1.1 / 14, "straggler_wait": 1 / 14, "communication": 2 / 14}
    )


def test_no_figure_of_a_rank_is_multiplied() -> None:
    # Twice the ranks, none faster than before: the ratio is that of all envs' steps, not of a rank's times a number.
    comparison = compare(
        [make_bundle(compute_s=(0.010, 0.012)), make_bundle(num_envs=(256,) * 4, compute_s=(*[0.010] * 3, 0.022))],
        ["two", "four"],
    )
    assert comparison.entries[1].ratio is not None
    assert comparison.entries[1].ratio.value == pytest.approx((1024 / 0.024) / (512 / 0.014))


def test_what_is_different_is_told() -> None:
    other = make_bundle(
        versions__python="3.12.1",
        run__dtype="bfloat16",
        run__config={"task": "cartpole_balance", "num_envs": 256, "agent": {"num_steps_per_env": 48}},
        num_nodes=2,
    )
    found = {(each.area, each.name): each.values for each in compare([make_bundle(), other], ["a", "b"]).differences}
    assert found[("versions", "python")] == ("3.11.9", "3.12.1")
    assert found[("settings", "dtype")] == ("float32", "bfloat16")
    assert found[("settings", "agent.num_steps_per_env")] == ("24", "48")
    assert found[("hardware", "hosts")] == ("node-0", "node-0, node-1")
    assert ("settings", "seed") not in found
    assert compare([make_bundle(), make_bundle()], ["a", "b"]).differences == ()


def test_phases_of_starts_are_compared() -> None:
    slower = make_bundle("startup").model_dump()
    for phase in slower["startup"]["phases"]:
        for kind in ("cold_s", "warm_s"):
            phase[kind]["median"] *= 3
    slower["startup"]["phases"][0]["cold_s"] = None
    comparison = compare([make_bundle("startup"), Bundle.model_validate(slower)], ["a", "b"])
    imports, config = comparison.entries[1].phases[:2]
    assert (imports.name, imports.cold_s, imports.cold_ratio) == ("imports", None, None)
    assert imports.warm_ratio == pytest.approx(3)
    assert config.cold_ratio == pytest.approx(3)
    assert comparison.entries[1].ratio is None


@pytest.mark.parametrize(
    ("bundles", "strong", "words"),
    [
        ([make_bundle()], False, "needs two bundles at least"),
        ([make_bundle(), make_bundle("training")], False, "kind training, a of kind runtime"),
        ([make_bundle(), make_bundle(run__task="pendulum")], False, "of task pendulum, a of cartpole_balance"),
        ([make_bundle(num_envs=(256, 256)), make_bundle(num_envs=(128, 128))], False, "with --num_envs 256"),
        # Equal totals: then, and only then, --strong is a way on.
        ([make_bundle(num_envs=(256,)), make_bundle(num_envs=(128, 128))], False, "add --strong to compare equal"),
        ([make_bundle(num_envs=(320, 192)), make_bundle()], False, "different numbers of envs on its ranks (320, 192)"),
        ([make_bundle(num_envs=(320, 192)), make_bundle(num_envs=(320, 192))], False, "add --strong"),
        ([make_bundle(num_envs=(256,)), make_bundle(num_envs=(256, 256))], True, "--total_envs 256"),
    ],
)
def test_what_is_refused(bundles: list[Bundle], strong: bool, words: str) -> None:
    with pytest.raises(UsageError) as error:
        compare(bundles, ["a", "b"][: len(bundles)], strong)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_strong_takes_equal_totals_and_flags_unequal_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundles = {"one": make_bundle(num_envs=(512,)), "two": make_bundle(num_envs=(320, 192))}
    assert main([*written(tmp_path, **bundles), "--strong"]) == 0
    assert "note: two has different numbers of envs on its ranks (320, 192)" in capsys.readouterr().out
    assert compare(list(bundles.values()), list(bundles), strong=True).flags != ()
    assert compare([make_bundle(num_envs=(512,)), make_bundle()], ["a", "b"], strong=True).flags == ()


def test_the_terminal_shows_every_bundle_in_120_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundles = {f"a_bundle_with_a_long_name_{k}": make_bundle(num_envs=(256,) * k) for k in (1, 2, 4, 8)}
    assert main(written(tmp_path, **bundles)) == 0
    output = capsys.readouterr().out
    assert max(len(line) for line in output.splitlines()) <= 120
    assert "\x1b" not in output
    assert output.count("Rank 7 is a straggler") == 1
    assert "878 k" in output  # 512 envs x 24 steps / 14 ms


def test_names_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(written(tmp_path, **{"[bold]a[_bold]": make_bundle(), "b": make_bundle()})) == 0
    assert "[bold]a" in capsys.readouterr().out


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path, a=make_bundle(compute_s=[0.010, 0.012]), b=make_bundle(compute_s=[0.008, 0.009]))
    assert main([*paths, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in content["entries"]] == ["a", "b"]
    assert content["entries"][1]["ratio"]["value"] == pytest.approx(14 / 11)
    assert content["strong"] is False


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no bundles given"),
        (["a.json"], "1 bundle given"),
        (["a.json", ""], "the path of a file"),
        (["a.json", "b.json"], "a.json: No such file or directory"),
        (["a.json", "b.json", "--stron"], "did you mean '--strong'"),
        (["a.json", "b.json", "--output", "c.html"], "lockstep report"),
        (["a.json", "b.json", "--strong=perhaps"], "strong must be true or false"),
    ],
)
def test_wrong_command_lines(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        main(argv)
    assert words in str(error.value)


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(flag in output for flag in ("--strong", "--json"))


def test_names_stay_short_while_they_are_distinct() -> None:
    assert short_names(["out/a.json", "out/b.json"]) == ["a", "b"]
    assert short_names(["1/a.json", "2/a.json"]) == ["1/a.json", "2/a.json"]
    assert short_names(["a.json", "a.json"]) == ["a.json (1)", "a.json (2)"]
