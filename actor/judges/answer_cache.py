"""The judge's answers on disk, by the hash of the request: one SQLite file that many processes share."""

import contextlib
import fcntl
import hashlib
import logging
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

FILE = "judge.sqlite3"
LOCK_S = 2.0
"""Longest wait for another process that writes; after it the cache is passed over."""
_TABLES = """
CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key BLOB UNIQUE NOT NULL, answer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS total (num_bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON answers
    BEGIN UPDATE total SET num_bytes = num_bytes + length(CAST(new.answer AS BLOB)); END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON answers
    BEGIN UPDATE total SET num_bytes = num_bytes - length(CAST(old.answer AS BLOB)); END;
"""


class AnswerCache:
    """Answers by request. The oldest are deleted above `max_bytes`. A cache that fails is passed over, with one warning."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._path = folder / FILE
        self._max_bytes = max_bytes
        self._connection: sqlite3.Connection | None = None
        self._retry_at = 0.0
        """Time before which a cache that has failed is left alone: each wait for a lock would block the caller's loop."""

    def find(self, request: bytes) -> str | None:
        """Return the answer to a request, if it is here."""
        with self._guarded():
            rows = self._open().execute("SELECT answer FROM answers WHERE key = ?", (_key(request),)).fetchone()
            return None if rows is None else str(rows[0])
        return None

    def keep(self, request: bytes, answer: str) -> None:
        """Keep an answer; the first one to a request stays."""
        with self._guarded():
            connection = self._open()
            with connection:
                connection.execute("INSERT OR IGNORE INTO answers (key, answer) VALUES (?, ?)", (_key(request), answer))
                while connection.execute("SELECT num_bytes FROM total").fetchone()[0] > self._max_bytes:
                    connection.execute("DELETE FROM answers WHERE number = (SELECT min(number) FROM answers)")

    def _open(self) -> sqlite3.Connection:
        if time.monotonic() < self._retry_at:
            raise sqlite3.OperationalError("it has just failed")
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("wb") as lock:
                # SQLite does not wait for processes that make the same file at the same time.
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._connection = self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        # Any thread: the loop of a process may be another one later.
        connection = sqlite3.connect(self._path, timeout=LOCK_S, check_same_thread=False)
        try:
            # A lost answer is only asked for again, so no write waits for the disk.
            connection.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; {_TABLES}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if time.monotonic() >= self._retry_at:
                logger.warning("judge.cache: %s cannot be used (%s); the judge is asked each time", self._path, error)
                self._retry_at = time.monotonic() + 60.0


def _key(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()
