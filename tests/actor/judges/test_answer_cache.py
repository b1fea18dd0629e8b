"""The cache keeps its bound and loses nothing when many write to it at once."""

import sqlite3
import threading
from pathlib import Path

from offbeat.actor.judges.answer_cache import AnswerCache


def test_oldest_answers_leave_above_the_bound(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path, max_bytes=100)
    for number in range(8):
        cache.keep(b"%d" % number, "ü" * 10)
    # 20 bytes each.
    assert [number for number in range(8) if cache.find(b"%d" % number)] == [3, 4, 5, 6, 7]
    cache.keep(b"7", "another")
    assert cache.find(b"7") == "ü" * 10
    assert AnswerCache(tmp_path, max_bytes=100).find(b"3") == "ü" * 10


def test_many_writers_make_one_cache(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        cache = AnswerCache(tmp_path, max_bytes=10_000)
        for number in range(20):
            cache.keep(b"%d %d" % (writer, number), "answer")

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    cache = AnswerCache(tmp_path, max_bytes=10_000)
    assert all(cache.find(b"%d %d" % (writer, number)) for writer in range(6) for number in range(20))
    with sqlite3.connect(tmp_path / "judge.sqlite3") as connection:
        assert connection.execute("SELECT num_bytes FROM total").fetchall() == [(6 * 20 * len("answer"),)]


def test_prompts_are_not_written(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path, max_bytes=100)
    cache.keep(b"a private prompt", "yes")
    assert all(b"private" not in file.read_bytes() for file in tmp_path.iterdir())
