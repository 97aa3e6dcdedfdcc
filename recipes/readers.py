"""Strict readers of csv, json, jsonl and parquet files: each row with its place, or with what is wrong with it."""

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

BOM = b"\xef\xbb\xbf"
KIND_NAMES = {str: "a string", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
JSON_NAMES = {**KIND_NAMES, type(None): "null", bool: "true or false"}


def named(value: Any) -> str:
    """The kind of a value in JSON's words: "null", "a list" ..."""
    return JSON_NAMES.get(type(value), type(value).__name__)


@dataclass(frozen=True)
class Located:
    """One row and its place.

    Args:
        origin: ``file:line`` or ``file:row N``.
        value: the row, or ``None`` where it is damaged or blank.
        reason: what is wrong with a damaged row.
        blank: it is a blank line.
        untyped: all values are strings (csv), so that numbers are to be converted.
    """

    origin: str
    value: dict[str, Any] | None
    reason: str = ""
    blank: bool = False
    untyped: bool = False


def coerced(value: Any, kinds: tuple[type, ...], name: str, untyped: bool) -> Any:
    """The value of column ``name`` as one of ``kinds``; a whole number is a number too.

    Raises:
        ValueError: it is of another type, null, or not finite.
    """
    if untyped and value is not None and str not in kinds:
        for kind in [kind for kind in (int, float) if kind in kinds]:
            try:
                value = kind(value)
                break
            except ValueError:
                continue
    if float in kinds and type(value) is int:
        value = float(value)
    if isinstance(value, bool) and bool not in kinds or not isinstance(value, kinds):
        allowed = " or ".join(KIND_NAMES.get(kind, kind.__name__) for kind in kinds)
        given = named(value)
        shown = "" if value is None else f" ({value!r:.60})"
        raise ValueError(f"column {name!r} is {given}{shown}, not {allowed}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"column {name!r} is {value}, not a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"column {name!r} is a whole number of more than 64 bits")
    return value


def read_json_lines(path: Path) -> Iterator[Located]:
    """JSON Lines: one object a line, strict UTF-8; only ``\\n`` (or ``\\r\\n``) ends a line."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            origin = f"{path}:{number}"
            line = raw.removeprefix(BOM) if number == 1 else raw
            if not line.strip():
                yield Located(origin, None, blank=True)
                continue
            try:
                yield Located(origin, _object(_json(_text(line.rstrip(b"\r\n")))))
            except ValueError as error:
                yield Located(origin, None, str(error))


def read_json(path: Path) -> Iterator[Located]:
    """A json file: one array of objects, or JSON Lines."""
    raw = path.read_bytes().removeprefix(BOM)
    if not raw.lstrip().startswith(b"["):
        yield from read_json_lines(path)
        return
    try:
        values = _json(_text(raw))
    except ValueError as error:
        yield Located(str(path), None, str(error))
        return
    for index, value in enumerate(values, 1):
        try:
            yield Located(f"{path}:row {index}", _object(value))
        except ValueError as error:
            yield Located(f"{path}:row {index}", None, str(error))


def read_csv(path: Path) -> Iterator[Located]:
    """A csv file with a header line; quoted fields may hold line ends. An empty field is null."""
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        while True:
            origin = f"{path}:{reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield Located(origin, None, f"not valid csv ({error}; is a quote missing?)")
                continue
            if cells is None:
                return
            if not cells or cells == [""]:
                yield Located(origin, None, blank=True)
            elif header is None:
                header = cells
                if len(set(header)) < len(header) or "" in header:
                    yield Located(origin, None, f"the header repeats or lacks a column name: {header}")
            elif bad := re.search("[\udc80-\udcff]", "".join(cells)):
                yield Located(origin, None, f"invalid UTF-8: byte 0x{ord(bad.group()) - 0xDC00:02x}")
            elif len(cells) != len(header):
                yield Located(origin, None, f"{len(cells)} fields, but the header has {len(header)}")
            else:
                row = {name: cell or None for name, cell in zip(header, cells, strict=True)}
                yield Located(origin, row, untyped=True)


def read_parquet(path: Path) -> Iterator[Located]:
    """A parquet file."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for value in batch.to_pylist():
                    number += 1
                    yield Located(f"{path}:row {number}", value)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield Located(str(path), None, f"not a readable parquet file ({error})")


READERS = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
"""File endings that can be read, each with its reader."""


def _text(raw: bytes) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("the file is UTF-16; save it as UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        raise ValueError(f"invalid UTF-8: {place} ({error.reason})") from error


def _json(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"not valid JSON: {error.msg} ({place}); is the object cut?") from error
    except UnicodeEncodeError as error:
        raise ValueError("a string holds half of a surrogate pair, which is not valid text") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"not valid JSON: {name} is not a JSON number")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"the row is {named(value)}, not an object")
    return value
