"""Every shipped YAML file is accepted by the script it names, and its comments tell the truth about each option."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import yaml
from arguments import RecipeParser
from method import MethodArguments, make_config
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

RECIPES = Path(__file__).parents[1] / "recipes"
FILES = sorted(RECIPES.glob("*.yaml"))
COMMENT = re.compile(r"\(type: (?P<type>[^,()]+), (?:default: (?P<default>.*)|(?P<required>required))\)$")
LOCAL_PATH = re.compile(r"(^|[\s'\"])(~|/(home|root|work|tmp|usr|opt|mnt|data|Users)\b)")


def script_of(path: Path) -> str:
    """The script that the file's first comment calls: `python recipes/SCRIPT.py recipes/THIS.yaml`."""
    found = re.search(rf"^#\s+python recipes/(\w+)\.py recipes/{re.escape(path.name)}", path.read_text(), re.MULTILINE)
    assert found, f"{path.name} has no comment `python recipes/<script>.py recipes/{path.name}`"
    return found[1]


def parser_of(script: str) -> RecipeParser:
    """A parser with the dataclasses that the script uses."""
    module = importlib.import_module(script)
    names = [
        name for name in vars(module) if name.endswith("Arguments") and dataclasses.is_dataclass(vars(module)[name])
    ]
    assert "MethodArguments" in names and "ZeroLockTrainingArguments" in names
    return RecipeParser([vars(module)[name] for name in names], f"{script}.py")


def comment_above(lines: list[str], number: int) -> str:
    """The comment lines directly above a line, joined."""
    start = number
    while start and lines[start - 1].startswith("#"):
        start -= 1
    return " ".join(line.lstrip("# ") for line in lines[start:number])


def test_there_are_files_for_both_scripts():
    assert {script_of(path) for path in FILES} >= {"glue", "instruct"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_script_accepts_the_file(path):
    parser = parser_of(script_of(path))
    values = yaml.safe_load(path.read_text())
    parsed = {}
    for instance in parser.parse([str(path)]):
        parsed |= {option.name: getattr(instance, option.name) for option in dataclasses.fields(instance)}
    for key, value in values.items():
        given = parsed[key].value if hasattr(parsed[key], "value") else parsed[key]
        if key == "report_to":
            given = given[0] if given else "none"
        assert given == value, key


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_is_commented_with_its_type_and_its_true_default(path):
    options = parser_of(script_of(path))
    defaults, lines = options.defaults(), path.read_text().splitlines()
    actions = {action.dest: action for action in options._actions}
    for number, line in enumerate(lines):
        key = re.match(r"(\w+):", line)
        if not key:
            continue
        comment = COMMENT.search(comment_above(lines, number))
        assert comment, (
            f"{path.name}:{number + 1}: no `(type: T, default: D)` at the end of the comment above {key[1]}"
        )
        default = defaults[key[1]]
        if comment["required"]:
            assert default is dataclasses.MISSING, key[1]
        else:
            default = default.value if hasattr(default, "value") else default
            assert yaml.safe_load(comment["default"]) == default, key[1]
        action = actions[key[1]]
        kind = getattr(action.type, "__name__", "str")
        kind = {"string_to_bool": "bool", "<lambda>": "str"}.get(kind, kind)
        assert comment["type"] == (f"list[{kind}]" if action.nargs == "+" else kind), key[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_a_path_of_a_machine(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert not LOCAL_PATH.search(line), f"{path.name}:{number}: {line}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_method_options_make_a_config(path):
    script = script_of(path)
    (options,) = [part for part in parser_of(script).parse([str(path)]) if isinstance(part, MethodArguments)]
    tiny = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    if script == "glue":
        config = make_config(options, BertForSequenceClassification(BertConfig(**tiny)), "SEQ_CLS", ["classifier"])
    else:
        config = make_config(options, LlamaForCausalLM(LlamaConfig(**tiny)), "CAUSAL_LM")
    written = yaml.safe_load(path.read_text())
    for name in {"r", "lora_alpha", "num_chunks", "chunk_sizes", "readout", "alpha"} & written.keys():
        assert getattr(config, name) == written[name], name
