"""The pages of runs: what they show of a whole run, and of one that is damaged in any way."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.benchmark.report.charts import MAX_POINTS
from lockstep.benchmark.report.plain import as_text, core_list
from lockstep.benchmark.report.run_record import read_run
from lockstep.cli.report import main
from lockstep.core.errors import UsageError
from tests.unit.page_fixtures import Page, make_record, make_run, page_of

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def test_a_run_is_told_in_words_figures_and_tables() -> None:
    page = page_of(make_run(Path("run")))
    assert "Finished (all iterations are done). 10 of 10 iterations, 30.7 k env steps, 2.50 s of training." in page.text
    assert page.table("Ranks").head == ["rank", "host", "local rank", "device", "cores", "process id"]
    assert page.table("Ranks").rows == [
        ["0", "host-0", "0", "cpu", "0-1", "100"],
        ["1", "host-1", "1", "cpu", "2-3", "101"],
    ]
    assert [row[:3] for row in page.table("Attempts").rows] == [
        ["1", "2026-03-01 12:00:00 +0000", "0"],
        ["2", "2026-03-01 13:00:00 +0000", "4"],
    ]
    metrics = {row[0]: row[1:] for row in page.table("Metrics").rows}
    assert metrics["mean_return"] == ["125", "9"]  # of the last of 10 iterations; the first had no whole episode
    assert "lockstep 0123456789ab, with changes" in page.text
    assert "num_envs: 64" in page.text
    assert "Left out" not in page.text


def test_charts_are_there_and_say_what_they_show() -> None:
    records = [make_record(k) for k in range(1, 11)]
    records[9] |= {"eval/mean_return": 140.0}
    page = page_of(make_run(Path("run"), records))
    labels = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == 6
    assert "Mean return over env steps: training from 25.0 to 125; evaluation from 140 to 140" in labels
    assert "Reward terms over env steps: alive from 40.0 to 200; effort from -15.0 to -75.0" in labels
    assert any("on average rollout 60.0 ms, update 30.0 ms, wait 10.0 ms" in label for label in labels)
    assert "wait 10.0 ms 10 %" in page.text


def test_colours_of_charts_are_those_of_the_page() -> None:
    make_run(Path("run"))
    assert main(["run"]) == 0
    html = Path("run/report.html").read_text(encoding="utf-8")
    drawn = html[html.index("<svg") : html.rindex("</svg>")]
    assert "#fe01" not in html, "a stand-in for a colour was left"
    assert "fill: var(--muted)" in drawn and "stroke: var(--series-1)" in drawn
    assert "xmlns" not in html and "DejaVu" not in drawn and "<metadata" not in html


def test_the_throughput_of_a_run_is_work_over_time() -> None:
    # 3072 env steps at 10 k steps/s and as many at 30 k: 6144 in 0.4096 s.
    records = [make_record(k, steps_per_s=rate) for k, rate in ((1, 1.0), (2, 10_000.0), (3, 30_000.0))]
    page = page_of(make_run(Path("run"), records))
    assert any(value == pytest.approx(15_000.0) for value in page.exact)


def test_jax_has_steps_instead_of_rollouts_and_updates() -> None:
    records = [
        {"iteration": k, "env_steps": 100 * k, "time/step_mean": 0.05, "time/compile": 2.0 if k == 1 else None}
        for k in range(1, 4)
    ]
    assert "step 50.0 ms 100 %" in page_of(make_run(Path("run"), records)).text


def test_long_runs_are_thinned() -> None:
    records = [make_record(k, mean_return=float(k % 7)) for k in range(1, 10 * MAX_POINTS)]
    page = page_of(make_run(Path("run"), records))
    assert "Points are means of neighbouring iterations." in page.text
    assert Path("page.html").stat().st_size < 300_000


def test_a_run_without_iterations() -> None:
    page = page_of(make_run(Path("run"), []))
    assert "The run has no whole iteration yet." in page.text
    assert "svg" not in page.tags


def test_a_run_without_metrics_or_progress() -> None:
    run = make_run(Path("run"))
    (run / "metrics.jsonl").unlink()
    (run / "progress.json").write_text("{", encoding="utf-8")
    page = page_of(run)
    assert "There is no metrics.jsonl" in page.text
    assert "progress.json is missing or damaged" in page.text
    assert "unknown status" in page.text


def test_several_runs_of_a_task_are_put_beside_each_other() -> None:
    first = make_run(Path("first"))
    second = make_run(Path("second"), [make_record(k, mean_return=33.0, steps_per_s=5000.0) for k in range(1, 4)])
    page = page_of(first, second)
    assert [row[:5] for row in page.table("Runs, in figures").rows] == [
        ["first", "finished", "125", "–", "20.0 k"],
        ["second", "finished", "33.0", "–", "5.00 k"],
    ]
    labels = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert "Mean return by time: first reaches 125; second reaches 33.0" in labels
    assert "Runs, in figures" not in [table.label for table in page_of(first).tables]


def test_half_a_line_is_left_out_and_noted() -> None:
    run = make_run(Path("run"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 11, "env_st')
    page = page_of(run)
    assert "1 line of metrics.jsonl is damaged and left out." in page.text
    assert read_run(run).num_iterations == 10


def test_a_metric_that_comes_late_or_is_none_keeps_its_place() -> None:
    records: list[dict[str, Any]] = [
        {"iteration": 1},
        {"iteration": 2, "late": 5},
        {"iteration": 3, "late": None},
        {"iteration": 4, "late": "x"},
    ]
    run = read_run(make_run(Path("run"), records))
    assert [repr(value) for value in run.columns["late"].tolist()] == ["nan", "5.0", "nan", "nan"]
    assert run.last("late") == 5.0


@pytest.mark.parametrize("missing", ["config.yaml", "run.json"])
def test_what_is_no_run_directory(missing: str) -> None:
    run = make_run(Path("run"))
    (run / missing).unlink()
    with pytest.raises(UsageError, match=f"it has no {missing}"):
        main(["run"])
    assert not (run / "report.html").exists()


def test_names_of_a_run_are_text_not_markup() -> None:
    records = [make_record(k, **{f"reward/{ATTACK}": 1.0 * k, "metric/$x^2$ & <b>": 2.0}) for k in range(1, 4)]
    run = make_run(
        Path(ATTACK.replace("/", "_")),
        records,
        host=ATTACK,
        ranks=[{"rank": 0, "host": ATTACK, "device": ATTACK}],
        versions={ATTACK: ATTACK},
        git={"lockstep": {"commit": ATTACK}},
    )
    (run / "config.yaml").write_text(f"task: {ATTACK!r}\nother: '{{{{ 7 * 7 }}}}'\n", encoding="utf-8")
    (run / "progress.json").write_text(json.dumps({"status": ATTACK, "reason": ATTACK}), encoding="utf-8")
    page = page_of(run)
    assert page.text.count(ATTACK) > 5
    assert page.table("Ranks").rows == [["0", ATTACK, ATTACK]]
    assert "{{ 7 * 7 }}" in page.text
    assert "$x^2$ & <b>" in page.text


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    run = make_run(Path(os.fsdecode(b"run-\xff")))
    assert "run run-?" in page_of(run).text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["<b>&\"'", "\ud800", "\x00\x1b", "$\\frac{1}$", "x" * 3000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
INFO = ("versions", "git", "host", "hardware", "seed", "world_size", "ranks", "attempts", "run_id", "platform")
RANK = st.dictionaries(st.sampled_from(["rank", "host", "device", "cores", "pid", "command", "start_time"]), JSON)
METRICS = ("env_steps", "wall_s", "steps_per_s", "mean_return", "reward/a", "eval/mean_return")
TIMES = ("time/rollout_mean", "time/update_mean", "time/step_mean")


@settings(max_examples=15)
@given(
    info=st.dictionaries(st.sampled_from(INFO), JSON | st.lists(RANK, max_size=2) | RANK),
    progress=JSON | st.dictionaries(st.sampled_from(["iteration", "env_steps", "wall_s", "status", "reason"]), JSON),
    lines=st.lists(
        st.dictionaries(st.sampled_from((*METRICS, *TIMES)), JSON | st.floats(), max_size=6).map(
            lambda values: json.dumps({"iteration": 1, **values})
        )
        | JSON.map(json.dumps)
        | st.text(max_size=20),
        max_size=6,
    ),
    config=st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()),
)
def test_whatever_a_run_holds_there_is_a_whole_page_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, info: dict[str, Any], progress: Any, lines: list[str], config: bytes
) -> None:
    run = make_run(tmp_path_factory.mktemp("runs") / "run", [])
    (run / "run.json").write_text(json.dumps(info), encoding="utf-8")
    (run / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
    (run / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    (run / "config.yaml").write_bytes(config)
    try:
        assert main([str(run)]) == 0
    except UsageError as error:
        assert "\n" not in str(error)
        return
    Page((run / "report.html").read_text(encoding="utf-8")).assert_whole()


@settings(max_examples=60)
@given(
    content=JSON.map(json.dumps) | st.text() | JSON.map(lambda value: json.dumps({"schema_version": 1, "kind": value}))
)
def test_whatever_a_file_holds_it_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: str
) -> None:
    path = tmp_path_factory.mktemp("files") / "in.json"
    path.write_text(content, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(UsageError) as error:
        main([str(path)])
    assert "\n" not in str(error.value)


@given(value=JSON)
def test_any_value_is_a_short_text(value: Any) -> None:
    assert 0 < len(as_text(value)) <= 2001
    core_list(value)


def test_cores_are_drawn_together() -> None:
    assert core_list([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert core_list([3]) == "3"
    assert core_list(None) == "–"
