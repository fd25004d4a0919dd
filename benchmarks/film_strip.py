"""Make one picture of a film: frames at equal distances, in rows.

    .venv/bin/python benchmarks/film_strip.py walk.mp4 strip.png [--start_s 1] [--every_s 0.08] [--frames 8]

The film is one that ``lockstep play --video`` or ``lockstep train --video`` has made.
"""

import argparse
from pathlib import Path

import imageio.v3
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("film", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--start_s", type=float, default=1.0, help="where in the film the first frame is")
    parser.add_argument("--every_s", type=float, default=0.08, help="seconds between frames")
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--columns", type=int, default=4)
    parser.add_argument("--shrink", type=int, default=2, help="take every so manieth pixel of a row and column")
    arguments = parser.parse_args()
    film = imageio.v3.imread(arguments.film, plugin="FFMPEG")
    rate = float(imageio.v3.immeta(arguments.film, plugin="FFMPEG")["fps"])
    moments = arguments.start_s + arguments.every_s * np.arange(arguments.frames)
    indices = np.round(moments * rate).astype(int)
    if indices[-1] >= len(film):
        raise SystemExit(f"the film has {len(film) / rate:.1f} s; the last frame asked for is at {moments[-1]:.1f} s")
    small = film[indices, :: arguments.shrink, :: arguments.shrink]
    rows = [np.concatenate(list(row), axis=1) for row in np.split(small, arguments.frames // arguments.columns)]
    imageio.v3.imwrite(arguments.picture, np.concatenate(rows, axis=0))


if __name__ == "__main__":
    main()
