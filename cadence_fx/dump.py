"""The graph before and after each pass, as numbered files of runnable Python."""

from __future__ import annotations

import textwrap
from pathlib import Path

from torch import fx

from cadence_fx.catalog import Signature
from cadence_fx.compiler import Compiler
from cadence_fx.module import CadenceModule
from cadence_fx.program import describe
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of, source_of

__all__ = ["record", "source_code", "write"]

_HEADER = '''"""{title}

{operators} operators. Values of attributes are placeholders of the right shape; run the file to see the graph execute.
"""

import math
from math import inf, nan

import torch
from torch import device

NoneType = type(None)


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
'''


def record(compiler: Compiler, signature: Signature) -> dict[str, FlatGraph]:
    """Compile a signature once more and keep the graph at every stage: "before", then the name of each pass."""
    kept: dict[str, FlatGraph] = {}
    previous = compiler.observer
    compiler.observer = lambda _, name, flat: kept.__setitem__(name, flat)
    try:
        compiler.compile(signature)
    finally:
        compiler.observer = previous
    return kept


def write(fast: CadenceModule, out: Path, signature: Signature | None = None) -> list[Path]:
    """Write every stage of one signature to ``out`` as ``00_before.py``, ``01_normalise.py`` and so on.

    Args:
        fast: a transformed module.
        out: folder; made if missing.
        signature: the steady signature with the longest state by default.

    Returns:
        The files, in order.
    """
    chosen = signature or fast.steady_signature()
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for i, (name, flat) in enumerate(record(fast.compiler, chosen).items()):
        path = out / f"{i:02d}_{name}.py"
        stage = "as traced" if name == "before" else f"after pass {name}"
        path.write_text(source_code(flat, f"{fast.contract.name}, {describe(chosen)}, {stage}"))
        files.append(path)
    return files


def source_code(flat: FlatGraph, title: str) -> str:
    """Python of a graph: a module with its attributes, and a main that runs it on random inputs."""
    lines = [_HEADER.format(title=title, operators=flat.calls())]
    for node in flat.graph.nodes:
        meta = meta_of(node)
        if node.op == "get_attr" and meta is not None:
            comment = (
                f"  # {flat.attributes[str(node.target)]}" if flat.attributes[str(node.target)] != node.target else ""
            )
            lines.append(f"        self.{node.target} = {_tensor(meta)}{comment}\n")
    lines.append("\n" + textwrap.indent(_forward(flat.graph), "    "))
    inputs = [(n.name, meta_of(n)) for n in flat.graph.nodes if n.op == "placeholder"]
    arguments = ", ".join(_tensor(meta) for _, meta in inputs if meta is not None)
    lines.append(f'\n\nif __name__ == "__main__":\n    with torch.no_grad():\n        results = Graph()({arguments})\n')
    lines.append("    print([tuple(r.shape) if isinstance(r, torch.Tensor) else r for r in results])\n")
    return "".join(lines)


def _forward(graph: fx.Graph) -> str:
    """The code that fx makes with the vendor's source line above each group of nodes that it made."""
    code = graph.python_code("self", verbose=False).src
    by_name = {node.name: node for node in graph.nodes}
    out, last = [], ""
    for line in code.strip().splitlines():
        name = line.strip().split(" ", 1)[0].rstrip(":")
        node = by_name.get(name)
        source = source_of(node) if node is not None else ""
        if source and source != last:
            short = "/".join(source.split("/")[-2:])
            out.append(f"    # {short}")
            last = source
        meta = meta_of(node) if node is not None else None
        out.append(f"{line}  # {meta}" if meta is not None and "=" in line else line)
    return "\n".join(out)


def _tensor(meta: TensorMeta) -> str:
    shape, dtype = list(meta.shape), meta.dtype
    if dtype.is_floating_point and meta.numel <= 1 << 20:
        return f"torch.randn({shape}, dtype={dtype})"
    if dtype.is_complex and meta.numel <= 1 << 20:
        return f"torch.randn({shape}, dtype={dtype})"
    return f"torch.zeros({shape}, dtype={dtype})"
