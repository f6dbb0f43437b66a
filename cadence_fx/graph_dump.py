"""What a captured graph will launch: its nodes by kind and kernel name, read through the driver.

Needs ``cuda.bindings``, which torch's CUDA 13 builds bring along; without it nothing can be listed (None).
"""

from __future__ import annotations

import ctypes
import importlib
from collections import Counter
from functools import lru_cache
from typing import Any

from cadence_fx.errors import CadenceError

__all__ = ["MEMCPY", "MEMSET", "checked", "demangled", "driver", "kernel_name", "launches"]

MEMSET, MEMCPY = "memset", "memcpy"


@lru_cache(maxsize=1)
def driver() -> Any:
    """The module ``cuda.bindings.driver``, or None where it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None


def checked(result: tuple[Any, ...]) -> Any:
    """The values of a driver call.

    Raises:
        CadenceError: the call failed.
    """
    status, *values = result
    if int(status) != 0:
        raise CadenceError(f"CUDA driver call failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


@lru_cache(maxsize=1)
def _demangle() -> Any:
    function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return function


@lru_cache(maxsize=4096)
def demangled(name: str) -> str:
    """A C++ symbol as the profiler prints it; any other name as it is."""
    status = ctypes.c_int()
    found = _demangle()(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or not found:
        return name
    try:
        text = ctypes.string_at(found)
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(found))
    return text.decode()


def launches(raw_graph: int) -> Counter[str] | None:
    """How often a graph launches each kernel (demangled), and "memset" and "memcpy"; None without ``cuda.bindings``.

    Args:
        raw_graph: the ``cudaGraph_t``, as `torch.cuda.CUDAGraph.raw_cuda_graph` gives it.
    """
    cu = driver()
    if cu is None:
        return None
    graph = cu.CUgraph(raw_graph)
    _, count = checked(cu.cuGraphGetNodes(graph))
    nodes, _ = checked(cu.cuGraphGetNodes(graph, count))
    kinds = cu.CUgraphNodeType
    found: Counter[str] = Counter()
    for node in nodes:
        kind = checked(cu.cuGraphNodeGetType(node))
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            found[kernel_name(cu, checked(cu.cuGraphKernelNodeGetParams(node)))] += 1
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            found[MEMSET] += 1
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            found[MEMCPY] += 1
    return found


def kernel_name(cu: Any, parameters: Any) -> str:
    """The demangled name of a kernel node, from its parameters."""
    if int(parameters.func):
        return demangled(checked(cu.cuFuncGetName(parameters.func)).decode())
    return demangled(checked(cu.cuKernelGetName(parameters.kern)).decode())
