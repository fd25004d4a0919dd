"""Collectives that devices of a CPU could mix up: they are found before they run, and ``after`` keeps them apart."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.core.errors import UsageError
from lockstep.distributed.jax import (
    REPLICATED,
    SHARDED,
    Moments,
    after,
    make_mesh,
    merge_over_ranks,
    pmax,
    psum,
    shmap_map,
    shmap_vmap,
)
from tests.unit.jax_fixtures import ranks_of

pytestmark = pytest.mark.usefixtures("double_precision")

ROWS = np.arange(8.0).reshape(4, 2)


def traceable(function: Any) -> Any:
    return ranks_of(2).compile(function, SHARDED, REPLICATED)


def looped(rows: Any) -> Any:
    """Return a sum over ranks, (2,), that a loop has made of three others."""

    def one(carry: Any, _: None) -> Any:
        return carry * 0.5 + psum(jnp.sin(rows + carry).sum(0)), None

    return jax.lax.scan(one, jnp.zeros(2), None, length=3)[0]


def in_a_branch(rows: Any) -> Any:
    return jax.lax.cond(psum(rows.sum()) > 0, lambda: psum(rows.sum(0)), lambda: jnp.zeros(2))


def of_nested(rows: Any) -> Any:
    return jax.jit(looped)(rows), jax.jit(psum)(rows.sum(0))


def inside_of_a_loop(rows: Any) -> Any:
    def one(carry: Any, _: None) -> Any:
        return carry + looped(rows + carry) + psum((rows * carry).sum(0)), None

    return jax.lax.scan(one, jnp.zeros(2), None, length=2)[0]


def inside_of_a_while(rows: Any) -> Any:
    def one(carry: Any) -> Any:
        number, total = carry
        return number + 1, total + psum((rows * total).sum(0))

    return jax.lax.while_loop(lambda carry: carry[0] < 3, one, (0, jnp.ones(2)))[1], pmax(rows[0, 0])


APART = {
    "loop, then sum": lambda rows: (looped(rows), psum(rows.sum(0))),
    "sum, then loop": lambda rows: (psum(rows.sum(0)), looped(rows)),
    "two loops": lambda rows: (looped(rows), looped(rows + 1)),
    "branch, then gathered": lambda rows: (in_a_branch(rows), merge_over_ranks([Moments.of(rows, rows[:, 0] > 0)])),
    "nested": of_nested,
    "in a loop": inside_of_a_loop,
    "while": inside_of_a_while,
    "the third": lambda rows: (psum(looped(rows).sum() * rows[0]), psum(rows[0])),
}
IN_ORDER = {
    "many sums": lambda rows: psum([rows[0], rows[1], rows.sum()]),
    "loop after sum": lambda rows: looped(rows + psum(rows[0])),
    "sum after loop": lambda rows: psum(looped(rows) * rows[0]),
    "by after": lambda rows: psum(after(rows[0], looped(rows))),
    "loop by after": lambda rows: looped(after(rows, looped(rows))),
    "loop without any": lambda rows: (
        psum(rows[0]),
        jax.lax.scan(lambda c, row: (c + row, None), rows[0], rows)[0][None],
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_could_be_mixed_up_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="don't depend on one another") as caught:
        ranks_of(2).compile(APART[name], SHARDED, REPLICATED)(ROWS)
    assert len(re.findall(r"test_jax_order\.py:\d+", str(caught.value))) >= 2


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_comes_one_after_the_other_is_not(name: str) -> None:
    specs = (REPLICATED, SHARDED) if name == "loop without any" else REPLICATED
    compiled = ranks_of(2).compile(IN_ORDER[name], SHARDED, specs)
    jax.block_until_ready(compiled(ROWS))


def test_the_message_names_both_and_the_mend() -> None:
    with pytest.raises(UsageError) as caught:
        traceable(APART["loop, then sum"]).trace(ROWS)
    place = r"\S*test_jax_order\.py:\d+ \(.*?\)"
    assert re.match(rf"the loop at {place} with its psum at {place} and psum at {place} don't ", str(caught.value))
    assert "after(values, result)" in str(caught.value)


@pytest.mark.parametrize("over_rows", [shmap_vmap, shmap_map])
def test_populations_are_refused_too(over_rows: Any) -> None:
    apart = over_rows(lambda row: (looped(row[None]), psum(row)), ranks_of(2), SHARDED, SHARDED)
    with pytest.raises(UsageError, match=r"the loop at .* and psum at .* don't depend on one another"):
        apart(np.ones((4, 2)))


def test_one_device_may_do_as_it_likes() -> None:
    compiled = make_mesh(jax.devices()[:1]).compile(APART["two loops"], SHARDED, REPLICATED)
    jax.block_until_ready(compiled(ROWS))


def test_what_waits_still_does_when_it_is_compiled() -> None:
    def sums(rows: Any) -> Any:
        own = looped(rows)
        return own, psum(after({"sum": rows.sum(0)}, own))

    compiled = traceable(sums)
    _, found = compiled(ROWS)
    assert np.asarray(found["sum"]).tolist() == ROWS.sum(0).tolist()
    text = compiled.trace(ROWS).lower().compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    operands = {line[0]: re.findall(r"%[\w.-]+", line[1]) for line in re.findall(r"(%[\w.-]+) = (.*)", entry)}
    (waiting,) = (name for name, rest in re.findall(r"(%[\w.-]+) = .*?(all-reduce\()", entry))
    (loop,) = (name for name, rest in re.findall(r"(%[\w.-]+) = .*?( while\()", entry))
    before, to_do = set(), [waiting]
    while to_do:
        name = to_do.pop()
        if name not in before:
            before.add(name)
            to_do += [each for each in operands.get(name, []) if each != name]
    assert loop in before


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int32", "uint8", "bool", "complex64"])
def test_after_changes_no_number(dtype: str) -> None:
    first = {"x": jnp.asarray(np.full((2, 2), np.nan if "float" in dtype else -1 if dtype == "int32" else 1), dtype)}
    values = jnp.asarray([1.5, -np.inf, np.nan], jnp.float32)
    np.testing.assert_array_equal(jax.jit(after)(values, first), values)


def test_after_keeps_types_and_keys_can_be_waited_for() -> None:
    key = jax.random.key(3)
    assert after(jnp.int32(3), key).dtype == jnp.int32
    with pytest.raises(ValueError, match="none with an element"):
        after(jnp.ones(2), {"nothing": jnp.ones((0, 2))})
