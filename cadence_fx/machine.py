"""What a result was made with and on: the command, the machine, the versions and the flags."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cadence_fx.modes import MODE_NAMES, ambient_modes

__all__ = ["command_line", "driver_version", "environment"]


def command_line(arguments: Sequence[str]) -> str:
    """The command that a result can be made again with: files by their names, not where they lay on this machine."""
    return shlex.join(["cadence-fx", *(Path(a).name if Path(a).is_absolute() else a for a in arguments)])


def environment(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, threads, and the modes of this moment that can change bits; JSON-safe."""
    on_gpu = device.type == "cuda"
    modes = dict(zip(MODE_NAMES, ambient_modes(device.type), strict=True))
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "driver": driver_version() if on_gpu else None,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "threads": torch.get_num_threads(),
        "flags": {name: v if isinstance(v, (bool, str, type(None))) else str(v) for name, v in modes.items()},
    }


def driver_version() -> str | None:
    """Version of the GPU's driver, which torch does not tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None
