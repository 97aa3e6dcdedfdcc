"""Command lines and YAML files: what is unknown or wrong is refused with a hint, flags override the file."""

import glue
import pytest
from arguments import RecipeParser, one_line_errors
from method import CHUNK_OPTIONS, MethodArguments

from peft_zerolock import ZeroLockConfig


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--learning_rat", "1"], "unknown option 'learning_rat'; did you mean learning_rate"),
        (["--task", "sst"], "--task: invalid choice: 'sst'"),
        (["--num_chunks", "two"], "--num-chunks: invalid int value: 'two'"),
        (["more"], "unexpected 'more'; options begin with --"),
        (["--train_file", "a.csv"], "train_file and validation_file belong together"),
        (["--max_length", "0"], "max_length=0: it must be at least 1"),
        (["--alpha", "0"], "alpha=0.0 is not valid: it must be in (0, 1]"),
        (["--logits_slice", "two"], "--logits-slice: invalid int value: 'two'"),
    ],
)
def test_unknown_and_wrong_options_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as error:
        glue.main(["--task", "sst2", "--model", "m", *flags])
    assert error.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("tsk: sst2", "unknown option 'tsk'; did you mean task"),
        ("- sst2", "holds a list; expected one `option: value` a line"),
        ("", "is empty; expected one `option: value` a line"),
        ("task: [", "is not valid YAML"),
        ("r: null", "r is null; give a value, or leave it out for the default 8"),
        ("eval_strategy: no", 'YAML takes what eval_strategy is set to for False; put it in quotes, such as "no"'),
    ],
)
def test_wrong_yaml_files_are_refused(tmp_path, text, message, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        glue.main([str(path)])
    assert message in capsys.readouterr().err


def test_flags_override_the_yaml_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("task: sst2\nmodel: minilm-l6\nchunk_sizes: [2, 4]\nlearning_rate: 2e-4\nnum_chunks: null\n")
    parser = RecipeParser(glue.ARGUMENTS, "glue.py")
    options, method, args = parser.parse([str(path), "--task", "rte", "--weight_decay", "0.1"])
    assert (options.task, options.model, method.chunk_sizes, method.num_chunks) == ("rte", "minilm-l6", [2, 4], None)
    assert (args.learning_rate, args.weight_decay) == (2e-4, 0.1)


@pytest.mark.parametrize("word", ["null", "None"])
def test_null_is_a_value_where_it_differs_from_the_default(tmp_path, word):
    path = tmp_path / "run.yaml"
    path.write_text("task: sst2\nmodel: m\nlogits_slice: null\n")
    parser = RecipeParser(glue.ARGUMENTS, "glue.py")
    assert parser.parse([str(path)])[1].logits_slice is None
    assert parser.parse(["--task", "sst2", "--model", "m", "--logits_slice", word])[1].logits_slice is None
    assert parser.parse([str(path), "--logits_slice", "8"])[1].logits_slice == 8


def test_errors_before_training_are_one_message_unless_debugging():
    with pytest.raises(SystemExit, match="^glue.py: no such thing$"), one_line_errors("glue.py"):
        raise OSError("no such thing")
    with pytest.raises(ValueError, match="^with its traceback$"), one_line_errors("glue.py", debug=True):
        raise ValueError("with its traceback")
    with pytest.raises(KeyError), one_line_errors("glue.py"):
        raise KeyError("not the user's")


def test_the_defaults_of_the_method_are_the_config_s():
    options, config = MethodArguments(), ZeroLockConfig()
    assert options.chunk_options() == {name: getattr(config, name) for name in CHUNK_OPTIONS}
