"""Videos read back, and a renderer, if there is one here."""

from pathlib import Path
from typing import Any, NamedTuple

import imageio.v2 as imageio
import numpy as np
import pytest

from lockstep.core.errors import UsageError
from lockstep.session.video import find_renderer
from lockstep.tasks.cartpole.task import Cartpole

MODEL_PATH = Cartpole.model_path


class Shown(NamedTuple):
    """What is in a video file."""

    pictures: np.ndarray  # (num_frames, height, width, 3) uint8
    fps: float


def read_back(path: Path) -> Shown:
    reader: Any = imageio.get_reader(path)
    with reader:
        pictures = [picture for picture in reader]  # noqa: C416 - list() asks for a length, which is infinite
        return Shown(np.stack(pictures), float(reader.get_meta_data()["fps"]))


def change(shown: Shown, first: int, second: int) -> float:
    """Return by how much two pictures of a video differ in the mean, in units of 1/255."""
    before, after = (shown.pictures[index].astype(float) for index in (first, second))
    return float(np.abs(after - before).mean())


def require_renderer() -> str:
    """Return a renderer that works here; skip the test if there is none."""
    assert MODEL_PATH is not None
    try:
        return find_renderer(MODEL_PATH, 64, 64)
    except UsageError as error:
        pytest.skip(str(error))
