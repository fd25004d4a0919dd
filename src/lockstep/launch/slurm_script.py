"""A job in words: the script that SLURM runs on the first node. The same job gives the same text.

Every value stands where it can only be a value: quoted for the shell by ``shlex``, in ``#SBATCH`` lines as sbatch
reads quotes. sbatch does not expand anything there, takes a backslash for itself, and ends at a line break, of which
``make_job`` lets none through.
"""

import re
import shlex
from collections.abc import Iterator, Sequence

from lockstep.launch.slurm import WRITTEN_BY, Job

_PLAIN = re.compile(r"[\w./:=,@%+-]+", re.ASCII)
FIRST_PORT, NUM_PORTS = 10000, 20000
"""Where the nodes of a job meet: above the ports of services, below those that systems hand out by themselves."""


def script_of(job: Job) -> str:
    """Return the text of a job's script."""
    sections = (_header(job), _directives(job), _setup(job), _work(job), _step(job), _end())
    return "\n".join("\n".join(section) + "\n" for section in sections)


def quoted_for_sbatch(word: str) -> str:
    """Return a word of a ``#SBATCH`` line that sbatch reads as it is.

    Between double quotes sbatch knows one thing alone: the character after a backslash is meant literally.
    """
    if _PLAIN.fullmatch(word):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def _header(job: Job) -> Iterator[str]:
    options, surroundings = job.options, job.surroundings
    nodes = "1 node" if options.num_nodes == 1 else f"{options.num_nodes} nodes"
    each = "" if options.num_nodes == 1 else " each"
    number = job.ranks_per_node
    ranks = f"{number} rank{'s' if number > 1 else ''}"
    what = f"{ranks}{each} on CPU cores" if options.ranks_per_node else f"{number} GPU{'s' if number > 1 else ''}{each}"
    yield "#!/bin/bash"
    yield f"# {job.payload.name} on {nodes} with {what}."
    yield f"{WRITTEN_BY} This writes it again:"
    yield f"#   cd {shlex.quote(str(surroundings.folder))}"
    yield f"#   {shlex.join(surroundings.command)}"


def _directives(job: Job) -> Iterator[str]:
    options = job.options

    def line(name: str, value: object) -> str:
        return f"#SBATCH {quoted_for_sbatch(f'--{name}={value}')}"

    yield line("job-name", job.name)
    yield line("chdir", job.surroundings.folder)
    yield line("nodes", options.num_nodes)
    yield "# One task per node, lockstep's launcher: it starts the ranks of its node, and sees all cores and GPUs."
    yield line("ntasks-per-node", 1)
    if options.gpus_per_node is not None:
        yield "# Of each node; each rank takes one."
        yield line("gres", ":".join(["gpu", *filter(None, [options.gpu_type]), str(options.gpus_per_node)]))
    wanted = {
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
    }
    yield from (line(name, value) for name, value in wanted.items() if value is not None)
    yield "# So many seconds before the time limit SLURM asks the ranks to save and stop; then the end of this script"
    yield "# puts the job back into the queue, as SLURM itself does when a node fails."
    yield line("signal", f"USR1@{options.stop_before_s}")
    yield "#SBATCH --requeue"
    yield "# A job that is started again goes on writing to the same files. SLURM does not make their folder."
    yield "#SBATCH --open-mode=append"
    for name, path in zip(("output", "error"), job.output("\0"), strict=True):
        # In these two a percent sign begins a pattern.
        yield line(name, str(path).replace("%", "%%").replace("\0", "%j"))
    if job.sbatch:
        yield f"#SBATCH {' '.join(map(quoted_for_sbatch, job.sbatch))}"


def _setup(job: Job) -> Iterator[str]:
    options, packages = job.options, job.surroundings.packages
    yield "set -eo pipefail"
    yield "# The signal is for the ranks; this shell and srun live on to see how they end."
    yield "trap '' USR1"
    if options.setup:
        yield ""
        yield "# What --setup asked for; srun hands this shell's environment on to all nodes."
        yield from options.setup
    if options.gpus_per_node is not None and packages is not None:
        yield ""
        yield "# torch must find the NVIDIA libraries that it was built with before those of a CUDA module."
        yield f"for folder in {shlex.quote(str(packages))}/nvidia/*/lib; do"
        yield '    if [ -d "$folder" ]; then export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; fi'
        yield "done"
    yield ""
    yield "# By this key a job that is started again finds the run that it began; other clusters count from 1 too."
    yield 'export LOCKSTEP_RUN_KEY="slurm-${SLURM_CLUSTER_NAME:+$SLURM_CLUSTER_NAME-}$SLURM_JOB_ID"'
    if options.assets_dir is not None:
        yield "# On a file system that all nodes see."
        yield f"export LOCKSTEP_ASSETS_DIR={shlex.quote(str(job.surroundings.folder / options.assets_dir))}"


def _work(job: Job) -> Iterator[str]:
    """Yield what the launcher is told. Several nodes meet at the first, one node needs no meeting point."""
    options = job.options
    several = options.num_nodes > 1
    meeting = ""
    if several:
        yield "# The nodes meet at the first one, as SLURM itself addresses it, on a port that no other job has:"
        yield "# it comes from the job's id. If somebody else has it all the same, the job ends before it begins."
        yield 'first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)'
        yield "master_addr=$(scontrol show node \"$first_node\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')"
        yield f"master_port=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"
        yield ""
        meeting = f' --nnodes {options.num_nodes} --master_addr "$master_addr" --master_port "$master_port"'
    yield "# The Python of lockstep's own environment: nothing is installed or synchronised when a job starts."
    yield f"python={shlex.quote(job.surroundings.python)}"
    yield f"launcher=(--num_gpus {job.ranks_per_node}{meeting})"
    yield "work=("
    yield from (f"    {shlex.join(words)}" for words in _by_flag(job.payload.words))
    yield ")"
    yield ""
    node_rank = " --node_rank 0" if several else ""
    yield "# Check and show everything here, on the first node; what is refused ends the job now, in one line."
    yield f'"$python" -m lockstep train_multigpu "${{launcher[@]}}"{node_rank} --dry_run "${{work[@]}}"'


def _by_flag(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words in groups that each begin with a flag, but perhaps for the first."""
    group: list[str] = []
    for word in words:
        if group and word.startswith("-"):
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _step(job: Job) -> Iterator[str]:
    options = job.options
    node_rank = ' --node_rank "$SLURM_NODEID"' if options.num_nodes > 1 else ""
    # Before the launcher of a training has its handlers, the signal simply ends it. A script's ranks may end by it too.
    codes = "75" if job.payload.is_script else "75 | 138"
    mark = shlex.quote(str(options.output_dir / f".{job.name}_"))
    yield "# 75 says that all ranks have saved and stopped because they were asked to. To srun any code but 0 is a"
    yield "# failure, for which it ends the other nodes. So the first node, this one, leaves a file instead."
    if not job.payload.is_script:
        yield "# (138: the signal came before the launcher could take it, so nothing had begun.)"
    yield f'preempted={mark}"$SLURM_JOB_ID.preempted"'
    yield "on_each_node='"
    yield "trap : USR1 TERM # the launcher gets them too; this shell waits for it"
    yield "python=$1 preempted=$2"
    yield "shift 2"
    yield "code=0"
    yield f'"$python" -m lockstep train_multigpu{node_rank} "$@" || code=$?'
    yield 'case "$code" in'
    yield f"    {codes})"
    yield '        if [ "$SLURM_NODEID" = 0 ]; then : > "$preempted" || exit 75; fi'
    yield "        exit 0 ;;"
    yield "esac"
    yield 'exit "$code"'
    yield "'"
    yield 'rm -f -- "$preempted"'
    yield "code=0"
    yield "# A node whose launcher fails ends the others. All of them get the environment of this shell on any cluster."
    yield "# Slurm 22.05 to 23.02 would forget the cores if they were not named again. lockstep pins its ranks itself."
    cpus = [] if options.cpus_per_task is None else [f"--cpus-per-task={options.cpus_per_task}"]
    flags = [f"--nodes={options.num_nodes}", "--ntasks-per-node=1", *cpus]
    yield f"srun {' '.join(flags)} --cpu-bind=none --kill-on-bad-exit=1 --export=ALL \\"
    yield '    bash -c "$on_each_node" on_each_node "$python" "$preempted" "${launcher[@]}" "${work[@]}" || code=$?'


def _end() -> Iterator[str]:
    yield "# A job that was cancelled does not come here: SLURM ends this shell first."
    yield 'if [ "$code" = 0 ] && [ -e "$preempted" ]; then'
    yield '    rm -f -- "$preempted"'
    yield '    echo "lockstep: job $SLURM_JOB_ID was asked to stop and goes back into the queue" >&2'
    yield "    # Of an array only this element: one of them has the id that also stands for all."
    yield "    element=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
    yield '    scontrol requeue "${element:-$SLURM_JOB_ID}" ||'
    yield '        echo "lockstep: that failed; go on with lockstep slurm ... -- train --resume RUN_DIR" >&2'
    yield "    exit 75"
    yield "fi"
    yield 'exit "$code"'
