"""``--video``: several ranks train, one of them films, and the others wait for it."""

from tests.multiproc.commands import LOGS, SMALL, lockstep, only_run, progress_of
from tests.unit.video_fixtures import change, read_back, require_renderer

TASK = "cartpole_balance"
FLAGS = ["train_multigpu", TASK, *SMALL[2:], "--num_gpus", "2", "--max_iterations", "1", "--video"]


def test_a_training_ends_with_a_clip() -> None:
    require_renderer()
    result = lockstep(*FLAGS)
    assert result.returncode == 0, result.stderr
    run = only_run(TASK)
    clip = run / "videos" / "model_1.mp4"
    assert result.stdout.count("video: ") == 1
    assert f"video: {clip}" in result.stdout
    assert f"video: {clip}" in (run / "ranks" / "rank_0.log").read_text()
    assert [path.name for path in clip.parent.iterdir()] == ["model_1.mp4"]
    shown = read_back(clip)
    assert shown.pictures.shape == (125, 480, 640, 3)  # five seconds
    assert shown.fps == 25.0
    assert change(shown, 0, 60) > 0.02
    assert progress_of(run)["status"] == "finished"


def test_without_a_renderer_no_rank_begins() -> None:
    result = lockstep(*FLAGS, MUJOCO_GL="crayons")
    assert result.returncode == 2
    assert result.stderr.count("nothing can be rendered with MUJOCO_GL=crayons") == 1
    assert "iteration" not in result.stdout
    assert not LOGS.exists()
