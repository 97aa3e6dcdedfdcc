"""What a plan says: rows of device uses, all in bytes and FLOPs; the same object for tables, JSON and programs."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

PARTS = {
    "weights": "frozen weights and buffers, in the model's type",
    "copies": "frozen copies of what later chunks train and a readout reads: a head, or LoRA on another device",
    "adapters": "what is trained and saved: LoRA and modules_to_save (a classification head), float32",
    "readouts": "what the readouts train and is thrown away, float32",
    "gradients": "one for each weight that learns, float32; kept through an update window",
    "optimizer": "the optimizer's state of each weight that learns",
    "activations": "all that the step's operations made and that is alive at the peak, gradients of activations and "
    "temporaries included",
    "logits": "tensors over the vocabulary that are alive at the peak",
    "boundary": "the hidden state handed to the chunk, times the in-flight depth",
}
"""The parts of a device's memory, and how each is counted."""

NOT_COUNTED = (
    "the device's context (on CUDA some 0.3 to 1 GiB a process)",
    "what the allocator rounds up or cannot use (fragmentation)",
    "what kernels allocate for themselves (workspaces)",
    "the optimizer's temporaries while it steps",
    "what batches without padding save: rows are taken to be padded, so that attention has a mask",
    "the CPU's attention kernels stand for the device's: other kernels may keep a little more or less",
)


@dataclass
class DeviceUse:
    """One device at the peak of a step, in bytes; see PARTS.

    Attributes:
        device: its name.
        blocks: how many blocks' chunks it holds: `[first, after the last]`.
        flops: of one step, forward and backward.
        capacity: its memory; None where unknown.
        measured: the same parts, measured; `step` is what a step adds (activations, logits and boundary together).
    """

    device: str
    blocks: list[int]
    weights: int = 0
    copies: int = 0
    adapters: int = 0
    readouts: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    boundary: int = 0
    flops: int = 0
    capacity: int | None = None
    measured: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """What a step adds at its peak."""
        return self.activations + self.logits + self.boundary

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def fits(self) -> bool | None:
        """Whether the device's memory is enough; None where it is unknown."""
        return None if self.capacity is None else self.total <= self.capacity

    def predicted(self) -> dict[str, int]:
        """What `measured` is compared with."""
        static = [part for part in PARTS if part not in ("activations", "logits", "boundary")]
        return {part: getattr(self, part) for part in static} | {"step": self.step, "total": self.total}

    def errors(self) -> dict[str, float]:
        """Predicted against measured, in percent of the measured; by part."""
        predicted = self.predicted()
        return {
            part: 0.0 if predicted[part] == size else 100 * (predicted[part] - size) / max(size, 1)
            for part, size in self.measured.items()
        }


@dataclass
class Row:
    """One way to train.

    Attributes:
        name: as it is printed.
        method: "bp", "checkpointing" or "zerolock".
        split: how the chunk sizes were found: "", "even", "given", "cost" or "devices".
        chunk_sizes: blocks per chunk; one chunk for backpropagation.
        devices: one for each device in use.
        largest_batch: rows of the largest batch that fits; None where the devices' memory is unknown, 0 if none does.
        overhead_percent: FLOPs of a step above those of backpropagation.
    """

    name: str
    method: str
    split: str
    chunk_sizes: list[int]
    devices: list[DeviceUse]
    largest_batch: int | None = None
    overhead_percent: float = 0.0

    @property
    def flops(self) -> int:
        """Of one step, on all devices."""
        return sum(use.flops for use in self.devices)

    @property
    def fits(self) -> bool | None:
        """Whether every device's memory is enough."""
        answers = [use.fits for use in self.devices]
        return None if None in answers else all(answers)


@dataclass
class Plan:
    """What training takes before it runs.

    Attributes:
        model: the name or the class of the model.
        blocks: its number of blocks.
        batch, seq, supervised: the shape of a micro-batch.
        dtype: of the frozen weights.
        optimizer: its name.
        in_flight: micro-batches under way between devices.
        rows: side by side.
        measured_by: how `DeviceUse.measured` came about; "" where nothing was measured.
    """

    model: str
    blocks: int
    batch: int
    seq: int
    supervised: int
    dtype: str
    optimizer: str
    in_flight: int
    rows: list[Row]
    measured_by: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with derived ones (`total`, `step`, `fits`, errors) and how parts are counted."""
        out = asdict(self)
        for row, made in zip(self.rows, out["rows"], strict=True):
            made |= {"flops": row.flops, "fits": row.fits}
            for use, found in zip(row.devices, made["devices"], strict=True):
                found |= {"step": use.step, "total": use.total, "fits": use.fits, "error_percent": use.errors()}
        return out | {"counted": dict(PARTS), "not_counted": list(NOT_COUNTED)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        """The plan that `to_dict` was called on."""
        rows = [_made(Row, row | {"devices": [_made(DeviceUse, d) for d in row["devices"]]}) for row in values["rows"]]
        return _made(cls, values | {"rows": rows})


def _made(cls: Any, values: dict[str, Any]) -> Any:
    return cls(**{f.name: values[f.name] for f in fields(cls)})
