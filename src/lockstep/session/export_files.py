"""The files of an exported policy: written, read again and compared."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.session.deployed import DeployedPolicy
from lockstep.session.export_check import Check

OPSET = 20
"""Of ONNX; onnxruntime reads such files since 1.18."""
_BATCH = 3  # of the example; 1 would be taken for the only size there is


def write(form: str, network: DeployedPolicy, path: Path, description: Mapping[str, Any], check: Check) -> float:
    """Write one file, run it, and return by how much its actions differ from the policy's own at most.

    Args:
        form: ``onnx`` or ``torchscript``.
        network: what is exported.
        path: of the file.
        description: plain values, which the file holds too.
        check: against the policy itself.

    Raises:
        RunError: they differ by more than the tolerance.
    """
    return _WRITERS[form](network, path, description, check)


def _write_onnx(network: DeployedPolicy, path: Path, description: Mapping[str, Any], check: Check) -> float:
    import onnxruntime

    batch = torch.export.Dim("batch")
    is_recurrent = network.memory is not None
    with _quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            network,
            _example(network),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=["observations", "state"][: 1 + is_recurrent],
            output_names=["actions", "next_state"][: 1 + is_recurrent],
            dynamic_shapes={"observations": {0: batch}} | ({"state": {1: batch}} if is_recurrent else {}),
        )
    _forget_sources(program.model)
    program.model.producer_name = "lockstep"
    program.model.metadata_props.update(
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in description.items()}
    )
    program.save(str(path))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(observations: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        given = {"observations": observations} | ({"state": state} if is_recurrent else {})
        actions, *after = session.run(None, given)
        return actions, next(iter(after), state)

    return check.compare(path.name, run)


def _forget_sources(model: Any) -> None:
    """Take out of a model on which lines of which files of this machine each of its nodes was made."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in graph.all_nodes():
            node.doc_string = None
            for part in (node, *node.outputs):
                part.metadata_props.clear()


def _write_torchscript(network: DeployedPolicy, path: Path, description: Mapping[str, Any], check: Check) -> float:
    with _quiet(), torch.no_grad():
        traced: Any = torch.jit.trace(network, _example(network), check_trace=False)
        content = io.BytesIO()  # torch's own writer ends the process where a disk refuses
        torch.jit.save(traced, content, _extra_files={"policy.json": json.dumps(description)})
        _copy_without_sources(content, path)
        loaded: Any = torch.jit.load(str(path))
    is_recurrent = network.memory is not None

    def run(observations: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        given = torch.from_numpy(observations)
        with torch.no_grad():
            if not is_recurrent:
                return loaded(given).numpy(), state
            actions, after = loaded(given, torch.from_numpy(state))
        return actions.numpy(), after.numpy()

    return check.compare(path.name, run)


def _copy_without_sources(content: io.BytesIO, path: Path) -> None:
    """Write a TorchScript archive without the tables that lead from its code to lines of files of this machine."""
    with zipfile.ZipFile(content) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as bare:
        for record in whole.infolist():
            if not record.filename.endswith(".debug_pkl"):
                bare.writestr(record, whole.read(record))


def _example(network: DeployedPolicy) -> tuple[torch.Tensor, ...]:
    observations = torch.zeros((_BATCH, network.num_observations))
    return (observations,) if network.memory is None else (observations, network.initial_state(_BATCH))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what torch says of other packages, and of its own plans, while it exports."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


_WRITERS = {"onnx": _write_onnx, "torchscript": _write_torchscript}
