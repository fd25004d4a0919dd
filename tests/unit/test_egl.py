"""EGL's list of devices, through a library that answers as libEGL would."""

import ctypes
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.distributed import egl
from tests.unit.gpu_fixtures import UUIDS

QUERY_DEVICES = ctypes.CFUNCTYPE(
    ctypes.c_uint, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int32)
)
QUERY_BINARY = ctypes.CFUNCTYPE(
    ctypes.c_uint, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)
)


class FakeEgl:
    """libEGL with real function addresses; its device handles are 100, 101, ..."""

    def __init__(self, uuids: list[str | None], works: bool = True, size: int = 16) -> None:
        def devices(limit: int, handles: Any, count: Any) -> int:
            count[0] = min(limit, len(uuids))
            for index in range(count[0]):
                handles[index] = 100 + index
            return int(works)

        def binary(device: int, name: int, limit: int, value: int, written: Any) -> int:
            text = uuids[device - 100]
            if name != 0x335C or limit < 16 or text is None:
                return 0
            ctypes.memmove(value, uuid.UUID(text.removeprefix("GPU-")).bytes, 16)
            written[0] = size
            return 1

        self.functions = {
            b"eglQueryDevicesEXT": QUERY_DEVICES(devices),
            b"eglQueryDeviceBinaryEXT": QUERY_BINARY(binary),
        }

    def address(self, name: bytes) -> int | None:
        function = self.functions.get(name)
        return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


def test_uuids_in_egls_order_as_nvml_writes_them() -> None:
    library = FakeEgl([UUIDS[2], None, UUIDS[0]])
    assert egl.device_uuids(library.address) == [UUIDS[2], None, UUIDS[0]]


@pytest.mark.parametrize("missing", [b"eglQueryDevicesEXT", b"eglQueryDeviceBinaryEXT"])
def test_a_driver_without_the_extension_gives_nothing(missing: bytes) -> None:
    library = FakeEgl([UUIDS[0]])
    del library.functions[missing]
    assert egl.device_uuids(library.address) == []


def test_a_call_that_fails_gives_nothing() -> None:
    assert egl.device_uuids(FakeEgl([UUIDS[0]], works=False).address) == []
    assert egl.device_uuids(FakeEgl([UUIDS[0]], size=8).address) == [None]


def test_the_systems_library_is_asked_unless_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Callable[..., int]:
        raise OSError(f"{name}: cannot open shared object file")

    assert isinstance(egl.device_uuids(), list)  # with whatever this machine has
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert egl.device_uuids() == []
