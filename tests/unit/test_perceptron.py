"""Perceptrons whose passes are spelled out, beside torch's own layers and autograd."""

import copy
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from lockstep.core.types import ActionSpace
from lockstep.learn.config import PpoConfig
from lockstep.learn.torch import perceptron as module
from lockstep.learn.torch.networks import ActorCritic
from lockstep.learn.torch.perceptron import ACTIVATIONS, LEAST_WORK, Perceptron, affine, transposed_product

SHAPES = [(5,), (9, 5), (7, 9, 3)]  # hidden layers


def perceptron(hidden: tuple[int, ...], activation: str, dtype: torch.dtype = torch.float64) -> Perceptron:
    torch.manual_seed(0)
    network = Perceptron((4, *hidden, 2), activation).to(dtype)
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)  # what other chunks have left there
    return network


def gradients(network: Perceptron) -> list[torch.Tensor]:
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", SHAPES, ids=str)
@pytest.mark.parametrize("num_samples", [31, 1, 0])
def test_values_and_gradients_are_those_of_autograd(activation: str, hidden: tuple[int, ...], num_samples: int) -> None:
    network = perceptron(hidden, activation)
    reference = copy.deepcopy(network)
    for copied, own in zip(reference.parameters(), gradients(network), strict=True):
        copied.grad = own.clone()
    inputs = 3.0 * torch.randn((num_samples, 4), dtype=torch.float64)
    weights = torch.randn((num_samples, 2), dtype=torch.float64)

    expected = reference(inputs)
    trace = network.trace(inputs)
    torch.testing.assert_close(trace.outputs, expected, rtol=1e-12, atol=1e-12)
    (expected * weights).sum().backward()
    network.backward_(trace, weights)
    for ours, theirs in zip(gradients(network), gradients(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_arguments_and_nan_come_out_as_in_torch(activation: str) -> None:
    values = torch.tensor([-torch.inf, -1e30, -100.0, -1e-9, -0.0, 0.0, 1e-9, 50.0, 1e30, torch.inf, torch.nan])
    kind = ACTIVATIONS[activation]
    expected = kind.layer()(values.clone())
    torch.testing.assert_close(kind.apply_(values.clone()), expected, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(("rows", "wide", "narrow"), [(2048, 64, 64), (2048, 64, 12), (700, 128, 48)])
def test_large_products_in_single_precision(rows: int, wide: int, narrow: int) -> None:
    # So large that another library is asked for them.
    assert rows * wide * narrow >= LEAST_WORK
    torch.manual_seed(0)
    inputs, weight, bias = torch.randn(rows, wide), torch.randn(narrow, wide), torch.randn(narrow)

    def compare(product: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> None:
        exact = product(*(argument.double() for argument in arguments))
        torch.testing.assert_close(product(*arguments).double(), exact, rtol=1e-4, atol=2e-4)

    compare(affine, inputs, weight, bias)
    compare(lambda left, right: affine(left, right, None), inputs, weight)
    compare(lambda left, right: affine(left, right.t(), None), inputs[:, :narrow], weight)
    compare(transposed_product, inputs, torch.randn(rows, narrow))
    compare(transposed_product, torch.randn(rows, narrow), inputs)


needs_onednn = pytest.mark.skipif(not module._has_onednn(), reason="torch without oneDNN, or another processor")


@pytest.fixture
def fresh_trial() -> Iterator[None]:
    """Let a test try oneDNN anew, and the next one too."""
    module._has_onednn.cache_clear()
    yield
    module._has_onednn.cache_clear()


@needs_onednn
def test_who_is_asked_for_a_product() -> None:
    large, small = torch.ones(2048, 64), torch.ones(20, 64)
    square, thin = torch.ones(64, 64), torch.ones(1, 64)
    asked = {
        name: "onednn" if module._asks_onednn(inputs, weight.numel(), min(weight.shape)) else "torch"
        for name, inputs, weight in (
            ("large", large, square),
            ("small", small, square),
            ("thin", large, thin),
            ("double", large.double(), square.double()),
            ("no samples", large[:0], square),
        )
    }
    assert asked == {"large": "onednn"} | dict.fromkeys(("small", "thin", "double", "no samples"), "torch")


@needs_onednn
def test_torchs_own_flag_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    large, square = torch.ones(2048, 64), torch.ones(64, 64)
    with mock.patch.object(module, "_onednn", wraps=module._onednn) as asked:
        for enabled in (True, False, True):
            monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
            assert affine(large, square, None)[5, 7] == 64.0
            assert transposed_product(large, large)[5, 7] == 2048.0
            calls.append(asked.call_count)
    assert calls == [2, 2, 4]


def _raise(error: Exception) -> Callable[..., torch.Tensor]:
    def operator(*arguments: object) -> torch.Tensor:
        raise error

    return operator


OPERATORS = {
    "is gone": _raise(AttributeError("no attribute '_linear_pointwise'")),
    "is for another processor": _raise(NotImplementedError("could not run")),
    "takes other arguments": _raise(TypeError("incompatible arguments")),
    "forgets the bias": lambda inputs, weight, bias: torch.mm(inputs, weight.t()),
    "does not turn the weight round": lambda inputs, weight, bias: (
        torch.mm(inputs, weight) + (0 if bias is None else bias)
    ),
    "gives another shape": lambda inputs, weight, bias: torch.mm(inputs, weight.t())[:1],
    "is less precise than float32": lambda inputs, weight, bias: torch.mm(inputs, weight.t()).bfloat16(),
}


@pytest.mark.parametrize("fault", OPERATORS)
def test_an_operator_that_fails_is_done_without(fault: str, monkeypatch: pytest.MonkeyPatch, fresh_trial: None) -> None:
    monkeypatch.setattr(module, "_onednn", OPERATORS[fault])
    large, square, bias = torch.ones(2048, 64), torch.ones(64, 64).triu(), torch.ones(64)
    assert not module._has_onednn()
    product = affine(large, square, bias)
    assert product.shape == (2048, 64)
    assert product[3, [0, 63]].tolist() == [65.0, 2.0]  # a row of 64 ones, a row of one, and the bias


def test_a_graph_is_made_where_one_is_wanted() -> None:
    network = perceptron((5,), "elu")
    inputs = torch.randn((3, 4), dtype=torch.float64)
    assert network.infer(inputs).requires_grad
    with torch.no_grad():
        assert not network.infer(inputs).requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_what_is_exported_is_made_of_torchs_usual_operations() -> None:
    config = PpoConfig(actor_hidden_dims=(64, 64))
    policy = ActorCritic(config, {"actor": 8, "critic": 8}, ActionSpace("continuous", 2))

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = policy

        def forward(self, observations: torch.Tensor) -> torch.Tensor:
            distribution, _ = policy.act({"actor": observations}, torch.zeros(0))
            return distribution.mode()

    observations = torch.randn(4096, 8)
    with torch.no_grad():
        traced = torch.jit.trace(Mean(), observations)
        exported = torch.export.export(Mean(), (observations,))
        expected, _ = policy.act({"actor": observations}, torch.zeros(0))
        assert "mkldnn" not in str(traced.inlined_graph)
        assert "mkldnn" not in str(exported.graph)
        for network in (traced, exported.module()):
            torch.testing.assert_close(network(observations), expected.mode())
