"""A short soak, with each kind of fault once: the run goes on, the right rank is blamed, and nothing is lost."""

import random
from pathlib import Path

import pytest

from tests.multiproc.soak import Kind, Soak, draw

SEED = 1
NUM_ITERATIONS = 90


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_ranks", "restarts", "kinds"),
    [
        (3, (100,), ("kill", "stop", "terminate")),
        # The first launch ends with its first fault, and the second restarts.
        (2, (0, 100), ("nan", "exception")),
    ],
    ids=["3 ranks", "2 ranks"],
)
def test_a_training_survives_whatever_happens_to_its_ranks(
    num_ranks: int, restarts: tuple[int, ...], kinds: tuple[Kind, ...], tmp_path: Path
) -> None:
    randomness = random.Random(SEED)
    faults = [draw(randomness, kind, num_ranks) for kind in kinds]
    soak = Soak(tmp_path / "soak", num_ranks, NUM_ITERATIONS, restarts)
    accounts = soak.run(faults, lambda account: print(f"{account.fault}: {account.end} after {account.took_s:.1f} s"))
    for account in accounts:
        assert account.wrong == [], account.said
