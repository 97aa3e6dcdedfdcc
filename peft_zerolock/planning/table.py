"""A plan as tables on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .result import NOT_COUNTED, PARTS, DeviceUse, Plan, Row

_MIB = 2**20


def print_plan(plan: Plan, console: Console) -> None:
    """Prints what each way to train takes, how it was counted, and the measurement where there is one."""
    supervised = "" if plan.supervised == plan.seq - 1 else f", {plan.supervised} of them targets"
    console.print(
        f"{plan.model}: {plan.blocks} blocks, weights in {plan.dtype}, {plan.optimizer}; batch {plan.batch} x "
        f"{plan.seq} tokens{supervised}",
        highlight=False,
    )
    console.print(_memory(plan))
    console.print("MiB at the peak of a training step.", highlight=False)
    for part, meaning in PARTS.items():
        console.print(f"  {part}: {meaning}", highlight=False)
    console.print("Not counted: " + "; ".join(NOT_COUNTED) + ".", highlight=False)
    if plan.measured_by:
        console.print(_measurement(plan))
        console.print(f"Measured on real steps by {plan.measured_by}; MiB, error in % of the measured.")


def _memory(plan: Plan) -> Table:
    table = Table()
    spread = any(len(row.devices) > 1 for row in plan.rows)
    known = any(use.capacity is not None for row in plan.rows for use in row.devices)
    table.add_column("training", no_wrap=True)
    table.add_column("split")
    table.add_column("blocks")
    if spread:
        table.add_column("device")
    for part in (*PARTS, "total"):
        table.add_column(part, justify="right")
    if known:
        table.add_column("fits")
        table.add_column("largest batch", justify="right")
    table.add_column("FLOPs", justify="right")
    for row in plan.rows:
        for number, use in enumerate(row.devices):
            first = number == 0
            cells = [row.name if first else "", row.split if first else "", _blocks(row, use)]
            cells += [use.device] if spread else []
            cells += [_mib(getattr(use, part)) for part in (*PARTS, "total")]
            if known:
                cells += ["yes" if use.fits else "[red]no[/red]", str(row.largest_batch) if first else ""]
            cells.append(_flops(row) if first else "")
            table.add_row(*cells, end_section=use is row.devices[-1] and spread)
    return table


def _blocks(row: Row, use: DeviceUse) -> str:
    return str(use.blocks[1] - use.blocks[0]) if len(row.devices) > 1 else "+".join(map(str, row.chunk_sizes))


def _flops(row: Row) -> str:
    return f"{row.overhead_percent:+.0f} %" if row.method != "bp" else f"{row.flops:.2e}"


def _measurement(plan: Plan) -> Table:
    parts: Sequence[str] = list(plan.rows[0].devices[0].predicted())
    table = Table("training", "", *parts)
    for row in plan.rows:
        (use,) = row.devices
        predicted, errors = use.predicted(), use.errors()
        table.add_row(row.name, "predicted", *(_mib(predicted[part]) for part in parts))
        table.add_row("", "measured", *(_mib(use.measured[part]) for part in parts))
        table.add_row("", "error, %", *(f"{errors[part]:+.1f}" for part in parts), end_section=True)
    return table


def _mib(size: int) -> str:
    return f"{size / _MIB:,.{0 if size >= 10 * _MIB or size == 0 else 1}f}"
