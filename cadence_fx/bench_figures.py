"""The measured figures of a README, made from the benchmark's JSON: ``python -m cadence_fx.bench_figures README.md``.

The README holds a block between ``<!-- bench:begin FILE... -->`` and ``<!-- bench:end -->``. It is written anew from
the files that its first line names, or from those that the command names. The first file gives the table of cells,
each other one a row of a second table, as for fewer solver steps or under autocast.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["block", "main", "named_files", "rewritten"]

_BLOCK = re.compile(r"<!-- bench:begin(?P<files>[^>]*?) ?-->\n.*?<!-- bench:end -->", re.DOTALL)
LEFT_OUT = ("B0b", "ours_chain")  # a check of the benchmark itself, and an ablation: the JSON has them


def named_files(readme: str) -> list[str]:
    """The files that a README's block is made from; none if it has no block."""
    found = _BLOCK.search(readme)
    return found["files"].split() if found else []


def rewritten(readme: str, files: Sequence[str], contents: Sequence[Mapping[str, Any]]) -> str:
    """The README with its block made anew.

    Raises:
        ValueError: it has no block.
    """
    if not _BLOCK.search(readme):
        raise ValueError("the README has no <!-- bench:begin --> ... <!-- bench:end --> block")
    made = f"<!-- bench:begin {' '.join(files)} -->\n{block(contents)}\n<!-- bench:end -->"
    return _BLOCK.sub(lambda found: made, readme, count=1)


def block(contents: Sequence[Mapping[str, Any]]) -> str:
    """Text and tables for results of the benchmark, the first in full."""
    first, *others = contents
    parts = [_surroundings(first), _table(CELL_COLUMNS, _cell_rows(first))]
    if others:
        parts.append(_table(VARIANT_COLUMNS, [_variant_row(found) for found in contents]))
    return "\n\n".join(parts)


def _surroundings(found: Mapping[str, Any]) -> str:
    e = found["environment"]
    return (
        f"{e['device']}, driver {e['driver']}, torch {e['torch']}, cuDNN {e['cudnn']} (deterministic kernels, TF32 "
        f"{'as torch has it' if found['tf32'] else 'off'}); {found['blocks']} matched blocks of {found['chunks']} "
        f"chunks, medians of the steady ones with 95 % intervals:\n`{found['command']}`"
    )


CELL_COLUMNS = ("cell", "", "p50 ms", "p95 ms", "stock / cell", "peak MiB", "of stock's", "serving MiB", "bits")
VARIANT_COLUMNS = ("variant", "stock p50 ms", "ours p50 ms", "stock / ours", "peak of stock's", "bits")
_BITS = {True: "equal", False: "differ", None: "-"}


def _cell_rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, cell in found["cells"].items():
        if name in LEFT_OUT:
            continue
        shown = f"`{name}`"
        if cell["p50_ms"] is None:
            rows.append(
                [shown, cell["title"], "-", "-", "-", "-", "-", "-", f"fails: {cell['error'].splitlines()[0][:80]}"]
            )
            continue
        times = [f"{cell['p50_ms']:.1f}", f"{cell['p95_ms']:.1f}", _ratio(found, f"p50 B0/{name}")]
        memory = [_whole(cell["peak_mib"]), _share(found, name), _whole(cell.get("serving_peak_mib"))]
        rows.append([shown, cell["title"], *times, *memory, _BITS[cell["bits_equal"]]])
    return rows


def _variant_row(found: Mapping[str, Any]) -> list[str]:
    options = [f"{name}={value}" for name, value in found["options"].items()]
    options += [f"autocast {found['autocast']}"] if found["autocast"] else []
    stock, ours = found["cells"]["B0"], found["cells"]["ours"]
    p50 = [f"{cell['p50_ms']:.1f}" if cell["p50_ms"] is not None else "-" for cell in (stock, ours)]
    return [", ".join(options) or "as above", *p50, _ratio(found, "p50 B0/ours"), _share(found, "ours"),
            _BITS[ours["bits_equal"]]]  # fmt: skip


def _ratio(found: Mapping[str, Any], name: str) -> str:
    ratio = found["ratios"].get(name)
    if ratio is None:
        return "1" if name == "p50 B0/B0" else "-"
    if ratio["low"] is None:
        return f"{ratio['ratio']:.2f}"
    return f"{ratio['ratio']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _share(found: Mapping[str, Any], name: str) -> str:
    ratio = found["ratios"].get(f"peak {name}/B0")
    return "-" if ratio is None else f"{100 * ratio['ratio']:.0f} %"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the block; 0 if it was as it should be or could be written, 1 with ``--check`` if it was not."""
    parser = argparse.ArgumentParser(prog="python -m cadence_fx.bench_figures", description=__doc__.split("\n")[0])
    parser.add_argument("readme", type=Path)
    parser.add_argument("files", nargs="*", help="results, relative to the README; those of its block by default")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the block is another")
    given = parser.parse_args(arguments)
    text = given.readme.read_text(encoding="utf-8")
    files = given.files or named_files(text)
    if not files:
        parser.error(f"{given.readme} names no results; give them after it")
    contents = [json.loads((given.readme.parent / file).read_text(encoding="utf-8")) for file in files]
    made = rewritten(text, files, contents)
    if given.check:
        return int(made != text)
    given.readme.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
