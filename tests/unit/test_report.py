"""The pages of bundles: every figure is there and exact, nothing is taken for HTML, nothing comes from elsewhere."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.benchmark.amounts import digits, duration, per_rank, rate, seconds, share
from lockstep.benchmark.bundle import write_bundle
from lockstep.benchmark.comparison.screen import PARTS
from lockstep.benchmark.scaling.result import write_scaling
from lockstep.benchmark.scaling.sweep import Job, Sweep, result_of
from lockstep.benchmark.schema import Bundle
from lockstep.cli.report import main
from lockstep.core.errors import RunError, UsageError
from tests.unit.bundle_fixtures import make_bundle
from tests.unit.page_fixtures import Page, make_run, page_of

ATTACK = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;{{ 7 * 7 }}"


def written(name: str, bundle: Bundle) -> Path:
    write_bundle(bundle, Path(name))
    return Path(name)


def test_every_rank_has_its_row_with_its_own_figures() -> None:
    bundle = make_bundle(num_envs=(256, 128, 64), compute_s=(0.010, 0.0125, 0.008), device="cuda")
    page = page_of(written("three.json", bundle))
    table = page.table("All ranks, all figures")
    assert [row[0] for row in table.rows] == ["0", "1 slowest", "2"]
    assert table.marked == [table.rows[1]]
    work = table.head.index("own work ms")
    assert [row[work] for row in table.rows] == [
        "10.0 11.0",
        "12.5 13.8",
        "8.00 8.80",
    ]  # mean, and a tenth more at most
    assert [row[table.head.index("envs")] for row in table.rows] == ["256", "128", "64"]
    assert [row[table.head.index("cores")] for row in table.rows] == ["0-1", "2-3", "4-5"]
    assert table.rows[2][table.head.index("GPU UUID")] == "GPU-00000000-0000-0000-0000-000000000002"


def test_figures_are_exactly_those_of_the_bundle() -> None:
    bundle = make_bundle("training", compute_s=(0.010, 0.0123), device="cuda")
    exact = set(page_of(written("a.json", bundle)).exact)
    runtime = bundle.runtime
    assert runtime is not None and runtime.split is not None
    expected = {runtime.steps_per_s, runtime.iteration_s.p10, runtime.iteration_steps_per_s.p90, runtime.warm_up.wall_s}
    expected |= set(runtime.split.model_dump().values())
    uses = [use for rank in bundle.ranks for use in rank.model_dump().values() if isinstance(use, dict)]
    assert len(uses) == 24  # two ranks with twelve figures each
    expected |= {use[name] for use in uses for name in ("mean", "peak")}
    expected |= {rank.wall_s for rank in bundle.ranks} | {runtime.exchanges[0].num_bytes}
    assert expected <= exact


def test_figures_that_no_rank_has_are_left_out() -> None:
    bundle = make_bundle().model_dump()
    for rank in bundle["ranks"]:
        rank["contention_s"] = None
    bundle["ranks"][0]["rollout_s"] = None
    table = page_of(written("a.json", Bundle.model_validate(bundle))).table("All ranks, all figures")
    assert not any(name.startswith(("contention", "GPU")) for name in table.head)
    rollout = next(number for number, name in enumerate(table.head) if name.startswith("rollout"))
    assert [row[rollout] for row in table.rows] == ["–", "7.20 7.92"]


def test_the_headline_findings_and_split_are_in_words() -> None:
    text = page_of(written("a.json", make_bundle(compute_s=(0.010, 0.012)))).text
    assert "878 k env steps/s by 2 ranks on 1 node" in text
    assert "Rank 1 is a straggler" in text
    assert "compute 9.90 ms 70.7 %" in text
    assert "communication 2.00 ms 14.3 %" in text


def test_what_is_not_known_is_said() -> None:
    note = "An iteration is one program of the compiler's."
    page = page_of(written("a.json", make_bundle(runtime__split=None, runtime__split_note=note, compute_spread=None)))
    assert note in page.text


def test_names_are_text_not_markup() -> None:
    bundle = make_bundle(
        "training",
        num_nodes=2,
        run__task=ATTACK,
        run__command=("lockstep", ATTACK),
        run__config={ATTACK: {"$x^2$": ATTACK}},
        runtime__split_note=ATTACK,
        findings=({"reason": "unknown", "rank": None, "lost_share": 0.1, "words": ATTACK},),
    ).model_dump()
    for part in (*bundle["ranks"], *bundle["hardware"]):
        part["host"] = ATTACK
    bundle["runtime"]["exchanges"][0]["tag"] = ATTACK
    name = written(f"{ATTACK.replace('/', '_')}.json", Bundle.model_validate(bundle))
    page = page_of(name)  # which looks for elements and attributes that must not be there
    assert page.text.count(ATTACK) > 8
    assert page.table("All ranks, all figures").rows[0][1] == ATTACK
    raw = Path("page.html").read_text(encoding="utf-8")
    assert "<script" not in raw and "<img" not in raw and "49" not in page.table("Exchanges between ranks").rows[0][0]


def test_128_ranks_are_all_there() -> None:
    work = [0.010 + 0.00002 * ((37 * rank) % 128) for rank in range(128)]
    bundle = make_bundle(num_envs=[512] * 128, compute_s=work, num_nodes=16, device="cuda")
    page = page_of(written("big.json", bundle))
    rows = page.table("All ranks, all figures").rows
    assert [row[0].split()[0] for row in rows] == [str(rank) for rank in range(128)]
    assert len(page.table("Hardware of every node").rows) == 16
    assert Path("page.html").stat().st_size < 2**20


FIGURE = st.floats(0, allow_infinity=False, allow_nan=False) | st.sampled_from([0.0, 5e-324, 1e300, 1.7e308])


@settings(max_examples=12)
@given(
    speed=st.fixed_dictionaries(dict.fromkeys(("num", "mean", "median", "p10", "p90", "least", "most", "std"), FIGURE)),
    split=st.fixed_dictionaries({f"{name}_s": FIGURE for name in PARTS}),
    uses=st.lists(st.none() | st.fixed_dictionaries({"mean": FIGURE, "peak": FIGURE}), min_size=2, max_size=2),
    returns=st.lists(st.none() | st.floats(allow_infinity=False, allow_nan=False), max_size=4),
    rate=FIGURE,
)
def test_figures_of_any_size_make_a_page(
    tmp_path_factory: pytest.TempPathFactory,
    speed: dict[str, Any],
    split: dict[str, float],
    uses: list[dict[str, float] | None],
    returns: list[float | None],
    rate: float,
) -> None:
    content = make_bundle("training").model_dump()
    content["runtime"] |= {"iteration_s": speed | {"num": 3}, "iteration_steps_per_s": speed | {"num": 3}}
    content["runtime"] |= {"split": split, "steps_per_s": rate or 1.0}
    content["learning"]["curve"] = tuple((100 * k, value) for k, value in enumerate(returns))
    for rank, use in zip(content["ranks"], uses, strict=True):
        rank |= {"compute_s": use, "memory_bytes": use}
    folder = tmp_path_factory.mktemp("bundles")
    for name in ("a", "b"):
        write_bundle(Bundle.model_validate(content), folder / f"{name}.json")
    page_of(folder / "a.json", folder / "b.json", output=str(folder / "page.html"))


def test_a_start_is_told_phase_by_phase() -> None:
    bundle = make_bundle("startup")
    assert bundle.startup is not None
    page = page_of(written("a.json", bundle))
    rows = page.table("Phases, in figures").rows
    assert [row[0] for row in rows] == [phase.name for phase in bundle.startup.phases]
    assert rows[0][1:3] == ["3.02 s 3.03 s", "2.01 s 2.02 s"]
    assert {phase.cold_s.median for phase in bundle.startup.phases if phase.cold_s} <= set(page.exact)
    assert page.table("Functions that take longest").rows[0][0] == "torch/__init__.py:1 <module>"
    assert "5.03 s from a warm start" in page.text


def test_a_start_without_cold_or_warm_figures() -> None:
    bundle = make_bundle("startup").model_dump()
    for phase in bundle["startup"]["phases"]:
        phase["cold_s"] = None
    bundle["startup"]["functions"] = ()
    page = page_of(written("a.json", Bundle.model_validate(bundle)))
    assert "cold" not in page.table("Phases, in figures").head
    for phase in bundle["startup"]["phases"]:
        phase["warm_s"] = None
    page_of(written("b.json", Bundle.model_validate(bundle)))


def test_several_bundles_are_compared() -> None:
    paths = [
        written("before.json", make_bundle(compute_s=(0.010, 0.012))),
        written("after.json", make_bundle(compute_s=(0.008, 0.009), run__dtype="bfloat16")),
        written("start.json", make_bundle("startup")),
    ]
    page = page_of(*paths)
    rows = page.table("Throughput, in figures").rows
    assert [row[0] for row in rows] == ["before", "after"]  # and not the start, which is of another kind
    assert rows[1][2] == "1.27"
    assert ["dtype", "settings", "float32", "bfloat16"] in page.table("What else is different").rows
    assert "The fastest is after: 1.27 times the throughput of before." in page.text


def test_bundles_that_do_not_compare_are_shown_apart() -> None:
    paths = [written("a.json", make_bundle()), written("b.json", make_bundle(num_envs=(64, 64)))]
    page = page_of(*paths)
    assert "b has 64 envs on each rank, a 256" in page.text
    assert len([table for table in page.tables if table.label == "All ranks, all figures"]) == 2


def test_one_bundle_of_other_work_keeps_the_rest_from_nothing() -> None:
    paths = [
        written("a.json", make_bundle()),
        written("uneven.json", make_bundle(num_envs=(64, 32))),
        written("b.json", make_bundle(compute_s=(0.008, 0.009))),
    ]
    page = page_of(*paths)
    assert [row[0] for row in page.table("Throughput, in figures").rows] == ["a", "b"]
    assert "Not compared" not in page.text


def test_equal_totals_are_compared_as_such() -> None:
    page = page_of(written("a.json", make_bundle(num_envs=(512,))), written("b.json", make_bundle(num_envs=(320, 192))))
    assert "the same number of envs in total" in page.text
    assert "b has different numbers of envs on its ranks (320, 192)" in page.text


def test_a_sweep_has_a_section() -> None:
    bundles = {1: make_bundle(num_envs=(64,)), 2: make_bundle(num_envs=(64, 64))}
    jobs = [Job(count, 0, bundle, f"{count}.json") for count, bundle in bundles.items()]
    result = result_of(Sweep((1, 2), 1, is_strong=False, command=(ATTACK,)), jobs)
    write_scaling(result, Path("scaling.json"))
    page = page_of("scaling.json")
    rows = page.table("By number of ranks").rows
    assert [row[0] for row in rows] == ["1", "2"]
    assert {each.mean_steps_per_s for each in result.counts} | {result.counts[1].efficiency.mean} <= set(page.exact)
    assert result.counts[1].verdict in page.text
    assert ATTACK in page.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no in.json"),
        ("", "is no JSON"),
        ('{"a": 1', "is no JSON"),
        ("[]", "is no bundle"),
        ('{"schema_version": 99}', "has schema_version 99"),
        ('{"schema_version": 1, "kind": "runtime"}', "is damaged"),
        ('{"kind": "scaling"}', "no result of a scaling sweep"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_what_is_no_bundle_is_told_in_a_line(
    content: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("in.json").write_text(content)
    with pytest.raises(UsageError) as error:
        main(["in.json"])
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not Path("report.html").exists()
    assert capsys.readouterr().out == ""


def test_what_is_broken_among_others_is_left_out_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.json").write_text('{"a": ')
    page = page_of("broken.json", written("a.json", make_bundle()))
    assert "Left out broken.json is no JSON" in page.text
    assert "left out: broken.json is no JSON" in capsys.readouterr().err


def test_pipes_and_devices_are_not_read_forever() -> None:
    os.mkfifo("pipe")
    for path in ("pipe", "/dev/zero"):
        with pytest.raises(UsageError, match="no regular file"):
            main([path])


def test_the_page_is_where_it_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    bundle, run = written("a.json", make_bundle()), make_run(Path("run"))
    assert main([str(bundle)]) == 0
    assert Path("report.html").is_file()
    assert main([str(run)]) == 0
    assert (run / "report.html").is_file()
    assert capsys.readouterr().out == "report: report.html\nreport: run/report.html\n"
    assert main([str(run), str(bundle), "--output=both.html"]) == 0
    assert Path("both.html").is_file()


def test_an_older_page_is_replaced_at_once() -> None:
    Path("report.html").write_text("old")
    inode = Path("report.html").stat().st_ino
    assert main([str(written("a.json", make_bundle()))]) == 0
    assert Path("report.html").stat().st_ino != inode
    assert Page(Path("report.html").read_text(encoding="utf-8")).tables
    assert sorted(path.name for path in Path().iterdir()) == ["a.json", "report.html"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "what to report on"),
        ([""], "is a path, not ''"),
        (["a.json", "--output", "."], "is a folder"),
        (["a.json", "--output", "missing/page.html"], "missing does not exist"),
        (["a.json", "--output", "a.json/page.html"], "a.json is no folder"),
        (["a.json", "--output", "a.json"], "would replace what the report is made of"),
        (["a.json", "--output"], "needs a value"),
        (["a.json", "--outpt", "b.html"], "did you mean '--output'"),
        (["a.json", "--run", "b"], "without flags"),
    ],
)
def test_wrong_command_lines(argv: list[str], words: str) -> None:
    written("a.json", make_bundle())
    before = Path("a.json").read_bytes()
    with pytest.raises(UsageError) as error:
        main(argv)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert Path("a.json").read_bytes() == before


def test_a_name_that_is_too_long_for_the_disk() -> None:
    path = str(written("a.json", make_bundle()))
    with pytest.raises(UsageError, match="longer than 220 bytes"):
        main([path, "--output", "x" * 221])
    assert main([path, "--output", "x" * 220]) == 0


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder here in which nobody may make a file")
def test_a_folder_that_takes_no_file() -> None:
    with pytest.raises(RunError) as error:
        main([str(written("a.json", make_bundle())), "--output", "/proc/page.html"])
    assert str(error.value).startswith("can't write /proc/page.html: ") and "\n" not in str(error.value)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert "--output FILE.html" in output
    assert max(map(len, output.splitlines())) <= 120


def test_amounts_read_well() -> None:
    assert [seconds(value) for value in (0, 0.0000123, 0.01234, 1.5, None)] == [
        "0 s",
        "12.3 µs",
        "12.3 ms",
        "1.50 s",
        "–",
    ]
    assert [seconds(0.9996), rate(999_600), rate(123)] == ["1.00 s", "1.00 M env steps/s", "123 env steps/s"]
    assert [digits(value) for value in (-0.5, 12.34, 1234.5, 2e9, 0.0123)] == [
        "-0.50",
        "12.3",
        "1234",
        "2.00e+09",
        "0.012",
    ]
    assert [duration(value) for value in (59, 61, 3661, 90_000)] == [
        "59.0 s",
        "1:01 min",
        "01:01:01 h",
        "1 d 01:00:00 h",
    ]
    assert [share(0.123), share(-0.0001)] == ["12.3 %", "0.0 %"]
    assert [per_rank(256), per_rank((3, 2)), per_rank(tuple(range(1, 20)))] == ["256", "3, 2", "1 to 19"]
