"""How much later a job of several ranks has done its first iteration than one process.

    .venv/bin/python benchmarks/launch_delay.py [--num_ranks 2] [--rounds 5]

Both commands train one short iteration, by turns; a time runs from the start of the command to the first line of
``metrics.jsonl``.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMEOUT_S = 120.0


def first_iteration_s(command: list[str], folder: Path) -> float:
    """Return the seconds until the first iteration of a training in an empty folder is recorded."""
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while time.perf_counter() - began < TIMEOUT_S:
            files = list(folder.glob("logs/*/*/metrics.jsonl"))
            if files and files[0].stat().st_size:
                seconds = time.perf_counter() - began
                said, _ = process.communicate(timeout=TIMEOUT_S)
                if process.returncode == 0:
                    return seconds
                break
            if process.poll() is not None:
                said = process.stdout.read() if process.stdout else ""
                break
            time.sleep(0.01)
        process.kill()
    raise SystemExit(f"{' '.join(command)} did not train:\n{said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    lockstep = str(Path(sys.executable).with_name("lockstep"))
    task = ["cartpole_classic", "--device", "cpu", "--max_iterations", "1", "--num_envs", "64"]
    task += ["--evaluation.interval", "0"]
    commands = {
        "train": [lockstep, "train", *task],
        "train_multigpu": [lockstep, "train_multigpu", *task, "--num_gpus", str(arguments.num_ranks)],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(arguments.rounds):
        for name in commands if number % 2 == 0 else reversed(commands):
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(first_iteration_s(commands[name], Path(folder)))
        print(", ".join(f"{name} {own[-1]:.2f} s" for name, own in times.items()), flush=True)
    later = [many - one for one, many in zip(times["train"], times["train_multigpu"], strict=True)]
    print(
        f"first iteration of {arguments.num_ranks} ranks later by {statistics.median(later):.2f} s "
        f"({min(later):.2f} .. {max(later):.2f})"
    )


if __name__ == "__main__":
    main()
