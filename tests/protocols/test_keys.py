"""Key files and the allow-list are read back as written; anything else is refused with the reason."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.protocols.keys import (
    LOOK_INTERVAL_S,
    AllowList,
    KeyFileError,
    KeyPair,
    PublicKey,
    Sender,
    make_key_pair,
    public_text,
    read_allowed_keys,
    read_key_pair,
    read_public_key,
    secret_text,
)

ACTOR = make_key_pair("actor", "actor-0")
OPERATOR = make_key_pair("operator", "me")
LEARNER = make_key_pair("learner", "learner")


class Clock:
    """Time that only the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_until_the_next_look(self) -> None:
        self.now += LOOK_INTERVAL_S


def write_secret(path: Path, text: str = secret_text(ACTOR), mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def write_list(path: Path, *keys: KeyPair) -> Path:
    path.write_text("# a comment\n\n" + "".join(f"{key.owner.line()}\n" for key in keys))
    return path


def test_key_pair_survives_its_file(tmp_path: Path) -> None:
    assert read_key_pair(write_secret(tmp_path / "a.key")) == ACTOR


def test_public_key_survives_its_file_and_has_no_secret_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.pub").write_text(public_text(ACTOR.owner))
    assert read_public_key(tmp_path / "a.pub") == ACTOR.owner
    assert ACTOR.secret.decode() not in public_text(ACTOR.owner)


def test_every_pair_made_is_another_one() -> None:
    assert make_key_pair("actor", "a").secret != make_key_pair("actor", "a").secret


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601])
def test_secret_key_open_to_everybody_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    path = write_secret(tmp_path / "a.key", mode=mode)
    with pytest.raises(KeyFileError, match=f"chmod 600 {path}"):
        read_key_pair(path)


def test_secret_key_of_a_group_is_accepted(tmp_path: Path) -> None:
    # As secrets are mounted into containers.
    assert read_key_pair(write_secret(tmp_path / "a.key", mode=0o640)) == ACTOR


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a secret key file"),
        (public_text(ACTOR.owner), "not a secret key file"),
        (secret_text(ACTOR) + "more\n", "not a secret key file"),
        (secret_text(ACTOR).replace("actor actor-0", "actor"), "ROLE NAME PUBLIC-KEY"),
        (secret_text(ACTOR).replace("actor actor-0", "queen actor-0"), "ROLE NAME PUBLIC-KEY"),
        (secret_text(ACTOR).replace(ACTOR.owner.public.decode(), "#" * 40), "ROLE NAME PUBLIC-KEY"),
        (secret_text(ACTOR).replace(ACTOR.secret.decode(), ACTOR.secret.decode()[:-1]), "do not belong together"),
        (secret_text(ACTOR).replace(ACTOR.secret.decode(), "#" * 40), "do not belong together"),
        (secret_text(KeyPair(ACTOR.owner, OPERATOR.secret)), "do not belong together"),
    ],
    # The keys are new ones in each process.
    ids=range(9),
)
def test_damaged_secret_key_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(KeyFileError, match=problem):
        read_key_pair(write_secret(tmp_path / "a.key", text))


def test_missing_file_folder_and_binary_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for read in (read_key_pair, read_public_key, read_allowed_keys):
        with pytest.raises(KeyFileError, match=r"there is no such file.*offbeat keygen"):
            read(tmp_path / "absent")
        with pytest.raises(KeyFileError, match="cannot be read"):
            read(tmp_path)
        with pytest.raises(KeyFileError, match="it is not text"):
            read(tmp_path / "binary")


def test_secret_key_is_no_public_key(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"Name a \.pub file"):
        read_public_key(write_secret(tmp_path / "a.key"))


@given(st.text(max_size=200))
def test_any_text_is_keys_or_a_key_file_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_text(text)
    path.chmod(0o600)
    for read in (read_key_pair, read_public_key, read_allowed_keys):
        try:
            read(path)
        except KeyFileError as error:
            assert str(path) in str(error)


def test_allowed_keys_are_found_with_name_and_role(tmp_path: Path) -> None:
    allowed = AllowList(write_list(tmp_path / "list", ACTOR, OPERATOR))
    assert allowed.sender(ACTOR.owner.public) == Sender("actor-0", "actor")
    assert allowed.sender(OPERATOR.owner.public) == Sender("me", "operator")
    assert allowed.sender(LEARNER.owner.public) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("actor a", "line 4 is not"),
        (f"actor a {ACTOR.secret.decode()[:-1]}", "line 4 is not"),
        ("actor a é" + "x" * 39, "line 4 is not"),
        (LEARNER.owner.line(), "line 4 is the learner's own key"),
        (PublicKey("actor", "b", ACTOR.owner.public).line(), "line 4 has the same key as an earlier one"),
    ],
    ids=["no key", "cut key", "not ASCII", "the learner's", "twice"],
)
def test_wrong_line_of_an_allow_list_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write_list(tmp_path / "list", ACTOR)
    path.write_text(path.read_text() + line)
    with pytest.raises(KeyFileError, match=problem):
        AllowList(path)


def test_name_with_a_star_is_for_a_fleet() -> None:
    fleet, one = Sender("gpu-*", "actor"), Sender("gpu-1", "actor")
    assert [fleet.may_be(name) for name in ("gpu-1", "gpu-", "cpu-1", "GPU-1")] == [True, True, False, False]
    assert [one.may_be(name) for name in ("gpu-1", "gpu-12")] == [True, False]


def test_changed_list_is_seen_at_the_next_look_and_not_before(tmp_path: Path) -> None:
    clock = Clock()
    allowed = AllowList(write_list(tmp_path / "list", ACTOR), clock)
    write_list(tmp_path / "list", OPERATOR)
    assert allowed.sender(ACTOR.owner.public) is not None
    clock.pass_until_the_next_look()
    assert allowed.sender(ACTOR.owner.public) is None
    assert allowed.sender(OPERATOR.owner.public) is not None


def test_list_replaced_by_one_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    clock = Clock()
    path = write_list(tmp_path / "list", ACTOR)
    other = write_list(tmp_path / "other", make_key_pair("actor", "actor-1"))
    allowed = AllowList(path, clock)
    times = path.stat().st_mtime_ns
    os.utime(other, ns=(times, times))
    assert other.stat().st_size == path.stat().st_size
    other.replace(path)
    clock.pass_until_the_next_look()
    assert allowed.sender(ACTOR.owner.public) is None


def test_list_behind_a_link_that_is_swapped_is_seen_as_kubernetes_updates_volumes(tmp_path: Path) -> None:
    clock = Clock()
    for name, key in (("old", ACTOR), ("new", OPERATOR)):
        (tmp_path / name).mkdir()
        write_list(tmp_path / name / "list", key)
        (tmp_path / f"..data-{name}").symlink_to(name)
    (tmp_path / "..data-old").rename(tmp_path / "..data")
    (tmp_path / "list").symlink_to("..data/list")
    allowed = AllowList(tmp_path / "list", clock)
    assert allowed.sender(ACTOR.owner.public) is not None
    (tmp_path / "..data-new").rename(tmp_path / "..data")
    clock.pass_until_the_next_look()
    assert allowed.sender(ACTOR.owner.public) is None
    assert allowed.sender(OPERATOR.owner.public) is not None


@pytest.mark.parametrize("harm", ["broken", "gone"])
def test_broken_list_keeps_the_last_good_one_says_so_once_and_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    clock = Clock()
    path = write_list(tmp_path / "list", ACTOR)
    allowed = AllowList(path, clock)
    if harm == "gone":
        path.unlink()
    else:
        path.write_text("actor actor-0")
    for _ in range(3):
        clock.pass_until_the_next_look()
        assert allowed.sender(ACTOR.owner.public) is not None
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    write_list(path, OPERATOR)
    clock.pass_until_the_next_look()
    assert allowed.sender(ACTOR.owner.public) is None
