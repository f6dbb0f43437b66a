"""The package as installed: its folders, its guards, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata, resources
from pathlib import Path

import pytest

import cadence_fx

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONAL = ("typer", "rich", "matplotlib", "pydot", "prometheus_client", "hypothesis", "numpy", "scipy", "einops")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def distribution() -> metadata.Distribution:
    try:
        return metadata.distribution(PROJECT["project"]["name"])
    except metadata.PackageNotFoundError:
        pytest.skip("run from a checkout that is not installed")


def test_declared_packages_are_the_folders_on_disk() -> None:
    top = [("cadence_fx", "cadence_fx"), ("passes", "cadence_fx.passes"), ("adapters", "cadence_fx.adapters")]
    on_disk = {
        ".".join((package, *init.parent.relative_to(ROOT / folder).parts))
        for folder, package in top
        for init in (ROOT / folder).rglob("__init__.py")
        if not (folder == "cadence_fx" and init.relative_to(ROOT / folder).parts[0] in ("passes", "adapters"))
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk


@pytest.mark.parametrize("folder", ["passes", "adapters"])
def test_links_for_type_checkers_point_at_the_folders_beside_the_package(folder: str) -> None:
    link = ROOT / "cadence_fx" / folder
    if not link.is_symlink() and link.is_file():
        pytest.skip("this checkout was made without symbolic links")
    assert link.readlink() == Path("..") / folder


@pytest.mark.parametrize("folder", ["passes", "adapters"])
def test_a_folder_imported_by_its_bare_name_names_the_right_import(folder: str) -> None:
    ran = run_python(f"import {folder}")
    assert ran.returncode == 1
    assert f"ImportError: '{folder}' is a folder of cadence_fx: import cadence_fx.{folder}" in ran.stderr


def test_import_pulls_in_no_extra_and_leaves_cuda_alone() -> None:
    # torch itself imports numpy where it is installed; what counts is what cadence_fx adds.
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import cadence_fx, cadence_fx.cli, cadence_fx.families, cadence_fx.passes, cadence_fx.adapters\n"
        f"print([name for name in {OPTIONAL} if name in set(sys.modules) - before], torch.cuda.is_initialized())"
    )
    ran = run_python(code)
    assert ran.stdout.split("\n")[0] == "[] False", ran.stderr


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_command_line_without_its_extra_says_how_to_install_it(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; from cadence_fx.cli import main; main(['explain', 'moshi'])"
    ran = run_python(code)
    assert ran.returncode == 2
    assert ran.stderr == "cadence-fx: the command line needs typer and rich: pip install 'cadence-fx[cli]'\n"


def test_version_is_that_of_the_metadata(distribution: metadata.Distribution) -> None:
    assert distribution.version == cadence_fx.__version__


def test_console_script_is_the_entry_point(distribution: metadata.Distribution) -> None:
    (script,) = distribution.entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("cadence-fx", "cadence_fx.cli:main")


def test_types_are_published() -> None:
    assert resources.files("cadence_fx").joinpath("py.typed").is_file()
