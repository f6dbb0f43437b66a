"""A captured graph as something that can be looked at and edited before it is instantiated.

Nodes are numbered in the order in which they were recorded. Edits are collected (dependencies, nodes that go) and
written to the driver's graph at once; parameters of kernels are written at once. `RawGraph` is the real one; the edits
of `cadence_fx.graph_edits` need no more than `LaunchGraph`.
"""

from __future__ import annotations

import ctypes
import struct
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from cadence_fx.graph_dump import MEMCPY, MEMSET, checked, driver, kernel_name

__all__ = ["LaunchGraph", "RawGraph", "pointers"]

_DEVICE_RANGE = range(1 << 40, 1 << 48)  # where words of parameters can be addresses at all


def pointers(parameter: bytes) -> list[tuple[int, int]]:
    """(offset, value) of the aligned words of a kernel's parameter that can be addresses."""
    words = ((at, struct.unpack_from("<Q", parameter, at)[0]) for at in range(0, len(parameter) - 7, 8))
    return [(at, value) for at, value in words if value in _DEVICE_RANGE]


class LaunchGraph(Protocol):
    """What the edits need of a graph. ``before`` and ``after`` are sets of node numbers and may be changed."""

    before: list[set[int]]
    after: list[set[int]]

    def kind(self, node: int) -> str:
        """One of "kernel", "memset", "memcpy" and "other"."""

    def name(self, node: int) -> str:
        """Of a kernel, demangled; of others their kind."""

    def parameters(self, node: int) -> list[bytes]:
        """Of a kernel, each argument as it is passed; empty where the driver does not tell."""

    def memset_range(self, node: int) -> tuple[int, int]:
        """Address and bytes that a memset writes."""

    def set_parameters(self, node: int, parameters: Sequence[bytes]) -> None:
        """Give a kernel other arguments of the same sizes."""

    def drop(self, node: int) -> None:
        """Take a node out; what came after it comes after what came before it."""

    def run_once(self, nodes: Sequence[int]) -> None:
        """Run kernels now, in order, and wait for them."""


class RawGraph:
    """A ``cudaGraph_t`` that has been captured and not yet instantiated.

    Args:
        raw: the handle, as `torch.cuda.CUDAGraph.raw_cuda_graph` gives it.

    Raises:
        CadenceError: the driver refuses.
    """

    def __init__(self, raw: int) -> None:
        cu = self._cu = driver()
        self._graph = cu.CUgraph(raw)
        self._nodes = checked(cu.cuGraphGetNodes(self._graph, checked(cu.cuGraphGetNodes(self._graph))[1]))[0]
        index = {int(node): i for i, node in enumerate(self._nodes)}
        count = checked(cu.cuGraphGetEdges(self._graph))[-1]
        sources, targets, data, _ = checked(cu.cuGraphGetEdges(self._graph, count))
        ends = [(index[int(a)], index[int(b)]) for a, b in zip(sources, targets, strict=True)]
        self._edges = dict(zip(ends, data, strict=True)) if len(data) == len(ends) else dict.fromkeys(ends)
        self.before: list[set[int]] = [set() for _ in self._nodes]
        self.after: list[set[int]] = [set() for _ in self._nodes]
        for a, b in ends:
            self.before[b].add(a)
            self.after[a].add(b)
        self._dropped: set[int] = set()
        self._kept: list[Any] = []  # memory that parameters point into until the driver has copied them
        self._layouts: dict[int, list[int]] = {}

    @cached_property
    def _kinds(self) -> list[str]:
        kinds = self._cu.CUgraphNodeType
        names = defaultdict(
            lambda: "other",
            {
                kinds.CU_GRAPH_NODE_TYPE_KERNEL: "kernel",
                kinds.CU_GRAPH_NODE_TYPE_MEMSET: MEMSET,
                kinds.CU_GRAPH_NODE_TYPE_MEMCPY: MEMCPY,
            },
        )
        return [names[checked(self._cu.cuGraphNodeGetType(node))] for node in self._nodes]

    def __len__(self) -> int:
        return len(self._nodes)

    def kind(self, node: int) -> str:
        return self._kinds[node]

    def name(self, node: int) -> str:
        return kernel_name(self._cu, self._kernel(node)) if self.kind(node) == "kernel" else self.kind(node)

    def _kernel(self, node: int) -> Any:
        return checked(self._cu.cuGraphKernelNodeGetParams(self._nodes[node]))

    def parameters(self, node: int) -> list[bytes]:
        kernel = self._kernel(node)
        array = int(kernel.kernelParams or 0)
        if not array:
            return []  # packed into one buffer of unknown layout
        return [
            ctypes.string_at(ctypes.c_void_p.from_address(array + 8 * i).value or 0, size)
            for i, size in enumerate(self._sizes(kernel))
        ]

    def _sizes(self, kernel: Any) -> list[int]:
        function = int(kernel.func)
        key = function or int(kernel.kern)
        if key not in self._layouts:
            ask = self._cu.cuFuncGetParamInfo if function else self._cu.cuKernelGetParamInfo
            handle = kernel.func if function else kernel.kern
            sizes: list[int] = []
            while int((found := ask(handle, len(sizes)))[0]) == 0:
                sizes.append(int(found[2]))
            self._layouts[key] = sizes
        return self._layouts[key]

    def memset_range(self, node: int) -> tuple[int, int]:
        found = checked(self._cu.cuGraphMemsetNodeGetParams(self._nodes[node]))
        row = found.width * found.elementSize
        return int(found.dst), row if found.height <= 1 else found.pitch * (found.height - 1) + row

    def set_parameters(self, node: int, parameters: Sequence[bytes]) -> None:
        kernel = self._kernel(node)
        buffers = [ctypes.create_string_buffer(value, max(len(value), 1)) for value in parameters]
        array = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        self._kept.append((buffers, array))
        kernel.kernelParams = ctypes.addressof(array)
        checked(self._cu.cuGraphKernelNodeSetParams(self._nodes[node], kernel))

    def drop(self, node: int) -> None:
        for a in self.before[node]:
            self.after[a].discard(node)
            self.after[a] |= self.after[node]
        for b in self.after[node]:
            self.before[b].discard(node)
            self.before[b] |= self.before[node]
        self.before[node], self.after[node] = set(), set()
        self._dropped.add(node)

    def run_once(self, nodes: Sequence[int]) -> None:
        cu = self._cu
        graph = checked(cu.cuGraphCreate(0))
        try:
            last: list[Any] = []
            for node in nodes:
                last = [checked(cu.cuGraphAddKernelNode(graph, last, len(last), self._kernel(node)))]
            executable = checked(cu.cuGraphInstantiate(graph, 0))
            try:
                stream = checked(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
                checked(cu.cuGraphLaunch(executable, stream))
                checked(cu.cuStreamSynchronize(stream))
                checked(cu.cuStreamDestroy(stream))
            finally:
                checked(cu.cuGraphExecDestroy(executable))
        finally:
            checked(cu.cuGraphDestroy(graph))

    def apply(self) -> None:
        """Write the collected edits to the driver's graph."""
        cu, wanted = self._cu, {(a, b) for b, sources in enumerate(self.before) for a in sources}
        for node in self._dropped:
            checked(cu.cuGraphDestroyNode(self._nodes[node]))  # and its edges with it
        left = {e: d for e, d in self._edges.items() if not self._dropped & {*e}}
        gone = [edge for edge in left if edge not in wanted]
        new = [edge for edge in wanted if edge not in left]
        plain = cu.CUgraphEdgeData
        self._change(cu.cuGraphRemoveDependencies, gone, [left[e] or plain() for e in gone])
        self._change(cu.cuGraphAddDependencies, new, [plain() for _ in new])

    def _change(self, call: Any, edges: Sequence[tuple[int, int]], data: Sequence[Any]) -> None:
        if edges:
            sources, targets = ([self._nodes[e[end]] for e in edges] for end in (0, 1))
            checked(call(self._graph, sources, targets, list(data), len(edges)))
