"""Reading checkpoints: damaged, foreign or hostile files give one line that names the file and the mend."""

import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.core.errors import UsageError
from lockstep.learn.torch.checkpoint import load, load_strictly
from tests.unit.learner_fixtures import differences, make_training, small_config

MENDS = (
    "use an older one",
    "name a file",
    "has model_<iteration>.pt",
    "this version reads",
    "not torch",
    "not a lockstep",
)


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    small = {"actor_hidden_dims": (3,), "critic_hidden_dims": (3,), "num_steps_per_env": 2}
    training = make_training(small_config(num_envs=2, agent=small))
    training.iterate()
    return training.state_dict()


@pytest.fixture(scope="module")
def whole(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("checkpoint") / "model_1.pt"
    torch.save(content, path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model_1.pt"


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_a_whole_file_comes_back_bit_for_bit(path: Path, whole: bytes, content: dict[str, Any]) -> None:
    path.write_bytes(whole)
    assert differences(load(path), content) == []


# --- not a file ----------------------------------------------------------------------------------------------------


def test_missing(path: Path) -> None:
    assert "does not exist; 'checkpoints/'" in refused(path)


def test_a_name_that_is_too_long(path: Path) -> None:
    refused(path.with_name("x" * 300))


def test_a_folder(path: Path) -> None:
    path.mkdir()
    assert "is a folder; name a file" in refused(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    path.chmod(0)
    assert "permission denied" in refused(path)


# --- damaged -------------------------------------------------------------------------------------------------------


def test_truncated_anywhere(path: Path, whole: bytes) -> None:
    lengths = {0, 1, 2, 3, 4, 21, 22, 23, 100, len(whole) - 1, len(whole) - 2, len(whole) - 22, len(whole) - 23}
    lengths |= set(range(0, len(whole), len(whole) // 60))
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        message = refused(path)
        assert "use an older one" in message or "not a lockstep checkpoint" in message


def outcome(path: Path, content: dict[str, Any]) -> str:
    """What loading a damaged file comes to; anything but a UsageError is let through."""
    try:
        loaded = load(path)
    except UsageError as error:
        assert "\n" not in str(error)
        assert str(path) in str(error)
        return "refused"
    return "equal" if differences(loaded, content) == [] else "different"


def test_a_flipped_bit_is_found_or_does_no_harm(path: Path, whole: bytes, content: dict[str, Any]) -> None:
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as archive:
        directory, entries = archive.start_dir, archive.infolist()
    # The names, sizes and sums of the archive's directory and of one entry, and a sample of everything.
    pickled = next(entry for entry in entries if entry.filename.endswith("data.pkl"))
    positions = [*range(directory, directory + 47), *range(pickled.header_offset, pickled.header_offset + 31)]
    positions += range(len(whole) - 22, len(whole))
    chosen = [(position, bit) for position in positions for bit in range(8)]
    generator = random.Random(0)
    chosen += [(generator.randrange(directory), generator.randrange(8)) for _ in range(200)]
    counts = {"refused": 0, "equal": 0, "different": 0}
    for position, bit in chosen:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bit
        path.write_bytes(damaged)
        counts[outcome(path, content)] += 1
    assert counts["different"] == 0
    assert counts["refused"] > 250


def test_a_changed_compression_method_is_refused(path: Path, whole: bytes, content: dict[str, Any]) -> None:
    # Each entry of the archive's directory says at byte 10 how its data are packed: stored, deflate, bzip2, lzma.
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    for method in (8, 9, 12, 14, 99):
        start = directory
        while (start := whole.find(b"PK\x01\x02", start)) >= 0:
            damaged = bytearray(whole)
            damaged[start + 10] = method
            path.write_bytes(damaged)
            assert outcome(path, content) in ("refused", "equal")
            start += 4


def test_a_block_of_zeros_is_found(path: Path, whole: bytes, content: dict[str, Any]) -> None:
    # What a file system may leave where data had not reached the disk.
    for start in range(0, len(whole), 512):
        block = whole[start : start + 512]
        path.write_bytes(whole[:start] + bytes(len(block)) + whole[start + len(block) :])
        assert outcome(path, content) in ("refused", "equal")
    path.write_bytes(bytes(len(whole)))
    refused(path)


# --- foreign -------------------------------------------------------------------------------------------------------


class Hostile:
    """Would write a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.trace, "executed"))


def hostile_files(trace: Path, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "alone": lambda path: torch.save(Hostile(trace), path),
        "inside": lambda path: torch.save(content | {"policy": Hostile(trace)}, path),
        "legacy": lambda path: torch.save(Hostile(trace), path, _use_new_zipfile_serialization=False),
        "plain": lambda path: path.write_bytes(pickle.dumps(Hostile(trace))),
    }


@pytest.mark.parametrize("kind", ["alone", "inside", "legacy", "plain"])
def test_code_in_a_file_is_not_executed(kind: str, path: Path, tmp_path: Path, content: dict[str, Any]) -> None:
    trace = tmp_path / "trace"
    hostile_files(trace, content)[kind](path)
    refused(path)
    assert not trace.exists()


def test_the_hostile_file_would_have_been_executed(path: Path, tmp_path: Path, content: dict[str, Any]) -> None:
    trace = tmp_path / "trace"
    hostile_files(trace, content)["inside"](path)
    torch.load(path, weights_only=False)
    assert trace.read_text() == "executed"


@pytest.mark.parametrize(
    "foreign",
    [
        b"",
        b"not a checkpoint at all",
        b"PK\x03\x04 and then something else",
        b"PK\x05\x06" + bytes(18),  # an empty archive
        b"\x80\x02}q\x00.",  # a pickled empty dict
        b"\x89HDF\r\n\x1a\n" + bytes(100),
    ],
)
def test_other_files(path: Path, foreign: bytes) -> None:
    path.write_bytes(foreign)
    refused(path)


def test_another_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(path)


def test_a_compiled_module(path: Path) -> None:
    buffer = torch.jit.script(nn.Linear(2, 2))
    torch.jit.save(buffer, path)
    refused(path)


@pytest.mark.parametrize("foreign", [torch.zeros(3), {"model_state_dict": {}, "iter": 100}, [1, 2], None, {}])
def test_other_checkpoints_of_torch(path: Path, foreign: Any) -> None:
    torch.save(foreign, path)
    assert "not a lockstep checkpoint" in refused(path)


@pytest.mark.parametrize("name", ["format", "ml_framework", "task", "config", "iteration", "env_steps", "policy"])
def test_a_missing_part(path: Path, content: dict[str, Any], name: str) -> None:
    torch.save({key: value for key, value in content.items() if key != name}, path)
    assert "not a lockstep checkpoint" in refused(path)


def test_another_format(path: Path, content: dict[str, Any]) -> None:
    torch.save(content | {"format": 99}, path)
    assert "has format 99, this version reads format 1" in refused(path)


def test_another_framework(path: Path, content: dict[str, Any]) -> None:
    torch.save(content | {"ml_framework": "jax"}, path)
    assert "of framework 'jax', not torch" in refused(path)


# --- strict loading ------------------------------------------------------------------------------------------------


def test_strict_loading_names_the_first_that_does_not_fit() -> None:
    saved = nn.Linear(3, 2).state_dict()
    for changed, words in (
        ({"bias": saved["bias"]}, "model_1.pt lacks weight: it is of another kind of policy"),
        (saved | {"weight": torch.zeros(2, 4)}, "has weight of shape (2, 4), the config asks for (2, 3)"),
        (saved | {"extra": torch.zeros(1)}, "has extra, which the config has no place for"),
    ):
        module = nn.Linear(3, 2)
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with pytest.raises(UsageError) as caught:
            load_strictly(module, changed, "model_1.pt")
        assert words in str(caught.value)
        assert differences(before, module.state_dict()) == []


def test_strict_loading_takes_what_fits() -> None:
    saved, module = nn.Linear(3, 2).state_dict(), nn.Linear(3, 2)
    load_strictly(module, saved, "model_1.pt")
    assert differences(saved, module.state_dict()) == []
