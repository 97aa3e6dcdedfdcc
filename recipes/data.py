"""Rows of text from the Hub, a local folder laid out like the Hub's, or csv / json / jsonl / parquet files.

Every file is read strictly: a damaged row is an error that names the file, the line and the reason, or, with
``skip_bad_rows``, a row that is dropped, counted and reported. A byte order mark and blank lines are tolerated.
Each row keeps its ``origin`` (``file:line``), so that later steps can name it too.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, load_dataset
from readers import READERS, Located, coerced

logger = logging.getLogger(__name__)

ORIGIN = "origin"
"""The column that says where a row comes from: ``file:line`` (parquet, json arrays and the Hub: ``file:row N``)."""

SPLIT_ALIASES = {"validation": ("validation", "valid", "val", "dev"), "train": ("train", "training")}
REASONS_SHOWN = 5

Columns = Mapping[str, type | tuple[type, ...]]


class DataError(ValueError):
    """The data cannot be used as it is; the message names the place, the reason and the remedy."""


class SplitNotFound(DataError):
    """The source is there, but it has no such split."""


@dataclass
class RowReport:
    """What happened to the rows of one split.

    Args:
        kept: rows handed on.
        blank: blank lines, skipped.
        bad: damaged rows, dropped because of ``skip_bad_rows``.
        too_long: rows dropped by :func:`drop_long_rows`, or cut by the caller.
        reasons: ``file:line: reason`` of the first dropped rows.
    """

    kept: int = 0
    blank: int = 0
    bad: int = 0
    too_long: int = 0
    reasons: list[str] = field(default_factory=list)

    def note(self, reason: str) -> None:
        """Keep the reason if it is among the first."""
        if len(self.reasons) < REASONS_SHOWN:
            self.reasons.append(reason)

    def counts(self) -> dict[str, int]:
        """The numbers without the reasons, which hold paths: for ``summary.json``, which may be published."""
        return {"kept": self.kept, "blank": self.blank, "bad": self.bad, "too_long": self.too_long}


def load_rows(
    source: str | Path | Sequence[str | Path],
    split: str = "train",
    *,
    config: str | None = None,
    columns: Columns | None = None,
    convert: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    skip_bad_rows: bool = False,
    report: RowReport | None = None,
) -> Dataset:
    """One split as a dataset in memory, with the column ``origin`` added.

    Args:
        source: a Hub name, a local folder (README with ``configs:``, ``<config>/<split>.jsonl`` or
            ``<split>.jsonl``; csv, json and parquet as well), or one file or several (``split`` and ``config``
            are then not used).
        split: name of the split; "dev", "val" and "valid" files are taken for "validation".
        config: configuration (sub-folder) of the data set, such as "sst2" of "nyu-mll/glue".
        columns: required columns and their types; with it, and without ``convert``, other columns are left out.
            Numbers in csv files are converted.
        convert: makes the row to keep from the row that was read; a ``ValueError`` it raises makes the row a bad one.
        skip_bad_rows: drop damaged rows, count and report them, instead of raising.
        report: filled with the counts.

    Raises:
        DataError: a damaged row (without ``skip_bad_rows``), an unreadable source, or no row left.
        SplitNotFound: the folder or the Hub data set has no such split.
    """
    report = RowReport() if report is None else report
    rows: list[dict[str, Any]] = []
    for row in _located_rows(source, split, config, columns):
        if row.blank:
            report.blank += 1
            continue
        try:
            kept = _checked(row, columns, convert)
        except ValueError as error:
            report.bad += 1
            report.note(f"{row.origin}: {error}")
            continue
        rows.append({**kept, ORIGIN: row.origin})
    name = f"split {split!r} of {_shown(source)}"
    if report.bad and not skip_bad_rows:
        raise DataError(
            f"{report.bad} bad row(s), {len(rows)} good one(s) in {name}:\n  "
            + "\n  ".join(report.reasons)
            + "\nCorrect the data, or pass --skip_bad_rows to drop, count and report such rows."
        )
    if not rows:
        found = "\n  ".join([f"{report.bad} bad row(s), {report.blank} blank line(s)", *report.reasons])
        raise DataError(f"no row is left in {name}: {found}")
    report.kept = len(rows)
    if report.bad or report.blank:
        logger.warning(
            "%s: kept %d rows, dropped %d bad ones, skipped %d blank lines.%s",
            name,
            report.kept,
            report.bad,
            report.blank,
            "".join(f"\n  {reason}" for reason in report.reasons),
        )
    try:
        return Dataset.from_list(rows)
    except (TypeError, ValueError, OverflowError) as error:  # Arrow's errors are ValueErrors and TypeErrors
        raise DataError(
            f"the rows of {name} do not share one type per column: {error}. Make them equal, or name columns."
        ) from error


def drop_long_rows(rows: Dataset, max_length: int, report: RowReport | None = None) -> Dataset:
    """The rows whose ``input_ids`` are at most ``max_length`` tokens long; the others are counted and reported.

    Raises:
        DataError: no row is short enough.
    """
    report = RowReport() if report is None else report
    lengths = [len(ids) for ids in rows["input_ids"]]
    short = [index for index, length in enumerate(lengths) if length <= max_length]
    dropped = len(lengths) - len(short)
    if not dropped:
        return rows
    origins = rows[ORIGIN] if ORIGIN in rows.column_names else [f"row {index + 1}" for index in range(len(rows))]
    reasons = [
        f"{origins[index]}: {length} tokens, more than {max_length}"
        for index, length in enumerate(lengths)
        if length > max_length
    ]
    report.too_long += dropped
    report.kept = len(short)
    for reason in reasons[:REASONS_SHOWN]:
        report.note(reason)
    shown = "\n  ".join(reasons[:REASONS_SHOWN])
    if not short:
        raise DataError(f"no row is left: all {dropped} are longer than {max_length} tokens.\n  {shown}")
    logger.warning("dropped %d of %d rows that are too long:\n  %s", dropped, len(lengths), shown)
    return rows.select(short)


def _checked(row: Located, columns: Columns | None, convert: Callable | None) -> dict[str, Any]:
    if row.value is None:
        raise ValueError(row.reason)
    value = row.value
    for name, kinds in (columns or {}).items():
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if name not in value:
            raise ValueError(f"missing column {name!r}; the row has {', '.join(map(repr, sorted(value))) or 'none'}")
        value = {**value, name: coerced(value[name], kinds, name, row.untyped)}
    if convert is not None:
        return convert(value)
    return {name: value[name] for name in columns} if columns else value


def _located_rows(source: Any, split: str, config: str | None, columns: Columns | None) -> Iterable[Located]:
    paths = [source] if isinstance(source, (str, Path)) else list(source)
    if not paths:
        raise DataError("no data was named: pass a Hub name, a folder or at least one file.")
    if len(paths) == 1 and Path(paths[0]).expanduser().is_dir():
        paths = _folder_files(Path(paths[0]).expanduser(), split, config)
    elif len(paths) == 1 and _is_hub_name(str(paths[0])):
        yield from _hub_rows(str(paths[0]), split, config)
        return
    for path in map(Path, paths):
        path = path.expanduser()
        if not path.is_file():
            raise DataError(
                f"{path} does not exist. Pass an existing file ({', '.join(READERS)}) or folder, or a Hub name."
            )
        if path.suffix.lower() not in READERS:
            raise DataError(f"{path} has the ending {path.suffix!r}; allowed are {', '.join(READERS)}.")
        yield from READERS[path.suffix.lower()](path)


def _is_hub_name(name: str) -> bool:
    looks_local = name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name
    is_file = Path(name).suffix.lower() in READERS
    return not looks_local and not is_file and not Path(name).exists() and name.count("/") <= 1


def _hub_rows(name: str, split: str, config: str | None) -> Iterable[Located]:
    try:
        rows = load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        kind = SplitNotFound if re.search("unknown split|bad split", str(error), re.IGNORECASE) else DataError
        raise kind(
            f"cannot load split {split!r} of {name!r} (configuration {config!r}) from the Hub: {error}\n"
            "Correct the name, go online, or pass a local folder or files."
        ) from error
    for index, value in enumerate(rows):
        yield Located(f"{name}/{config or 'default'}/{split}:row {index + 1}", value)


def _folder_files(folder: Path, split: str, config: str | None) -> list[Path]:
    files = _files_of_readme(folder, split, config)
    if files:
        return files
    places = [folder / config, folder] if config else [folder]
    for place in [*places, *(place / "data" for place in places)]:
        for alias in SPLIT_ALIASES.get(split, (split,)):
            files = sorted(
                path
                for path in (place.iterdir() if place.is_dir() else ())
                if path.suffix.lower() in READERS and (path.stem == alias or path.stem.startswith(f"{alias}-"))
            )
            if files:
                return files
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix.lower() in READERS)
    raise SplitNotFound(
        f"{folder} has no split {split!r}{f' of configuration {config!r}' if config else ''}. Expected "
        f"{config or '<config>'}/{split}.jsonl or {split}.jsonl ({', '.join(READERS)}), or a README.md with "
        f"`configs:`; data files there: {', '.join(found[:8]) or 'none'}{' ...' if len(found) > 8 else ''}."
    )


def _files_of_readme(folder: Path, split: str, config: str | None) -> list[Path]:
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if not text.startswith("---\n") or "\n---" not in text[4:]:
        return []
    try:
        front = yaml.safe_load(text[4:].partition("\n---")[0]) or {}
    except yaml.YAMLError as error:
        raise DataError(f"the YAML block on top of {readme} cannot be read: {error}. Correct or remove it.") from error
    configs = [entry for entry in front.get("configs") or [] if entry.get("data_files")]
    for entry in configs:
        if entry.get("config_name", "default") != (config or "default") and not (config is None and len(configs) == 1):
            continue
        base = folder / entry.get("data_dir", ".")
        data_files = entry["data_files"]
        if isinstance(data_files, str) or isinstance(data_files[0], str):
            data_files = [{"split": "train", "path": data_files}]
        patterns = [part["path"] for part in data_files if part["split"] in SPLIT_ALIASES.get(split, (split,))]
        flat = [p for pattern in patterns for p in ([pattern] if isinstance(pattern, str) else pattern)]
        files = [path for pattern in flat for path in sorted(base.glob(pattern))]
        if flat and not files:
            raise DataError(f"{readme} lists {', '.join(flat)} for split {split!r}, but no such file is in {base}.")
        return files
    return []


def _shown(source: Any) -> str:
    return str(source) if isinstance(source, (str, Path)) else ", ".join(map(str, source))
