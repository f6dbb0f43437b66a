"""What was found when an operator's compiled bits were compared with eager's, and where that holds."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from cadence_fx.exact_compile import exact_settings
from cadence_fx.machine import driver_version
from cadence_fx.unary import DTYPES, UnaryOperator

__all__ = ["Check", "Mismatch", "ProofKey", "Verdict"]

LAYOUTS = frozenset({"contiguous", "odd", "strided", "eager strided"})  # what a proof must have compared
METHOD = 1  # counts up when `prove` compares more than before: what an older one found is then no proof
# Settings of the compiler that change bits and that `compile_exact` leaves as the user has them.
_OTHER_SETTINGS = (
    "use_fast_math", "triton.codegen_upcast_to_fp32", "cpp.simdlen", "cpp.march", "cpp.use_decompose_tanh",
    "cpp.vec_isa_ok", "cpu_backend", "cuda_backend",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- circumstances
@dataclass(frozen=True)
class ProofKey:
    """All that the bits of a compiled operator can depend on. A proof under one key says nothing under another.

    Attributes:
        device: the GPU's name; for a CPU its model and the instruction set that torch uses.
        driver: version of the GPU's driver, or "" on a CPU.
        torch_version, cuda_version: of CUDA it is "" where torch has none.
        compiler: Triton with its assembler on a GPU, the C++ compiler on a CPU.
        settings: settings of Inductor as (name, JSON text), those of `exact_settings` and others that change bits.
        method: which comparisons `prove` makes.
    """

    device: str
    driver: str
    torch_version: str
    cuda_version: str
    compiler: str
    settings: tuple[tuple[str, str], ...]
    method: int = METHOD

    @classmethod
    def current(cls, device: torch.device | str) -> ProofKey:
        """The key of this process on a device. Imports Inductor's configuration."""
        device = torch.device(device)
        on_gpu = device.type == "cuda"
        runtime: Any = torch._C  # builds without CUDA lack some of it
        return cls(
            device=torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
            # The driver's own version is told by its tool only; torch knows the CUDA version that it supports.
            driver=(driver_version() or f"CUDA {runtime._cuda_getDriverVersion()}") if on_gpu else "",
            torch_version=torch.__version__,
            cuda_version=torch.version.cuda or "",
            compiler=_triton() if on_gpu else _cpp_compiler(),
            settings=_settings(device),
        )

    @property
    def digest(self) -> str:
        """A short name of the key, for files."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def slug(self) -> str:
        """The device's name as a part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "_", self.device.lower()).strip("_") or "device"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"settings": dict(self.settings)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ProofKey:
        """The key that `to_dict` wrote; ValueError, TypeError or KeyError for anything else."""
        if set(data) != {f.name for f in fields(cls)}:
            raise ValueError(f"a key has the fields {', '.join(f.name for f in fields(cls))}")
        return cls(**data | {"settings": tuple(sorted(dict(data["settings"]).items()))})


def _settings(device: torch.device) -> tuple[tuple[str, str], ...]:
    from torch._inductor import config

    now = config.get_config_copy()
    found = {name: now[name] for name in _OTHER_SETTINGS if name in now} | exact_settings()
    if device.type == "cpu":
        # A mode of the thread, set by `torch.set_flush_denormal`, that torch does not tell.
        found["flush_denormal"] = bool((torch.tensor([1e-40], dtype=torch.float32) * 1.0 == 0).item())
    return tuple(sorted((name, json.dumps(value, default=str)) for name, value in found.items()))


@functools.cache
def _cpu_name() -> str:
    model = ""
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        named = re.search(r"^model name\s*:\s*(.+)$", listing.read_text(errors="replace"), re.MULTILINE)
        model = named.group(1) if named else ""
    return f"{model or platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


@functools.cache
def _cpp_compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return _first_line(get_cpp_compiler())
    except Exception as error:  # noqa: BLE001 - Inductor has errors of several classes for "there is none"
        return f"none ({type(error).__name__})"


@functools.cache
def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    assembler = os.environ.get("TRITON_PTXAS_PATH")  # another than the one that Triton brings
    return f"triton {triton.__version__}" + (f", ptxas {_first_line(assembler, last=True)}" if assembler else "")


def _first_line(tool: str, last: bool = False) -> str:
    """The line of ``tool --version`` that tells the version."""
    if shutil.which(tool) is None:
        return "unknown"
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False, timeout=60)
    lines = done.stdout.strip().splitlines()
    return lines[-1 if last else 0].strip() if lines else "unknown"


# ---------------------------------------------------------------------------------------------- findings
@dataclass(frozen=True)
class Mismatch:
    """The first input on which results differ; raw bits in hex."""

    input: str
    eager: str
    compiled: str


@dataclass(frozen=True)
class Check:
    """One comparison over the inputs.

    Attributes:
        what: the expression that was compared, in ``f`` for the operator.
        layout: ``contiguous``; ``odd``, dense at a length that no vector divides; ``strided``, every second element; or
            ``eager strided``: eager on strided against eager on dense memory, whose bits may differ too.
        nan, denormal, others: number of inputs whose results differ, by the class of the input.
        first: the first of them, or None.
    """

    what: str
    layout: str
    nan: int = 0
    denormal: int = 0
    others: int = 0
    first: Mismatch | None = None

    @property
    def differing(self) -> int:
        return self.nan + self.denormal + self.others

    def __str__(self) -> str:
        if not self.differing or self.first is None:
            return f"{self.what} {self.layout}: equal"
        named = ((self.nan, "NaN"), (self.denormal, "denormal"), (self.others, "other"))
        counts = ", ".join(f"{count:,} {name}" for count, name in named if count)
        first = f"first {self.first.input}: eager {self.first.eager}, compiled {self.first.compiled}"
        return f"{self.what} {self.layout}: {counts} inputs differ; {first}"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Check:
        """The check that `dataclasses.asdict` wrote; KeyError, TypeError or ValueError for anything else."""
        first = None if data["first"] is None else Mismatch(**data["first"])
        check = cls(**data | {"first": first})
        counts = (check.nan, check.denormal, check.others)
        if any(type(count) is not int or count < 0 for count in counts) or (first is None) != (check.differing == 0):
            raise ValueError(f"not what a check finds: {data}")
        return check


@dataclass(frozen=True)
class Verdict:
    """What `prove` found for one operator.

    Attributes:
        operator, key: what was compared, and the circumstances for which it holds.
        inputs: number of distinct inputs compared in each check.
        checks: the comparisons, each over all of these.
        seconds: that it took.
        error: why nothing could be compared, or "".
    """

    operator: UnaryOperator
    key: ProofKey
    inputs: int
    checks: tuple[Check, ...]
    seconds: float = 0.0
    error: str = ""

    @property
    def complete(self) -> bool:
        """True if every input was compared in every layout: no other verdict is kept or proves anything."""
        covered = {check.layout for check in self.checks} == LAYOUTS
        return not self.error and covered and self.inputs == self.operator.domain

    @property
    def exact(self) -> bool:
        """True if every bit of every input agrees, in every layout."""
        return self.complete and not any(check.differing for check in self.checks)

    @property
    def exact_contiguous(self) -> bool:
        """As `exact`, if eager reads and writes dense memory; on a CPU it computes strided elements by other code."""
        return self.complete and not any(c.differing for c in self.checks if not c.layout.endswith("strided"))

    @property
    def first_failure(self) -> Check | None:
        """The first check that found a difference."""
        return next((check for check in self.checks if check.differing), None)

    def __str__(self) -> str:
        if self.error:
            return f"not compared: {self.error}"
        failure = self.first_failure
        if failure is not None:
            return f"exact where dense; {failure}" if self.exact_contiguous else str(failure)
        return "exact" if self.complete else f"no proof: equal on {self.inputs:,} of {self.operator.domain:,} inputs"

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, without the key."""
        return {
            "operator": asdict(self.operator),
            "inputs": self.inputs,
            "checks": [asdict(check) for check in self.checks],
            "seconds": round(self.seconds, 3),
            "error": self.error,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], key: ProofKey) -> Verdict:
        """The verdict that `to_dict` wrote under ``key``; KeyError, TypeError or ValueError for anything else."""
        operator = UnaryOperator(**data["operator"])
        if operator.dtype not in DTYPES or not isinstance(json.loads(operator.arguments), dict):
            raise ValueError(f"no operator: {operator!r}")
        return cls(
            operator, key, int(data["inputs"]),
            tuple(Check.from_dict(check) for check in data["checks"]), float(data["seconds"]), str(data["error"]),
        )  # fmt: skip
