"""Episode statistics: sums over whole finished episodes, worked out by hand."""

import pytest
import torch

from lockstep.envs.episodes import EpisodeStatistics, summarise

TERMS = ("progress", "alive")


def statistics(*whole: bool) -> EpisodeStatistics:
    made = EpisodeStatistics(len(TERMS), len(whole), torch.device("cpu"))
    made.restart(torch.tensor(whole))
    return made


def add(made: EpisodeStatistics, *steps: tuple[float, bool]) -> None:
    """One env step: the term ``progress`` of each env and whether its episode ends; ``alive`` is always 1."""
    progress = torch.tensor([value for value, _ in steps])
    made.add(torch.stack((progress, torch.ones(len(steps))), dim=1), torch.tensor([done for _, done in steps]))


def test_sums_by_hand() -> None:
    made = statistics(True, True)
    add(made, (1.0, False), (10.0, True))  # the second env: an episode of 10, 1 step
    add(made, (2.0, True), (20.0, False))  # the first: 3, 2 steps
    add(made, (4.0, False), (40.0, True))  # the second: 60, 2 steps
    # Sums of progress, alive, length, and the number of episodes; the first env's second episode is still running.
    assert made.take().tolist() == [73.0, 5.0, 5.0, 3.0]
    assert made.take().tolist() == [0.0] * 4
    add(made, (8.0, True), (0.0, False))  # it began before the last look: 12, 2 steps
    assert made.take().tolist() == [12.0, 2.0, 2.0, 1.0]


def test_an_episode_that_began_in_the_middle_is_left_out() -> None:
    made = statistics(False, True)
    add(made, (100.0, True), (1.0, True))
    assert made.take().tolist() == [1.0, 1.0, 1.0, 1.0]
    add(made, (5.0, True), (2.0, True))  # from now on every episode is a whole one
    assert made.take().tolist() == [7.0, 2.0, 2.0, 2.0]


def test_restart_forgets_everything() -> None:
    made = statistics(True, True)
    add(made, (1.0, True), (1.0, False))
    whole = torch.tensor([True, False])
    made.restart(whole)
    whole.fill_(False)  # the caller's tensor is its own
    add(made, (7.0, True), (9.0, True))
    assert made.take().tolist() == [7.0, 1.0, 1.0, 1.0]


def test_a_saved_state_goes_on_with_the_episodes_under_way() -> None:
    made = statistics(True, False)
    add(made, (1.0, False), (1.0, False))
    saved = made.state_dict()
    add(made, (50.0, True), (50.0, True))
    for _ in range(2):  # a saved state can be taken up again and again
        other = statistics(True, True)
        other.load_state_dict(saved)
        add(other, (2.0, True), (2.0, True))
        assert other.take().tolist() == [3.0, 2.0, 2.0, 1.0]
        add(other, (2.0, True), (2.0, True))
        assert other.take().tolist() == [4.0, 2.0, 2.0, 2.0]


def test_summary() -> None:
    assert summarise([73.0, 5.0, 5.0, 4.0], TERMS, ()) == {
        "mean_return": 19.5,
        "mean_episode_length": 1.25,
        "num_episodes": 4,
        "reward/progress": 18.25,
        "reward/alive": 1.25,
    }


def test_metrics_are_means_over_env_steps() -> None:
    summary = summarise([73.0, 5.0, 10.0, -2.0, 5.0, 4.0], TERMS, ("speed", "height"))
    assert summary["mean_return"] == 19.5
    assert {name: value for name, value in summary.items() if name.startswith("metric/")} == {
        "metric/speed": 2.0,
        "metric/height": -0.4,
    }


def test_no_episode_has_no_mean() -> None:
    summary = summarise([0.0] * 5, TERMS, ("speed",))
    assert summary["num_episodes"] == 0
    others = {name: value for name, value in summary.items() if name != "num_episodes"}
    assert others == dict.fromkeys(
        ("mean_return", "mean_episode_length", "reward/progress", "reward/alive", "metric/speed")
    )


def test_sums_do_not_lose_small_rewards() -> None:
    made = statistics(True)
    for step in range(2000):
        made.add(torch.tensor([[0.1, 1.0]]), torch.tensor([step == 1999]))
    # Added up in float32 it would be off by more than a thousandth.
    assert made.take()[0].item() == pytest.approx(200.0, abs=1e-5)
