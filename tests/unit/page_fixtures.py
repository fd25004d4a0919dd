"""A report's page taken apart, and run directories made by hand."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from lockstep.cli.report import main

_VOID = {"meta", "br", "hr", "img", "input", "link", "source"}


@dataclass
class TableSeen:
    """A table of a page: its label, its head, and its rows as the texts of their cells."""

    label: str
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    marked: list[list[str]] = field(default_factory=list)


class Page(HTMLParser):
    """What a browser would find in a page, as far as the tests ask."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.styles: list[str] = []
        self.words: list[str] = []
        self.exact: list[float] = []
        self.tables: list[TableSeen] = []
        self._open: list[str] = []
        self._cell: list[str] | None = None
        self.feed(html)
        self.close()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def table(self, label: str) -> TableSeen:
        (found,) = [table for table in self.tables if table.label == label]
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in values.items()]
        if tag not in _VOID:
            self._open.append(tag)
        if values.get("class") == "box":
            self.tables.append(TableSeen(values["aria-label"]))
        elif tag == "tr" and "tbody" in self._open:
            row: list[str] = []
            self.tables[-1].rows.append(row)
            if values.get("class") == "marked":
                self.tables[-1].marked.append(row)
        elif tag in ("th", "td"):
            self._cell = []
        elif tag == "data":
            self.exact.append(float(values["value"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        assert self._open.pop() == tag, "elements must be closed in the order in which they were opened"
        if tag in ("th", "td"):
            assert self._cell is not None
            text = " ".join(" ".join(self._cell).split())
            table = self.tables[-1]
            (table.head if "thead" in self._open else table.rows[-1]).append(text)
            self._cell = None

    def handle_data(self, data: str) -> None:
        (self.styles if "style" in self._open else self.words).append(data)
        if self._cell is not None:
            self._cell.append(data)

    def assert_whole(self) -> None:
        """Check that every element was closed, that ids are distinct, and that nothing comes from elsewhere."""
        assert self._open == []
        forbidden = {"script", "link", "iframe", "object", "embed", "img", "base", "form", "audio", "video", "image"}
        assert not forbidden & set(self.tags)
        for tag, name, value in self.attributes:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "action", "data", "poster", "ping", "background"), (tag, name)
            if name in ("href", "xlink:href"):
                assert value.startswith("#"), (tag, value)
            if name == "style":
                assert "url(" not in value.replace("url(#", ""), (tag, value)
        style = " ".join(self.styles)
        assert "url(" not in style
        assert "@import" not in style
        ids = [value for _, name, value in self.attributes if name == "id"]
        assert len(ids) == len(set(ids))
        targets = [value[1:] for _, name, value in self.attributes if name == "href"]
        assert set(targets) <= set(ids)
        policy = [value for tag, name, value in self.attributes if tag == "meta" and value.startswith("default-src")]
        assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def page_of(*paths: Path | str, output: str = "page.html") -> Page:
    """Run ``lockstep report`` and return the page, which must be whole."""
    assert main([*(str(path) for path in paths), "--output", output]) == 0
    page = Page(Path(output).read_text(encoding="utf-8"))
    page.assert_whole()
    return page


def make_run(path: Path, records: list[dict[str, Any]] | None = None, **info: Any) -> Path:
    """Make the directory of a run of two ranks that is finished."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("task: cartpole_balance\nnum_envs: 64\n", encoding="utf-8")
    ranks = [
        {"rank": k, "local_rank": k, "host": f"host-{k}", "pid": 100 + k, "device": "cpu", "cores": [2 * k, 2 * k + 1]}
        for k in range(2)
    ]
    attempt = {"start_time": "2026-03-01T12:00:00.123456+00:00", "host": "host-0", "iteration": 0, "world_size": 2}
    content = {
        "run_id": "abc",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "jax": None},
        "git": {"lockstep": {"commit": "0123456789abcdef", "dirty": True}, "working_folder": None},
        "host": "host-0",
        "hardware": {"cpu": "AMD EPYC", "num_cores": 8, "num_allowed_cores": 4, "memory_bytes": 2**35, "gpus": []},
        "seed": 7,
        "world_size": 2,
        "ranks": ranks,
        "attempts": [attempt, attempt | {"iteration": 4, "start_time": "2026-03-01T13:00:00+00:00"}],
    }
    (path / "run.json").write_text(json.dumps(content | info), encoding="utf-8")
    records = [make_record(k) for k in range(1, 11)] if records is None else records
    progress = {
        "iteration": len(records),
        "max_iterations": 10,
        "env_steps": 3072 * len(records),
        "wall_s": 2.5,
        "status": "finished",
        "reason": None,
    }
    (path / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
    return path


def make_record(iteration: int, **changes: Any) -> dict[str, Any]:
    """Return the metrics of an iteration of a run by torch."""
    first = iteration == 1  # in which no episode ends
    record = {
        "iteration": iteration,
        "env_steps": 3072 * iteration,
        "wall_s": 0.25 * iteration,
        "steps_per_s": 20_000.0,
        "mean_return": None if first else 12.5 * iteration,
        "mean_episode_length": None if first else 10.0 * iteration,
        "reward/alive": None if first else 20.0 * iteration,
        "reward/effort": None if first else -7.5 * iteration,
        "loss/value": 1.0 / iteration,
        "time/rollout_mean": 0.06,
        "time/update_mean": 0.03,
        "time/wait_mean": 0.01,
    }
    return record | changes
