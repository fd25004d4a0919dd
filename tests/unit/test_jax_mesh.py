"""The mesh: which device is which rank, arrays there and back, and functions compiled for all ranks."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.distributed import jax_mesh
from lockstep.distributed.jax import REPLICATED, SHARDED, axis_index, pmean, psum
from lockstep.distributed.jax_mesh import RankMesh, make_mesh
from tests.unit.jax_fixtures import NUM_RANKS, ranks_of

pytestmark = pytest.mark.usefixtures("double_precision")

each_size = pytest.mark.parametrize("num_ranks", NUM_RANKS)


class Device(NamedTuple):
    process_index: int
    id: int


class Training(NamedTuple):
    replicated: Any
    sharded: Any


def test_ranks_are_devices_in_order() -> None:
    devices = jax.devices("cpu")
    ranks = make_mesh([devices[2], devices[0], devices[3]])
    assert list(ranks.mesh.devices) == [devices[0], devices[2], devices[3]]
    assert ranks.mesh.axis_names == ("ranks",)
    assert (ranks.num_ranks, ranks.local_ranks, ranks.is_multiprocess) == (3, (0, 1, 2), False)
    assert make_mesh() == make_mesh(jax.devices())
    assert make_mesh().num_ranks == jax.device_count()


def test_processes_come_before_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ids need not grow with processes: a GPU's does not.
    monkeypatch.setattr(jax_mesh, "Mesh", lambda devices, *_, **__: devices.tolist())
    shuffled: Any = [Device(1, 0), Device(0, 8), Device(1, 3), Device(0, 5)]
    found: Any = make_mesh(shuffled).mesh
    assert found == [[0, 5], [0, 8], [1, 0], [1, 3]]


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        ([], "a mesh needs at least one device"),
        ([Device(0, 1), Device(0, 2), Device(0, 1)], "comes twice in devices; name each once"),
        ([Device(1, 4)], "process 0 has no device in the mesh"),
    ],
)
def test_a_mesh_without_ranks_is_refused(devices: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make_mesh(devices)


def step(state: Training, rate: Any) -> tuple[Training, Any]:
    """Three rounds, in a loop: rows grow by the rank's number, the weight by a share of the mean of all rows."""

    def one(carry: Any, _: None) -> Any:
        weight, rows = carry
        rows = rows + axis_index()
        weight = weight + rate * pmean(rows.mean())
        return (weight, rows), weight

    carry, weights = jax.lax.scan(one, (state.replicated["weight"], state.sharded["rows"]), None, length=3)
    return Training({"weight": carry[0]}, {"rows": carry[1]}), {"weights": weights, "sum": psum(carry[1].sum())}


STATE = Training({"weight": np.float64(1.0)}, {"rows": np.array([0.0, 4.0, 8.0, 12.0])})
SPECS = Training(REPLICATED, SHARDED)
# The mean of the rows is 6 and grows each round by the mean of the ranks' numbers: 0, 0.5 or 1.5.
WEIGHTS = {1: [4.0, 7.0, 10.0], 2: [4.25, 7.75, 11.5], 4: [4.75, 9.25, 14.5]}
SUMS = {1: 24.0, 2: 30.0, 4: 42.0}


def placed(ranks: RankMesh) -> Training:
    return Training(ranks.replicate(STATE.replicated), ranks.shard(STATE.sharded))


@each_size
@pytest.mark.parametrize("enable_jit", [True, False])
def test_a_step_on_all_ranks(num_ranks: int, enable_jit: bool) -> None:
    ranks = ranks_of(num_ranks)
    run = ranks.compile(step, (SPECS, REPLICATED), (SPECS, REPLICATED), donate=0, enable_jit=enable_jit)
    state, metrics = run(placed(ranks), 0.5)
    metrics = ranks.to_host(metrics)
    assert metrics["weights"].tolist() == WEIGHTS[num_ranks]
    assert metrics["sum"] == SUMS[num_ranks]
    assert state.replicated["weight"].sharding == ranks.replicated
    assert state.sharded["rows"].sharding == ranks.sharded
    assert (
        ranks.unshard(state.sharded)["rows"].tolist()
        == {
            1: [0, 4, 8, 12],
            2: [0, 4, 11, 15],
            4: [0, 7, 14, 21],
        }[num_ranks]
    )


def test_without_jit_python_runs_every_time() -> None:
    def num_runs(enable_jit: bool) -> int:
        seen = []

        def function(rows: Any) -> Any:
            seen.append(rows)
            return rows

        run = ranks_of(2).compile(function, SHARDED, SHARDED, enable_jit=enable_jit)
        run(np.arange(4.0))
        run(np.ones(4))
        return len(seen)

    assert num_runs(enable_jit=True) == 1
    assert num_runs(enable_jit=False) == 2


def test_compiled_functions_can_be_called_in_others() -> None:
    run = ranks_of(2).compile(lambda rows: psum((rows**2).sum()), SHARDED, REPLICATED)
    assert jax.jit(run)(np.array([1.0, 2.0])) == 5
    assert jax.grad(run)(np.array([1.0, 2.0])).tolist() == [2, 4]


@each_size
def test_one_compilation_serves_all_steps(num_ranks: int) -> None:
    ranks, num_traces = ranks_of(num_ranks), 0

    def counted(state: Training, rate: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        return step(state, rate)

    run = ranks.compile(counted, (SPECS, REPLICATED), (SPECS, REPLICATED), donate=0)
    state = placed(ranks)
    for _ in range(3):
        state, _ = run(state, 0.5)
    assert num_traces == 1
    assert run._cache_size() == 1  # type: ignore[attr-defined]


@each_size
def test_a_donated_state_is_gone_without_a_warning(num_ranks: int) -> None:
    ranks = ranks_of(num_ranks)
    run = ranks.compile(step, (SPECS, REPLICATED), (SPECS, REPLICATED), donate=[0])
    state = placed(ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(state, 0.5)
    for leaf in jax.tree.leaves(state):
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(leaf)


@each_size
def test_copies_on_the_host_outlive_what_they_were_made_of(num_ranks: int) -> None:
    ranks = ranks_of(num_ranks)
    grow = ranks.compile(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), (SPECS,), SPECS, donate=0)
    weight, rows = np.arange(1000.0), np.arange(4000.0)
    on_device = jax.device_put(weight, jax.devices("cpu")[0])
    state = Training(ranks.replicate({"host": weight, "device": on_device}), ranks.shard(rows))
    state = grow(state)  # the memory that is now free is what the arrays were placed in
    before = ranks.to_host(state.replicated), ranks.unshard(state.sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            state = grow(state)
    for kept in (*before[0].values(), before[1]):
        np.testing.assert_array_equal(kept, np.arange(1.0, len(kept) + 1))
    for source in (weight, rows, np.asarray(on_device)):
        np.testing.assert_array_equal(source, np.arange(float(len(source))))


@each_size
def test_what_the_host_writes_later_stays_on_the_host(num_ranks: int) -> None:
    ranks = ranks_of(num_ranks)
    for put in (ranks.replicate, ranks.shard, ranks.shard_local):
        host = np.zeros(4096)
        array = put(host)
        host += 1
        assert np.asarray(array).sum() == 0


@each_size
def test_rows_go_to_ranks_and_come_back(num_ranks: int) -> None:
    ranks = ranks_of(num_ranks)
    tree: dict[str, Any] = {
        "float64": np.arange(8.0).reshape(4, 2),
        "bool": np.array([True, False, True, True]),
        "bfloat16": np.arange(4).astype(jnp.bfloat16),
        "uint32": np.full((8, 0), 7, np.uint32),
        "int8": np.arange(16, dtype=np.int8),
        "jax": jnp.arange(4, dtype=jnp.int32),
    }
    for put in (ranks.shard, ranks.shard_local):
        arrays = put(tree)
        for name, array in arrays.items():
            assert array.sharding == ranks.sharded
            assert len(array.addressable_shards[0].data) == len(tree[name]) // num_ranks
            assert array.addressable_shards[-1].data.tolist() == tree[name][-len(tree[name]) // num_ranks :].tolist()
        back = ranks.unshard(arrays)
        for name, array in back.items():
            assert isinstance(array, np.ndarray)
            assert array.dtype == tree[name].dtype
            np.testing.assert_array_equal(array, tree[name])
            array[:1] = 0  # it is a copy, to be written to
    keys = ranks.shard(jax.random.split(jax.random.key(3), 4))
    data = jax.random.key_data(jax.random.split(jax.random.key(3), 4))
    assert ranks.unshard(keys).tolist() == data.tolist()


@each_size
def test_copies_go_to_ranks_and_come_back(num_ranks: int) -> None:
    ranks = ranks_of(num_ranks)
    tree = {"weight": np.ones((3, 2), np.float32), "rate": 0.5, "count": 3, "key": jax.random.key(9)}
    arrays = ranks.replicate(tree)
    assert all(leaf.sharding == ranks.replicated for leaf in jax.tree.leaves(arrays))
    back = ranks.to_host(arrays)
    assert {name: (array.dtype.name, array.tolist()) for name, array in back.items()} == {
        "weight": ("float32", np.ones((3, 2)).tolist()),
        "rate": ("float64", 0.5),
        "count": ("int64", 3),
        "key": ("uint32", [0, 9]),
    }
    assert ranks.unshard(arrays)["rate"] == 0.5
    again = ranks.replicate(ranks.shard(np.arange(4.0)))
    assert again.sharding == ranks.replicated
    assert again.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("method", "tree", "line"),
    [
        ("shard", {"envs": [np.ones(6)]}, r"envs.0 has shape \(6,\), whose first axis can't be split over 4 ranks"),
        ("shard", 1.0, r"the array has shape \(\), whose first axis can't be split over 4 ranks"),
        ("shard_local", np.ones((2, 4)), r"the array has shape \(2, 4\), .* over the 4 ranks of this process"),
    ],
)
def test_rows_that_ranks_do_not_divide_are_refused(method: str, tree: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        getattr(ranks_of(4), method)(tree)


def test_what_is_split_is_not_read_as_if_it_were_a_copy() -> None:
    with pytest.raises(ValueError, match=r"rows \(4,\) is split over ranks .*; use unshard for it"):
        ranks_of(2).to_host({"rows": ranks_of(2).shard(np.ones(4))})


def test_what_is_not_the_same_on_all_ranks_may_not_be_called_so() -> None:
    run = ranks_of(2).compile(lambda rows: rows.sum(), SHARDED, REPLICATED)
    with pytest.raises(ValueError, match="replicat"):
        run(np.ones(4))
