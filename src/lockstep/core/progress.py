"""What a training shows while it runs: a live panel on a terminal, plain lines anywhere else."""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.core.metrics import Metrics
from lockstep.core.rank_log import RankLog, TolerantStream

_SECONDS_BETWEEN_LINES = 5.0
_NUM_FIRST_LINES = 3
_WIDE = 72  # columns from which the panel shows two pairs of columns
_ROOMY = 96  # columns from which two pairs leave room for what phases took on the fastest and slowest rank
_MAX_WIDTH = 110
_BARS = "▁▂▃▄▅▆▇█"


class Progress:
    """Shows one training. A context manager, or ``start`` ... ``stop``.

    On a terminal a panel stays at the bottom and what else is printed scrolls by above it; the plain lines then go
    to ``log`` only. A stdout that goes away ends the display, not the training.

    Args:
        task, run_path: what the panel names.
        log: of this rank.
        on_screen: False for a rank that speaks in its log alone.
        clock: in seconds.
    """

    def __init__(
        self,
        task: str,
        run_path: Path | None,
        log: RankLog | None = None,
        on_screen: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log or RankLog(None)
        self._on_screen = on_screen
        self._clock = clock
        self._view = _View(task, str(run_path or ""))
        self._panel: Live | None = None
        self._streams: tuple[TextIO, TextIO] | None = None
        self._last_line_at = -math.inf
        self._num_lines = 0
        self._line_pending = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to show; until ``stop``, stdout and stderr lead past the panel."""
        terminal = self._log.behind(sys.stdout) if self._on_screen else None
        if terminal is None or not terminal.isatty() or (os.environ.get("TERM") or "dumb") in ("dumb", "unknown"):
            return
        console = Console(file=cast(TextIO, TolerantStream(terminal)), highlight=False)
        self._panel = Live(
            self._view, console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False
        )
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (
            self._log.copy_of(cast(TextIO, FileProxy(console, stream))) for stream in self._streams
        )
        self._panel.start()

    def update(self, metrics: Metrics, iteration: int, max_iterations: int, env_steps: int, wall_s: float) -> None:
        """Show one iteration; any metric may be missing or None. ``wall_s``: seconds of training so far."""
        self._view.take(metrics, iteration, max_iterations, env_steps, wall_s)
        self._line_pending = True
        due = (
            self._num_lines < _NUM_FIRST_LINES
            or self._clock() - self._last_line_at >= _SECONDS_BETWEEN_LINES
            or iteration >= max_iterations
            or metrics.get("eval/mean_return") is not None
        )
        if due:
            self._write_line()

    def message(self, text: str) -> None:
        """Show one line of text, and keep it in the log."""
        if self._on_screen:
            _print(text)
        else:
            self._log.write_line(text)

    def stop(self) -> None:
        """Leave the last state on the screen and give the terminal back; further calls do nothing."""
        if self._line_pending:
            self._write_line()
        if self._panel is not None and self._streams is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            self._panel.stop()
            sys.stdout, sys.stderr = self._streams
            self._panel = self._streams = None

    def _write_line(self) -> None:
        self._line_pending = False
        self._num_lines += 1
        self._last_line_at = self._clock()
        if self._panel is None:
            self.message(self._view.line())
        else:
            self._log.write_line(self._view.line())


@dataclass
class _View:
    """The latest numbers, as the panel draws them and as the plain line writes them."""

    task: str
    run_path: str
    metrics: Metrics = field(default_factory=dict)
    iteration: int = 0
    max_iterations: int = 0
    env_steps: int = 0
    wall_s: float = 0.0
    evaluation: tuple[int, float] | None = None
    num_diverged: int = 0
    diverged_at: int = 0
    compile_s: float | None = None
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=50))

    def take(self, metrics: Metrics, iteration: int, max_iterations: int, env_steps: int, wall_s: float) -> None:
        self.metrics, self.iteration, self.max_iterations = metrics, iteration, max_iterations
        self.env_steps, self.wall_s = env_steps, wall_s
        self.times.append((iteration, wall_s))
        if (mean_return := self.number("mean_return")) is not None:
            self.returns.append(mean_return)
        if (evaluation := self.number("eval/mean_return")) is not None:
            self.evaluation = iteration, evaluation
        if (compile_s := self.number("time/compile")) is not None:
            self.compile_s = compile_s
        if num_diverged := self.number("num_diverged"):
            self.num_diverged += int(num_diverged)
            self.diverged_at = iteration

    def number(self, name: str) -> float | None:
        value = self.metrics.get(name)
        return value if value is not None and math.isfinite(value) else None

    def remaining_s(self) -> float | None:
        """Return the seconds left at the pace of the last iterations of this process."""
        if len(self.times) < 2:
            return None
        (first, start), (last, end) = self.times[0], self.times[-1]
        return (end - start) / (last - first) * max(self.max_iterations - last, 0) if last > first else None

    def line(self) -> str:
        """Return one plain line, in ASCII: it may end up anywhere."""
        width = len(str(self.max_iterations))
        parts = [
            f"iteration {self.iteration:>{width}}/{self.max_iterations}",
            f"return {_decimal(self.number('mean_return')):>8}",
            f"length {_decimal(self.number('mean_episode_length')):>7}",
            f"{_quantity(self.number('steps_per_s')):>7} steps/s",
            *(f"{phase} {_seconds(self.number(f'time/{phase}_mean')):>7}" for phase in self.phases()),
            f"left {_duration(self.remaining_s()):>7}",
        ]
        if (evaluation := self.number("eval/mean_return")) is not None:
            parts.append(f"evaluation {_decimal(evaluation)}")
        if (compile_s := self.number("time/compile")) is not None:
            parts.append(f"after {_seconds(compile_s)} of compiling")
        if num_diverged := self.number("num_diverged"):
            parts.append(_diverged(int(num_diverged)))
        return "  ".join(parts)

    def phases(self) -> tuple[str, ...]:
        """Return the parts of an iteration that its time is told of: one, if it is one compiled program."""
        return ("step",) if "time/step_mean" in self.metrics else ("rollout", "update")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        body: list[RenderableType] = [self._head(options), "", self._numbers(options)]
        if self.num_diverged:
            warning = f"{_diverged(self.num_diverged)}, last in iteration {self.diverged_at}"
            body += ["", Text(warning, style="yellow")]
        yield Panel(
            Padding(Group(*body), (0, 1)),
            title=Text.assemble(("lockstep", "bold cyan"), "  ", (self.task, "bold")),
            title_align="left",
            subtitle=Text(self.run_path, style="dim"),
            subtitle_align="left",
            border_style="dim",
            # Short of the edge: a ^C that the terminal echoes must not wrap the line that is drawn over.
            width=min(options.max_width - 3, _MAX_WIDTH),
        )

    def _head(self, options: ConsoleOptions) -> Table:
        share = self.iteration / self.max_iterations if self.max_iterations else 0.0
        head = Table.grid(padding=(0, 2, 0, 0), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        cells: list[RenderableType] = [
            Text(f"{self.iteration}/{self.max_iterations}" if self.max_iterations else "starting", style="bold"),
            ProgressBar(total=1.0, completed=share, pulse=not self.max_iterations),
            f"{share:.0%}",
        ]
        if options.max_width >= _WIDE:
            head.add_column(no_wrap=True, justify="right")
            cells.append(Text.assemble((_duration(self.remaining_s()), "bold"), (" left", "dim")))
        head.add_row(*cells)
        return head

    def _numbers(self, options: ConsoleOptions) -> Table:
        learning = [
            ("mean return", _decimal(self.number("mean_return")), "bold green"),
            ("episode length", _decimal(self.number("mean_episode_length")), ""),
            ("evaluation", self._evaluation(), ""),
            ("learning rate", _scientific(self.number("learning_rate")), ""),
            ("KL divergence", _scientific(self.number("kl")), ""),
        ]
        ranges = not _WIDE <= options.max_width < _ROOMY
        speed = [
            ("steps/s", _quantity(self.number("steps_per_s")), "bold"),
            *((phase, self._share(phase, ranges), "") for phase in self.phases()),
            *([("wait", self._share("wait", ranges), "")] if self.number("time/wait_max") else []),
            ("env steps", _quantity(self.env_steps), ""),
            ("elapsed", _duration(self.wall_s), ""),
            *([("compiling", _seconds(self.compile_s), "")] if self.compile_s is not None else []),
        ]
        wide = options.max_width >= _WIDE
        if wide and len(self.returns) > 1 and not options.ascii_only:
            learning[0] = ("mean return", f"{learning[0][1]}  {_sparkline(list(self.returns), 12)}", learning[0][2])
        if not wide:
            speed.append(("left", _duration(self.remaining_s()), ""))
        tables = [_pairs(learning), _pairs(speed)]
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        if wide:
            grid.add_column(ratio=1)
            grid.add_column(ratio=1)
            grid.add_row(*tables)
        else:
            for table in tables:
                grid.add_row(table)
        return grid

    def _evaluation(self) -> str:
        if self.evaluation is None:
            return "-"
        iteration, mean_return = self.evaluation
        return f"{_decimal(mean_return)}  at {iteration}"

    def _share(self, phase: str, ranges: bool) -> str:
        """Return a phase's seconds per iteration, its share of all phases, and what it was on the ranks."""
        times = {name: self.number(f"time/{name}_mean") or 0.0 for name in (*self.phases(), "wait")}
        total = sum(times.values())
        if not total:
            return "-"
        low, high = (self.number(f"time/{phase}_{end}") or 0.0 for end in ("min", "max"))
        over_ranks = f"  {_range(low, high)}" if ranges and low < high else ""
        return f"{_seconds(times[phase])} {times[phase] / total:4.0%}{over_ranks}"


def _pairs(rows: list[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=14)
    table.add_column(no_wrap=True)
    for name, value, style in rows:
        table.add_row(name, Text(value, style="dim" if value == "-" else style))
    return table


def _sparkline(values: list[float], width: int) -> str:
    """Return the course of ``values`` in ``width`` characters, each the mean of an equal share of them."""
    width = min(width, len(values))
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(_BARS[round((mean - low) / (high - low or 1.0) * (len(_BARS) - 1))] for mean in means)


def _decimal(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.01 or not value else f"{value:.1e}"


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _quantity(value: float | None) -> str:
    if value is None:
        return "-"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {letter}" if value < 999.5 * limit else f"{value / limit:.0f} {letter}"
    return f"{value:.0f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _range(low: float, high: float) -> str:
    """Return two durations in the unit of the larger."""
    factor, unit = (1.0, "s") if high >= 1 else (1e3, "ms")
    return f"{low * factor:.3g} to {high * factor:.3g} {unit}"


def _diverged(count: int) -> str:
    return "1 env diverged and was reset" if count == 1 else f"{count} envs diverged and were reset"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _print(text: str) -> None:
    """Print a line to wherever stdout leads now; if that went away, drop it."""
    stream = TolerantStream(sys.stdout)
    stream.write(f"{text}\n")
    stream.flush()
