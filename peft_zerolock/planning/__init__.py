"""What training takes, counted before it runs."""

from .devices import Device
from .plan import plan, read_config
from .result import DeviceUse, Plan, Row

__all__ = ["Device", "DeviceUse", "Plan", "Row", "plan", "read_config"]
