"""Multilayer perceptrons, and their passes forward and backward spelled out for a CPU.

What torch does by itself for such small networks is mostly not arithmetic that has to be: on an AMD EPYC the library
behind ``torch.mm`` reaches half the speed of oneDNN, which torch brings along, and an exponential costs more than the
product of a whole layer (``benchmarks/README.md``). What is here does the same sums with fewer passes over memory;
parity with torch's own layers is tested for every activation.

On x86-64 large products are oneDNN's, unless ``torch.backends.mkldnn.enabled`` says no. That is a rule and no trial of
speed, which might end otherwise at the next start and change the last bits of a run. Its numbers are those of one AMD
EPYC; on processors of Intel, where ``torch.mm`` may do as well, nothing was measured.
"""

import functools
import math
import platform
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import nn

LOG2_E = math.log2(math.e)
LEAST_WORK = 2**19
"""Multiplications from which oneDNN is asked for a product: it takes 12 microseconds to answer at all."""
LEAST_WIDTH = 4  # of a matrix's narrower side; products of thinner ones are limited by memory

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


class Activation(NamedTuple):
    """An activation in torch's own words and in passes.

    Attributes:
        layer: makes the module.
        apply_: gives the values; may overwrite its argument unless ``of_inputs``.
        backward_: overwrites a gradient by the values (first argument) by that by the arguments; the second argument
            are the values, or what they were made of if ``of_inputs``.
        of_inputs: whether ``backward_`` needs the arguments.
    """

    layer: Callable[[], nn.Module]
    apply_: Callable[[torch.Tensor], torch.Tensor]
    backward_: Callable[[torch.Tensor, torch.Tensor], None]
    of_inputs: bool = False


def exp_(exponents: torch.Tensor) -> torch.Tensor:
    """Overwrite exponents by the exponential: a power of two, which torch does five times as fast on a CPU."""
    return exponents.mul_(LOG2_E).exp2_()


def _elu_(inputs: torch.Tensor) -> torch.Tensor:
    below = exp_(torch.clamp_max(inputs, 0.0)).sub_(1.0)  # above x on either side of zero
    return torch.maximum(inputs, below, out=inputs)


def _elu_backward_(gradient: torch.Tensor, values: torch.Tensor) -> None:
    torch.ops.aten.elu_backward.grad_input(gradient, 1.0, 1.0, 1.0, True, values, grad_input=gradient)


def _relu_backward_(gradient: torch.Tensor, values: torch.Tensor) -> None:
    torch.ops.aten.threshold_backward.grad_input(gradient, values, 0.0, grad_input=gradient)


def _tanh_(inputs: torch.Tensor) -> torch.Tensor:
    # tanh(x) = 2 / (1 + exp(-2 x)) - 1, five times as fast as torch's.
    return inputs.mul_(2.0).sigmoid_().mul_(2.0).sub_(1.0)


def _tanh_backward_(gradient: torch.Tensor, values: torch.Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(gradient, values, grad_input=gradient)


def _silu_backward_(gradient: torch.Tensor, inputs: torch.Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(gradient, inputs, grad_input=gradient)


ACTIVATIONS: dict[str, Activation] = {
    # Modules in place: no second buffer, and the gradient is made from the result instead of another exponential.
    "elu": Activation(lambda: nn.ELU(inplace=True), _elu_, _elu_backward_),
    "relu": Activation(lambda: nn.ReLU(inplace=True), torch.relu_, _relu_backward_),
    "tanh": Activation(nn.Tanh, _tanh_, _tanh_backward_),
    "silu": Activation(nn.SiLU, nn.functional.silu, _silu_backward_, of_inputs=True),
}


class Trace(NamedTuple):
    """A pass forward: what ``Perceptron.backward_`` needs of it."""

    outputs: torch.Tensor  # (num_samples, num_outputs)
    inputs: list[torch.Tensor]  # of each linear layer, (num_samples, width)
    activated: list[torch.Tensor]  # of each activation what its gradient is made from, (num_samples, width)


class Perceptron(nn.Sequential):
    """Linear layers with an activation after each but the last; as a module it is torch's own.

    Args:
        widths: of the inputs, the hidden layers and the outputs.
        activation: one of ACTIVATIONS.
    """

    def __init__(self, widths: Sequence[int], activation: str) -> None:
        layers: list[nn.Module] = []
        for num_inputs, num_outputs in pairwise(widths):
            layers += [nn.Linear(num_inputs, num_outputs), ACTIVATIONS[activation].layer()]
        super().__init__(*layers[:-1])
        self._activation = ACTIVATIONS[activation]

    @property
    def linear_layers(self) -> list[nn.Linear]:
        """The layers that have parameters."""
        return cast(list[nn.Linear], [*self][::2])

    def infer(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the module returns, to rounding; in passes where nobody wants a graph of it."""
        # What is compiled or exported is to be made of torch's usual operations, and autocast knows only those.
        if torch.is_grad_enabled() or inputs.device.type != "cpu" or torch.is_autocast_enabled("cpu") or _is_traced():
            return cast(torch.Tensor, self(inputs))
        *hidden, last = self.linear_layers
        for layer in hidden:
            inputs = self._activation.apply_(affine(inputs, layer.weight, layer.bias))
        return affine(inputs, last.weight, last.bias)

    @torch.no_grad()
    def trace(self, inputs: torch.Tensor) -> Trace:
        """Go forward over ``inputs (num_samples, num_inputs)`` and keep what going backward takes."""
        kept, activated = [inputs], []
        *hidden, last = self.linear_layers
        for layer in hidden:
            before = affine(kept[-1], layer.weight, layer.bias)
            after = self._activation.apply_(before)
            activated.append(before if self._activation.of_inputs else after)
            kept.append(after)
        return Trace(affine(kept[-1], last.weight, last.bias), kept, activated)

    @torch.no_grad()
    def backward_(self, trace: Trace, gradient: torch.Tensor) -> None:
        """Add to each parameter's ``.grad``, which must be there, what ``gradient`` by the outputs makes of it."""
        layers = self.linear_layers
        for index in reversed(range(len(layers))):
            weight, bias = layers[index].weight, layers[index].bias
            cast(torch.Tensor, weight.grad).add_(transposed_product(gradient, trace.inputs[index]))
            cast(torch.Tensor, bias.grad).add_(gradient.sum(0))
            if index:
                gradient = affine(gradient, weight.t(), None)
                self._activation.backward_(gradient, trace.activated[index - 1])


def affine(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``inputs @ weight.T + bias`` of ``(num_samples, num_inputs)`` and ``(num_outputs, num_inputs)``."""
    if _asks_onednn(inputs, weight.numel(), min(weight.shape)):
        return _onednn(inputs, weight, bias)
    return torch.mm(inputs, weight.t()) if bias is None else torch.addmm(bias, inputs, weight.t())


def transposed_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``left.T @ right``, ``(width_left, width_right)``, of ``(num_samples, width)`` each."""
    # Which of the two is turned round makes a difference of up to seven times.
    if left.shape[1] > right.shape[1]:
        return transposed_product(right, left).t()
    if _asks_onednn(left, left.shape[1] * right.shape[1], left.shape[1]):
        return _onednn(left.t(), right.t(), None)
    return torch.mm(left.t(), right)


def _asks_onednn(inputs: torch.Tensor, num_products: int, width: int) -> bool:
    return (
        inputs.dtype == torch.float32
        and inputs.device.type == "cpu"
        and width >= LEAST_WIDTH
        and inputs.shape[0] * num_products >= LEAST_WORK
        and bool(torch.backends.mkldnn.enabled)
        and _has_onednn()
    )


@functools.cache
def _has_onednn() -> bool:
    """Return whether oneDNN's operator is here and does what it should: it is none that torch documents."""
    if not _IS_X86 or not torch.backends.mkldnn.is_available():
        return False

    def matrix(*rows: list[float]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.float32, device="cpu")

    inputs, weight = matrix([1, 2], [3, 4], [5, 6]), matrix([7, 8], [9, -10])
    by_hand = matrix([23, -11], [53, -13], [83, -15])  # small whole numbers, so exact in any order of the sums
    bias = torch.tensor([0.5, -1.0], dtype=torch.float32, device="cpu")
    try:
        plain, shifted = _onednn(inputs, weight, None), _onednn(inputs, weight, bias)
        return torch.equal(plain, by_hand) and torch.equal(shifted, by_hand + bias)
    except (AttributeError, RuntimeError, TypeError):  # no such operator, or one of other arguments
        return False


def _onednn(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outputs: Any = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return cast(torch.Tensor, outputs)


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]
