"""Populations, keys and copies over the devices of a mesh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.distributed.jax import (
    REPLICATED,
    SHARDED,
    axis_index,
    get_global_ranks,
    is_dist_initialized,
    pmean,
    psum,
    replicate,
    shmap_map,
    shmap_vmap,
    split_key_to_devices,
    tree_device_put,
    unreplicate,
)
from tests.unit.jax_fixtures import NUM_RANKS, ranks_of

pytestmark = pytest.mark.usefixtures("double_precision")

each_size = pytest.mark.parametrize("num_ranks", NUM_RANKS)
each_way = pytest.mark.parametrize("way", [shmap_vmap, shmap_map], ids=lambda way: way.__name__)
Way = Callable[..., Callable[..., Any]]


def population(num_members: int) -> np.ndarray:
    return np.arange(num_members * 30.0).reshape(num_members, 10, 3)


def fitness(member: Any) -> Any:
    assert member.shape == (10, 3)
    return member[:, 0] + 100 * member[:, 2]


# Entry (i, j) holds the numbers 30 i + 3 j and the two after it.
FITNESS = [[101 * (30 * i + 3 * j) + 200 for j in range(10)] for i in range(5)]


@each_way
@pytest.mark.parametrize(("num_ranks", "num_members"), [(1, 4), (2, 4), (4, 4), (1, 5), (2, 5), (4, 5), (4, 1)])
def test_each_member_gets_its_fitness(way: Way, num_ranks: int, num_members: int) -> None:
    ranks = ranks_of(num_ranks)
    found = way(fitness, ranks, SHARDED, SHARDED)(population(num_members))
    assert found.shape == (num_members, 10)
    assert found.tolist() == FITNESS[:num_members]
    if num_members == 4:
        assert found.sharding.is_equivalent_to(ranks.sharded, 2)


@each_way
def test_members_may_be_anywhere_before(way: Way) -> None:
    ranks = ranks_of(4)
    evaluate = way(fitness, ranks, SHARDED, SHARDED)
    assert evaluate(jnp.asarray(population(5))).tolist() == FITNESS
    assert evaluate(ranks.replicate(population(5))).tolist() == FITNESS
    assert jax.jit(evaluate)(population(5)).tolist() == FITNESS
    placed = tree_device_put(population(4), ranks)
    assert way(fitness, ranks.mesh, SHARDED, SHARDED)(placed).tolist() == FITNESS[:4]


@each_way
def test_a_mesh_as_jax_makes_it_by_itself(way: Way) -> None:
    mesh = jax.make_mesh((4,), ("ranks",), devices=ranks_of(4).mesh.devices.tolist())
    evaluate = way(fitness, mesh, SHARDED, SHARDED)
    for num_members in (4, 5):
        assert evaluate(population(num_members)).tolist() == FITNESS[:num_members]
    placed = tree_device_put(population(4), mesh)
    assert (evaluate(placed) + placed[..., 0]).sharding.mesh == mesh


@each_way
def test_repeated_rows_are_no_part_of_an_exchange(way: Way) -> None:
    center = way(lambda row: row - pmean(row), ranks_of(4), SHARDED, SHARDED)
    assert center(np.array([1.0, 2.0, 3.0, 6.0])).tolist() == [-2.0, -1.0, 0.0, 3.0]
    with pytest.raises(ValueError, match=r"repeated rows would count in psum at .*; give a multiple of 4"):
        center(np.array([1.0, 2.0, 3.0]))


@each_size
@each_way
def test_arguments_and_results_are_trees_some_for_all_rows(way: Way, num_ranks: int) -> None:
    def function(member: dict[str, Any], scale: Any) -> dict[str, Any]:
        assert member["x"].shape == scale.shape == ()
        return {"scaled": member["x"] * scale, "shifted": [member["x"] + member["y"], axis_index()]}

    evaluate = way(function, ranks_of(num_ranks), ({"x": SHARDED, "y": REPLICATED}, REPLICATED), SHARDED)
    found = evaluate({"x": np.array([1.0, 2.0, 3.0]), "y": 10.0}, 5.0)
    assert found["scaled"].tolist() == [5.0, 10.0, 15.0]
    assert found["shifted"][0].tolist() == [11.0, 12.0, 13.0]
    assert found["shifted"][1].tolist() == {1: [0, 0, 0], 2: [0, 0, 1], 4: [0, 1, 2]}[num_ranks]


@each_size
def test_a_result_may_be_the_same_for_all_rows(num_ranks: int) -> None:
    def function(row: Any, scale: Any) -> tuple[Any, Any]:
        return row * scale, psum(scale)

    evaluate = shmap_vmap(function, ranks_of(num_ranks), (SHARDED, REPLICATED), (SHARDED, REPLICATED))
    scaled, total = evaluate(np.arange(4.0), 5.0)
    assert scaled.tolist() == [0.0, 5.0, 10.0, 15.0]
    assert total == 5 * num_ranks


def test_little_memory_means_one_row_at_a_time() -> None:
    def num_loops(way: Way, **options: Any) -> int:
        evaluate = way(fitness, ranks_of(2), SHARDED, SHARDED, **options)
        return str(jax.make_jaxpr(evaluate)(population(8))).count("scan[")

    assert [num_loops(shmap_vmap), num_loops(shmap_map)] == [0, 1]
    in_pairs = shmap_map(fitness, ranks_of(2), SHARDED, SHARDED, batch_size=2)
    assert in_pairs(population(5)).tolist() == FITNESS


def test_rows_over_two_axes_and_over_one_of_two() -> None:
    mesh = jax.sharding.Mesh(ranks_of(4).mesh.devices.reshape(2, 2), ("hosts", "devices"))
    for entry in (("hosts", "devices"), "hosts"):
        spec = PartitionSpec(entry)
        assert shmap_vmap(fitness, mesh, spec, spec)(population(5)).tolist() == FITNESS


@pytest.mark.parametrize(
    ("in_specs", "out_specs", "arguments", "line"),
    [
        (REPLICATED, REPLICATED, [np.ones(4)], r"in_specs and out_specs split nothing; .* one axis, of \('ranks',\)"),
        (PartitionSpec("pop"), SHARDED, [np.ones(4)], "split rows over pop, ranks; rows must be split over one axis"),
        (PartitionSpec("pop"), PartitionSpec("pop"), [np.ones(4)], "over 'pop', but the axes of the mesh are"),
        (PartitionSpec(None, "ranks"), SHARDED, [np.ones((4, 4))], "only the first axis, the rows, can be split"),
        ("ranks", SHARDED, [np.ones(4)], r"in_specs holds 'ranks'; use PartitionSpec\('ranks'\) or PartitionSpec\(\)"),
        (SHARDED, SHARDED, [np.ones(4), np.ones(5)], r"same number of rows, but have shapes: 0 \(4,\), 1 \(5,\)"),
        (SHARDED, SHARDED, [np.ones(4), 1.0], r"same number of rows, but have shapes: 0 \(4,\), 1 \(\)"),
        (REPLICATED, SHARDED, [np.ones(4)], "no argument has rows: in_specs split nothing"),
        (SHARDED, (SHARDED, REPLICATED), [np.ones(5)], "2 devices don't divide 5 rows, and repeated rows might count"),
    ],
)
def test_what_has_no_rows_to_split_is_refused(in_specs: Any, out_specs: Any, arguments: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        shmap_vmap(lambda *rows: rows, ranks_of(2), in_specs, out_specs)(*arguments)


def test_one_row_at_a_time_has_no_common_result() -> None:
    with pytest.raises(ValueError, match="every result of shmap_map has rows"):
        shmap_map(lambda row: row, ranks_of(2), SHARDED, (SHARDED, REPLICATED))


class Spied:
    """Something that is read by parts, as a file is."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape
        self.read: list[list[float]] = []

    def __getitem__(self, index: Any) -> np.ndarray:
        part: np.ndarray = self.array[index]
        self.read.append(part[:, 0].tolist())
        return part


@each_size
def test_each_device_reads_its_own_part(num_ranks: int) -> None:
    rows = np.arange(8.0).reshape(4, 2)
    spied = Spied(rows)
    (placed,) = tree_device_put([spied], ranks_of(num_ranks))
    parts = {1: [[0.0, 2.0, 4.0, 6.0]], 2: [[0.0, 2.0], [4.0, 6.0]], 4: [[0.0], [2.0], [4.0], [6.0]]}
    assert sorted(spied.read) == parts[num_ranks]
    assert [shard.data.shape for shard in placed.addressable_shards] == [(4 // num_ranks, 2)] * num_ranks
    assert placed.tolist() == rows.tolist()


def test_a_file_and_any_other_layout(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", population(4))
    on_disk = np.load(tmp_path / "rows.npy", mmap_mode="r")
    ranks = ranks_of(2)
    by_column = tree_device_put(on_disk, NamedSharding(ranks.mesh, PartitionSpec(None, "ranks")))
    assert [shard.data.shape for shard in by_column.addressable_shards] == [(4, 5, 3)] * 2
    assert by_column.tolist() == population(4).tolist()
    by_row = tree_device_put(by_column, ranks.mesh)
    assert [shard.data.shape for shard in by_row.addressable_shards] == [(2, 10, 3)] * 2
    assert by_row.tolist() == population(4).tolist()


def test_a_layout_that_does_not_fit_names_the_array() -> None:
    with pytest.raises(ValueError, match=r"member.x has shape \(5, 2\), which 4 devices don't divide"):
        tree_device_put({"member": {"x": np.ones((5, 2))}}, ranks_of(4))
    with pytest.raises(ValueError, match=r"the array has shape \(\), which 4 devices don't divide"):
        tree_device_put(1.0, ranks_of(4))


@each_size
def test_copies_for_all_and_one_back(num_ranks: int) -> None:
    tree = {"weight": np.arange(6.0).reshape(2, 3), "count": 3, "key": jax.random.key(5)}
    copied = replicate(tree, ranks_of(num_ranks))
    assert [shard.data.shape for shard in copied["weight"].addressable_shards] == [(2, 3)] * num_ranks
    back = unreplicate(copied)
    assert back["weight"].tolist() == tree["weight"].tolist()  # type: ignore[attr-defined]
    assert back["count"] == 3
    assert jax.random.key_data(back["key"]).tolist() == [0, 5]
    assert {leaf.device for leaf in jax.tree.leaves(back)} == {jax.devices("cpu")[0]}


def test_what_was_never_copied_is_given_back_as_it_is() -> None:
    ranks, tree = ranks_of(2), {"count": 3, "row": np.array([1.5, 2.5])}
    for back in (unreplicate(tree), ranks.to_host(tree), ranks.unshard(tree)):
        assert back["count"] == 3
        assert back["row"].tolist() == [1.5, 2.5]
        assert back["row"] is not tree["row"]


def test_what_is_split_has_no_copy_to_give_back() -> None:
    with pytest.raises(ValueError, match=r"rows \(4,\) is not the same on every device"):
        unreplicate({"rows": ranks_of(2).shard(np.ones(4))})


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_no_two_devices_draw_alike(make_key: Callable[[int], Any]) -> None:
    drawn = {}
    for num_ranks in NUM_RANKS:
        keys = split_key_to_devices(make_key(7), ranks_of(num_ranks))
        assert [len(shard.data) for shard in keys.addressable_shards] == [1] * num_ranks
        draw = ranks_of(num_ranks).compile(lambda keys: jax.random.bits(keys[0], (1,)), SHARDED, SHARDED)
        drawn[num_ranks] = draw(keys).tolist()
    assert len(set(drawn[4])) == 4
    assert drawn[1] == drawn[4][:1]
    assert drawn[2] == drawn[4][:2]
    assert split_key_to_devices(make_key(8)).shape[0] == jax.device_count()


def test_one_key_is_split_not_several() -> None:
    with pytest.raises(ValueError, match=r"key has shape \(3,\), which is not one key"):
        split_key_to_devices(jax.random.split(jax.random.key(0), 3))


def test_a_key_may_be_of_the_host_but_not_traced() -> None:
    key = jax.random.PRNGKey(7)
    assert split_key_to_devices(np.asarray(key)).tolist() == split_key_to_devices(key).tolist()
    with pytest.raises(ValueError, match=r"key is int64\[\], which is no key; give that of jax.random.key"):
        split_key_to_devices(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="call it outside"):
        jax.jit(split_key_to_devices)(key)


def test_ranks_of_this_process() -> None:
    assert get_global_ranks(ranks_of(2)).tolist() == get_global_ranks(ranks_of(2).mesh).tolist() == [0, 1]
    assert get_global_ranks().tolist() == list(range(jax.device_count()))
    assert get_global_ranks().dtype == np.int64
    assert is_dist_initialized() is False
