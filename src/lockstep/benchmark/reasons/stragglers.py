"""What is to be said of ranks that the others always wait for: by how much, in which phase, and why."""

from collections.abc import Sequence

import numpy as np

from lockstep.benchmark.reasons.figures import (
    SEEN,
    introduced,
    is_crowded,
    mean_over,
    others_busy_percent,
    per_iteration,
    share,
)
from lockstep.benchmark.schema import Finding, NodeHardware, RankFigures
from lockstep.benchmark.units import duration, percent

PER_ENV_TOLERANCE = 0.25
"""By how much more than in proportion to its envs a rank may be behind, for its envs to be the reason."""


class Stragglers:
    """The ranks that others wait for, beside the others; there is one of each at least.

    Args:
        ranks: every rank, in order.
        slow: numbers of those that the others wait for.
        compute_s: own work of each rank in each iteration, ``(num_ranks, num_iterations)``.
        iteration_s: the mean iteration, in seconds.
        hardware: of every node.
    """

    def __init__(
        self,
        ranks: Sequence[RankFigures],
        slow: Sequence[int],
        compute_s: np.ndarray,
        iteration_s: float,
        hardware: Sequence[NodeHardware],
    ) -> None:
        self._ranks = ranks
        self._slow = [ranks[rank] for rank in slow]
        self._others = [each for each in ranks if each.rank not in slow]
        self._rest = "the other rank" if len(self._others) == 1 else "the others"
        self._hardware = hardware
        self._iteration_s = iteration_s
        is_slow = np.isin(np.arange(len(ranks)), slow)
        by_rank_s = np.median(compute_s, axis=1)
        self._slow_s, self._others_s = float(by_rank_s[is_slow].mean()), float(by_rank_s[~is_slow].mean())
        self._gap_s = self._slow_s - self._others_s
        self._num_last = int(np.isin(compute_s.argmax(axis=0), slow).sum())
        self._num_iterations = compute_s.shape[1]

    def finding(self, lost_share: float) -> Finding:
        """Return the finding, which costs so much of an iteration."""
        by_envs_s = self._by_envs_s()
        is_uneven = self._gap_s <= by_envs_s * (1 + PER_ENV_TOLERANCE)
        why = self._envs() if is_uneven else self._why()
        if not is_uneven and by_envs_s > 0:
            why += f" More envs account for {duration(by_envs_s)} of the difference at most."
        return Finding(
            reason="uneven_envs" if is_uneven else "straggler",
            rank=self._slow[0].rank if len(self._slow) == 1 else None,
            lost_share=lost_share,
            words=f"{self._what(is_uneven)} {why}",
        )

    def _what(self, is_uneven: bool) -> str:
        kind = "" if is_uneven else self._one_or_many(" is a straggler: it", " are stragglers: they")
        times = self._slow_s / self._others_s if self._others_s > 0 else 0.0
        longer = f" ({times:.3g} times as long)" if times >= 2 else f" ({percent(times - 1)} longer)" if times else ""
        measured_s = mean_over(self._others, "straggler_wait_s")
        wait_s = self._gap_s if measured_s is None else measured_s
        is_pair = len(self._others) == 1
        last = f", {self._one_or_many('the', 'one of them the')} last in {self._num_last} of {self._num_iterations} "
        last = f"{last}iterations" if self._num_iterations > 1 else ""
        return (
            f"{introduced(self._slow)}{kind} {self._one_or_many('computes', 'compute')} {duration(self._slow_s)} per "
            f"iteration, {self._rest} {duration(self._others_s)}{longer}{self._phase()}. {self._rest.capitalize()} "
            f"{'waits' if is_pair else 'wait'} {per_iteration(wait_s)} ({percent(share(wait_s, self._iteration_s))}) "
            f"for {self._one_or_many('it', 'them')}{last}."
        )

    def _phase(self) -> str:
        """Return in which phase most of the difference lies, if that is known."""
        for name, words in (("rollout_s", "in the rollout"), ("update_s", "in the update")):
            difference_s = self._difference(name)
            if difference_s is not None and difference_s > SEEN * self._gap_s:
                return f", {duration(difference_s)} of the difference {words}"
        return ""

    def _by_envs_s(self) -> float:
        """Return how much longer the slow ranks would take if computing took as long as there are envs."""
        slow = sum(each.num_envs for each in self._slow) / len(self._slow)
        others = sum(each.num_envs for each in self._others) / len(self._others)
        return self._slow_s * (1 - others / slow) if slow > others else 0.0

    def _envs(self) -> str:
        slow, others = (
            " to ".join(map(str, sorted({min(each.num_envs for each in group), max(each.num_envs for each in group)})))
            for group in (self._slow, self._others)
        )
        total = sum(each.num_envs for each in self._ranks)
        has = self._one_or_many("It has", "They have")
        return f"{has} {slow} envs, {self._rest} {others}: share them out evenly (--total_envs {total})."

    def _why(self) -> str:
        """Return why the slow ranks compute longer: what makes up at least half of the difference."""
        lack_s, cpu_s = self._difference("contention_s"), self._difference("cpu_s")
        if lack_s is not None and lack_s >= SEEN * self._gap_s:
            return self._starved(lack_s)
        if not self._slow[0].device.startswith("cpu"):
            return self._of_gpus()
        if cpu_s is None:
            return "Why was not measured."
        if self._is_asleep(lack_s or 0.0, cpu_s):
            idle_s = min(self._gap_s, self._gap_s - (lack_s or 0.0) - cpu_s)
            return (
                f"For {duration(idle_s)} more than {self._rest} "
                f"{self._one_or_many('it is', 'they are')} neither on a core nor waiting for one: something in "
                f"{self._its()} own envs sleeps, or waits for a disk or a network."
            )
        if cpu_s >= SEEN * self._gap_s:
            return f"{self._one_or_many('It really computes', 'They really compute')} more: {self._more_work(cpu_s)}"
        return "Why can't be told from CPU times."

    def _starved(self, lack_s: float) -> str:
        words = (
            f"{self._one_or_many('It is', 'They are')} starved of {self._its()} cores, ready to compute without one "
            f"for {duration(lack_s)} more than {self._rest}:"
        )
        nodes = {each.node for each in self._slow}
        if any(is_crowded(node, self._ranks) for node in self._hardware if node.node in nodes):
            return f"{words} the node has more ranks than cores."
        busy = others_busy_percent(self._slow)
        if busy is None or busy < SEEN * 100 * share(lack_s, self._iteration_s):
            return f"{words} what has them was not seen."
        return f"{words} something else keeps them busy, {busy:.0f} % of a core."

    def _is_asleep(self, lack_s: float, cpu_s: float) -> bool:
        """Return whether most of the difference is neither CPU time nor the lack of a core.

        Ranks that wait may spin, so that CPU times alone compare badly: the slow ones' own must leave room for a sleep.
        """
        compute_s, contention_s, own_cpu_s = (
            mean_over(self._slow, name) for name in ("compute_s", "contention_s", "cpu_s")
        )
        busy_s = (self._slow_s if compute_s is None else compute_s) - (contention_s or 0.0) - SEEN * self._gap_s
        threads = max(each.threads or 1 for each in self._slow)
        return self._gap_s - lack_s - cpu_s >= SEEN * self._gap_s and (own_cpu_s or 0.0) <= threads * busy_s

    def _more_work(self, cpu_s: float) -> str:
        models = [{self._node(each).cpu for each in group} for group in (self._slow, self._others)]
        why = (
            f"{self._its()} envs cost more (contacts, resets), or {self._its()} cores are slower"
            if models[0] & models[1] or None in models[0] | models[1]
            else f"{self._its()} cores are of another kind ({_listed(models[0])}; {_listed(models[1])})"
        )
        return f"{duration(cpu_s)} more CPU time; {why}."

    def _of_gpus(self) -> str:
        names = [{self._gpu(each) for each in group} for group in (self._slow, self._others)]
        if not names[0] & names[1] and None not in names[0] | names[1]:
            return f"{self._its().capitalize()} GPU is of another kind ({_listed(names[0])}; {_listed(names[1])})."
        busy = [mean_over(group, "gpu_percent") for group in (self._slow, self._others)]
        told = (
            ""
            if busy[0] is None or busy[1] is None
            else f", which is busy {busy[0]:.0f} % of the time ({self._rest}: {busy[1]:.0f} %)"
        )
        return f"Lack of cores is not why. See to {self._its()} GPU{told}: its clock, its heat, and who else uses it."

    def _difference(self, name: str) -> float | None:
        slow, others = mean_over(self._slow, name), mean_over(self._others, name)
        return None if slow is None or others is None else slow - others

    def _gpu(self, each: RankFigures) -> str | None:
        return next((gpu.name for gpu in self._node(each).gpus if gpu.uuid == each.gpu_uuid), None)

    def _node(self, each: RankFigures) -> NodeHardware:
        return next(node for node in self._hardware if node.node == each.node)

    def _one_or_many(self, one: str, many: str) -> str:
        return one if len(self._slow) == 1 else many

    def _its(self) -> str:
        return self._one_or_many("its", "their")


def _listed(names: set[str | None]) -> str:
    return " / ".join(sorted(str(name) for name in names))
