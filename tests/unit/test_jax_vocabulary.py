"""Collectives over ranks: worked out by hand on 1, 2 and 4 devices, and nothing at all where there are no ranks."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep.distributed
from lockstep.distributed import jax as vocabulary
from lockstep.distributed.jax import all_gather, axis_index, axis_size, local_parameters, pmax, pmean, pmin, psum
from lockstep.distributed.jax_mesh import REPLICATED, SHARDED
from tests.unit.jax_fixtures import NUM_RANKS, on_ranks, ranks_of

pytestmark = pytest.mark.usefixtures("double_precision")

ROWS = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
# What becomes of the sums that 1, 2 or 4 ranks make of their rows: (1+2+3+4), (1+2, 3+4), (1, 2, 3, 4).
EXPECTED: dict[Callable[..., Any], dict[int, Any]] = {
    psum: {1: [10, 100], 2: [10, 100], 4: [10, 100]},
    pmean: {1: [10, 100], 2: [5, 50], 4: [2.5, 25]},
    pmax: {1: [10, 100], 2: [7, 70], 4: [4, 40]},
    pmin: {1: [10, 100], 2: [3, 30], 4: [1, 10]},
    all_gather: {1: [[10, 100]], 2: [[3, 30], [7, 70]], 4: ROWS.tolist()},
}
# What becomes of a 2 that all ranks have.
OF_ONE_VALUE: dict[Callable[..., Any], dict[int, Any]] = {
    psum: {1: 2, 2: 4, 4: 8},
    pmean: {1: 2, 2: 2, 4: 2},
    pmax: {1: 2, 2: 2, 4: 2},
    pmin: {1: 2, 2: 2, 4: 2},
    all_gather: {1: [2], 2: [2, 2], 4: [2, 2, 2, 2]},
}
COLLECTIVES = list(EXPECTED)
each_collective = pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda collective: collective.__name__)
each_size = pytest.mark.parametrize("num_ranks", NUM_RANKS)


@pytest.mark.filterwarnings("ignore:pmean of what is the same")  # as a 2 is that all ranks have
@each_size
@pytest.mark.parametrize("check_vma", [True, False])
def test_reduced_over_ranks_and_the_same_on_all(num_ranks: int, check_vma: bool) -> None:
    def function(rows: Any, two: Any) -> Any:
        tree = {"sum": rows.sum(0), "none": None, "more": [-rows.sum(0)]}
        return {collective.__name__: (collective(tree), collective(two), collective(2.0)) for collective in COLLECTIVES}

    found = on_ranks(num_ranks, function, ROWS, 2.0, in_specs=(SHARDED, REPLICATED), check_vma=check_vma)
    for collective in COLLECTIVES:
        tree, of_argument, of_constant = found[collective.__name__]
        assert tree["sum"].tolist() == EXPECTED[collective][num_ranks]
        assert tree["none"] is None
        assert of_argument.tolist() == of_constant.tolist() == OF_ONE_VALUE[collective][num_ranks]
        opposite = {pmax: pmin, pmin: pmax}.get(collective, collective)
        assert (-tree["more"][0]).tolist() == EXPECTED[opposite][num_ranks]


@each_collective
def test_nothing_happens_where_there_is_no_axis(collective: Callable[..., Any]) -> None:
    tree = {"array": np.array([1.0, 2.0]), "number": 3}
    assert collective(tree) is tree
    assert collective(tree, None) is tree
    assert collective(tree, axis_name="another") is tree

    def within_ranks(rows: Any) -> Any:
        assert collective(rows, None) is rows
        assert collective(rows, "another") is rows
        return rows

    assert on_ranks(2, within_ranks, ROWS, out_specs=SHARDED).tolist() == ROWS.tolist()
    assert inspect.signature(collective).parameters["axis_name"].default == vocabulary.AXIS_NAME == "ranks"


@each_size
def test_rows_are_joined_in_the_order_of_ranks(num_ranks: int) -> None:
    def function(rows: Any) -> Any:
        return all_gather(rows, tiled=True)

    assert on_ranks(num_ranks, function, ROWS).tolist() == ROWS.tolist() == function(ROWS).tolist()


def test_what_has_no_rows_is_not_joined() -> None:
    with pytest.raises(ValueError, match=r"joins rows, but an array of the tree has shape \(\); use tiled=False"):
        on_ranks(2, lambda rows: all_gather(rows.sum(), tiled=True), ROWS)


@each_size
@pytest.mark.parametrize("check_vma", [True, False])
def test_which_rank_this_is_and_of_how_many(num_ranks: int, check_vma: bool) -> None:
    def function() -> tuple[Any, Any]:
        assert axis_size() == num_ranks
        assert axis_index().dtype == jnp.int32
        return axis_index()[None], psum(axis_index())

    own, total = on_ranks(num_ranks, function, in_specs=(), out_specs=(SHARDED, REPLICATED), check_vma=check_vma)
    assert own.tolist() == [0, 1, 2, 3][:num_ranks]
    assert total == {1: 0, 2: 1, 4: 6}[num_ranks]


def test_without_an_axis_this_is_rank_0_of_1() -> None:
    for axis_name in ("ranks", "another", None):
        assert axis_size(axis_name) == 1
        assert axis_index(axis_name) == 0
        assert axis_index(axis_name).dtype == jnp.int32


def test_what_holds_on_some_ranks_is_counted() -> None:
    assert on_ranks(4, lambda rows: psum(rows[0, 0] > 1.5), ROWS) == 3
    assert on_ranks(4, lambda rows: pmax(rows[0, 0] > 3.5), ROWS).tolist() is True
    assert on_ranks(4, lambda rows: pmin(rows[0, 0] > 3.5), ROWS).tolist() is False


def test_axes_of_another_name() -> None:
    mesh = jax.sharding.Mesh(ranks_of(4).mesh.devices.reshape(2, 2), ("hosts", "devices"))
    specs = jax.P(("hosts", "devices"))

    def function(rows: Any) -> Any:
        return [all_gather(psum(rows[0], "devices"), "hosts"), pmax(pmean(rows[0], "hosts"), "devices")]

    sums, means = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=REPLICATED))(ROWS)
    assert sums.tolist() == [[3, 30], [7, 70]]
    assert means.tolist() == [3, 30]


def test_several_axes_are_counted_through() -> None:
    mesh = jax.sharding.Mesh(ranks_of(4).mesh.devices.reshape(2, 2), ("hosts", "devices"))
    specs, both = jax.P(("hosts", "devices")), ("hosts", "devices", "nowhere")

    def function(weight: Any, rows: Any) -> Any:
        reduced = {each.__name__: each({"sum": rows.sum(0)}, both)["sum"] for each in COLLECTIVES}
        own = jax.grad(lambda weight: (weight * rows[:, 0]).sum())(local_parameters(weight, both))
        of_rank = [axis_index(both)[None], own[None]]
        assert axis_size(both) == 4
        return reduced, of_rank

    mapped = jax.shard_map(function, mesh=mesh, in_specs=(REPLICATED, specs), out_specs=(REPLICATED, specs))
    reduced, (index, gradients) = jax.jit(mapped)(1.0, ROWS)
    assert {name: found.tolist() for name, found in reduced.items()} == {
        collective.__name__: EXPECTED[collective][4] for collective in COLLECTIVES
    }
    assert index.tolist() == [0, 1, 2, 3]
    assert gradients.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("dtype", "value", "dtype_of_mean"),
    [
        ("uint8", 200, "float32"),
        ("int8", -100, "float32"),
        ("int32", 2**30, "float32"),
        ("float16", 40_000, "float16"),
        ("bfloat16", 256, "bfloat16"),
        ("float8_e4m3fn", 240, "float8_e4m3fn"),
        ("float32", 3, "float32"),
        ("complex64", 3j, "complex64"),
    ],
)
def test_means_do_not_overflow_small_numbers(dtype: str, value: Any, dtype_of_mean: str) -> None:
    mean = on_ranks(4, lambda rows: pmean(rows[0]), jnp.full(4, value, dtype))
    assert mean.dtype.name == dtype_of_mean
    assert complex(mean) == value


@pytest.mark.parametrize("number", [2, 2.0])
def test_the_mean_of_a_plain_number_makes_nothing_wider(number: Any) -> None:
    found = on_ranks(2, lambda rows: psum(rows.sum()) * pmean(number), ROWS.astype(np.float32))
    assert found.dtype == np.float32
    assert found == 220.0


def test_a_mean_of_what_is_the_same_already_is_warned_of() -> None:
    weight = np.ones(1, np.float32)

    def of_a_sum(weight: Any, rows: Any) -> Any:
        return pmean(jax.grad(lambda weight: (weight * rows).sum())(weight))

    with pytest.warns(UserWarning, match=r"if it is a gradient, .* with respect to local_parameters\(parameters\)"):
        on_ranks(2, of_a_sum, weight, ROWS, in_specs=(REPLICATED, SHARDED))


@pytest.mark.parametrize("check_vma", [True, False])
def test_other_means_are_not(recwarn: pytest.WarningsRecorder, check_vma: bool) -> None:
    def means(weight: Any, rows: Any) -> Any:
        own = jax.grad(lambda weight: (weight * rows).sum())(local_parameters(weight))
        return pmean((own, rows.sum(), 2.0, jnp.int32(3)))

    specs: Any = {"in_specs": (REPLICATED, SHARDED), "out_specs": REPLICATED, "check_vma": check_vma}
    jax.jit(jax.shard_map(means, mesh=ranks_of(2).mesh, **specs))(np.ones(1, np.float32), ROWS)
    assert [str(each.message) for each in recwarn if "pmean" in str(each.message)] == []


def test_an_axis_of_vmap_will_do() -> None:
    def function(row: Any) -> dict[str, Any]:
        return {collective.__name__: collective({"row": row}, "rows")["row"] for collective in COLLECTIVES}

    mapped: Any = jax.vmap(function, axis_name="rows")
    for every in (mapped(ROWS), jax.jit(mapped)(ROWS)):
        for collective in COLLECTIVES:
            assert every[collective.__name__].tolist() == [EXPECTED[collective][4]] * 4


def test_what_is_not_reduced_is_refused() -> None:
    with pytest.raises(ValueError, match="replicat"):
        on_ranks(2, lambda rows: rows.sum(0), ROWS)


@each_size
def test_gradients_of_local_parameters_are_this_ranks_own(num_ranks: int) -> None:
    def function(weight: Any, rows: Any) -> Any:
        own = local_parameters({"weight": weight})
        again = local_parameters(own)
        return jax.grad(lambda tree: (tree["weight"] * rows[:, 0]).sum())(again)["weight"][None]

    def of(check_vma: bool) -> list[float]:
        found: list[float] = on_ranks(
            num_ranks, function, 1.0, ROWS, in_specs=(REPLICATED, SHARDED), out_specs=SHARDED, check_vma=check_vma
        ).tolist()
        return found

    assert of(True) == of(False) == {1: [10.0], 2: [3.0, 7.0], 4: [1.0, 2.0, 3.0, 4.0]}[num_ranks]
    weight = np.ones(3)
    assert local_parameters(weight) is weight
    assert local_parameters(weight, None) is weight


def test_operation_by_operation_it_is_the_same() -> None:
    def function(rows: Any) -> dict[str, Any]:
        found = {collective.__name__: collective((rows.sum(0), 2.0)) for collective in COLLECTIVES}
        return found | {"index": psum(axis_index())}

    mapped = jax.shard_map(function, mesh=ranks_of(4).mesh, in_specs=SHARDED, out_specs=REPLICATED)
    found = mapped(ROWS)
    for collective in COLLECTIVES:
        array, number = found[collective.__name__]
        assert array.tolist() == EXPECTED[collective][4]
        assert number.tolist() == OF_ONE_VALUE[collective][4]
    assert found["index"] == 6


def test_it_is_found_in_lockstep_distributed() -> None:
    assert lockstep.distributed.jax is vocabulary
    assert "jax" in dir(lockstep.distributed)
    for name in vocabulary.__all__:
        member = getattr(vocabulary, name)
        assert not callable(member) or member.__doc__
