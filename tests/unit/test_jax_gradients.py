"""One update from the gradients of all ranks: the same as one rank's, with types or without, worked out by hand."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.distributed import jax_gradients
from lockstep.distributed.jax import axis_index, gradient_update, local_parameters
from lockstep.distributed.jax_mesh import REPLICATED, SHARDED
from tests.unit.jax_fixtures import NUM_RANKS, on_ranks, ranks_of

pytestmark = pytest.mark.usefixtures("double_precision")

PLACES = [(num_ranks, check_vma) for num_ranks in NUM_RANKS for check_vma in (True, False)]
each_place = pytest.mark.parametrize(("num_ranks", "check_vma"), [*PLACES, (0, True)], ids=str)


def everywhere(num_ranks: int, check_vma: bool, update: Callable[..., Any], start: Any, *rows: Any) -> Any:
    """Return what ``update(parameters, *rows)`` gives on ranks that share the rows; on 0 ranks there is no axis."""
    if num_ranks == 0:
        return jax.jit(update)(start, *rows)
    specs = (REPLICATED, *(SHARDED for _ in rows))
    return on_ranks(num_ranks, update, start, *rows, in_specs=specs, check_vma=check_vma)


def descend(loss_fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a step down the gradient, of length 1 times that: what is subtracted is the gradient."""
    optimizer = optax.sgd(1.0)
    update = gradient_update(loss_fn, optimizer, **options)
    return lambda params, *rows: update(params, optimizer.init(params), *rows)


@each_place
def test_the_mean_over_ranks_is_subtracted(num_ranks: int, check_vma: bool) -> None:
    step = descend(lambda params, rows: (params["weight"] * rows).mean())
    loss, params, _ = everywhere(num_ranks, check_vma, step, {"weight": 3.0}, np.array([1.0, 2.0, 3.0, 4.0]))
    assert loss == 7.5
    assert params["weight"] == 0.5  # 3 - 2.5


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_gradient_that_is_summed_twice_would_be_seen(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_gradients, "local_parameters", lambda tree, axis_name: tree)
    step = descend(lambda params, rows: (params * rows).mean())
    rows = np.array([1.0, 2.0, 3.0, 4.0])
    assert everywhere(num_ranks, True, step, 3.0, rows)[1] == 3 - num_ranks * 2.5
    assert everywhere(num_ranks, False, step, 3.0, rows)[1] == 0.5


@pytest.mark.parametrize("axis_name", ["hosts", "devices", None])
def test_samples_that_differ_over_another_axis_are_refused(axis_name: str | None) -> None:
    mesh = jax.sharding.Mesh(ranks_of(4).mesh.devices.reshape(2, 2), ("hosts", "devices"))
    rows = np.array([1.0, 2.0, 3.0, 4.0])

    def gradient(axis_name: Any, own_axes: Any = None) -> list[float]:
        step = descend(lambda weight, rows: (weight * rows).mean(), axis_name=axis_name)

        def function(weight: Any, rows: Any) -> Any:
            return -step(local_parameters(weight, own_axes), rows)[1][None]

        specs = jax.P(("hosts", "devices"))
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(REPLICATED, specs), out_specs=specs)
        found: list[float] = jax.jit(mapped)(0.0, rows).tolist()
        return found

    with pytest.raises(ValueError, match=r"but the loss differs over \[.*give it axis_name=\('(hosts|devices)', '"):
        gradient(axis_name)
    assert gradient(("hosts", "devices")) == [2.5] * 4
    # Parameters that are to differ over an axis have gradients of their own there.
    others = tuple(name for name in ("hosts", "devices") if name != axis_name)
    assert gradient(axis_name, others) == {"hosts": [2.0, 3.0] * 2, "devices": [1.5, 1.5, 3.5, 3.5]}.get(
        str(axis_name), rows.tolist()
    )


@each_place
def test_samples_count_alike_wherever_they_are(num_ranks: int, check_vma: bool) -> None:
    # Three samples, one, none and two: on four ranks, one has none, and its loss is 0/0.
    rows = np.array([[1.0, 2.0, 3.0], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0], [4.0, 5.0, 0.0]])

    def loss_fn(weight: Any, rows: Any) -> Any:
        return weight * rows.sum() / (rows > 0).sum()

    optimizer = optax.sgd(1.0)
    update = gradient_update(loss_fn, optimizer)

    def step(weight: Any, rows: Any) -> Any:
        return update(weight, optimizer.init(weight), rows, num_samples=(rows > 0).sum())

    loss, weight, _ = everywhere(num_ranks, check_vma, step, 1.0, rows)
    assert float(loss) == pytest.approx(4.0)  # 24 / 6
    assert float(weight) == pytest.approx(-3.0)
    loss, weight, _ = everywhere(num_ranks, check_vma, step, 1.0, 0 * rows)
    assert (loss, weight) == (0.0, 1.0)


@each_place
def test_clipped_after_the_mean(num_ranks: int, check_vma: bool) -> None:
    # The mean is (3, 4), of length 5; ranks' own gradients point elsewhere.
    rows = np.array([[12.0, 0.0], [0.0, 0.0], [0.0, 16.0], [0.0, 0.0]])

    def loss_fn(params: Any, rows: Any) -> Any:
        return (params["x"] * rows[:, 0] + params["y"] * rows[:, 1]).mean()

    def both(params: Any, rows: Any) -> Any:
        return [descend(loss_fn, max_grad_norm=norm)(params, rows)[1] for norm in (1.0, 10.0)]

    clipped, whole = everywhere(num_ranks, check_vma, both, {"x": 0.0, "y": 0.0}, rows)
    assert [float(clipped["x"]), float(clipped["y"])] == pytest.approx([-0.6, -0.8])
    assert whole == {"x": -3.0, "y": -4.0}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_what_the_loss_returns_besides_stays_this_ranks_own(num_ranks: int) -> None:
    def loss_fn(weight: Any, rows: Any) -> Any:
        return weight * rows.mean(), {"rank": axis_index()[None]}

    step = descend(loss_fn, has_aux=True)
    (loss, extra), _, _ = on_ranks(
        num_ranks,
        step,
        1.0,
        np.array([1.0, 2.0, 3.0, 4.0]),
        in_specs=(REPLICATED, SHARDED),
        out_specs=((REPLICATED, SHARDED), REPLICATED, REPLICATED),
    )
    assert loss == 2.5
    assert extra["rank"].tolist() == [0, 1, 2, 3][:num_ranks]


@pytest.mark.parametrize("check_vma", [True, False])
def test_many_steps_of_adam_are_those_of_one_rank(check_vma: bool) -> None:
    inputs = np.random.default_rng(0).normal(size=(8, 3))
    optimizer = optax.adam(0.1)
    update = gradient_update(lambda params, rows: ((rows @ params - 1.0) ** 2).mean(), optimizer, max_grad_norm=0.5)

    def train(params: Any, rows: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            loss, *carry = update(*carry, rows)
            return tuple(carry), loss

        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), None, length=20)
        return params, losses

    alone, losses = jax.jit(train)(np.zeros(3), inputs)
    together, same_losses = everywhere(4, check_vma, train, np.zeros(3), inputs)
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    np.testing.assert_allclose(same_losses, losses, rtol=1e-12)


def test_one_exchange_for_all_parameters() -> None:
    step = descend(lambda params, rows: (params["x"] * rows + params["y"].sum() * rows**2).mean(), max_grad_norm=1.0)
    compiled: Any = ranks_of(4).compile(step, (REPLICATED, SHARDED), REPLICATED)
    params = {"x": jnp.float32(1.0), "y": jnp.ones(5)}
    text = compiled.lower(params, np.arange(4.0)).compile().as_text()
    assert sum(" all-reduce(" in line or " all-reduce-start(" in line for line in text.splitlines()) == 1
    assert "all-gather" not in text


def test_types_stay() -> None:
    step = descend(lambda params, rows: params["half"] * rows.astype(jnp.bfloat16).mean() + 0 * params["single"])
    start = {"half": jnp.zeros((), jnp.bfloat16), "single": jnp.zeros((), jnp.float32)}
    _, params, _ = everywhere(4, True, step, start, np.ones(4))
    assert params["half"].dtype == jnp.bfloat16
    assert params["single"].dtype == jnp.float32


def test_half_precision_is_summed_in_more() -> None:
    # What is sent is looked at, since sums come out the same on a CPU, which adds bfloat16 in float32 anyway.
    step = descend(lambda weight, rows: weight * rows.astype(jnp.bfloat16).mean())
    run = ranks_of(4).compile(step, (REPLICATED, SHARDED), REPLICATED)
    text = str(jax.make_jaxpr(run)(jnp.zeros((), jnp.bfloat16), np.ones(4)))
    assert re.findall(r":(\w+)\[3\] = psum", text) == ["f32"]  # the loss, the gradient and the count
    assert run(jnp.zeros((), jnp.bfloat16), np.ones(4))[1].dtype == jnp.bfloat16


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_clips_everything_is_refused(norm: float) -> None:
    with pytest.raises(ValueError, match=rf"max_grad_norm is {norm}; it must be above 0, or None"):
        gradient_update(lambda params: params, optax.sgd(1.0), max_grad_norm=norm)
