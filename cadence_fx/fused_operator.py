"""A group of operators as one operator of the graph, and its compiled function.

The group's own graph has no attributes: what it reads, views of a state's buffer among them, is passed to it. Groups of
equal structure and layout, as the blocks and steps of a solver have them, share one compiled function.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cadence_fx.compiled_segments import graph_text, layout
from cadence_fx.effects import written
from cadence_fx.errors import CadenceError
from cadence_fx.exact_compile import Compile, compile_exact
from cadence_fx.fusion_groups import FusionGroup
from cadence_fx.schedule import dependencies, is_view, operators, viewed
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of, source_of

__all__ = ["FusedKernels", "FusedOperator", "with_groups"]


@dataclass(eq=False)
class FusedOperator:
    """The target of a graph's node: tensors in, a list of tensors out.

    Attributes:
        graph: of the group; its placeholders are the arguments.
        results: what the arguments' operators would have returned.
        writes: positions of arguments that are written in place.
        targets, names: the operators that it stands for, and their nodes.
        function: the compiled form; the node cannot be run before it is there.
    """

    graph: fx.Graph
    results: tuple[TensorMeta, ...]
    writes: tuple[int, ...]
    targets: tuple[str, ...]
    names: tuple[str, ...]
    text: str
    function: Callable[..., Any] | None = None

    @property
    def __name__(self) -> str:
        return "fused_" + "_".join(target.split(".")[1] for target in self.targets[:4])

    def __str__(self) -> str:
        return self.__name__

    def __call__(self, *arguments: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.function is None:
            raise CadenceError(f"{self.__name__} has not been compiled")
        found: Sequence[torch.Tensor] = self.function(*arguments)
        return found


# ---------------------------------------------------------------------------------------------- graphs with groups
def with_groups(flat: FlatGraph, groups: Sequence[FusionGroup]) -> FlatGraph:
    """A graph in which each group is one node. ``flat`` is left as it is."""
    return _Rewriter(flat, groups).run()


class _Rewriter:
    def __init__(self, flat: FlatGraph, groups: Sequence[FusionGroup]) -> None:
        self.flat, self.graph = flat, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.group_of = {node: group for group in groups for node in group.nodes}

    def run(self) -> FlatGraph:
        for node in self.flat.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.new[node] = self.graph.node_copy(node)
        for item in self._order():
            if isinstance(item, FusionGroup):
                self._fuse(item)
            else:
                self.new[item] = self.graph.node_copy(item, self._value)
        self.graph.output(fx.map_arg(self.flat.output.args[0], self._value))
        return FlatGraph(self.graph, self.flat.out_spec, dict(self.flat.attributes), dict(self.flat.constants))

    def _order(self) -> list[fx.Node | FusionGroup]:
        """Operators and groups so that each comes after what it needs, else as they were."""
        position = {node: i for i, node in enumerate(operators(self.flat))}
        needs: dict[Any, set[Any]] = {}
        place: dict[Any, int] = {}
        for node, found in dependencies(self.flat).items():
            item = self.group_of.get(node, node)
            needs.setdefault(item, set()).update(self.group_of.get(n, n) for n in found)
            place[item] = max(place.get(item, 0), position[node])
        waiting = {item: len(found - {item}) for item, found in needs.items()}
        followers: dict[Any, list[Any]] = {}
        for item, found in needs.items():
            for other in found - {item}:
                followers.setdefault(other, []).append(item)
        ready = [(place[item], item) for item, count in waiting.items() if count == 0]
        heap = [(at, i, item) for i, (at, item) in enumerate(ready)]
        heapq.heapify(heap)
        ordered: list[fx.Node | FusionGroup] = []
        while heap:
            _, _, item = heapq.heappop(heap)
            ordered.append(item)
            for other in followers.get(item, ()):
                waiting[other] -= 1
                if waiting[other] == 0:
                    heapq.heappush(heap, (place[other], len(place) + len(ordered), other))
        if len(ordered) != len(needs):
            raise CadenceError("groups of operators wait for each other")
        return ordered

    def _value(self, node: fx.Node) -> fx.Node:
        """The new graph's node; a view is made where it is first needed."""
        if node not in self.new:
            assert node not in self.group_of, f"{node} is inside of a group"
            self.new[node] = self.graph.node_copy(node, self._value)
        return self.new[node]

    def _fuse(self, group: FusionGroup) -> None:
        shown = [n for n in group.nodes if not written(n) and self._seen_outside(n, group)]
        body, inputs = _body(group, shown)
        written_nodes = {a for n in group.nodes for a in written(n)}
        target = FusedOperator(
            body, tuple(m for n in shown if (m := meta_of(n)) is not None),
            tuple(i for i, n in enumerate(inputs) if n in written_nodes), tuple(str(n.target) for n in group.nodes),
            tuple(n.name for n in group.nodes), graph_text(body),
        )  # fmt: skip
        made = self.graph.call_function(target, tuple(self._value(n) for n in inputs))
        made.meta = {
            "val": target.results,
            "source": source_of(group.nodes[0]),
            "where": group.nodes[0].meta.get("where"),
        }
        for i, node in enumerate(shown):
            item = self.graph.call_function(operator.getitem, (made, i))
            item.meta = dict(node.meta)
            self.new[node] = item
        for node in group.nodes:
            if written(node):  # whoever reads the result of a copy reads what was written
                self.new[node] = self._value(written(node)[0])

    def _seen_outside(self, node: fx.Node, group: FusionGroup) -> bool:
        todo = [node]
        while todo:
            for user in todo.pop().users:
                if user.op == "output" or (not is_view(user) and self.group_of.get(user) is not group):
                    return True
                if is_view(user):
                    todo.append(user)
        return False


def _body(group: FusionGroup, shown: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """The group's operators as a graph that returns what is shown, and the nodes that its placeholders stand for."""
    members = set(group.nodes)
    body, inside, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[fx.Node]()

    def find(node: fx.Node) -> list[fx.Node]:
        """Nodes from outside that an argument takes."""
        if node in members:
            return []
        if is_view(node) and viewed(node) in members:
            return [found for argument in node.all_input_nodes for found in find(argument)]
        return [node]

    for node in dict.fromkeys(found for n in group.nodes for a in n.all_input_nodes for found in find(a)):
        inside[node] = body.placeholder(f"arg_{len(inputs)}")
        inputs.append(node)

    def value(node: fx.Node) -> fx.Node:
        if node not in inside:
            inside[node] = body.node_copy(node, value)
            inside[node].meta = {}
        return inside[node]

    for node in group.nodes:
        value(node)
    body.output(tuple(inside[node] for node in shown))
    body.lint()
    return body, inputs


# ---------------------------------------------------------------------------------------------- compiling
@dataclass
class FusedKernels:
    """Compiled functions, by structure and by the layout of what they are given. Shared by all captures of a module.

    Attributes:
        compile: a graph and example arguments -> a function.
        functions: what was compiled; the error's text of what could not be.
    """

    compile: Compile = compile_exact
    functions: dict[Any, Callable[..., Any] | str] = field(default_factory=dict)

    def prepare(self, nodes: Sequence[fx.Node], attribute: Callable[[str], torch.Tensor]) -> dict[fx.Node, str]:
        """Give every fused node its function.

        Args:
            attribute: the tensor behind a get_attr node's target.

        Returns:
            Nodes whose group cannot be compiled, or returns another layout than its operators; with the error's text.
        """
        failed: dict[fx.Node, str] = {}
        for node in nodes:
            target = node.target
            assert isinstance(target, FusedOperator)
            examples = [example(a, attribute) for a in node.args if isinstance(a, fx.Node)]
            key = (target.text, *((layout(t), t.data_ptr() % 16) for t in examples))
            if key not in self.functions:
                try:
                    self.functions[key] = self._compiled(target, examples)
                except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the operators are still there
                    self.functions[key] = f"{type(error).__name__}: {error}"
            found = self.functions[key]
            if isinstance(found, str):
                failed[node] = found
            else:
                target.function = found
        return failed

    def _compiled(self, target: FusedOperator, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
        graph = fx.Graph()
        graph.output(graph.graph_copy(target.graph, {}))
        function = self.compile(fx.GraphModule(torch.nn.Module(), graph), examples)
        # On memory of its own: what it writes may be a state's buffer. The first run also loads the kernels.
        given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in examples]
        with torch.no_grad():
            found = function(*given)
        for result, meta in zip(found, target.results, strict=True):
            # The stride of a dimension of one element says nothing.
            strides = all(a == b for a, b, n in zip(result.stride(), meta.stride, meta.shape, strict=True) if n > 1)
            if (tuple(result.shape), result.dtype) != (meta.shape, meta.dtype) or not strides:
                raise CadenceError(
                    f"{target}: compiled to {result.dtype} {tuple(result.shape)} strides {result.stride()}, "
                    f"expected {meta} strides {meta.stride}"
                )
        return function


def example(node: fx.Node, attribute: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """A tensor with the layout and alignment that a node's value has; an attribute, or a view of it, is itself."""
    found = _example(node, attribute)
    assert isinstance(found, torch.Tensor), f"{node} is no tensor"
    return found


def _example(node: fx.Node, attribute: Callable[[str], torch.Tensor]) -> Any:
    if node.op == "get_attr":
        return attribute(str(node.target))
    # An item of what an operator returns is memory of its own; one of what a view returns (a split) is a view.
    is_result = node.target is operator.getitem and not is_view(node.all_input_nodes[0])
    if node.op == "call_function" and is_view(node) and not is_result:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _example(n, attribute))
        return node.target(*args, **kwargs)  # type: ignore[operator]
    meta = meta_of(node)
    assert meta is not None, f"{node} is no tensor"
    return meta.empty()
