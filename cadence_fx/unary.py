"""Unary floating-point operators by exact name: what a proof is about, and how to run it again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cadence_fx.specialise import meta_of

__all__ = ["DTYPES", "UnaryOperator"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = (bool, int, float, str, type(None))
# Constants that every dtype holds exactly and whose products and sums with most values must be rounded.
_FACTOR, _SUMMAND = 1.703125, 0.30078125


class _Input:
    """Stands for the tensor among an operator's arguments."""


@dataclass(frozen=True, slots=True, order=True)
class UnaryOperator:
    """One pointwise operator of one floating tensor, with its dtype and all its other arguments.

    Attributes:
        target: the overload, as ``aten.pow.Tensor_Scalar``.
        dtype: of input and result: ``float32``, ``bfloat16`` or ``float16``.
        arguments: the others, as a JSON object in the order of the schema, defaults filled in. An ``int`` and a
            ``float`` of one value stay apart, since compilers lower these differently.
        tensor: name of the argument that is the tensor.
    """

    target: str
    dtype: str
    arguments: str = "{}"
    tensor: str = "self"

    def __str__(self) -> str:
        others = ", ".join(f"{name}={value!r}" for name, value in json.loads(self.arguments).items())
        return f"{self.target}({others})" if others else self.target

    @classmethod
    def of(cls, node: fx.Node) -> UnaryOperator | None:
        """The operator that a node of a flat graph calls, or None if it is none that can be proven exhaustively.

        It is one if it is pointwise, draws and writes nothing, takes exactly one tensor (float32, bfloat16 or float16)
        beside plain numbers, text and None, and gives a tensor of the same shape, dtype and device.
        """
        overload = node.target
        if node.op != "call_function" or not isinstance(overload, torch._ops.OpOverload):
            return None
        sources = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)]
        meta = meta_of(node)
        if len(sources) != 1 or meta is None or meta.dtype not in _NAMES:
            return None
        source = meta_of(sources[0])
        if source is None or (source.shape, source.dtype, source.device) != (meta.shape, meta.dtype, meta.device):
            return None
        args = [_Input() if a is sources[0] else a for a in node.args]
        kwargs = {name: _Input() if a is sources[0] else a for name, a in node.kwargs.items()}
        return _named(overload, meta.dtype, args, kwargs)

    @classmethod
    def make(cls, target: str, dtype: str, *others: Any, **named: Any) -> UnaryOperator:
        """The operator whose first argument is the tensor and whose others are given.

        Raises:
            ValueError: there is no such operator or dtype, or it is none that can be proven.
        """
        if dtype not in DTYPES:
            raise ValueError(f"{dtype!r} is none of {', '.join(DTYPES)}")
        made = _named(_resolve(target), DTYPES[dtype], [_Input(), *others], named)
        if made is None:
            raise ValueError(f"{target} with {others} {named} is no pointwise operator of one tensor and plain values")
        return made

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def bits(self) -> int:
        """Of one input: 16 or 32."""
        return self.torch_dtype.itemsize * 8

    @property
    def domain(self) -> int:
        """Number of all inputs."""
        return 1 << self.bits

    def add_to(self, graph: fx.Graph, source: fx.Node) -> fx.Node:
        """A call of the operator on ``source``, at the graph's insertion point."""
        overload = _resolve(self.target)
        values = json.loads(self.arguments) | {self.tensor: source}
        args = [values[a.name] for a in overload._schema.arguments if not a.kwarg_only]
        kwargs = {a.name: values[a.name] for a in overload._schema.arguments if a.kwarg_only}
        return graph.call_function(overload, tuple(args), kwargs)

    def alone(self) -> fx.GraphModule:
        """``x -> (operator(x),)``."""
        graph = fx.Graph()
        graph.output((self.add_to(graph, graph.placeholder("x")),))
        return fx.GraphModule({}, graph)

    def embedded(self) -> tuple[tuple[str, ...], fx.GraphModule]:
        """The operator within one kernel between products and sums, and what each result is.

        A neighbour that is contracted with the operator's first or last operation, or an intermediate that is kept
        wider than its dtype, shows in the results.
        """
        graph = fx.Graph()
        x = graph.placeholder("x")
        times, plus = torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor

        def scaled(source: fx.Node) -> fx.Node:
            return graph.call_function(times, (source, _FACTOR))

        def moved(source: fx.Node) -> fx.Node:
            return graph.call_function(plus, (source, _SUMMAND))

        # No result may have a second use: compilers contract a product only where nothing else reads it.
        results = {
            "f(x) + b": moved(self.add_to(graph, x)),
            "f(x * a) * a + b": moved(scaled(self.add_to(graph, scaled(x)))),
            "f(x + b) * a": scaled(self.add_to(graph, moved(x))),
        }
        graph.output(tuple(results.values()))
        return tuple(results), fx.GraphModule({}, graph)


def _named(
    overload: torch._ops.OpOverload, dtype: torch.dtype, args: Sequence[Any], kwargs: dict[str, Any]
) -> UnaryOperator | None:
    """The operator with its arguments in canonical form, or None if it is not pointwise in one tensor."""
    schema = overload._schema
    if not _pointwise(overload) or len(args) > len(schema.arguments):
        return None
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    others: dict[str, Any] = {}
    tensor = ""
    for argument in schema.arguments:
        value = given.get(argument.name, argument.default_value)
        if isinstance(value, _Input):
            tensor = argument.name
        elif not isinstance(value, _PLAIN) or (argument.name not in given and not argument.has_default_value()):
            return None
        else:
            others[argument.name] = _as_declared(value, str(argument.type))
    if not set(given) <= {*others, tensor}:  # no such argument
        return None
    return UnaryOperator(str(overload), _NAMES[dtype], json.dumps(others), tensor) if tensor else None


def _as_declared(value: Any, declared: str) -> Any:
    """A number where the schema wants a float is one: there 1 and 1.0 are the same call."""
    if "float" in declared and isinstance(value, int):
        return float(value)
    return value


def _pointwise(overload: torch._ops.OpOverload) -> bool:
    """True if each element of the only result depends on that element alone, and on nothing drawn."""
    schema, tags = overload._schema, overload.tags
    return (
        torch.Tag.pointwise in tags
        and torch.Tag.nondeterministic_seeded not in tags
        and len(schema.returns) == 1
        and all(item.alias_info is None for item in _all(schema))
    )


def _all(schema: torch._C.FunctionSchema) -> Iterable[Any]:
    return [*schema.arguments, *schema.returns]


def _resolve(target: str) -> torch._ops.OpOverload:
    """The overload of that name; ValueError if this torch has none."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"torch {torch.__version__} has no operator {target!r}")  # noqa: TRY004 - the name is wrong
    return found
