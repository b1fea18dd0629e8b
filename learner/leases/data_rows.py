"""The rows of a task's data: a file or folder in a common format, a dataset of the Hugging Face Hub, or made by a program."""

from __future__ import annotations

import csv
import glob
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from offbeat.common.errors import SettingError, one_line
from offbeat.common.settings.config import NO_ENVIRONMENT, Environment
from offbeat.common.settings.loading import is_local_data
from offbeat.common.user_code.external_environment import environment_rows, is_environment_rows
from offbeat.common.user_code.functions import is_function, load_function, mistakes_of
from offbeat.common.user_code.generated_tasks import generated_rows, is_generated

_HALF_CHARACTER = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_NOT_A_NUMBER = re.compile(rb"[:\[,]\s*-?(NaN|Infinity)\s*[,}\]]")
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_COMPRESSED_MARKS = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh", b"PK\x03\x04")
"""First bytes of gzip, Zstandard, xz, bzip2 and zip."""
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
"""The builder of `datasets` for a file's suffix. Files with any other suffix than these and the next hold JSON."""
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""The character between the cells of a table, by the file's suffix."""
_EXACT = 1 << 53
"""Whole numbers below this are exact as floats."""
LARGEST_SOURCE = 1_000_000
"""Number of rows above which a function is taken to be endless."""


class DataRow(NamedTuple):
    """One row of the data."""

    place: str
    """The row's place, for messages: `train.jsonl:7`, or `row 7 of openai/gsm8k`."""
    fields: dict[str, Any]
    json: str
    """The fields as a JSON object."""


def read_rows(source: str, split: str, setting: str, environment: Environment = NO_ENVIRONMENT) -> Iterable[DataRow]:
    """Return the rows of a file, of a folder's or dataset's `split`, or those that a function or generators make for it.

    `environment` is asked for those that it brings along itself.

    What is on this machine comes before the hub's. Rows of JSON lines are read as they are asked for. Raises `SettingError`
    about `setting` for data that is missing or malformed, and a function that fails.
    """
    if is_environment_rows(source):
        return _made_rows(environment_rows(environment, source, setting), source, setting)
    if is_generated(source):
        return _made_rows(generated_rows(source, split, setting), source, setting)
    if is_function(source):
        return _own_rows(source, split, setting)
    if "://" in source:
        problem = "offbeat reads files of this machine and datasets of the Hugging Face Hub, no other addresses"
        raise SettingError(setting, source, problem, "Copy the data here, or load it in your own function, module:function.")
    path = Path(source).expanduser()
    if path.is_dir() or not is_local_data(source):
        return _dataset_rows(source, split, setting)
    suffix = path.suffix.lower()
    if suffix in _BUILDERS:
        if not path.is_file():
            raise _unreadable(path, setting, "No such file")
        # Otherwise `datasets` takes brackets and stars in a path for a pattern.
        return _loaded_rows(source, setting, _BUILDERS[suffix], split="train", data_files=glob.escape(str(path)))
    if suffix in _SEPARATORS:
        return _table_rows({path: _SEPARATORS[suffix]}, setting)
    return _json_rows(path, setting)


def is_json(source: str) -> bool:
    """Return whether `read_rows` reads a source without `datasets` and without a user's function."""
    if is_generated(source) or is_environment_rows(source):
        return True
    path = Path(source).expanduser()
    return not is_function(source) and not path.is_dir() and is_local_data(source) and path.suffix.lower() not in _BUILDERS


def _made_rows(rows: Iterable[Mapping[str, Any]], source: str, setting: str) -> Iterator[DataRow]:
    for number, fields in enumerate(rows):
        yield _own_row(fields, f"row {number} of {source}", source, setting)


def _own_rows(path: str, split: str, setting: str) -> list[DataRow]:
    """Return all rows of a function, so that an endless one is known before any row is used."""
    rows = [_own_row(fields, f"row {number} of {path}", path, setting) for number, fields in _yielded(path, split, setting)]
    if len(rows) > LARGEST_SOURCE:
        problem = f"it gave more than {LARGEST_SOURCE} rows and may never end"
        cure = "Give it a limit, for example with itertools.islice: prompts are taken again in every epoch."
        raise SettingError(setting, path, problem, cure)
    return rows


def _yielded(path: str, split: str, setting: str) -> Iterator[tuple[int, object]]:
    function = load_function(path, setting=setting)
    with mistakes_of(setting, path):
        # By keyword, so that a run's settings cannot call any function of Python with any text.
        rows = function(split=split)
    if not isinstance(rows, Iterable):
        raise SettingError(setting, path, f"it returned {type(rows).__name__}", "Return or yield rows, each a dict.")
    with mistakes_of(setting, path):
        yield from enumerate(itertools.islice(rows, LARGEST_SOURCE + 1))


def _own_row(fields: object, place: str, path: str, setting: str) -> DataRow:
    if not isinstance(fields, Mapping):
        raise SettingError(setting, path, f"{place} is of type {type(fields).__name__}", "Return or yield rows, each a dict.")
    try:
        encoded = msgspec.json.encode({name: _sorted(value) for name, value in fields.items()})
    # No text stands for other values here, as it does for datasets: it might hold an address, another in each process.
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"{place} cannot be written as JSON ({one_line(error)})"
        raise SettingError(setting, path, problem, "Give text, numbers, lists and dicts.") from error
    # Decoded again: the reward's `row` is the same as for a line of a file, whatever the function does with its dict.
    return DataRow(place, msgspec.json.decode(encoded), encoded.decode())


def _sorted(value: Any) -> Any:
    """Return a value with its sets as sorted lists: a set of texts has another order in each process."""
    match value:
        case set() | frozenset():
            return sorted(value)
        case dict():
            return {key: _sorted(part) for key, part in value.items()}
        case list() | tuple():
            return [_sorted(part) for part in value]
        case _:
            return value


def _json_rows(path: Path, setting: str) -> Iterator[DataRow]:
    """Yield the objects of JSON lines, or of one JSON array."""
    content = _read(path, setting)
    if content.lstrip()[:1] == b"[" and path.suffix not in (".jsonl", ".ndjson"):
        yield from _array_rows(content, path, setting)
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            place = f"{path}:{number}"
            cure = "Write one JSON object on each line."
            yield DataRow(place, _decode(line, dict[str, Any], place, path, setting, cure), line.decode())


def _array_rows(content: bytes, path: Path, setting: str) -> Iterator[DataRow]:
    rows = _decode(content, list[dict[str, Any]], str(path), path, setting, "Write an array of objects.")
    for number, fields in enumerate(rows, start=1):
        yield DataRow(f"row {number} of {path}", fields, msgspec.json.encode(fields).decode())


def _decode(text: bytes, kind: Any, place: str, path: Path, setting: str, cure: str) -> Any:
    try:
        text.decode()
        return msgspec.json.decode(text, type=kind)
    except UnicodeDecodeError as error:
        raise SettingError(setting, str(path), f"{place} is not UTF-8 ({error.reason})", "Save the file as UTF-8.") from error
    except msgspec.DecodeError as error:
        if _HALF_CHARACTER.search(text) and _has_half_character(text):
            problem = f"{place} has half of a character, a \\ud800 to \\udfff without its other half, which is no text"
            raise SettingError(setting, str(path), problem, "Write both halves, or remove it.") from error
        if _NOT_A_NUMBER.search(text):
            problem = f"{place} has NaN or Infinity, which JSON does not know"
            raise SettingError(setting, str(path), problem, "Write null, or text.") from error
        kind_name = "a JSON array of objects" if kind == list[dict[str, Any]] else "a JSON object"
        raise SettingError(setting, str(path), f"{place} is not {kind_name} ({error})", cure) from error


def _has_half_character(text: bytes) -> bool:
    """Return whether JSON is right but for escapes of lone surrogates, which Python writes and no UTF-8 can hold."""
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except ValueError:
        return False
    return False


def _table_rows(separators: Mapping[Path, str], setting: str) -> Iterator[DataRow]:
    """Yield the rows of CSV and TSV files. A column of cells that are empty, or numbers as JSON writes them, holds numbers."""
    rows = [row for path, separator in separators.items() for row in _cells(path, separator, setting)]
    texts: set[str] = set()
    for _, cells in rows:
        texts.update(name for name, cell in cells.items() if name not in texts and cell and _number(cell) is None)
    for place, cells in rows:
        fields = {name: (cell if name in texts else _number(cell)) if cell else None for name, cell in cells.items()}
        yield DataRow(place, fields, msgspec.json.encode(fields).decode())


def _cells(path: Path, separator: str, setting: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place of each row of a table, and its cells by their names in the first row."""
    try:
        text = _read(path, setting).decode()
    except UnicodeDecodeError as error:
        raise SettingError(setting, str(path), f"it is not UTF-8 ({error.reason})", "Save the file as UTF-8.") from error
    csv.field_size_limit(sys.maxsize)
    # Otherwise a carriage return that a program wrote without quotes would end a row.
    lines = io.StringIO(text, newline="\n" if "\n" in text else "")
    # Strict: a cell that only begins with a quote mark would take in the rows up to the next one.
    reader = csv.reader(lines, delimiter=separator, strict=True)
    names: list[str] = []
    try:
        for cells in reader:
            # Spreadsheets end with rows of empty cells.
            if not "".join(cells).strip():
                continue
            if not names:
                names = [name or f"Unnamed: {number}" for number, name in enumerate(cells)]
                if len(set(names)) < len(names):
                    raise SettingError(setting, str(path), "two columns have the same name", "Give each a name of its own.")
                continue
            if len(cells) > len(names):
                problem = f"line {reader.line_num} has more cells than its first line has names"
                cure = "Put text with separators in quotes, and give each column a name."
                raise SettingError(setting, str(path), problem, cure)
            yield f"{path}:{reader.line_num}", dict(itertools.zip_longest(names, cells, fillvalue=""))
    except csv.Error as error:
        problem = f"its cells cannot be told apart in line {reader.line_num} ({error})"
        cure = "Put a cell that has quote marks or line ends in quote marks, and double its own quote marks."
        raise SettingError(setting, str(path), problem, cure) from error


def _number(cell: str) -> int | float | None:
    """Return the number in a cell, 42 also for 42.0; None where JSON would not write it so, such as 007."""
    try:
        value = msgspec.json.decode(cell, type=int | float)
    except msgspec.DecodeError:
        return None
    return int(value) if abs(value) < _EXACT and value == int(value) else value


def _read(path: Path, setting: str) -> bytes:
    """Return the content of a text file, without a byte order mark."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, setting, error.strerror) from error
    if content.startswith(_UTF16_MARKS):
        raise SettingError(setting, str(path), "the file is UTF-16", "Save it as UTF-8.")
    if content.startswith(_COMPRESSED_MARKS):
        raise SettingError(setting, str(path), "the file is compressed", "Unpack it, and give the unpacked file.")
    return content.removeprefix(_UTF8_MARK)


def _unreadable(path: Path, setting: str, reason: str | None) -> SettingError:
    return SettingError(setting, str(path), f"cannot be read ({reason})", "Give the path of a file or folder with data.")


def _dataset_rows(source: str, split: str, setting: str) -> Iterable[DataRow]:
    folder = Path(source).expanduser()
    if not folder.is_dir():
        # owner/name, or owner/name/config
        parts = source.split("/")
        name, config = ("/".join(parts[:2]), parts[2]) if len(parts) == 3 else (source, None)
        return _loaded_rows(source, setting, name, name=config, split=split)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _saved_rows(folder, split, setting)
    return _loaded_rows(source, setting, str(folder.resolve()), split=split)


def _saved_rows(folder: Path, split: str, setting: str) -> Iterator[DataRow]:
    """Yield the rows that `save_to_disk` of `datasets` wrote."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise SettingError(setting, str(folder), f"the dataset cannot be loaded ({error})", "Save it again.") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            there = ", ".join(map(str, loaded))
            raise SettingError(setting, str(folder), f"it has no split {split!r}", f"Its splits are: {there}.")
        loaded = loaded[split]
    # Saved with its format: rows of "torch" or "pandas" would be the text of their tensors and series.
    yield from _numbered(loaded.with_format(None), str(folder))


def _loaded_rows(source: str, setting: str, builder: str, *, split: str, **options: Any) -> Iterator[DataRow]:
    """Yield the rows that `datasets.load_dataset` loads."""
    # Imported here: it takes a second, and JSON lines do not need it.
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset_builder(builder) if Path(builder).is_dir() else None
        if found is not None and found.name in ("json", "csv"):
            yield from _split_rows(found.config.data_files or {}, split, setting, is_table=found.name == "csv")
            return
        loaded = datasets.load_dataset(builder, split=split, **options)
    except (OSError, ValueError, DatasetsError, HfHubHTTPError) as error:
        reason = re.sub(r"\s+", " ", str(error.__cause__ or error))
        cure = (
            "Give a file (.jsonl, .json, .parquet, .csv, .tsv, .arrow), a folder of such files, or a dataset's name "
            "(owner/name or owner/name/config) on a machine that reaches the hub."
        )
        raise SettingError(setting, source, f"the data or its split {split!r} cannot be loaded ({reason})", cure) from error
    yield from _numbered(loaded, source)


def _split_rows(data_files: Mapping[str, list[str]], split: str, setting: str, *, is_table: bool) -> list[DataRow]:
    """Return the rows of a split of a folder's text files, read as single files are: `datasets` makes times of dates in text.

    Raises `ValueError` for a split that is not there.
    """
    import datasets

    manager, rows = datasets.DownloadManager(), dict[str, list[DataRow]]()
    for name, given in data_files.items():
        separators = {
            Path(path): "\t" if ".tsv" in Path(file).suffixes else ","
            for file in given
            for path in manager.iter_files(manager.extract(file))
        }
        of_files = [_table_rows(separators, setting)] if is_table else [_json_rows(path, setting) for path in separators]
        rows[str(name)] = list(itertools.chain(*of_files))
    # A split may be a part of one, or several: train[:10%]+test, or all.
    instruction = datasets.ReadInstruction.from_spec("+".join(rows) if split == "all" else split)
    parts = instruction.to_absolute({name: len(of_split) for name, of_split in rows.items()})
    return [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]


def _numbered(rows: Iterable[Any], source: str) -> Iterator[DataRow]:
    for number, row in enumerate(rows):
        fields = dict(row)
        # Datasets hold values that JSON does not (dates, bytes, images): the reward gets those as text.
        yield DataRow(f"row {number} of {source}", fields, msgspec.json.encode(fields, enc_hook=_text_of).decode())


def _text_of(value: object) -> str:
    # An object's address is another in each process, and a run whose rows differ cannot be resumed.
    return _ADDRESS.sub("", str(value))
