"""The files of user code are found without running it."""

from pathlib import Path

import pytest

from offbeat.common.user_code.functions import find_sources, hash_sources


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    return tmp_path


def write(folder: Path, **texts: str) -> None:
    """Write modules by their names, `__` for a dot."""
    for name, text in texts.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_modules_that_a_module_imports_from_its_folder_are_its_sources_and_nothing_is_run(folder: Path) -> None:
    write(
        folder,
        mine="import json, numpy, helpers\nfrom pack.inner import rules, number\nraise SystemExit('it was executed')",
        helpers="def f():\n    import late",
        late="import mine",
        unused="",
        pack__inner__rules="from .. import near\nfrom .beside import x",
        pack__inner__beside="x = 1",
        pack__near="",
        pack__far="",
        elsewhere__other="",
    )
    (folder / "pack" / "__init__.py").write_text("raise SystemExit('it was executed')")
    assert sorted(find_sources("mine:reward")) == [
        "helpers.py",
        "late.py",
        "mine.py",
        "pack/__init__.py",
        "pack/inner/beside.py",
        "pack/inner/rules.py",
        "pack/near.py",
    ]
    assert find_sources("mine:reward")["helpers.py"].read_text().startswith("def f")
    assert sorted(find_sources("pack.near:f")) == ["pack/__init__.py", "pack/near.py"]


def test_package_module_without_init_and_module_that_cannot_be_parsed_have_their_files(folder: Path) -> None:
    write(folder, plain__inner__rules="", broken="def")
    assert list(find_sources("plain.inner.rules:f")) == ["plain/inner/rules.py"]
    assert list(find_sources("broken:f")) == ["broken.py"]
    assert find_sources("absent:f") == {}


def test_module_that_tries_a_relative_import_first_has_the_files_of_both_imports(folder: Path) -> None:
    write(folder, mine="try:\n    from . import helpers\nexcept ImportError:\n    import helpers", helpers="")
    assert sorted(find_sources("mine:reward")) == ["helpers.py", "mine.py"]


def test_other_folders_of_the_path_and_other_installed_packages_are_no_sources(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, elsewhere__there="import mine, beside", elsewhere__beside="", mine="import there")
    assert sorted(find_sources("there:f")) == ["beside.py", "there.py"]
    installed = folder / "site-packages"
    write(installed, theirs__rules="from theirs import more\nimport foreign", theirs__more="", foreign="")
    monkeypatch.syspath_prepend(str(installed))
    assert sorted(find_sources("theirs.rules:f")) == ["theirs/more.py", "theirs/rules.py"]
    assert all(name.startswith("json/") for name in find_sources("json:dump"))


REWARD = '''
def digits(prompt, completion, row):
    """The share of digits."""
    size = 16.0
    return f"{size!r:>8}" and sum(c.isdigit() for c in completion) / size or None
'''


@pytest.mark.parametrize(
    "copy",
    [
        pytest.param(REWARD.replace("\n", "\r\n"), id="line ends"),
        pytest.param("# A note.\n" + REWARD.replace("16.0\n", "16.0  # as many as fit\n\n"), id="comments"),
        pytest.param(REWARD.replace("    ", "\t").replace('f"{size!r:>8}"', "f'{ size!r:>8}'"), id="layout"),
        pytest.param(
            "\ufeff" + REWARD.replace("return f", "return (\n      f").replace("None", "None)"), id="mark and brackets"
        ),
    ],
)
def test_copies_that_do_the_same_have_the_same_hash(folder: Path, copy: str) -> None:
    write(folder, mine=REWARD)
    before = hash_sources("mine:digits")
    (folder / "mine.py").write_bytes(copy.encode())
    assert hash_sources("mine:digits") == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("16.0", "16"),
        ("16.0", "17.0"),
        ("digits.", "digits!"),
        (" None", " 0"),
        ("isdigit", "isalpha"),
        ("!r", "!s"),
        (")", ")#\n\ndef"),
    ],
    ids=["type", "number", "docstring", "none", "name", "conversion", "no Python"],
)
def test_copy_that_does_something_else_has_another_hash(folder: Path, old: str, new: str) -> None:
    write(folder, mine=REWARD)
    before = hash_sources("mine:digits")
    assert REWARD.count(old)
    write(folder, mine=REWARD.replace(old, new))
    assert hash_sources("mine:digits").keys() == before.keys()
    assert hash_sources("mine:digits") != before


def test_functions_own_file_is_hashed_first_and_built_in_functions_have_none(folder: Path) -> None:
    write(folder, mine="import early", early="")
    assert list(hash_sources("mine:digits")) == ["mine.py", "early.py"]
    assert (
        hash_sources("exact_match")
        == hash_sources("offbeat.common.models.folders:hash_model")
        == hash_sources("absent:f")
        == {}
    )


def test_long_sum_is_hashed_without_recursion(folder: Path) -> None:
    write(folder, mine=f"x = {' + '.join('1' * 900)}")
    assert len(hash_sources("mine:x")["mine.py"]) == 16
