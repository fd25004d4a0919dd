"""Does an exported policy do what the policy does? On random and on extreme observations, step after step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.core.errors import RunError
from lockstep.session.deployed import DeployedPolicy

if TYPE_CHECKING:
    from lockstep.session.policy import Policy

TOLERANCE = 1e-5
"""Of a difference between two actions, relative to the largest number that the last layer adds up, at least to 1."""
EXTREMES = (0.0, 1.0, -1.0, 1e6, -1e6, 1e30, -1e30, 1e-40, np.nan)
"""Each is all of an observation once, and a single entry of an ordinary one once."""
NUM_RANDOM = 64
NUM_STEPS = 4
"""One after another, so that a memory goes through different states; the extremes come in the third."""

Run = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""An exported policy: from observations and state to actions and the next state, all in numpy."""


class Check:
    """What the policy itself does, for comparison.

    Args:
        policy: as ``load_policy`` gives it, on the CPU.
        network: what was made of it, in torch.
    """

    def __init__(self, policy: Policy, network: DeployedPolicy) -> None:
        self._network = network
        self._steps = _observations(network)
        self.num_rows = NUM_STEPS * len(self._steps[0])
        policy.reset()
        self._own = [np.asarray(policy(step)) for step in self._steps]
        policy.reset()

    def compare(self, name: str, run: Run) -> float:
        """Return the largest difference between an exported policy and the policy itself; see TOLERANCE.

        Args:
            name: of the file.
            run: the exported policy.

        Raises:
            RunError: it is larger than the tolerance, or the one gives NaN or infinity where the other does not.
        """
        state = self._network.initial_state(len(self._steps[0]))
        exported_state, largest = state.numpy(), 0.0
        for number, (observations, own) in enumerate(zip(self._steps, self._own, strict=True)):
            actions, exported_state = run(observations, exported_state)
            with torch.no_grad():
                features, state = self._network.features(torch.from_numpy(observations), state)
                outputs, scale = self._network.last(features).numpy(), _scale(self._network, features)
            differences = _differences(actions, own, outputs, scale)
            row = int(differences.argmax())
            if not differences[row] <= TOLERANCE:
                raise RunError(
                    f"{name} does not do what the policy does: for the observation {_short(observations[row])} in step "
                    f"{number} it gives {_short(actions[row])}, the policy {_short(own[row])}; nothing is exported"
                )
            largest = max(largest, float(differences[row]))
        self._compare_few(name, run)
        return largest

    def _compare_few(self, name: str, run: Run) -> None:
        """Run it for one env and for two: an export may have taken the size of its example for the only one."""
        for batch in (1, 2):
            many, _ = run(self._steps[0], self._network.initial_state(len(self._steps[0])).numpy())
            few, _ = run(self._steps[0][:batch], self._network.initial_state(batch).numpy())
            if few.shape != many[:batch].shape or not np.allclose(few, many[:batch], TOLERANCE, TOLERANCE):
                raise RunError(f"{name} gives other actions for {batch} env(s) than for many; nothing is exported")


def _scale(network: DeployedPolicy, features: torch.Tensor) -> np.ndarray:
    """Return ``(num_rows,)``: what rounding is to be measured by, since large numbers may cancel one another."""
    terms = features.abs() * network.last.weight.abs().amax(0)
    scale: np.ndarray = terms.amax(-1).nan_to_num(1.0).clamp(min=1.0).numpy()
    return scale


def _differences(exported: np.ndarray, own: np.ndarray, outputs: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return for each row by how much two actions differ, infinity where they can't be compared."""
    if exported.shape != own.shape:
        return np.full(len(own), np.inf)
    if own.ndim == 1:
        regrets: np.ndarray = _regrets(exported, own, outputs) / scale
        return regrets
    with np.errstate(invalid="ignore", over="ignore"):
        relative = np.abs(exported.astype(np.float64) - own) / scale[:, None]
    is_same = (exported == own) | (np.isnan(exported) & np.isnan(own))
    is_number = np.isfinite(exported) & np.isfinite(own)
    largest: np.ndarray = np.where(is_same, 0.0, np.where(is_number, relative, np.inf)).max(axis=1)
    return largest


def _regrets(exported: np.ndarray, own: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return how much worse another choice is; one that the policy likes as well is as good."""
    rows = np.arange(len(own))
    is_choice = (exported >= 0) & (exported < outputs.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        regret = np.abs(outputs[rows, own] - outputs[rows, np.where(is_choice, exported, 0)])
    return np.where(exported == own, 0.0, np.where(is_choice & np.isfinite(regret), regret, np.inf))


def _observations(network: DeployedPolicy) -> list[np.ndarray]:
    """Return ``NUM_STEPS`` arrays ``(num_rows, num_observations)``: what a policy meets, and what it should never."""
    generator = np.random.default_rng(0)
    size, num_extremes = network.num_observations, len(EXTREMES)
    shape = (NUM_STEPS, NUM_RANDOM + 2 * num_extremes, size)
    steps = generator.normal(size=shape) * generator.choice((0.1, 1.0, 10.0), size=(1, shape[1], 1))
    extremes = steps[2, NUM_RANDOM:]  # a view
    extremes[:num_extremes] = np.array(EXTREMES)[:, None]
    extremes[num_extremes:, generator.integers(size)] = EXTREMES
    return list(steps.astype(np.float32))


def _short(row: Any) -> str:
    return np.array2string(np.asarray(row), precision=7, threshold=8, edgeitems=3, separator=", ").replace("\n", "")
