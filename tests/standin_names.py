"""cupy's names for the arrays of a stand-in: numpy's functions, executed lazily on a stream."""

import os
from functools import partial
from types import SimpleNamespace

import numpy as np
from standin_arrays import Described, DeviceArray, asnumpy, empty, lazily
from standin_blas import TYPES as CUDA_TYPES
from standin_blas import cublas, device
from standin_streams import DEVICES, HERE, Device, Event, Stream, get_current_stream, set_device

OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "matmul": "matmul",
}
COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
UNARY = {"neg": "negative", "invert": "invert", "abs": "absolute"}
FUNCTIONS = (
    *OPERATORS.values(),
    *COMPARISONS.values(),
    *UNARY.values(),
    "abs",
    "clip",
    "conj",
    "cos",
    "exp",
    "expm1",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "log1p",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "maximum",
    "minimum",
    "rint",
    "sign",
    "sin",
    "sqrt",
    "square",
    "take_along_axis",
    "tanh",
    "where",
    "zeros_like",
)
REDUCTIONS = ("all", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum")
TYPES = (
    "bool_",
    "complex128",
    "complex64",
    "float16",
    "float32",
    "float64",
    "int32",
    "int64",
    "uint32",
    "uint64",
    "uint8",
)

cuda = SimpleNamespace(
    Device=Device,
    Event=Event,
    Stream=Stream,
    get_current_stream=get_current_stream,
    alloc_pinned_memory=bytearray,
    cublas=cublas,
    device=device,
    runtime=SimpleNamespace(
        getDeviceCount=lambda: DEVICES,
        getDevice=lambda: HERE.device,
        setDevice=set_device,
        getDeviceProperties=lambda number: {"name": b"stand-in"},
        runtimeGetVersion=lambda: 13000,
        deviceGetPCIBusId=lambda number: f"{os.getpid():08x}:{number:02x}",  # each process has devices of its own
        **CUDA_TYPES,
    ),
)


def _stacked(*arrays, axis=0):
    return np.stack(arrays, axis)


def _joined(*arrays, axis=0):
    return np.concatenate(arrays, axis)


def _give_operators() -> None:
    for short, name in OPERATORS.items():
        function = getattr(np, name)
        setattr(DeviceArray, f"__{short}__", _operator(function))
        setattr(DeviceArray, f"__r{short}__", _operator(function, turned=True))
        setattr(DeviceArray, f"__i{short}__", _operator(function, in_place=True))
    for short, name in (COMPARISONS | UNARY).items():
        setattr(DeviceArray, f"__{short}__", _operator(getattr(np, name)))
    for name in REDUCTIONS:
        setattr(DeviceArray, name, _reduction(getattr(np, name)))


def _operator(function, turned=False, in_place=False):
    def operator(array, *other):
        inputs = (*other, array) if turned else (array, *other)
        return lazily(function, *inputs, out=array if in_place else None)

    return operator


def _reduction(function):
    return lambda array, axis=None, **options: lazily(function, array, axis=axis, **options)


_give_operators()


class ReductionKernel:
    """cupy.ReductionKernel, for sums in float64 of a map whose text is also valid Python."""

    def __init__(self, inputs, outputs, mapped, reduced, after, identity, name, reduce_type):
        assert (reduced, after, identity, reduce_type) == ("a + b", f"{outputs.split()[1]} = a", "0", "double")
        assert outputs.split()[0] == "float64"
        self.name, self.mapped = inputs.split()[1], mapped

    def __call__(self, array, axis):
        return lazily(self.summed, array, axis=axis)

    def summed(self, array, axis):
        return np.sum(eval(self.mapped, {"double": np.float64, self.name: array}), axis=axis)


def _as_strided(array, shape, strides):
    return array._view(np.lib.stride_tricks.as_strided(array._host, shape, strides))


def names(kind) -> dict:
    """Name -> value of a module with cupy's names. kind: the class of its arrays."""

    def asarray(value, dtype=None):
        if hasattr(value, "__cuda_array_interface__"):
            memory = Described(value)
            return kind(memory.bytes, memory)
        host = np.array(value, dtype)
        made = empty(host.shape, host.dtype, kind)
        made.set(host)
        return made

    def full(shape, number, dtype=np.float64):
        made = empty(shape, dtype, kind)
        made[...] = number
        return made

    def array(value, dtype=None, order="C"):
        return value.astype(value.dtype) if isinstance(value, kind) else asarray(value, dtype)

    made = {
        "asarray": asarray,
        "array": array,
        "full": full,
        "zeros": lambda shape, dtype=np.float64: full(shape, 0, dtype),
        "ones": lambda shape, dtype=np.float64: full(shape, 1, dtype),
        "empty": partial(empty, kind=kind),
        "arange": lambda *ends, dtype=None: asarray(np.arange(*ends), dtype),
    }
    taken = {
        "stack": lambda arrays, axis=0: lazily(_stacked, *arrays, axis=axis),
        "concatenate": lambda arrays, axis=0: lazily(_joined, *arrays, axis=axis),
        "asnumpy": asnumpy,
    }
    of_numpy = {name: partial(lazily, getattr(np, name)) for name in FUNCTIONS}
    reduced = {name: _reduction(getattr(np, name)) for name in REDUCTIONS}
    types = {name: getattr(np, name) for name in TYPES}
    return {
        **types,
        **made,
        **taken,
        **of_numpy,
        **reduced,
        "ndarray": kind,
        "cuda": cuda,
        "lib": SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=_as_strided)),
        "fuse": lambda function: function,
        "ReductionKernel": ReductionKernel,
    }
