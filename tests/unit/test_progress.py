"""What a training shows: on a real terminal, in a pipe, and when nobody listens any more."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.core.progress import Progress
from lockstep.core.rank_log import RankLog

# Shows a training of 20 iterations; the log goes to the path given.
TRAINING = """
import sys, time
from pathlib import Path
from lockstep.core.progress import Progress
from lockstep.core.rank_log import RankLog
with RankLog(Path(sys.argv[1])) as log, Progress("cartpole", Path("logs/cartpole/a_run"), log) as progress:
    progress.message("run directory: logs/cartpole/a_run")
    for iteration in range(1, 21):
        metrics = {"mean_return": None if iteration < 5 else 10.0 * iteration, "mean_episode_length": 33.0,
                   "steps_per_s": 1234567.0, "time/rollout_mean": 0.003, "time/update_mean": 0.001,
                   "time/rollout_min": 0.002, "time/rollout_max": 0.0045, "time/wait_mean": 0.0005,
                   "time/wait_min": 0.0, "time/wait_max": 0.001, "time/update_min": 0.001, "time/update_max": 0.001,
                   "num_diverged": int(iteration == 10), "learning_rate": 3e-4}
        if iteration == 15:
            print("a print of a library")
            metrics["eval/mean_return"] = 321.0
        progress.update(metrics, iteration, 20, 1000 * iteration, 0.5 * iteration)
        time.sleep(0.005)
print("after the training")
"""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(log: Path, columns: int = 100, **environment: str) -> str:
    """Run the training on a terminal of that width; return everything that was sent to it."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    variables |= {"TERM": "xterm-256color"} | environment
    command = [sys.executable, "-c", TRAINING, str(log)]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, stdin=terminal, env=variables) as process:
        os.close(terminal)
        output = b""
        try:
            while chunk := os.read(main, 65536):
                output += chunk
        except OSError:  # how Linux says that the other side is closed
            pass
        assert process.wait() == 0
    os.close(main)
    return output.decode()


def last_panel(output: str) -> list[str]:
    """Return the lines of the panel that stays on the screen, without colours."""
    lines = CONTROL.sub("", output.replace("\r", "")).split("\n")
    bottom = max(number for number, line in enumerate(lines) if "╰" in line)
    top = max(number for number, line in enumerate(lines[:bottom]) if "╭" in line)
    # The panel before it is erased by control codes, which are gone here, on the same line.
    return [lines[top][lines[top].rindex("╭") :], *lines[top + 1 : bottom + 1]]


def test_the_panel_shows_the_training(tmp_path: Path) -> None:
    output = on_a_terminal(tmp_path / "log")
    panel = last_panel(output)
    text = "\n".join(panel)
    assert "lockstep  cartpole" in panel[0]
    assert "logs/cartpole/a_run" in panel[-1]
    # Mean and share; what it was on the ranks where that differs.
    for row in (r"rollout +3.0 ms +67%  2 to 4.5 ms", r"update +1.0 ms +22% ", r"wait +0.5 ms +11%  0 to 1 ms"):
        assert re.search(row, text)
    assert {len(line) for line in panel} == {97}  # 3 columns are left for what the terminal echoes
    for shown in ("20/20", "100%", "200.0", "33.0", "1.23 M", "321.0  at 15", "3.00e-04"):
        assert shown in text
    assert "1 env diverged and was reset" in text
    assert "a print of a library" in output
    assert output.rstrip().endswith("after the training")
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor must be visible again"


def test_the_log_gets_plain_lines_instead_of_the_panel(tmp_path: Path) -> None:
    on_a_terminal(tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert "\x1b" not in log
    assert "╭" not in log
    assert log.count("iteration ") == len(re.findall(r"^iteration +\d+/20 ", log, re.MULTILINE)) >= 5
    for line in ("run directory: logs/cartpole/a_run", "a print of a library", "after the training"):
        assert log.count(f"{line}\n") == (0 if line == "after the training" else 1)


@pytest.mark.parametrize("columns", [30, 50, 71, 72, 200])
def test_the_panel_fits_any_width(tmp_path: Path, columns: int) -> None:
    panel = last_panel(on_a_terminal(tmp_path / "log", columns))
    assert len({len(line) for line in panel}) == 1
    assert len(panel[0]) <= columns
    assert "20/20" in "".join(panel)


def test_no_color_is_respected(tmp_path: Path) -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|9[0-7]|38)\b[0-9;]*m")
    assert coloured.search(on_a_terminal(tmp_path / "log"))
    plain = on_a_terminal(tmp_path / "log", NO_COLOR="1")
    assert "╭" in plain
    assert not coloured.search(plain)


def test_a_dumb_terminal_gets_lines(tmp_path: Path) -> None:
    output = on_a_terminal(tmp_path / "log", TERM="dumb")
    assert "\x1b" not in output
    assert "iteration 20/20" in output


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    output = on_a_terminal(tmp_path / "log", PYTHONIOENCODING="ascii")
    assert output.isascii()
    assert "20/20" in output


def test_a_pipe_gets_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "log")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = output.splitlines()
    assert lines[0] == "run directory: logs/cartpole/a_run"
    assert [line[:15] for line in lines[1:4]] == ["iteration  1/20", "iteration  2/20", "iteration  3/20"]
    assert lines[-2].startswith("iteration 20/20  return    200.0  length    33.0   1.23 M steps/s")
    assert output.isascii()
    log = (tmp_path / "log").read_text().splitlines()
    assert log[1:] == lines[:-1]  # all but what was printed after the training, and a first line with the date
    assert log[0].startswith("--- ")


def test_nobody_listening_does_not_end_the_training(tmp_path: Path) -> None:
    command = f'"{sys.executable}" -c "$TRAINING" log {{}}; echo "code $?" >> codes'
    for number, ending in enumerate(("| true", ">&-", "> /dev/full")):
        shell = f"( {command.format('')} ) {ending}"
        errors = subprocess.run(shell, shell=True, env=os.environ | {"TRAINING": TRAINING}, capture_output=True).stderr
        assert (tmp_path / "codes").read_text() == "code 0\n" * (number + 1), errors
        assert b"BrokenPipe" not in errors
    assert (tmp_path / "log").read_text().count("iteration 20/20") == 3


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the iterations shown since the last call."""
    return re.findall(r"^iteration +(\d+)/", capsys.readouterr().out, re.MULTILINE)


def test_lines_are_throttled_by_time(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress("cartpole", None, clock=clock)
    progress.start()
    for iteration in range(1, 50):
        progress.update({}, iteration, 100, 0, 0.0)
    assert shown(capsys) == ["1", "2", "3"]
    clock.now += 5.0
    for iteration in range(50, 60):
        progress.update({}, iteration, 100, 0, 0.0)
    assert shown(capsys) == ["50"]
    progress.update({"eval/mean_return": 1.0}, 60, 100, 0, 0.0)
    assert shown(capsys) == ["60"]
    progress.update({}, 61, 100, 0, 0.0)
    progress.update({}, 100, 100, 0, 0.0)
    assert shown(capsys) == ["100"]
    progress.stop()
    progress.stop()
    assert shown(capsys) == []


def test_the_last_line_is_shown_even_when_the_training_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("cartpole", None, clock=Clock()) as progress:
        for iteration in range(1, 6):
            progress.update({}, iteration, 100, 0, 0.0)
        assert shown(capsys) == ["1", "2", "3"]
    assert shown(capsys) == ["5"]


def test_missing_numbers_are_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("cartpole", None)
    progress.update({"mean_return": None, "mean_episode_length": float("nan")}, 1, 10, 0, 0.0)
    line = " ".join(capsys.readouterr().out.split())
    assert line == "iteration 1/10 return - length - - steps/s rollout - update - left -"


def test_an_iteration_that_is_one_program_is_one_step_and_says_once_how_long_it_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress("cartpole", None)
    progress.update({"time/step_mean": 0.012, "time/compile": 26.5}, 1, 10, 0, 0.0)
    progress.update({"time/step_mean": 0.012, "time/step_min": 0.011, "time/step_max": 0.013}, 2, 10, 0, 1.0)
    first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert first.endswith("- steps/s step 12.0 ms left - after 26.50 s of compiling")
    assert second.endswith("- steps/s step 12.0 ms left 0:08")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(progress._view)
    panel = console.export_text()
    assert re.search(r"step +12.0 ms 100%  11 to 13 ms", panel)
    assert re.search(r"compiling +26.50 s", panel)
    assert "rollout" not in panel


def test_the_time_left_is_that_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("cartpole", None)
    # Resumed at iteration 100 after a day of an earlier attempt; now an iteration takes 30 s.
    progress.update({}, 101, 301, 0, 86400.0)
    progress.update({}, 102, 301, 0, 86430.0)
    assert "left 1:39:30" in capsys.readouterr().out


def test_the_log_goes_on_after_a_restart(tmp_path: Path) -> None:
    for text in ("first attempt", "second attempt"):
        with RankLog(tmp_path / "log"):
            print(text)
            print("to stderr", file=sys.stderr)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("---")] == [
        "first attempt",
        "to stderr",
        "second attempt",
        "to stderr",
    ]


def test_the_log_tells_what_ended_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="NaN"), RankLog(tmp_path / "log"):
        raise ValueError("NaN in the value loss")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: NaN in the value loss"
    assert capsys.readouterr() == ("", "")


def test_a_log_that_cannot_be_written_hides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (Path("/dev/full"), tmp_path / "no_such_folder" / "log"):
        with RankLog(path):
            print("still here")
        assert capsys.readouterr().out == "still here\n"


def test_a_rank_that_is_not_on_the_screen_speaks_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RankLog(tmp_path / "log") as log, Progress("task", tmp_path, log, on_screen=False) as progress:
        progress.update({"mean_return": 1.5}, 1, 1, 1, 1.0)
        progress.message("what only the log is told")
    assert capsys.readouterr().out == ""
    text = (tmp_path / "log").read_text()
    assert "iteration 1/1" in text
    assert "what only the log is told" in text
