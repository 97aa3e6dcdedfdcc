"""Command lines of the recipes: flags, or a YAML file with flags after it; unknown names are refused with a hint."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import yaml
from transformers import HfArgumentParser

NULLS = ("null", "none")
"""What sets an option to None whose default is another value."""


class RecipeParser(HfArgumentParser):
    """``HfArgumentParser`` with short messages, without abbreviations, and with a YAML file as first argument.

    Args:
        dataclass_types: the dataclasses whose fields are the options.
        script: name of the script, for messages.
    """

    def __init__(self, dataclass_types: Sequence[type], script: str):
        usage = f"python recipes/{script} [CONFIG.yaml] [--option value ...]; --help lists the options"
        super().__init__(dataclass_types, usage=usage, allow_abbrev=False)
        self.script = script
        hints = [hint for kind in dataclass_types for hint in get_type_hints(kind).items()]
        nullable = {name for name, hint in hints if type(None) in get_args(hint)}
        for action in self._actions:
            if action.dest in nullable and action.default is not None and action.type in (int, float):
                action.type = _or_null(action.type)
                action.nullable = True

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the hundreds of options, and exit with status 2."""
        self.exit(2, f"{self.script}: {message}\n")

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """One instance of each dataclass; flags after a YAML file override its values.

        Raises:
            SystemExit: an unknown option or key, a value of the wrong type, an unreadable file, or a refused value.
        """
        flags = list(argv)
        if flags and flags[0].endswith((".yaml", ".yml")):
            flags = [*self.yaml_flags(Path(flags[0])), *flags[1:]]
        try:
            *parsed, unknown = self.parse_args_into_dataclasses(
                flags, return_remaining_strings=True, look_for_args_file=False
            )
        except (ValueError, ImportError) as error:  # the dataclasses' own checks
            self.error(str(error))
        if unknown:
            self.error("; ".join(self._unknown(word) for word in unknown if word.startswith("-")) or _stray(unknown))
        return tuple(parsed)

    def yaml_flags(self, path: Path) -> list[str]:
        """The options of a YAML file as command-line words.

        Raises:
            SystemExit: the file cannot be read, is not a mapping of options, or has an unknown key.
        """
        if not path.is_file():
            self.error(f"{path} does not exist; give an existing YAML file, or only flags.")
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            self.error(f"{path} is not valid YAML: {error}")
        if not isinstance(values, dict):
            held = "is empty" if values is None else f"holds a {type(values).__name__}"
            self.error(f"{path} {held}; expected one `option: value` a line.")
        defaults = self.defaults()
        unknown = [self._unknown(str(key)) for key in values if key not in defaults]
        if unknown:
            self.error(f"{path}: {'; '.join(unknown)}")
        chosen = {action.dest for action in self._actions if action.choices}
        nullable = {action.dest for action in self._actions if getattr(action, "nullable", False)}
        flags: list[str] = []
        for key, value in values.items():
            if isinstance(value, bool) and key in chosen:
                self.error(f'{path}: YAML takes what {key} is set to for {value}; put it in quotes, such as "no".')
            if value is None and key in nullable:
                value = NULLS[0]
            if value is None and defaults[key] is not None:
                self.error(f"{path}: {key} is null; give a value, or leave it out for the default {defaults[key]!r}.")
            if isinstance(value, list):
                flags += [f"--{key}", *map(str, value)]
            elif isinstance(value, dict):
                flags.append(f"--{key}={json.dumps(value)}")
            elif value is not None:
                flags.append(f"--{key}={value}")
        return flags

    def defaults(self) -> dict[str, Any]:
        """Every option with its default; ``dataclasses.MISSING`` where one must be given."""
        options = {}
        for kind in self.dataclass_types:
            for option in dataclasses.fields(kind):
                if option.init:
                    made = option.default_factory is not dataclasses.MISSING
                    options[option.name] = option.default_factory() if made else option.default
        return options

    def _unknown(self, word: str) -> str:
        name = word.lstrip("-").partition("=")[0]
        close = difflib.get_close_matches(name.replace("-", "_"), self.defaults(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "--help lists the options."
        return f"unknown option {name!r}; {hint}"


@contextmanager
def one_line_errors(script: str, debug: bool = False) -> Iterator[None]:
    """Errors of data, model and settings end the script with their message alone; for all that precedes training.

    Args:
        script: name of the script, for the message.
        debug: let the error through, with its traceback (``--log_level debug``).

    Raises:
        SystemExit: in place of a ``ValueError``, ``OSError`` or ``ImportError``.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if debug:
            raise
        raise SystemExit(f"{script}: {error}") from error


def _or_null(kind: type) -> Callable[[str], Any]:
    """`kind`, and None for the words of `NULLS`."""

    def convert(word: str) -> Any:
        return None if word.lower() in NULLS else kind(word)

    convert.__name__ = kind.__name__  # argparse names the type in its messages
    return convert


def _stray(words: Sequence[str]) -> str:
    return f"unexpected {' '.join(map(repr, words))}; options begin with --, a YAML file comes first."
