"""Command lines and YAML files: what is unknown or wrong is refused with a hint, flags override the file."""

import glue
import pytest
from arguments import RecipeParser


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--learning_rat", "1"], "unknown option 'learning_rat'; did you mean learning_rate"),
        (["--task", "sst"], "--task: invalid choice: 'sst'"),
        (["--num_chunks", "two"], "--num-chunks: invalid int value: 'two'"),
        (["more"], "unexpected 'more'; options begin with --"),
        (["--train_file", "a.csv"], "train_file and validation_file belong together"),
        (["--max_length", "0"], "max_length=0: it must be at least 1"),
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
        ("- sst2", "holds list; expected one `option: value` a line"),
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
