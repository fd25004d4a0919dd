"""Bundles on the disk: written whole, read strictly, and described by the page in docs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.benchmark import schema_page
from lockstep.benchmark.bundle import parse_bundle, read_bundle, write_bundle
from lockstep.benchmark.schema import Bundle
from lockstep.benchmark.spread import spread_of, use_of
from lockstep.core.errors import UsageError
from tests.unit.bundle_fixtures import make_bundle

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bundle", [make_bundle("training"), make_bundle("runtime", (3, 5)), make_bundle("startup")])
def test_what_is_written_is_read_again(bundle: Bundle, tmp_path: Path) -> None:
    write_bundle(bundle, tmp_path / "bundle.json")
    assert read_bundle(tmp_path / "bundle.json") == bundle
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.json"]


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (0, "schema_version 0, older than the 1 that this lockstep reads"),
        (2, "schema_version 2, not the 1 that this lockstep reads"),
        ("1", "schema_version '1', not the 1 that"),
        (True, "schema_version True, not the 1 that"),
        (None, "schema_version None, not the 1 that"),
    ],
)
def test_other_versions_are_refused(version: Any, words: str) -> None:
    content = make_bundle().model_dump(mode="json") | {"schema_version": version}
    with pytest.raises(UsageError, match=re.escape(words)):
        parse_bundle(content, "old.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 3}, "ranks must be 0 to 2, each once and in order"),
        ({"total_envs": 7}, "total_envs must be the sum of the ranks' num_envs"),
        ({"slowest_rank": 2}, "slowest_rank 2 is not among 2 ranks"),
        ({"runtime": None}, "a bundle of kind startup has startup, any other has runtime"),
        ({"kind": "walking"}, "damaged: kind: input should be 'startup', 'runtime' or 'training'"),
        ({"mood": "good"}, "damaged: mood: extra inputs are not permitted"),
        ({"ranks": []}, "damaged: ranks"),
        ({"hardware": []}, "hardware must name the nodes 0 to 0"),
    ],
)
def test_what_does_not_agree_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        parse_bundle(make_bundle().model_dump(mode="json") | changes, "b.json")
    assert "\n" not in str(caught.value)


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    text = make_bundle().model_dump_json()
    (tmp_path / "b.json").write_text(re.sub(r'"steps_per_s":[0-9.e+]+', '"steps_per_s":NaN', text))
    with pytest.raises(UsageError, match=r"b\.json is damaged: runtime\.steps_per_s"):
        read_bundle(tmp_path / "b.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '{"a": 1}', "\xff", "[" * 100_000])
def test_what_is_no_bundle_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"give a file that lockstep benchmark wrote$") as caught:
        read_bundle(tmp_path / "b.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.json", ".", "a/b.json"])
def test_a_file_that_is_not_there_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^bundle "):
        read_bundle(tmp_path / name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CONTENT = make_bundle("training").model_dump(mode="json")


@given(st.sampled_from(sorted(CONTENT)), JSON)
@settings(max_examples=150, deadline=None)
def test_whatever_stands_in_a_field_is_taken_or_refused_in_one_line(name: str, value: Any) -> None:
    try:
        found = parse_bundle(CONTENT | {name: value}, "b.json")
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert found.model_dump(mode="json")[name] == json.loads(json.dumps(value))


def test_the_page_of_the_schema_is_up_to_date() -> None:
    # python -m lockstep.benchmark.schema_page > docs/benchmark-schema.md
    assert (ROOT / "docs/benchmark-schema.md").read_text() == schema_page.page().rstrip("\n") + "\n"


def test_the_page_describes_every_field() -> None:
    page = schema_page.page()
    for record in schema_page._records(Bundle):
        assert f"## {record.__name__}\n" in page
        for name in record.model_fields:
            assert f"| `{name}` |" in page


def test_a_spread() -> None:
    spread = spread_of([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (spread.num, spread.mean, spread.median, spread.least, spread.most) == (5, 4.0, 3.0, 1.0, 10.0)
    assert (spread.p10, spread.p90) == pytest.approx((1.4, 7.6))
    assert spread.std == pytest.approx(12.5**0.5)
    assert spread_of([2.0]).std == 0.0
    assert use_of([]) is None
    assert use_of([1.0, 3.0]) == use_of([3.0, 1.0])
