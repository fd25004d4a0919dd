"""The order in which EGL counts GPUs, which knows nothing of CUDA_VISIBLE_DEVICES."""

import ctypes
import uuid
from collections.abc import Callable

# eglext.h, extension EGL_EXT_device_persistent_id
EGL_DEVICE_UUID_EXT = 0x335C
UUID_BYTES = 16
MAX_DEVICES = 64

_QueryDevices = ctypes.CFUNCTYPE(
    ctypes.c_uint, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int32)
)
_QueryDeviceBinary = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_int32),
)


def device_uuids(get_function: Callable[[bytes], int | None] | None = None) -> list[str | None]:
    """Return the UUID of every EGL device as NVML writes it (``GPU-...``), None for a device without one.

    The position in the list is the number that MUJOCO_EGL_DEVICE_ID wants. Without EGL, or with a driver that can't
    tell, the list is empty.

    Args:
        get_function: from the name of an EGL function to its address, 0 or None if there is none; libEGL's if None.
    """
    get_function = get_function or _libegl()
    if get_function is None:
        return []
    find_devices, find_binary = get_function(b"eglQueryDevicesEXT"), get_function(b"eglQueryDeviceBinaryEXT")
    if not find_devices or not find_binary:
        return []
    query_devices, query_binary = _QueryDevices(find_devices), _QueryDeviceBinary(find_binary)
    devices = (ctypes.c_void_p * MAX_DEVICES)()
    count = ctypes.c_int32()
    if not query_devices(MAX_DEVICES, devices, ctypes.byref(count)):
        return []
    return [_uuid(query_binary, device) for device in devices[: count.value]]


def _uuid(query_binary: Callable[..., int], device: int | None) -> str | None:
    buffer = (ctypes.c_ubyte * UUID_BYTES)()
    size = ctypes.c_int32()
    if not query_binary(device, EGL_DEVICE_UUID_EXT, UUID_BYTES, buffer, ctypes.byref(size)):
        return None
    return f"GPU-{uuid.UUID(bytes=bytes(buffer))}" if size.value == UUID_BYTES else None


def _libegl() -> Callable[[bytes], int | None] | None:
    try:
        function = ctypes.CDLL("libEGL.so.1").eglGetProcAddress
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_void_p
    return function
