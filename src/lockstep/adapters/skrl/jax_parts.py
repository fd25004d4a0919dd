"""Parts of skrl's agents in the library's own interfaces, whose exchanges between ranks are ours (JAX)."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from skrl.resources.preprocessors.jax import RunningStandardScaler
from skrl.resources.schedulers.jax import KLAdaptiveLR

from lockstep.adapters.skrl.jax_actor import scale_of
from lockstep.distributed.jax_guests import Exchange
from lockstep.distributed.jax_moments import Moments

State = dict[str, np.ndarray]


class InStepOptimizer:
    """An optimizer of the library that is given the gradient of all ranks' samples, which it then clips.

    Args:
        inner: the library's.
        exchange: between the ranks.
        tag: what the gradient is of.
    """

    def __init__(self, inner: Any, exchange: Exchange, tag: str) -> None:
        self._inner, self._exchange, self._tag = inner, exchange, tag

    @property
    def state(self) -> Any:
        """Of optax."""
        return self._inner.state

    def step(self, *, grad: Any, model: Any, lr: float | None = None) -> Self:
        """Step the parameters of a model; return the optimizer after it."""
        mean = self._exchange.mean(grad, self._tag)
        return type(self)(self._inner.step(grad=mean, model=model, lr=lr), self._exchange, self._tag)

    def with_state(self, state: Any) -> Self:
        """Return the optimizer with another state."""
        return type(self)(self._inner.replace(state=state), self._exchange, self._tag)


class PooledKl:
    """The library's schedule by KL divergence, steered by that of all ranks' samples.

    Its ``kl_adaptive`` is the library's ``learning_rate_scheduler``, which is known there by its name.

    Attributes:
        kl: of the last epoch, over all ranks; None before the first.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._own: Any = None
        self.kl: float | None = None

    def kl_adaptive(self, **settings: Any) -> Callable[..., float]:
        """Return a schedule ``(timestep, lr, kl)`` that gives the next learning rate."""
        inner = KLAdaptiveLR(**settings)

        def schedule(timestep: int, *, lr: float | None = None, kl: Any = None) -> float:
            return float(inner(timestep, lr=lr, kl=None if kl is None else self._pool(kl)))

        return schedule

    def _pool(self, kl: Any) -> float:
        if kl is not self._own or self.kl is None:  # both networks are steered by the same object
            self._own = kl
            self.kl = float(self._exchange.mean(jnp.asarray([kl], jnp.float32), "kl")[0])
        return self.kl


class SharedScaler(RunningStandardScaler):  # type: ignore[misc]
    """A normaliser that is the same on all ranks: exact moments in float64, of each sample once.

    ``train`` means nothing to it: it takes up what all ranks give to ``merge_scalers``. Before that it has mean 0 and
    variance 1, and no sample.
    """

    def __init__(self, size: Any, *, exchange: Exchange, **named: Any) -> None:
        super().__init__(size, **named)
        self.exchange = exchange
        width: tuple[int, ...] = self.running_mean.shape
        self._moments: State = no_moments(width)

    def take(self, rows: np.ndarray) -> None:
        """Take up samples of all ranks, whose packed moments are ``rows (num_ranks, 1 + 2 * size)``."""
        self._moments = merged(self._moments, rows)
        self._take_up()

    def __call__(self, x: jax.Array | None, *, train: bool = False, inverse: bool = False) -> jax.Array | None:
        """Return samples scaled, or scaled back."""
        scaled: jax.Array | None = super().__call__(x, inverse=inverse)
        return scaled

    def moments(self) -> State:
        """Return count, mean and sum of squared deviations of all samples so far, in float64."""
        return dict(self._moments)

    def put(self, moments: State) -> None:
        """Go on with such moments."""
        self._moments = {name: np.asarray(value, np.float64) for name, value in moments.items()}
        self._take_up()

    def _take_up(self) -> None:
        mean, variance = scale_of(self._moments, np)
        self.running_mean, self.running_variance = jax.device_put((mean, variance), self.device)


class SharedValueScaler(SharedScaler):
    """The same for returns, which the library trains where the ranks are in step: at the start of an update.

    Attributes:
        given: what it was trained on last, ``(num_steps, num_envs, 1)``.
    """

    given: jax.Array

    def __call__(self, x: jax.Array | None, *, train: bool = False, inverse: bool = False) -> jax.Array | None:
        """Return values scaled, or scaled back; with ``train`` those of all ranks are taken up first."""
        if train and x is not None:
            self.given = x
            merge_scalers([self], [x], self.exchange, "moments of values")
        return super().__call__(x, inverse=inverse)


def merge_scalers(scalers: Sequence[SharedScaler], samples: Sequence[jax.Array], exchange: Exchange, tag: str) -> None:
    """Have normalisers take up the samples of all ranks, in one exchange.

    Args:
        scalers: the same ones in the same order on every rank.
        samples: this rank's for each of them, ``(..., size)``; there may be none.
        exchange: between the ranks.
        tag: what the exchange is for.
    """
    if not scalers:
        return
    tables = gather_moments(samples, exchange, tag)
    for scaler, rows in zip(scalers, tables, strict=True):
        scaler.take(rows)


def gather_moments(samples: Sequence[jax.Array], exchange: Exchange, tag: str) -> list[np.ndarray]:
    """Return the packed moments of several sets of samples, of each ``(num_ranks, 1 + 2 * size)``, in one exchange.

    Args:
        samples: this rank's, ``(..., size)`` each; as many sets of the same sizes on every rank.
        exchange: between the ranks.
        tag: what the exchange is for.
    """
    with jax.enable_x64(True):
        own = [np.asarray(_packed_moments(each), np.float64) for each in samples]
    ends = np.cumsum([row.size for row in own])[:-1]
    return np.split(exchange.gather(np.concatenate(own), tag), ends, axis=1)


@jax.jit
def _packed_moments(samples: jax.Array) -> jax.Array:
    return Moments.of(samples.reshape(-1, samples.shape[-1])).pack()


def no_moments(size: tuple[int, ...]) -> State:
    """Return the moments of no sample."""
    return {"count": np.zeros(()), "mean": np.zeros(size), "m2": np.zeros(size)}


def merged(running: State, rows: np.ndarray) -> State:
    """Return moments with packed ones ``(num_ranks, 1 + 2 * size)`` merged in, those of one rank after the other."""
    for row in rows:
        running = _merged(running, row)
    return running


def _merged(running: State, row: np.ndarray) -> State:
    """Return moments with packed ones merged in (Chan, Golub and LeVeque 1983, equation 2.1)."""
    count, (mean, m2) = row[0], np.split(row[1:], 2)
    if count == 0:
        return running
    total = running["count"] + count
    difference = mean - running["mean"]
    return {
        "count": total,
        "mean": running["mean"] + count / total * difference,
        "m2": running["m2"] + m2 + count / total * running["count"] * difference**2,
    }
