"""curve.png, looked at pixel by pixel."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib import image

from lockstep.core.curve import draw_curve
from lockstep.core.errors import RunError


def draw(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "cartpole")
    return tmp_path / "curve.png"


def num_pixels(path: Path, red: int, green: int, blue: int) -> int:
    """Return how many pixels have exactly that colour."""
    picture: npt.NDArray[np.float32] = image.imread(path)
    return int((np.round(picture[..., :3] * 255) == (red, green, blue)).all(axis=-1).sum())


TRAINING = (31, 119, 180)
EVALUATION = (214, 39, 40)


def test_both_curves_are_drawn(tmp_path: Path) -> None:
    lines = [f'{{"iteration": {k}, "env_steps": {k * 100}, "mean_return": {k}.0}}' for k in range(1, 50)]
    path = draw(tmp_path, *lines)
    assert num_pixels(path, *TRAINING) > 500
    assert num_pixels(path, *EVALUATION) == 0
    evaluations = [f'{{"iteration": {k}, "env_steps": {k * 100}, "eval/mean_return": 20.0}}' for k in range(50, 60)]
    assert num_pixels(draw(tmp_path, *lines, *evaluations), *EVALUATION) > 100
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["curve.png", "metrics.jsonl"]


def test_one_line_is_a_point(tmp_path: Path) -> None:
    legend_only = num_pixels(draw(tmp_path, *['{"iteration": 1, "env_steps": 0, "mean_return": 5.0}'] * 2), *TRAINING)
    assert num_pixels(draw(tmp_path, '{"iteration": 1, "env_steps": 0, "mean_return": 5.0}'), *TRAINING) > legend_only


def test_missing_values_and_half_a_line_are_passed_over(tmp_path: Path) -> None:
    path = draw(
        tmp_path,
        '{"iteration": 1, "env_steps": 100, "mean_return": null}',
        '{"iteration": 2, "env_steps": 200, "mean_return": 1.5, "mean_episode_length": 12}',
        '{"iteration": 3, "env_st',
    )
    assert num_pixels(path, *TRAINING) > 0


@pytest.mark.parametrize("lines", [(), ('{"iteration": 1, "env_steps": 100, "mean_return": null}',)])
def test_without_numbers_there_is_no_picture(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert not draw(tmp_path, *lines).exists()


def test_without_metrics_there_is_no_picture(tmp_path: Path) -> None:
    draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "env_steps": 100, "mean_return": 1.0}\n')
    with pytest.raises(RunError, match=r"can't write .*curve\.png: "):
        draw_curve(tmp_path / "metrics.jsonl", tmp_path / "gone" / "curve.png")
