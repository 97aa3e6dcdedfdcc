"""ZeroLockTrainingArguments: TrainingArguments and how the chunks are run."""

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

RUNTIMES = ("sequential", "concurrent")


@dataclass
class ZeroLockTrainingArguments(TrainingArguments):
    """TrainingArguments and how the chunks are run. What they learn is in ZeroLockConfig.

    Args:
        runtime (`str`): `"sequential"`: one device, one chunk after the other. `"concurrent"`: the chunks work at the
            same time, each on its own device (paper, "The system"). The weights come out the same; on the
            CPU to the bit, given the same number of threads per chunk.
        devices (`list[str]`, *optional*): For `"concurrent"`: one device a chunk, first to last, such as
            `["cuda:0", "cuda:1"]` or `["cpu", "cpu"]`; the model is spread over them. Default: where the blocks of the
            model lie. One loaded with a `device_map` over several devices is cut where the map cuts it, into at least
            as many chunks; any other lies on the Trainer's device.
        in_flight_depth (`int`): For `"concurrent"`: how many hidden states may wait before a chunk. More of them even
            out micro-batches of uneven length and take more memory.
        trace (`str`, *optional*): For `"concurrent"`: a folder for the timeline of the run (`timeline.json` for
            Perfetto or chrome://tracing, `timeline.png`), with each chunk's busy share and queue depth. On CUDA the
            stages wait for their device at each mark, which costs time.

    Raises:
        ValueError: a value is out of its range; the message says what is allowed.
    """

    runtime: str = field(default="sequential", metadata={"help": f"How the chunks are run: {' or '.join(RUNTIMES)}."})
    devices: list[str] | None = field(default=None, metadata={"help": "Concurrent: one device a chunk."})
    in_flight_depth: int = field(default=2, metadata={"help": "Concurrent: hidden states that wait before a chunk."})
    trace: str | None = field(default=None, metadata={"help": "Concurrent: folder for the run's timeline."})

    def __post_init__(self):
        super().__post_init__()
        if self.runtime not in RUNTIMES:
            raise ValueError(f"runtime={self.runtime!r} is not known: it must be {' or '.join(map(repr, RUNTIMES))}.")
        for name in ("devices", "trace"):
            if self.runtime != "concurrent" and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} belongs to runtime='concurrent', got runtime={self.runtime!r}."
                )
        depth = self.in_flight_depth
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"in_flight_depth={depth!r}: it must be a whole number >= 1.")
        for device in self.devices or []:
            try:
                torch.device(device)
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f"devices has {device!r}, which is no device: give names such as 'cuda:0'."
                ) from error
