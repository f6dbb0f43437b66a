"""The commands of ``cadence-fx``: arguments in, tables, JSON and exit codes out. The work is done elsewhere."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

import cadence_fx
from cadence_fx.cli_show import Report, Show
from cadence_fx.errors import CadenceError
from cadence_fx.families import Family, available, load
from cadence_fx.machine import command_line, environment

__all__ = ["app"]

DIFFERENT, USAGE = 1, 2

app = typer.Typer(
    help="Exact replay of streaming speech decoders: what is rewritten, and proof that no bit changes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

TargetArgument = Annotated[
    str, typer.Argument(help=f"{', '.join(available())}, or package.module:factory", show_default=False)
]
DemoTarget = Annotated[str, typer.Argument(help=f"{', '.join(available())}, or package.module:factory")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:1; the first GPU if there is one.", show_default=False)
]
JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write one JSON object to FILE; - is standard output.", show_default=False
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of weights and inputs.")]
ChunksOption = Annotated[int, typer.Option("--chunks", min=1, help="Number of calls to compare.")]
OptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="NAME=VALUE", help="Option of the family; may be repeated.", show_default=False
    ),
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for the graphs.", file_okay=False)]


# ---------------------------------------------------------------------------------------------- commands
@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"cadence-fx {cadence_fx.__version__}")
        raise typer.Exit


@app.command()
def explain(
    target: TargetArgument,
    trace: Annotated[
        bool, typer.Option("--trace", help="Build and trace the module too, to list rewrites and refusals.")
    ] = False,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    option: OptionsOption = None,
    json: JsonOption = None,
) -> None:
    """Print what the declaration alone decides: windows, catalog widths, verdicts and bytes."""
    show, family, on = _show(json), _family(target, option), _device(device)
    from cadence_fx.explain import explain as run

    with _rejections():
        if trace:
            with show.console.status("tracing and rewriting"):
                report: Report = _transformed(family, on, seed, backend="plan").warmup().report
        else:
            report = run(None, family.contract())
    show.report(report, traced=trace)
    show.json(report.to_dict())


@app.command()
def verify(
    target: TargetArgument,
    chunks: ChunksOption = 8,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    option: OptionsOption = None,
    json: JsonOption = None,
) -> None:
    """Compare the rewritten decoder with stock, call by call, in every bit of output, state and generator."""
    show, on = _show(json), _device(device)
    _family(target, option)
    result = _verified(show, target, on, chunks, seed, _options(option))
    made_with = {"command": command_line(sys.argv[1:]), "seed": seed, "environment": environment(torch.device(on))}
    show.json({**made_with, **result.to_dict()})
    if not result.ok:
        raise typer.Exit(DIFFERENT)


@app.command()
def demo(
    target: DemoTarget = "token2wav",
    chunks: ChunksOption = 8,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    option: OptionsOption = None,
    out: OutOption = Path("graphs"),
    json: JsonOption = None,
) -> None:
    """Verify a decoder at released sizes, then show what was rewritten, what was declined and why."""
    show, on = _show(json), _device(device)
    _family(target, option)
    show.heading(f"{target} on {on}: stock and rewritten, side by side")
    if torch.device(on).type != "cuda":
        show.line("the first call of each shape includes tracing and compiling it")
    result = _verified(show, target, on, chunks, seed, _options(option))
    fast = result.module
    report: Report = fast.report
    show.heading("regions")
    show.report(report)
    files = _written(show, fast, out)
    show.json({"verify": result.to_dict(), "explain": report.to_dict(), "graphs": files})
    if not result.ok:
        raise typer.Exit(DIFFERENT)


@app.command()
def bench(
    target: TargetArgument,
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks of each block.")] = 40,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="Matched blocks; an interval needs some.")] = 4,
    cells: Annotated[
        str | None, typer.Option("--cells", help="Names, as B0,SRc,ours; all by default.", show_default=False)
    ] = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    option: OptionsOption = None,
    autocast: Annotated[
        str | None, typer.Option("--autocast", metavar="DTYPE", help="Run every call under it.", show_default=False)
    ] = None,
    tf32: Annotated[bool, typer.Option(help="TF32 as torch has it by default (in convolutions), or nowhere.")] = True,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Cells prepared at a time.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for a cell to prepare, and to measure.")] = 1800,
    prepare_within: Annotated[
        float | None,
        typer.Option("--prepare-within", help="Seconds for all cells to prepare.", show_default=False),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Instead of timing cells, show where a steady chunk's device time goes.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the cells (extra viz).", show_default=False)
    ] = None,
    json: JsonOption = None,
) -> None:
    """Time stock and the cells beside it, each in a process of its own, with peaks of memory and equality of bits."""
    show, on = _show(json), _device(device)
    _family(target, option)
    from cadence_fx.bench import bench as run
    from cadence_fx.bench import cell_names
    from cadence_fx.bench_plot import draw, require_matplotlib
    from cadence_fx.cli_bench import bench_progress, show_bench

    if profile:
        _profiled(show, target, on, seed, _options(option), plot)
        return
    with _rejections():
        if plot is not None:
            require_matplotlib()
        names = cell_names(None if cells is None else [name.strip() for name in cells.split(",")])
        with bench_progress(show, len(names), blocks) as progress:
            result = run(
                target, device=on, chunks=chunks, blocks=blocks, seed=seed, cells=names, options=_options(option),
                autocast=autocast, tf32=tf32, jobs=jobs, timeout=timeout, prepare_within=prepare_within,
                save=None if json == "-" else lambda so_far: show.json(so_far.to_dict()), progress=progress,
            )  # fmt: skip
    found = result.to_dict()
    show_bench(show, found)
    show.json(found)
    if plot is not None:
        draw(found, plot)
        show.line(f"drawn to {plot}")
    if not result.ok:
        raise typer.Exit(DIFFERENT)


@app.command()
def graph(
    target: TargetArgument,
    out: OutOption = Path("graphs"),
    device: DeviceOption = None,
    seed: SeedOption = 0,
    option: OptionsOption = None,
    json: JsonOption = None,
) -> None:
    """Write the graph as traced and after each pass."""
    show, family, on = _show(json), _family(target, option), _device(device)
    with _rejections(), show.console.status("tracing and rewriting"):
        fast = _transformed(family, on, seed, backend="plan")
    show.json({"family": target, "files": _written(show, fast, out)})


@app.command()
def prove(
    target: Annotated[
        str | None,
        typer.Argument(help="A family or package.module:factory: the operators of its graphs.", show_default=False),
    ] = None,
    operators: Annotated[
        str | None,
        typer.Option("--operators", help="Names, as exp,silu,pow_2; all known by default.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32,bfloat16,float16; on a CPU the last two by default.", show_default=False),
    ] = None,
    again: Annotated[bool, typer.Option("--all", help="Those too for which there is a verdict already.")] = False,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    option: OptionsOption = None,
    json: JsonOption = None,
) -> None:
    """Compare unary operators, compiled, with eager on every input; what is exact may be fused on this machine."""
    show, on = _show(json), _device(device)
    from cadence_fx.cli_prove import graph_operators, named_operators, prove_all

    if target is not None and operators is not None:
        _stop("give a TARGET or --operators, not both")
    if target is None:
        try:
            chosen = named_operators(operators, dtype, on)
        except ValueError as error:
            _stop(str(error))
    else:
        family = _family(target, option)
        with _rejections(), show.console.status("tracing and rewriting"):
            chosen = graph_operators(_transformed(family, on, seed, backend="plan").warmup(), dtype)
    try:
        found = prove_all(show, chosen, on, again=again)
    except OSError as error:
        _stop(f"the proofs cannot be kept: {error}", DIFFERENT)
    show.json({"command": command_line(sys.argv[1:]), **found})


# ---------------------------------------------------------------------------------------------- shared steps
def _verified(show: Show, target: str, device: str, chunks: int, seed: int, options: dict[str, Any]) -> Any:
    from cadence_fx.explain import explain
    from cadence_fx.verify import verify as run

    if torch.device(device).type == "cuda":  # before anything is captured
        show.catalog(explain(None, load(target, **options).contract()))
        show.line()
    with _rejections(), show.console.status("comparing with stock"):
        result = run(target, device=device, chunks=chunks, seed=seed, options=options, progress=show.step)
    show.verdict(result)
    return result


def _profiled(show: Show, target: str, device: str, seed: int, options: dict[str, Any], plot: Path | None) -> None:
    from cadence_fx.bench_plot import require_matplotlib
    from cadence_fx.cli_bench import show_profile
    from cadence_fx.profile_run import draw_timelines, profile_family

    if torch.device(device).type != "cuda":
        _stop("--profile needs a CUDA device: a CPU has no kernels to time")
    with _rejections():
        if plot is not None:
            require_matplotlib()
        with show.console.status("profiling"):
            profile, found = profile_family(target, device=device, seed=seed, options=options)
        show_profile(show, found)
        show.json(found)
        if plot is not None:
            draw_timelines(profile, plot)
            show.line(f"drawn to {plot}")


def _transformed(family: Family, device: str, seed: int, **settings: Any) -> Any:
    return cadence_fx.transform(family.build_random(device, seed), family.contract(), **settings)


def _written(show: Show, fast: Any, out: Path) -> list[str]:
    from cadence_fx.dump import write

    with _rejections():
        files = [str(path) for path in write(fast, out)]
    show.notes(f"graphs written to {out}", files, len(files))
    return files


# ---------------------------------------------------------------------------------------------- arguments
def _stop(text: str, code: int = USAGE) -> NoReturn:
    typer.echo(f"cadence-fx: {text}", err=True)
    raise typer.Exit(code)


@contextmanager
def _rejections() -> Iterator[None]:
    """Turns the library's errors into one line and exit code 1."""
    try:
        yield
    except CadenceError as error:
        _stop(str(error), DIFFERENT)


def _show(json: str | None) -> Show:
    """Checks before a long run that the JSON file can be written after it."""
    if json not in (None, "-") and not Path(str(json)).absolute().parent.is_dir():
        _stop(f"--json {json}: there is no folder {Path(str(json)).parent}")
    return Show(json)


def _family(target: str, option: list[str] | None) -> Family:
    here = str(Path.cwd())
    if ":" in target and here not in sys.path:  # a factory beside the user; `python -m` has it there already
        sys.path.insert(0, here)
    try:
        return load(target, **_options(option))
    except CadenceError as error:
        _stop(str(error))


def _options(option: list[str] | None) -> dict[str, Any]:
    """``steps=5`` as a Python value, or as text if it is none."""
    options: dict[str, Any] = {}
    for text in option or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            _stop(f"--option {text!r}: write NAME=VALUE")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        _stop(f"--device {name!r}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        _stop(f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here")
    return name
