"""Files of YAML documents as people write them: keys in the order given, long texts as blocks, no aliases."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from offbeat.common.errors import SettingError
from offbeat.common.setting_text import write_private

Document = dict[str, Any]
WIDTH = 120


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """Write equal parts out each time: people change one of them."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_text(comment: str, documents: Sequence[Document]) -> str:
    """Return the documents as YAML below a comment."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)


def write_yaml(path: Path, comment: str, documents: Sequence[Document]) -> None:
    """Write a private file: it may hold keys, and settings may hold secrets."""
    write_private(path, yaml_text(comment, documents))


def read_mapping(option: str, path: Path) -> Document:
    """Return the mapping in a file of YAML; raise `SettingError` for anything else."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"the file cannot be read ({error.strerror})"
        cure = f"Give the path of a YAML file, or a quantity: {option} memory=32Gi."
        raise SettingError(option, str(path), problem, cure) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingError(option, str(path), f"the file is not valid YAML: {error}", "Correct that line.") from error
    if not isinstance(content, dict):
        raise SettingError(option, str(path), "the file holds no mapping", "Write fields, such as nodeSelector: {...}.")
    return content
