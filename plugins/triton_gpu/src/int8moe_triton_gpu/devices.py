"""The device that torch would use: its name and architecture, and whether the kernels were compiled for it."""

from __future__ import annotations

from typing import NamedTuple

import torch

OLDEST_SM = 80
CHECKED_HIP = ("gfx942",)
"""What of AMD's the ahead-of-time check compiles for. Every NVIDIA device from sm_80 on has int8 tensor instructions of
some kind, and the compiler takes those that it has (sm_103 lacks tcgen05 for int8, and gets IMMA)."""


class Device(NamedTuple):
    """One device.

    Attributes:
        kind: "cuda" or "hip", the kind of compiler; "interpreter" on CPU tensors.
        family: whose default tiles it takes, a key of tiles.json.
        name: as the driver calls it.
        architecture: as the compiler calls it: "sm_90", "gfx942".
    """

    kind: str
    family: str
    name: str
    architecture: str


def find_device(device: torch.device) -> Device:
    """What a tensor's device is."""
    if device.type == "cpu":
        return Device("interpreter", "interpreter", "interpreter", "interpreter")
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        architecture = found.gcnArchName.partition(":")[0]
        return Device("hip", architecture, found.name, architecture)
    return Device("cuda", "sm_80" if found.major < 9 else "sm_90", found.name, f"sm_{found.major}{found.minor}")


def refusal(device: Device) -> str | None:
    """Why the kernels do not run on a device, or None."""
    if device.kind == "hip" and device.architecture not in CHECKED_HIP:
        return f"{device.name} is {device.architecture}; the kernels are for {', '.join(CHECKED_HIP)}"
    if device.kind == "cuda" and int(device.architecture.removeprefix("sm_")) < OLDEST_SM:
        return f"{device.name} is {device.architecture}; the kernels are for sm_{OLDEST_SM} and newer"
    return None
