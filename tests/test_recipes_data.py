"""Rows are read strictly: what is damaged is named by file, line and reason, or dropped and counted."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data import DataError, RowReport, SplitNotFound, drop_long_rows, load_rows
from datasets import Dataset, load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

SHARED = Path(__file__).parents[2] / "shared" / "data"
COLUMNS = {"sentence": str, "label": int}
GOOD = b'{"sentence": "good", "label": 1}'

BAD_LINES = {
    "invalid byte": (b'{"sentence": "\xff", "label": 1}', "invalid UTF-8: byte 0xff at column 15"),
    "cut character": (b'{"sentence": "\xe2\x82", "label": 1}', "invalid UTF-8: byte 0xe2 at column 15"),
    "cut object": (
        b'{"sentence": "go',
        "not valid JSON: Unterminated string starting at (column 14); is the object cut?",
    ),
    "two objects": (GOOD + GOOD, "not valid JSON: Extra data (column 33)"),
    "not an object": (b'["good", 1]', "the row is a list, not an object"),
    "null row": (b"null", "the row is null, not an object"),
    "missing column": (b'{"text": "good", "label": 1}', "missing column 'sentence'; the row has 'label', 'text'"),
    "null content": (b'{"sentence": null, "label": 1}', "column 'sentence' is null, not a string"),
    "list": (b'{"sentence": ["a", "b"], "label": 1}', "column 'sentence' is a list (['a', 'b']), not a string"),
    "label as text": (b'{"sentence": "good", "label": "1"}', "column 'label' is a string ('1'), not a whole number"),
    "label as truth": (b'{"sentence": "good", "label": true}', "column 'label' is true or false (True), not a whole"),
    "label with a fraction": (b'{"sentence": "good", "label": 0.5}', "column 'label' is a number (0.5), not a whole"),
    "label too large": (b'{"sentence": "good", "label": 9223372036854775808}', "whole number of more than 64 bits"),
    "NaN": (b'{"sentence": "good", "label": NaN}', "not valid JSON: NaN is not a JSON number"),
    "half a character": (b'{"sentence": "\\ud83d", "label": 1}', "half of a surrogate pair"),
    "deep": (b"[" * 200_000, "not valid JSON: nested too deeply"),
}


def written(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("line, reason", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_and_can_be_dropped(tmp_path, line, reason, caplog):
    path = written(tmp_path / "train.jsonl", GOOD, line, GOOD)
    with pytest.raises(DataError) as error:
        load_rows(path, columns=COLUMNS)
    assert f"{path}:2: " in str(error.value) and reason in str(error.value)
    assert "1 bad row(s), 2 good one(s)" in str(error.value) and "--skip_bad_rows" in str(error.value)

    report = RowReport()
    rows = load_rows(path, columns=COLUMNS, skip_bad_rows=True, report=report)
    assert rows["origin"] == [f"{path}:1", f"{path}:3"]
    assert report.counts() == {"kept": 2, "blank": 0, "bad": 1, "too_long": 0}
    assert len(report.reasons) == 1 and report.reasons[0].startswith(f"{path}:2: ")
    assert "kept 2 rows, dropped 1 bad ones" in caplog.text and f"{path}:2: " in caplog.text


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_tolerated(tmp_path):
    path = written(tmp_path / "train.jsonl", b"\xef\xbb\xbf" + GOOD, b"", b"  \r", GOOD + b"\r")
    report = RowReport()
    rows = load_rows(path, columns=COLUMNS, report=report)
    assert rows.to_list() == [{"sentence": "good", "label": 1, "origin": f"{path}:{line}"} for line in (1, 4)]
    assert (report.kept, report.blank, report.bad) == (2, 2, 0)


def test_utf16_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD.decode().encode("utf-16"))
    with pytest.raises(DataError, match=r"train\.jsonl:1: the file is UTF-16; save it as UTF-8"):
        load_rows(path)


def test_only_the_first_reasons_are_kept_but_all_are_counted(tmp_path):
    path = written(tmp_path / "train.jsonl", GOOD, *[b"{"] * 40)
    report = RowReport()
    load_rows(path, skip_bad_rows=True, report=report)
    assert report.bad == 40 and [reason.split(": ")[0] for reason in report.reasons] == [
        f"{path}:{line}" for line in range(2, 7)
    ]


@pytest.mark.parametrize("lines", [[b""], [b"{", b"{"]])
def test_nothing_left_is_an_error_even_when_bad_rows_are_skipped(tmp_path, lines):
    path = written(tmp_path / "train.jsonl", *lines)
    with pytest.raises(DataError, match="no row is left in split 'train' of "):
        load_rows(path, skip_bad_rows=True)


def test_convert_makes_the_row_and_refuses_with_a_reason(tmp_path):
    path = written(tmp_path / "train.jsonl", GOOD, b'{"sentence": "", "label": 1}')

    def convert(row):
        if not row["sentence"]:
            raise ValueError("the sentence is empty")
        return {"text": row["sentence"].upper()}

    with pytest.raises(DataError, match=r"train\.jsonl:2: the sentence is empty"):
        load_rows(path, convert=convert)
    assert load_rows(path, convert=convert, skip_bad_rows=True).to_list() == [{"text": "GOOD", "origin": f"{path}:1"}]


def test_columns_that_mix_types_are_an_error_without_named_columns(tmp_path):
    path = written(tmp_path / "train.jsonl", GOOD, b'{"sentence": ["good"], "label": 1}')
    with pytest.raises(DataError, match="do not share one type per column"):
        load_rows(path)


def test_csv_rows(tmp_path):
    text = '\ufeffsentence,label,extra\n"two\nlines, ""quoted""",1,x\n\nplain,0,y\n'
    path = tmp_path / "train.csv"
    path.write_bytes(text.encode())
    rows = load_rows(path, columns=COLUMNS)
    assert rows["sentence"] == ['two\nlines, "quoted"', "plain"] and rows["label"] == [1, 0]
    assert rows["origin"] == [f"{path}:2", f"{path}:5"]


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"a,1,2", "3 fields, but the header has 2"),
        (b"a", "1 fields, but the header has 2"),
        (b"\xff,1", "invalid UTF-8: byte 0xff"),
        (b",1", "column 'sentence' is null, not a string"),
        (b"a,one", "column 'label' is a string ('one'), not a whole number"),
        (b'"a"b,1', "not valid csv"),
        (b'"a,1', "not valid csv"),
    ],
)
def test_a_bad_csv_line_is_named(tmp_path, line, reason):
    path = written(tmp_path / "train.csv", b"sentence,label", b"good,1", line)
    with pytest.raises(DataError) as error:
        load_rows(path, columns=COLUMNS)
    assert f"{path}:3: " in str(error.value) and reason in str(error.value)
    assert load_rows(path, columns=COLUMNS, skip_bad_rows=True)["sentence"] == ["good"]


def test_json_arrays_and_json_lines_in_a_json_file(tmp_path):
    array, lines = tmp_path / "array.json", written(tmp_path / "lines.json", GOOD, GOOD)
    array.write_bytes(b"[" + GOOD + b",\n" + GOOD + b", 3]")
    assert load_rows(lines, columns=COLUMNS)["origin"] == [f"{lines}:1", f"{lines}:2"]
    with pytest.raises(DataError, match=r"array\.json:row 3: the row is a whole number, not an object"):
        load_rows(array, columns=COLUMNS)
    assert load_rows(array, columns=COLUMNS, skip_bad_rows=True)["label"] == [1, 1]
    array.write_bytes(b"[" + GOOD + b",\n{]")
    with pytest.raises(DataError, match=r"array\.json: not valid JSON: .* \(line 2 column 2\)"):
        load_rows(array)


def test_parquet_rows_and_a_broken_file(tmp_path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"sentence": ["good", None], "label": [1, 0]}), path)
    with pytest.raises(DataError, match=r"train\.parquet:row 2: column 'sentence' is null, not a string"):
        load_rows(path, columns=COLUMNS)
    assert load_rows(path, columns=COLUMNS, skip_bad_rows=True)["label"] == [1]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"train\.parquet: not a readable parquet file"):
        load_rows(path)


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(ANY_TEXT, min_size=1, max_size=5))
def test_any_text_comes_back_from_every_format(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("any")
    raw = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    written(folder / "rows.jsonl", *raw)
    (folder / "rows.json").write_bytes(b"[" + b",".join(raw) + b"]")
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    written(folder / "rows.csv", b"text", *(cell.encode() for cell in quoted))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "rows.parquet")
    for ending in ("jsonl", "json", "csv", "parquet"):
        assert list(load_rows(folder / f"rows.{ending}", columns={"text": str})["text"]) == texts, ending


def test_folder_layouts(tmp_path):
    for place in (
        "hub/sst2/train.jsonl",
        "hub/sst2/dev.jsonl",
        "flat/train-00000-of-00001.jsonl",
        "d/data/train.jsonl",
    ):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        written(path, GOOD)
    assert load_rows(tmp_path / "hub", "validation", config="sst2")["origin"] == [f"{tmp_path}/hub/sst2/dev.jsonl:1"]
    assert len(load_rows(tmp_path / "hub" / "sst2", config="sst2")) == 1
    assert len(load_rows(tmp_path / "flat")) == len(load_rows(tmp_path / "d")) == 1
    assert len(load_rows([tmp_path / "hub/sst2/train.jsonl", tmp_path / "hub/sst2/dev.jsonl"])) == 2
    with pytest.raises(SplitNotFound, match="has no split 'test' of configuration 'sst2'.*sst2/test.jsonl"):
        load_rows(tmp_path / "hub", "test", config="sst2")


def test_a_readme_with_configs_decides(tmp_path):
    front = (
        "---\nconfigs:\n- config_name: sst2\n  data_files:\n  - split: train\n    path: parts/a-*.jsonl\n"
        "  - split: validation\n    path: [b.jsonl]\n- config_name: rte\n  data_files: c.jsonl\n---\n# Data\n"
    )
    (tmp_path / "README.md").write_text(front)
    (tmp_path / "parts").mkdir()
    for name in ("parts/a-1.jsonl", "parts/a-2.jsonl", "b.jsonl"):
        written(tmp_path / name, GOOD)
    assert load_rows(tmp_path, config="sst2")["origin"] == [f"{tmp_path}/parts/a-{part}.jsonl:1" for part in (1, 2)]
    assert load_rows(tmp_path, "validation", config="sst2")["origin"] == [f"{tmp_path}/b.jsonl:1"]
    with pytest.raises(DataError, match="lists c.jsonl for split 'train', but no such file"):
        load_rows(tmp_path, config="rte")


@pytest.mark.parametrize(
    "source, message",
    [
        ("missing.jsonl", "missing.jsonl does not exist"),
        ("./missing", "missing does not exist. Pass an existing file"),
        ("a/b/c", "a/b/c does not exist"),
        ([], "no data was named"),
        ("nobody/nothing", "cannot load split 'train' of 'nobody/nothing' .* from the Hub"),
    ],
)
def test_missing_sources(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        load_rows(source)


def test_rows_and_splits_of_a_hub_data_set(tmp_path, monkeypatch):
    files = {"train": str(written(tmp_path / "train.jsonl", GOOD, b'{"sentence": null, "label": 0}'))}

    def from_hub(name, config, split):
        assert (name, config) == ("someone/set", "sst2")
        return load_dataset("json", data_files=files, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr("data.load_dataset", from_hub)
    with pytest.raises(DataError, match="someone/set/sst2/train:row 2: column 'sentence' is null, not a string"):
        load_rows("someone/set", config="sst2", columns=COLUMNS)
    rows = load_rows("someone/set", config="sst2", columns=COLUMNS, skip_bad_rows=True)
    assert rows.to_list() == [{"sentence": "good", "label": 1, "origin": "someone/set/sst2/train:row 1"}]
    with pytest.raises(SplitNotFound, match="cannot load split 'validation' of 'someone/set'"):
        load_rows("someone/set", "validation", config="sst2")


def test_an_unknown_ending_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has the ending '.txt'; allowed are .jsonl, .json, .csv, .parquet"):
        load_rows(written(tmp_path / "train.txt", GOOD))


def test_long_rows_are_dropped_and_counted(caplog):
    rows = Dataset.from_dict({"input_ids": [[1], [1] * 9, [1] * 4], "origin": ["a:1", "a:2", "a:3"]})
    report = RowReport(kept=3)
    assert drop_long_rows(rows, 4, report)["origin"] == ["a:1", "a:3"]
    assert (report.kept, report.too_long, report.reasons) == (2, 1, ["a:2: 9 tokens, more than 4"])
    assert "dropped 1 of 3 rows that are too long" in caplog.text and "a:2" in caplog.text
    assert drop_long_rows(rows, 9) is rows
    with pytest.raises(DataError, match="no row is left: all 3 are longer than 0 tokens"):
        drop_long_rows(rows, 0)


@pytest.mark.shared_data
@pytest.mark.parametrize(
    "name, split, columns, rows, ones",
    [
        ("sst2", "validation", {"sentence": str, "label": int}, 872, 444),
        ("cola", "train", {"sentence": str, "label": int}, 8551, 6023),
        ("mrpc", "validation", {"sentence1": str, "sentence2": str, "label": int}, 408, 279),
        ("boolq", "validation", {"question": str, "passage": str, "label": int}, 640, 395),
    ],
)
def test_real_data_is_read_whole(name, split, columns, rows, ones):
    report = RowReport()
    data = load_rows(SHARED, split, config=name, columns=columns, report=report)
    assert (len(data), sum(data["label"])) == (rows, ones)
    assert report.counts() == {"kept": rows, "blank": 0, "bad": 0, "too_long": 0}


@pytest.mark.shared_data
def test_real_scores_are_numbers():
    scores = load_rows(SHARED, "train", config="stsb", columns={"sentence1": str, "label": float})["label"]
    assert len(scores) == 5749 and (min(scores), max(scores)) == (0.0, 5.0)
    assert sum(scores) / len(scores) == pytest.approx(2.70, abs=0.005)
