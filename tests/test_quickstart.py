"""The quickstart's data, its scoring, and one run of it on a tiny random model."""

import datetime
import re
import shutil
import sys

import pytest
import quickstart
from orders import HELD_OUT_FAMILIES, NUMBERS, TRAIN_FAMILIES, conversation, exact_matches, make_orders
from tiny_text import CHATML, tiny_llama, tokenizer_with


def test_orders_are_seeded_and_different():
    orders = make_orders(300, seed=1)
    assert orders == make_orders(300, seed=1) != make_orders(300, seed=2)
    assert len({order["prompt"] for order in orders}) == 300
    assert orders[:100] == make_orders(100, seed=1)


def test_held_out_questions_are_disjoint_from_training():
    train, held_out = make_orders(1000, seed=0), make_orders(100, seed=0, families=HELD_OUT_FAMILIES)
    assert not set(TRAIN_FAMILIES) & set(HELD_OUT_FAMILIES)
    assert not {order["prompt"] for order in train} & {order["prompt"] for order in held_out}
    for order in train:
        assert not any(family in order["prompt"] for family in HELD_OUT_FAMILIES)


def test_answers_follow_from_the_notes():
    """Read back by other means: strptime for the date, words for the rest."""
    for order in make_orders(200, seed=3):
        note = order["prompt"]
        date, goods, family = order["completion"].split(" | ")
        written = re.search(r"\d+ [A-Z]\w+ \d{4}", note), re.search(r"[A-Z]\w+ \d+, \d{4}", note)
        parsed = [
            datetime.datetime.strptime(found.group(), form).date().isoformat()
            for found, form in zip(written, ("%d %B %Y", "%B %d, %Y"), strict=True)
            if found
        ]
        assert parsed == [date]
        number, what = goods.split(" x ")
        assert f"{NUMBERS[int(number) - 2]} {what} ".lower() in note.lower()
        assert re.search(rf"[A-Z]\w+ {family}\b", note)


def test_exact_match_counts_only_answers_that_are_right_to_the_letter():
    orders = make_orders(4, seed=0)
    right = [order["completion"] for order in orders]
    assert exact_matches(right, orders) == 4
    assert exact_matches([right[0], right[1] + ".", right[2].lower(), ""], orders) == 1
    with pytest.raises(ValueError):
        exact_matches(right[:3], orders)
    assert [message["role"] for message in conversation(orders[0])] == ["system", "user", "assistant"]


def test_the_whole_quickstart_on_a_tiny_model(tmp_path, capsys):
    tiny_llama(blocks=3).save_pretrained(tmp_path / "model")
    tokenizer_with(CHATML).save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    flags = ["--model", str(tmp_path / "model"), "--output_dir", str(out), "--train_rows", "16"]
    figures = quickstart.main([*flags, "--held_out_rows", "3", "--dtype", "float32"])
    assert (figures["before"], figures["questions"]) == (0, 3)
    assert {"adapter_config.json", "adapter_model.safetensors", "summary.json"} <= {
        path.name for path in out.iterdir()
    }
    printed = capsys.readouterr().out
    assert (
        "before (base model)                      0    3" in printed
        and f"PeftModel.from_pretrained(base_model, '{out}')" in printed
    )


def test_a_failed_check_says_where_the_adapter_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    options = quickstart.QuickstartArguments(output_dir=str(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match="loading the adapter in plain PEFT failed.*nothing"):
        quickstart.answers_in_plain_peft(options, quickstart.ModelSource(str(tmp_path)), [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_chunks", "4"], "num_chunks is 4; .* has 3 blocks: 1 to 3"),
        (["--model", "absent/"], "model 'absent/' does not exist"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_question(tmp_path, flags, message, capsys):
    tiny_llama(blocks=3).save_pretrained(tmp_path)
    tokenizer_with(CHATML).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=f"^quickstart.py: {message}"):
        quickstart.main(["--model", str(tmp_path), "--output_dir", str(tmp_path / "out"), *flags])
    assert "held-out" not in capsys.readouterr().out


def test_numbers_out_of_range_are_refused(capsys):
    with pytest.raises(SystemExit):
        quickstart.main(["--train_rows", "0"])
    assert "train_rows is 0; it must be at least 1" in capsys.readouterr().err
