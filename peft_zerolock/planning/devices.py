"""The devices that a plan is for."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Device:
    """A device: memory in bytes that training may use, and its speed against the others'."""

    name: str
    memory: int
    speed: float = 1.0

    def __post_init__(self):
        if not self.name or self.memory <= 0 or not 0 < self.speed < float("inf"):
            raise ValueError(f"{self}: a device needs a name, memory > 0 (bytes) and a speed > 0.")


def parse_device(text: str) -> Device:
    """A device from `name:memory` or `name:memory:speed`, such as `gpu0:24GiB:1.0`.

    Raises:
        ValueError: it has another form.
    """
    match = re.fullmatch(r"([^:\s]+):(\d+(?:\.\d+)?)\s*([KMG]?i?B)(?::(\d+(?:\.\d+)?))?", text.strip(), re.IGNORECASE)
    if match is None or match[3].upper() not in UNITS:
        raise ValueError(
            f"device {text!r} cannot be read: give name:memory or name:memory:speed, such as gpu0:24GiB:1.0. Memory "
            "is a number with GiB, MiB, GB, MB, KiB, KB or B; speed is relative to the other devices'."
        )
    name, number, unit, speed = match.groups()
    return Device(name, int(float(number) * UNITS[unit.upper()]), float(speed or 1))


def parse_devices(given: Iterable["str | Device"]) -> list[Device]:
    """Devices, each given as one or in its written form.

    Raises:
        ValueError: one cannot be read, or two have the same name.
    """
    devices = [parse_device(d) if isinstance(d, str) else d for d in given]
    names = [d.name for d in devices]
    if len(set(names)) < len(names):
        raise ValueError(f"devices {names}: each needs a name of its own.")
    return devices
