"""What the command line says: help texts, and the mend for flags that are not ours or not here yet."""

from collections.abc import Iterable, Mapping

from lockstep.core.config import show, suggestion
from lockstep.core.errors import UsageError

PLAY_HELP = """\
usage: lockstep play (--run RUN_DIR | --checkpoint PATH) [--num_episodes N] [--seed S] [--device D] [--json]
                     [--video FILE.mp4 [--video_size WxH] [--video_seconds S]] | [--viewer]

Run a trained policy, without exploration noise, and report its mean return, episode length, reward terms and metrics;
show it.

  --run RUN_DIR       the newest checkpoint of this run
  --checkpoint PATH   this checkpoint
  --num_episodes N    episodes to play (default: 64)
  --seed S            of the episodes' random streams (default: the run's)
  --device D          auto, cpu, cuda or cuda:<index> (default: auto)
  --json              print one JSON object and nothing else
  --video FILE.mp4    film the first episode, in real time; by MUJOCO_GL, or by what works here: egl or osmesa
  --video_size WxH    in pixels (default: 640x480)
  --video_seconds S   length of the video, through as many episodes as it takes (default: one episode)
  --viewer            open MuJoCo's viewer and show episodes until it is closed; nothing is reported

A video's camera is the model's own named 'track' or 'side', else one that follows the robot.
"""

EXPORT_HELP = """\
usage: lockstep export (--run RUN_DIR | --checkpoint PATH) [--output DIR] [--format onnx,torchscript]

Write a trained policy as files that run without lockstep: raw actor observations in, the most likely action out, with
the normaliser inside. Each is run and compared with the policy's own actions before it appears.

  --run RUN_DIR       the newest checkpoint of this run
  --checkpoint PATH   this checkpoint
  --output DIR        the folder (default: export in the run directory); gets policy.onnx, policy.pt (TorchScript) and
                      policy.json, which describes them; no file of another export may stay there
  --format F          onnx, torchscript, or both with a comma (default: both)
"""

MULTIGPU_HELP = """\
usage: lockstep train_multigpu [TASK] [--num_gpus N] [FLAGS OF LOCKSTEP TRAIN]
       lockstep train_multigpu [--num_gpus N] --script FILE.py [ITS ARGUMENTS]

Train one policy with one process per GPU, on this node or several. All flags of lockstep train mean the same here;
'lockstep train TASK --help' shows them. --num_envs is per GPU (or 320,192: a number for each), --total_envs for all.

on this node:
  --num_gpus N         ranks on this node, one per GPU (default: all that CUDA_VISIBLE_DEVICES shows);
                       also written --nproc_per_node N
  --device cpu         ranks on CPU cores instead; needs --num_gpus N
  --script FILE.py     run this instead of lockstep train; every word after the file is the script's own
  --dry_run            check everything, show GPUs, ranks, rendezvous and the exact command, and start nothing
  --max_restarts N     start all ranks again after a failure, at most N times (default: 0); a training goes on from
                       its newest checkpoint, and ends after 3 failures in a row without a new one
  --hang_timeout S     end a rank that has not moved for S seconds, and the job with it (default: 20; 0: never)

several nodes, the same command on each, in one of two ways:
  --nnodes N --node_rank R --master_addr A --master_port P
                       node 0 listens on a free port P of its address A
  --nnodes N --rdzv_endpoint HOST:PORT --rdzv_id ID [--rdzv_backend c10d] [--rdzv_conf K=V,...]
                       the nodes find each other, and their ranks, at HOST:PORT; ID is the job's own
  --nnodes MIN:MAX     with --rdzv_*: start on at least MIN nodes, go on (with --max_restarts) when one is lost, and
                       take in one that comes later; the envs of the whole job stay as many
  --local_addr A       the address under which the other nodes reach this one
  --coordinator_address HOST:PORT
                       JAX only, the same on every node: where process 0 keeps JAX's service (default: on a free port,
                       which the others are told); without --master_* the nodes meet there too, by the next port

what the ranks print (local rank 0 is on the screen, the others are kept in a temporary folder until a clean end):
  --log_all_ranks      show all ranks, each line with its rank
  --tee S              as torchrun's: 1 stdout, 2 stderr, 3 both, or by local rank as 0:3,1:2; shown and kept in files
  --log_dir D          keep the files in D

exit codes: as lockstep train; when ranks differ, that of the rank that failed first or worst; 128 + n for signal n.
The first Ctrl-C saves and stops, the second kills. SIGTERM and SIGUSR1 save and stop.
"""

SLURM_HELP = """\
usage: lockstep slurm [FLAGS] -- train TASK [FLAGS OF LOCKSTEP TRAIN_MULTIGPU]
       lockstep slurm [FLAGS] -- FILE.py [ITS ARGUMENTS]
       lockstep slurm status RUN_DIR

Write a job script for SLURM that trains on one node or several, and goes on by itself after a preemption or the time
limit; or show how a run and its job are getting on. What follows -- is checked as lockstep train_multigpu would.

  --nodes N            nodes (default: 1)
  --gpus_per_node N    GPUs of each node, a rank for each (default: 1)
  --gpu_type T         as the cluster names it: a100
  --ranks_per_node N   instead of GPUs: ranks on CPU cores
  --cpus_per_task C    CPU cores of each node, for all its ranks together (default: the cluster's, often a single one)
  --mem M              memory of each node: 64G
  --partition P, --account A, --time T
                       as in sbatch; T may be minutes, hours:minutes:seconds or days-hours, among others
  --stop_before S      seconds before the time limit at which the job saves and goes back into the queue (default: 120);
                       longer than an iteration and a checkpoint take; SLURM may be a minute early
  --setup LINE         a line of shell before everything else, as 'module load cuda'; may be repeated
  --sbatch OPTION      a further option of sbatch, as --qos=high; may be repeated
  --job_name J         (default: the task or script)
  --output_dir D       gets <job>_<id>.out and .err, and the script (default: slurm)
  --assets_dir D       a folder that all nodes see, for what tasks download
  --script FILE        the job script to write (default: <output_dir>/<job>.sh)
  --submit             submit it too
"""

TASKS_HELP = """\
usage: lockstep tasks [--json]

List the tasks: algorithms and engines (the default first; some with one framework alone), sizes of the actor's
observation and of the action, time limit.

  --json   print a JSON list and nothing else
"""

_NOT_YET = {
    **dict.fromkeys(
        ("num_gpus", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "multi_gpu"),
        "lockstep train runs one process; several GPUs are lockstep train_multigpu TASK --num_gpus N, with the same "
        "flags otherwise (with --ml_framework jax one process takes all of them, or --num_devices N)",
    ),
}

_ITERATIONS = "the length of a training is --max_iterations K, the total of iterations"
_DEVICE = "the device is --device auto|cpu|cuda"
_FOLDER = "runs go to <log_root>/<task>/<time>_<run_name>: use --log_root DIR and --run_name R"
_LOAD = "use --resume RUN_DIR to continue a run, or --checkpoint PATH to start a new one from its weights"
_CLIP = "--video films a few seconds at the end; for other videos there is lockstep play --run RUN_DIR --video out.mp4"
_SCREEN = "training never opens a window; leave it out"

TRAIN_HABITS = {
    **dict.fromkeys(("headless", "enable_cameras", "livestream", "viewer", "render", "no_render"), _SCREEN),
    **dict.fromkeys(("video_length", "video_interval", "video_seconds", "video_size"), _CLIP),
    **dict.fromkeys(("load_run", "load_checkpoint", "restore", "load", "ckpt", "checkpoint_path"), _LOAD),
    **dict.fromkeys(("experiment_name", "exp_name", "experiment", "experiment_dir"), _FOLDER),
    **dict.fromkeys(("logdir", "log_dir", "output_dir", "output", "out", "run_dir"), _FOLDER),
    **dict.fromkeys(("iterations", "num_iterations", "num_learning_iterations", "max_iters", "epochs"), _ITERATIONS),
    **dict.fromkeys(("max_epochs", "num_epochs", "total_timesteps", "timesteps", "num_steps"), _ITERATIONS),
    **dict.fromkeys(("sim_device", "rl_device", "gpu", "gpu_id", "device_id", "cuda"), _DEVICE),
    **dict.fromkeys(("n_envs", "num_environments", "envs"), "the number of envs is --num_envs N"),
    **dict.fromkeys(("env_id", "env_name", "task_name"), "the task is --task T"),
    **dict.fromkeys(("lr", "step_size"), "the learning rate is --agent.learning_rate X"),
    **dict.fromkeys(("algo", "alg", "agent_type"), "the algorithm is --algorithm ppo or sac"),
    **dict.fromkeys(("wandb", "use_wandb", "track"), "use --logger wandb"),
    **dict.fromkeys(("framework", "backend"), "the framework is --ml_framework torch or jax"),
    **dict.fromkeys(("physics_engine", "sim", "simulator", "physics"), "the physics engine is --engine E"),
    **dict.fromkeys(("name", "tag"), "a run's name is --run_name R"),
    "config_name": "use --config overlay.yaml",
}

_GPUS = "the number of ranks on this node, one per GPU, is --num_gpus N"
_CHOICE = "the GPUs are those that CUDA_VISIBLE_DEVICES shows, as in CUDA_VISIBLE_DEVICES=1,3"
_OWN_PORT = "a job on one node always has a rendezvous and a port of its own; leave it out"
_SCREENS = "local rank 0 is on the screen; --log_all_ranks, --tee 3 and --log_dir D show or keep more"

MULTIGPU_HABITS = {
    **dict.fromkeys(("gpus", "ngpus", "n_gpus", "n_devices", "num_processes", "nproc", "np"), _GPUS),
    **dict.fromkeys(("gpu_ids", "gpu_id", "device_ids", "devices", "gpu"), _CHOICE),
    **dict.fromkeys(("standalone", "multi_gpu"), _OWN_PORT),
    **dict.fromkeys(("redirects", "local_ranks_filter", "show_logs"), _SCREENS),
    **dict.fromkeys(("num_nodes", "num_machines", "nodes"), "the number of nodes is --nnodes N"),
    **dict.fromkeys(("machine_rank", "group_rank"), "the number of this node, from 0 on, is --node_rank R"),
    **dict.fromkeys(("main_process_ip", "master_address"), "the address of node 0 is --master_addr A"),
    "main_process_port": "the port on node 0 is --master_port P",
    "world_size": "the job has nnodes x num_gpus ranks; give --num_gpus N and, for several nodes, --nnodes N",
}

_NODES = "the number of nodes is --nodes N"
_NODE_GPUS = "the GPUs of each node are --gpus_per_node N, their type is --gpu_type T"
_NODE_CORES = "the cores of each node are --cpus_per_task C"
_NODE_RANKS = "ranks on CPU cores are --ranks_per_node N; with GPUs there is one for each"
_OUTPUT = "output goes to <output_dir>/<job>_<id>.out and .err: use --output_dir D and --job_name J"
_FURTHER = "further options of sbatch are written as in --sbatch=--qos=high"

SLURM_HABITS = {
    **dict.fromkeys(("nnodes", "num_nodes", "n"), _NODES),
    **dict.fromkeys(("gpus", "num_gpus", "ngpus", "gres", "nproc_per_node", "gpus_per_task"), _NODE_GPUS),
    **dict.fromkeys(("cpus", "num_cpus", "cores", "cpus_per_node", "cpus_per_gpu"), _NODE_CORES),
    **dict.fromkeys(("ntasks", "ntasks_per_node", "tasks", "tasks_per_node", "num_ranks"), _NODE_RANKS),
    **dict.fromkeys(("output", "error", "log_dir", "logs"), _OUTPUT),
    **dict.fromkeys(("memory", "ram", "mem_per_node"), "the memory of each node is --mem M"),
    **dict.fromkeys(("walltime", "wall_time", "time_limit", "timeout"), "the time limit is --time T"),
    **dict.fromkeys(("name", "job"), "the job's name is --job_name J"),
    **dict.fromkeys(("qos", "constraint", "exclude", "nodelist", "reservation", "array", "exclusive"), _FURTHER),
    **dict.fromkeys(("dependency", "mail_user", "mail_type", "export", "nice", "licenses", "comment"), _FURTHER),
    **dict.fromkeys(("module", "modules"), "write --setup 'module load NAME'"),
    **dict.fromkeys(("signal", "grace"), "how early the job is asked to stop is --stop_before S"),
    **dict.fromkeys(("task", "num_envs", "device", "max_iterations"), "what belongs to the training stands after --"),
    "dry_run": "nothing is submitted without --submit; the script that is written shows all",
}

PLAY_HABITS = {
    **dict.fromkeys(("load_run", "run_dir", "resume"), "the run to play is --run RUN_DIR"),
    **dict.fromkeys(("load_checkpoint", "ckpt", "checkpoint_path"), "the weights to play are --checkpoint PATH"),
    **dict.fromkeys(("task", "config", "env", "agent"), "the checkpoint knows its task and config; leave it out"),
    **dict.fromkeys(("headless", "no_render"), "nothing is shown unless you ask for it; leave it out"),
    **dict.fromkeys(("render", "gui", "show", "visualize"), "to look on, use --viewer, or --video out.mp4"),
    **dict.fromkeys(("video_length", "video_duration", "video_steps"), "its length is --video_seconds S"),
    **dict.fromkeys(("video_path", "video_dir", "record", "output"), "the video's file is --video out.mp4"),
    **dict.fromkeys(("num_envs", "episodes", "n_episodes"), "the number of episodes is --num_episodes N"),
}

EXPORT_HABITS = {
    **dict.fromkeys(("load_run", "run_dir", "resume"), "the run to export is --run RUN_DIR"),
    **dict.fromkeys(("load_checkpoint", "ckpt", "checkpoint_path"), "the weights to export are --checkpoint PATH"),
    **dict.fromkeys(("output_dir", "out", "path", "export_dir", "filename"), "the folder is --output DIR"),
    **dict.fromkeys(("onnx", "torchscript", "jit", "to"), "the formats are --format onnx,torchscript"),
    **dict.fromkeys(("task", "config", "device"), "the checkpoint knows its task, and the CPU will do; leave it out"),
    **dict.fromkeys(("opset", "opset_version"), "the opset is 20; leave it out"),
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
    if habits and name in habits:
        return UsageError(f"unknown flag {shown}: {habits[name]}")
    if name in _NOT_YET:
        return UsageError(_NOT_YET[name])
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
        return UsageError(f"unexpected {show(word)}; settings are flags: --{name.lstrip('+~')} {value}")
    return UsageError(f"unexpected {show(word)}; every value belongs to a flag, as in --run logs/<task>/<run>")
