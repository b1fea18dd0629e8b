"""Rows come out the same whatever format they are in; what cannot be read is refused with its place and the cure."""

import gzip
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from offbeat.common.errors import SettingError
from offbeat.learner.leases.data_rows import read_rows

ROWS = [{"prompt": "ab", "answer": 1}, {"prompt": "é", "answer": 2}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def read(path: Path, split: str = "train") -> list[dict[str, Any]]:
    return [row.fields for row in read_rows(str(path), split, "data.train_data")]


def write(path: Path) -> Path:
    """Write `ROWS` in the format of the path's suffix."""
    table = pyarrow.Table.from_pylist(ROWS)
    match path.suffix:
        case ".jsonl" | ".ndjson":
            path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS))
        case ".json":
            path.write_bytes(msgspec.json.format(msgspec.json.encode(ROWS)))
        case ".parquet":
            pyarrow.parquet.write_table(table, path)
        case ".csv":
            pyarrow.csv.write_csv(table, path)
        case ".tsv":
            path.write_text("prompt\tanswer\nab\t1\né\t2\n")
        case ".arrow":
            with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".arrow"])
def test_rows_are_the_same_in_every_format(suffix: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / f"rows{suffix}")) == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_brackets_in_a_path_are_no_pattern(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "v[2]").mkdir()
    assert read(write(tmp_path / "v[2]" / f"rows*{suffix}")) == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_folder_of_files_is_read_by_split(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / f"train{suffix}")
    assert read(folder) == ROWS
    with pytest.raises(SettingError, match="split 'test' cannot be loaded"):
        read(folder, "test")


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_cell_of_a_table_is_the_text_that_the_file_has(suffix: str, is_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "data" / f"train{suffix}"
    path.parent.mkdir()
    cells = [("prompt", "answer", "level"), ("a", "None", "1"), ("NA", "null", "2"), ("b", "", ""), ("nan", "n/a", "3")]
    separator = "\t" if suffix == ".tsv" else ","
    path.write_text("".join(separator.join(row) + "\n" for row in cells), encoding="utf-8-sig")
    assert read(path.parent if is_folder else path) == [
        {"prompt": "a", "answer": "None", "level": 1},
        {"prompt": "NA", "answer": "null", "level": 2},
        {"prompt": "b", "answer": None, "level": None},
        {"prompt": "nan", "answer": "n/a", "level": 3},
    ]


def test_whole_number_of_a_table_stays_one_beside_fractions_and_empty_cells(tmp_path: Path) -> None:
    """The built-in rewards compare with the answer's text, which `42.0` is not."""
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer,level,weight\n6*7>,42,1,0.5\n5/2>,2.5,,2\n10^300>,1e300,3,0\n")
    assert [str(list(row.values())) for row in read(path)] == [
        "['6*7>', 42, 1, 0.5]",
        "['5/2>', 2.5, None, 2]",
        "['10^300>', 1e+300, 3, 0]",
    ]


def test_cells_of_a_table_that_are_not_all_numbers_as_json_writes_them_are_text(tmp_path: Path) -> None:
    """The built-in rewards would compare with `True`, `7` and, in a column that `datasets` took for text late, `42.0`."""
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer,zip,late\na,true,007,\nb,False,100,\n" + "c,1,1,42\n" * 10_000 + "d,,2,x\n")
    rows = read(path)
    assert [list(row.values()) for row in (*rows[:3], rows[-1])] == [
        ["a", "true", "007", None],
        ["b", "False", "100", None],
        ["c", "1", "1", "42"],
        ["d", None, "2", "x"],
    ]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("cell", ['"Stop!" he said', '"Stop'])
@pytest.mark.parametrize("is_folder", [False, True])
def test_table_with_a_cell_that_only_begins_with_a_quote_mark_is_refused(
    suffix: str, cell: str, is_folder: bool, tmp_path: Path
) -> None:
    """Otherwise it takes in the rows up to the next quote mark, and rows and quote marks are lost."""
    path = tmp_path / "data" / f"train{suffix}"
    path.parent.mkdir()
    separator = "\t" if suffix == ".tsv" else ","
    path.write_text(f'prompt{separator}answer\n{cell}{separator}1\nb{separator}2\n"c" is a letter{separator}3\n')
    with pytest.raises(SettingError, match=r"train\.[ct]sv.*in line [24].*double"):
        read(path.parent if is_folder else path)


@pytest.mark.parametrize("row", ["Paris, France?,yes", "a,yes,"])
def test_table_whose_rows_have_more_cells_than_names_is_refused(row: str, tmp_path: Path) -> None:
    """Otherwise each cell would stand under the name of the one before it, and the prompt would be the answer."""
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt,answer\n{row}\n")
    with pytest.raises(SettingError, match=r"more cells than its first line has names.*in quotes"):
        read(path)


def test_carriage_return_without_quotes_is_refused_and_those_that_end_lines_are_read(tmp_path: Path) -> None:
    """pandas writes a cell with one as it is; as the end of a line it would make two rows of one."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,answer\na\rb,1\n")
    with pytest.raises(SettingError, match="in line 2"):
        read(path)
    for end in (b"\r", b"\r\n"):
        path.write_bytes(end.join((b"prompt,answer", b'"a\rb",1', b"")))
        assert read(path) == [{"prompt": "a\rb", "answer": 1}]


def test_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,prompt\na,b\n")
    with pytest.raises(SettingError, match=r"two columns have the same name"):
        read(path)


def test_rows_without_any_text_are_no_rows_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\nprompt,answer\n\na,1\n   \n,\n")
    assert read(path) == [{"prompt": "a", "answer": 1}]


def test_rows_of_a_folder_are_those_of_its_files(tmp_path: Path) -> None:
    """`datasets` would make a time of a date in text, a float of a large number, and refuse columns that only one file has."""
    rows = [{"prompt": "a", "answer": "2024-05-01"}, {"prompt": "b", "answer": 2**63 + 1}, {"prompt": "c", "level": None}]
    folder = tmp_path / "data"
    folder.mkdir()
    for number, row in enumerate(rows):
        (folder / f"train-{number}.jsonl").write_bytes(msgspec.json.encode(row))
    assert read(folder) == rows
    assert read(folder, "train[1:]+train[:1]") == [*rows[1:], rows[0]]
    assert read(folder, "all") == rows


def test_column_of_a_folder_holds_numbers_where_it_does_in_each_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, answer in enumerate(("7", "x")):
        (folder / f"train-{number}.csv").write_text(f"prompt,answer\na,{answer}\n")
    assert [row["answer"] for row in read(folder)] == ["7", "x"]


def test_folder_that_datasets_saved_is_read(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == ROWS
    with pytest.raises(SettingError, match=r"no split 'test'\. Its splits are: train"):
        read(tmp_path / "saved", "test")


@pytest.mark.parametrize("form", ["numpy", "torch", "pandas"])
def test_rows_are_those_of_the_saved_data_in_whatever_format_it_was_saved(form: str, tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).with_format(form, columns=["answer"]).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == ROWS


def test_value_that_json_has_not_is_the_same_text_in_every_process(tmp_path: Path) -> None:
    import datasets

    image = pytest.importorskip("PIL.Image").new("RGB", (4, 2))
    # `datasets` makes an object of Pillow of it, which shows its address.
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    rows = [{"prompt": "ab", "image": image}, {"prompt": "é", "image": None}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    first, second = (row.json for row in read_rows(str(tmp_path / "saved"), "train", "data.train_data"))
    assert first == '{"prompt":"ab","image":"<PIL.PngImagePlugin.PngImageFile image mode=RGB size=4x2>"}'
    assert second == '{"prompt":"é","image":null}'


def test_local_folder_wins_over_a_dataset_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "openai/gsm8k/main"
    folder.mkdir(parents=True)
    write(folder / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    assert read(Path("openai/gsm8k/main")) == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_byte_order_mark_is_no_part_of_the_data(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows{suffix}")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path) == ROWS


def test_address_of_a_store_is_refused_as_it_was_written() -> None:
    with pytest.raises(SettingError, match=r'^data\.train_data = "s3://b/x": offbeat reads files .* Copy the data here'):
        list(read_rows("s3://b/x", "train", "data.train_data"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"prompt": "é"}'.encode("latin-1"), r"rows\.jsonl:1 is not UTF-8 .* Save the file as UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), r"the file is UTF-16.* Save it as UTF-8"),
        (gzip.compress(b'{"prompt": "a"}', mtime=0), r"the file is compressed.* Unpack it"),
        (b'{"prompt": "a"}\n{"prompt": ', r"rows\.jsonl:2 is not a JSON object"),
        (rb'{"prompt": "\ud800"}', r"rows\.jsonl:1 has half of a character.* Write both halves"),
        (rb'{"prompt": "\ud83d\ude00 \ud800", ', r"rows\.jsonl:1 is not a JSON object"),
    ],
)
def test_file_in_another_encoding_or_broken_is_refused_with_its_place(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(SettingError, match=problem):
        read(path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_damaged_table_is_refused(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows{suffix}")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SettingError, match=r"rows.*cannot be loaded \(.+\)"):
        read(path)


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet"])
def test_missing_file_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        read(Path(name))


SOURCES = """
import itertools
import datasets
import numpy

ROWS = [{"prompt": "ab", "answer": 1}, {"prompt": "é", "answer": 2}]

def listed(split): return ROWS if split == "train" else []
def yielded(split): yield from ROWS
def dataset(split): return datasets.Dataset.from_list(ROWS)

def reused(split):
    row = {}
    for new in ROWS:
        row.update(new)
        yield row

def with_tuple(split): return [{"prompt": ("a", "b")}]
def with_sets(split): return [{"prompt": "a", "answers": [{"red", "green", "blue"}, frozenset({3, 1})]}]
def endless(split): return ({"prompt": str(number)} for number in itertools.count())
def fails(split):
    yield ROWS[0]
    raise KeyError("lost")
def leaves(split): raise SystemExit(3)
def none(split): return None
def texts(split): return ["ab"]
def numpy_number(split): return [*ROWS, {"prompt": "a", "answer": numpy.int64(3)}]
def surrogate(split): return [{"prompt": "\\ud800"}]
def other_name(part): return ROWS
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sources", raising=False)
    (tmp_path / "sources.py").write_text(SOURCES)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("name", ["listed", "yielded", "dataset", "reused"])
def test_rows_of_a_function_are_those_of_a_file(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    of_file = [(row.fields, row.json) for row in read_rows(str(path), "train", "data.train_data")]
    of_function = list(read_rows(f"sources:{name}", "train", "data.train_data"))
    assert [(row.fields, row.json) for row in of_function] == of_file
    assert of_function[1].place == f"row 1 of sources:{name}"


@pytest.mark.usefixtures("sources")
def test_function_gets_the_split_and_its_values_are_those_of_json() -> None:
    assert list(read_rows("sources:listed", "test", "data.eval_data")) == []
    assert read(Path("sources:with_tuple")) == [{"prompt": ["a", "b"]}]
    # Sets of texts have another order in each process.
    assert read(Path("sources:with_sets")) == [{"prompt": "a", "answers": [["blue", "green", "red"], [1, 3]]}]


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fails", r"it raised KeyError: 'lost' \(.*sources.py:23\). Correct the function"),
        ("leaves", "it raised SystemExit: 3"),
        ("none", "it returned NoneType. Return or yield rows, each a dict"),
        ("texts", "row 0 of sources:texts is of type str. Return or yield rows, each a dict"),
        ("numpy_number", r"row 2 of sources:numpy_number cannot be written as JSON \(.*numpy.int64.*\)"),
        ("surrogate", "row 0 of sources:surrogate cannot be written as JSON"),
        ("other_name", "unexpected keyword argument 'split'"),
        ("absent", "has no 'absent'"),
        ("endless", "it gave more than 1000 rows and may never end. Give it a limit"),
    ],
)
def test_function_that_fails_or_never_ends_is_refused(name: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.learner.leases.data_rows.LARGEST_SOURCE", 1000)
    with pytest.raises(SettingError, match=problem) as raised:
        read(Path(f"sources:{name}"))
    assert raised.value.setting == "data.train_data"


def test_function_of_python_itself_is_not_called_with_text_of_the_settings() -> None:
    with pytest.raises(SettingError, match="TypeError"):
        list(read_rows("os:system", "true", "data.train_data"))


def test_example_returns_the_same_rows_each_time_and_none_for_training_and_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "own_data")
    train, held_out = (read(Path("digits:rows"), split) for split in ("train", "test"))
    assert (len(train), len(held_out)) == (2048, 64)
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held_out)
    assert read(Path("digits:rows")) == train
    assert all(row["answer"] == row["prompt"][-2::-1] for row in train)
