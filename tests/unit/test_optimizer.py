"""Adam without torch's compiler: the same results, and a start that does not load what it does not use."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lockstep.learn.torch.optimizer import Adam

TRAIN = """
import sys
from lockstep.cli.main import main
words = "train cartpole_classic --device cpu --num_envs 4 --max_iterations 2 --agent.num_steps_per_env 4".split()
assert main(words) == 0
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "jax") if name in sys.modules])
"""


def stepped(kind: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return two parameters after ten steps, one of which is skipped, and the optimizer's state."""
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(5, generator=generator)) for _ in range(2)]
    rate = torch.tensor(1e-2)
    optimizer = kind(parameters, lr=rate, fused=True)
    optimizer.found_inf = torch.zeros(())
    for number in range(10):
        for parameter in parameters:
            parameter.grad = torch.randn(5, generator=generator)
        optimizer.found_inf.fill_(float(number == 4))
        rate.mul_(0.9)
        optimizer.step()
    restored = kind(parameters, lr=rate, fused=True)
    restored.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)
    return [parameter.detach() for parameter in parameters], restored.state_dict()


def test_it_steps_saves_and_loads_as_torchs_own_does() -> None:
    (first, second), state = stepped(Adam)
    (expected_first, expected_second), expected = stepped(torch.optim.Adam)
    assert torch.equal(first, expected_first) and torch.equal(second, expected_second)
    assert state["param_groups"] == expected["param_groups"]
    for index, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(state["state"][index][name], value)


def test_no_step_is_recorded_for_a_backward_pass() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Adam([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.grad_fn is None and parameter.requires_grad


def test_a_training_loads_no_compiler(tmp_path: Path) -> None:
    output = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert output.splitlines()[-1] == "[]"
