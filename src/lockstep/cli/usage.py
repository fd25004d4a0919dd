"""What the command line says: help texts, and the mend for flags that are not ours or not here yet."""

from collections.abc import Iterable, Mapping

from lockstep.core.config import suggestion
from lockstep.core.errors import UsageError

PLAY_HELP = """\
usage: lockstep play (--run RUN_DIR | --checkpoint PATH) [--num_episodes N] [--seed S] [--device D] [--json]

Run a trained policy, without exploration noise, and report its mean return, episode length and reward terms.

  --run RUN_DIR       the newest checkpoint of this run
  --checkpoint PATH   this checkpoint
  --num_episodes N    episodes to play (default: 64)
  --seed S            of the episodes' random streams (default: the run's)
  --device D          auto, cpu, cuda or cuda:<index> (default: auto)
  --json              print one JSON object and nothing else
"""

TASKS_HELP = """\
usage: lockstep tasks [--json]

List the tasks: engines (the default first), sizes of the actor's observation and of the action, time limit.

  --json   print a JSON list and nothing else
"""

_NOT_YET = {
    "video": "this version has no video yet; leave --video out",
    "runner": "this version has no runners of your own yet; leave --runner out",
    **dict.fromkeys(
        ("num_gpus", "nproc_per_node", "nnodes", "node_rank", "multi_gpu"),
        "training on several devices comes in a later version; lockstep train runs one process",
    ),
}

_ITERATIONS = "the length of a training is --max_iterations K, the total of iterations"
_DEVICE = "the device is --device auto|cpu|cuda"
_FOLDER = "runs go to <log_root>/<task>/<time>_<run_name>: use --log_root DIR and --run_name R"
_LOAD = "use --resume RUN_DIR to continue a run, or --checkpoint PATH to start a new one from its weights"
_SCREEN = "training never opens a window; leave it out"

TRAIN_HABITS = {
    **dict.fromkeys(("headless", "enable_cameras", "livestream", "viewer", "render", "no_render"), _SCREEN),
    **dict.fromkeys(("load_run", "load_checkpoint", "restore", "load", "ckpt", "checkpoint_path"), _LOAD),
    **dict.fromkeys(("experiment_name", "exp_name", "experiment", "experiment_dir"), _FOLDER),
    **dict.fromkeys(("logdir", "log_dir", "output_dir", "output", "out", "run_dir"), _FOLDER),
    **dict.fromkeys(("iterations", "num_iterations", "num_learning_iterations", "max_iters", "epochs"), _ITERATIONS),
    **dict.fromkeys(("max_epochs", "num_epochs", "total_timesteps", "timesteps", "num_steps"), _ITERATIONS),
    **dict.fromkeys(("sim_device", "rl_device", "gpu", "gpu_id", "device_id", "cuda"), _DEVICE),
    **dict.fromkeys(("n_envs", "num_environments", "envs"), "the number of envs is --num_envs N"),
    **dict.fromkeys(("env_id", "env_name", "task_name"), "the task is --task T"),
    **dict.fromkeys(("lr", "step_size"), "the learning rate is --agent.learning_rate X"),
    **dict.fromkeys(("wandb", "use_wandb", "track"), "use --logger wandb"),
    **dict.fromkeys(("framework", "backend"), "the framework is --ml_framework torch"),
    **dict.fromkeys(("physics_engine", "sim", "simulator", "physics"), "the physics engine is --engine E"),
    **dict.fromkeys(("name", "tag"), "a run's name is --run_name R"),
    "config_name": "use --config overlay.yaml",
}

PLAY_HABITS = {
    **dict.fromkeys(("load_run", "run_dir", "resume"), "the run to play is --run RUN_DIR"),
    **dict.fromkeys(("load_checkpoint", "ckpt", "checkpoint_path"), "the weights to play are --checkpoint PATH"),
    **dict.fromkeys(("task", "config", "env", "agent"), "the checkpoint knows its task and config; leave it out"),
    **dict.fromkeys(("headless", "render", "viewer"), "nothing is shown; leave it out"),
    **dict.fromkeys(("num_envs", "episodes", "n_episodes"), "the number of episodes is --num_episodes N"),
}


def unknown_flag(
    name: str, known: Iterable[str], habits: Mapping[str, str] | None = None, groups: Iterable[str] = ()
) -> UsageError:
    """Return the error for a flag that does not exist: its mend if it is a habit, else the nearest flag.

    ``name`` is without dashes and has underscores; a short flag still has its dash.
    """
    known = list(known)
    shown = repr(f"--{name}")
    if name.startswith("-"):
        return UsageError(f"unknown flag {name!r}; flags are written in full with two dashes (--help lists them)")
    if name in _NOT_YET:
        return UsageError(_NOT_YET[name])
    if habits and name in habits:
        return UsageError(f"unknown flag {shown}: {habits[name]}")
    if name in groups:
        task = "; the task is --task T" if name == "env" else ""
        return UsageError(f"--{name} is a group of settings: write --{name}.FIELD VALUE{task}")
    positive = ".".join(part.removeprefix("no_") for part in name.split("."))
    if positive in known and positive != name:
        return UsageError(f"unknown flag {shown}; write --{positive} false")
    near = suggestion(f"--{name}", [f"--{flag}" for flag in known])
    return UsageError(f"unknown flag {shown}{near or '; --help lists all flags'}")


def unexpected_word(word: str) -> UsageError:
    """Return the error for a word that belongs to no flag; ``agent.gamma=0.9`` gets the mend."""
    name, equals, value = word.partition("=")
    if equals and name:
        return UsageError(f"unexpected {word!r}; settings are flags: --{name.lstrip('+~')} {value}")
    return UsageError(f"unexpected {word!r}; every value belongs to a flag, as in --run logs/<task>/<run>")
