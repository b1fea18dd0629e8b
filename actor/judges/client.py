"""The client of the judge, one for each event loop of a process.

ask -> cache -> turn (pace of all processes, pause asked for by the server) -> slot -> request -> answer checked -> cache
                 ^ back-off <- no answer, HTTP 408, 425, 429, 5xx, an unusable answer
"""

import asyncio
import fcntl
import math
import mmap
import os
import re
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
import msgspec

from offbeat.actor.judges.answer_cache import AnswerCache
from offbeat.actor.rewards.retries import Failures, RateLimiter
from offbeat.actor.rewards.samples import JudgeError, JudgePrompt, RewardUnavailable, Verdict
from offbeat.common.errors import SettingError, one_line
from offbeat.common.formats import MASK
from offbeat.common.settings.config import Config, JudgeSection
from offbeat.common.settings.judge_checks import check_key_name
from offbeat.common.user_code.environment_host.host import TRANSIENT_STATUS
from offbeat.protocols.text import plain

MAX_CACHE_BYTES = 1 << 30
"""Size of the answers in `judge.cache` above which the oldest are deleted."""
COUNTS = ("requests", "failed", "cached", "tokens", "seconds")
"""Requests that were sent, unusable answers and missing ones, answers from the cache, tokens, seconds of all requests."""
NUM_OF_RATE = 2
"""Numbers in the shared file that are those of a `RateLimiter`; the counts follow."""
_FORMAT = struct.Struct(f"<{NUM_OF_RATE + len(COUNTS)}d")


class SharedNumbers:
    """A small file, mapped into each process and locked for each change. The lock of a process that dies is released."""

    def __init__(self, path: Path) -> None:
        """Open the file, which `handed_to_processes` has made."""
        self._file: BinaryIO = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), _FORMAT.size)

    @contextmanager
    def of_rate(self) -> Iterator[list[float]]:
        """Return a context with the numbers of a `RateLimiter` that all processes share."""
        with self._locked() as numbers:
            rate = numbers[:NUM_OF_RATE]
            yield rate
            numbers[:NUM_OF_RATE] = rate

    def add(self, **counts: float) -> None:
        """Add to some of `COUNTS`."""
        with self._locked() as numbers:
            for name, number in counts.items():
                numbers[NUM_OF_RATE + COUNTS.index(name)] += number

    def counts(self) -> dict[str, float]:
        """Return `COUNTS` by name."""
        with self._locked() as numbers:
            return dict(zip(COUNTS, numbers[NUM_OF_RATE:], strict=True))

    @contextmanager
    def _locked(self) -> Iterator[list[float]]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            numbers = list(_FORMAT.unpack_from(self._map))
            yield numbers
            _FORMAT.pack_into(self._map, 0, *numbers)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


VARIABLE = "OFFBEAT_JUDGE"
"""The environment variable with which an actor tells its processes the judge; it has no secret."""
LARGEST_ANSWER = 1 << 20
"""Most bytes of an answer that are read."""
SHOWN_CHARACTERS = 300
BYTES_PER_TOKEN = 4
"""Estimate for servers that do not count tokens."""


class Handed(msgspec.Struct, frozen=True):
    """Everything that a process needs to ask the judge."""

    settings: JudgeSection
    numbers: str
    """File of `SharedNumbers`."""
    max_concurrent: int
    """The share of one process."""


@contextmanager
def handed_to_processes(config: Config) -> Iterator[None]:
    """Let this process, and those that it starts, ask the judge of the settings; without one nothing happens."""
    if not config.judge.url:
        yield
        return
    num_processes = config.environment.workers if config.task.environment else config.actor.reward_workers
    with tempfile.TemporaryDirectory(prefix="offbeat-judge-") as folder:
        numbers = Path(folder) / "numbers"
        numbers.write_bytes(bytes(_FORMAT.size))
        handed = Handed(config.judge, str(numbers), max(1, config.judge.max_concurrent // num_processes))
        os.environ[VARIABLE] = msgspec.json.encode(handed).decode()
        try:
            yield
        finally:
            del os.environ[VARIABLE]


def handed() -> Handed | None:
    """Return what this process was handed; None for a run without a judge."""
    text = os.environ.get(VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=Handed)


def counts_of_judge() -> dict[str, float]:
    """Return what the judge was asked by all processes of this actor, as `COUNTS`; empty for a run without a judge."""
    here = handed()
    return {} if here is None else SharedNumbers(Path(here.numbers)).counts()


def client_of_this_loop() -> "JudgeClient":
    """Return the client of the running event loop: connections belong to a loop."""
    loop = asyncio.get_running_loop()
    client = _clients.get(loop)
    if client is None:
        here = handed()
        if here is None:
            problem = "the function asks a judge, and there is none"
            raise SettingError("judge.url", "", problem, "Set judge.url and judge.model: docs/rewards.md.")
        client = _clients[loop] = JudgeClient(here.settings, SharedNumbers(Path(here.numbers)), here.max_concurrent)
    return client


_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, JudgeClient]" = weakref.WeakKeyDictionary()


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    total_tokens: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Unusable(Exception):  # noqa: N818, no mistake of the program
    """A request that may succeed when it is repeated; the text says why."""

    def __init__(self, problem: str, retry_after_s: float | None = None) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class JudgeClient:
    """Asks the judge, and keeps to its limits."""

    def __init__(self, settings: JudgeSection, numbers: SharedNumbers, max_concurrent: int) -> None:
        self._settings = settings
        self._numbers = numbers
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._slots = asyncio.Semaphore(max_concurrent)
        self._headers = headers_of(settings)
        limits = httpx2.Limits(max_connections=max_concurrent, max_keepalive_connections=max_concurrent)
        self._http = httpx2.AsyncClient(limits=limits, headers=self._headers, timeout=settings.timeout_s)
        self._cache = AnswerCache(Path(settings.cache).expanduser(), MAX_CACHE_BYTES) if settings.cache else None
        per_minute = settings.requests_per_minute
        self._rate = RateLimiter(None if per_minute is None else per_minute / 60.0, numbers.of_rate)

    async def ask(self, prompt: JudgePrompt, pattern: str | None, options: Mapping[str, Any]) -> Verdict:
        """Return the judge's answer, from the cache or the server; see `asking.judge`."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        fields = {"temperature": 0, **self._settings.options, **options, "model": self._settings.model, "messages": messages}
        body = msgspec.json.encode(fields, order="deterministic")
        # Another temperature gives another answer each time, which may be what the caller asks for.
        cache = self._cache if fields["temperature"] == 0 else None
        request = self._url.encode() + b"\n" + body
        found = None if cache is None else cache.find(request)
        known = None if found is None else verdict_of(found, pattern)
        if known is not None:
            self._numbers.add(cached=1)
            return known._replace(is_cached=True)
        verdict = await self._try(body, pattern)
        if cache is not None:
            cache.keep(request, verdict.text)
        return verdict

    async def _try(self, body: bytes, pattern: str | None) -> Verdict:
        """Send a request until it has a usable answer. Raise `RewardUnavailable` or `JudgeError`."""
        num_tokens = 0
        failures = Failures()
        while True:
            try:
                text, used = await self._in_turn(body)
                num_tokens += used
                verdict = verdict_of(text, pattern)
                if verdict is None:
                    raise _Unusable(f"its answer has no score after {pattern!r}: {text[:SHOWN_CHARACTERS]!r}")
                return verdict._replace(num_tokens=num_tokens)
            except _Unusable as error:
                now = time.monotonic()
                failures.add(plain(str(error)), now)
                self._numbers.add(failed=1)
                if failures.num > self._settings.max_retries:
                    raise RewardUnavailable(f"the judge {self._settings.url}: {failures.problem}") from error
                # Where the server has said when to come back, the next turn is no earlier.
                if error.retry_after_s is None and failures.again_at is not None:
                    await asyncio.sleep(failures.again_at - now)

    async def _in_turn(self, body: bytes) -> tuple[str, int]:
        """Send a request when it may be sent; return the text and the tokens of its answer."""
        async with self._slots:
            wait_s = self._rate.take_turn(longest_wait_s=self._settings.timeout_s / 2)
            if wait_s is None:
                # Not a failed request: other calls have taken the turns, or the server has asked for a long pause.
                why = "no turn soon under judge.requests_per_minute, or the server has asked to wait"
                raise RewardUnavailable(f"the judge {self._settings.url}: {why}")
            await asyncio.sleep(wait_s)
            started = time.monotonic()
            try:
                # Over all: a time limit of the client's starts again with each byte.
                async with asyncio.timeout(self._settings.timeout_s):
                    return await self._send(body)
            except TimeoutError:
                raise _Unusable(f"no answer within judge.timeout_s = {self._settings.timeout_s:g}") from None
            except httpx2.RequestError as error:
                raise _Unusable(one_line(error)) from error
            finally:
                self._numbers.add(requests=1, seconds=time.monotonic() - started)

    async def _send(self, body: bytes) -> tuple[str, int]:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", self._url, content=body, headers=headers) as response:
            content = b""
            async for part in response.aiter_bytes():
                content += part
                if len(content) > LARGEST_ANSWER:
                    raise _Unusable(f"its answer has more than {LARGEST_ANSWER} bytes")
        if response.status_code in TRANSIENT_STATUS or response.status_code >= 500:
            retry_after_s = _retry_after_s(response.headers)
            if retry_after_s is not None:
                self._rate.pause(retry_after_s)
            raise _Unusable(f"HTTP {response.status_code} {self._shown(content)}", retry_after_s)
        if response.status_code != 200:
            raise JudgeError(f"the judge {self._settings.url}: HTTP {response.status_code} {self._shown(content)}")
        return self._read(content, num_sent_bytes=len(body))

    def _read(self, content: bytes, *, num_sent_bytes: int) -> tuple[str, int]:
        try:
            answer = msgspec.json.decode(content, type=_Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _Unusable(f"its answer is no chat completion ({error}): {self._shown(content)}") from error
        text = answer.choices[0].message.content if answer.choices else None
        estimate = (num_sent_bytes + len(content)) // BYTES_PER_TOKEN
        num_tokens = answer.usage.total_tokens if answer.usage is not None and answer.usage.total_tokens > 0 else estimate
        self._numbers.add(tokens=num_tokens)
        if not text:
            raise _Unusable(f"its answer has no text: {self._shown(content)}")
        return text, num_tokens

    def _shown(self, content: bytes) -> str:
        """Return the begin of an answer for messages; servers repeat a key that they refuse."""
        text = content[:SHOWN_CHARACTERS].decode(errors="replace")
        for header in self._headers.values():
            text = text.replace(header.removeprefix("Bearer "), MASK)
        return plain(text)


def headers_of(settings: JudgeSection) -> dict[str, str]:
    """Return the headers with the server's key. Raise `SettingError` when the environment has none that a header can carry."""
    if not settings.key_env:
        return {}
    check_key_name(settings.key_env)
    key = os.environ.get(settings.key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        problem = "this environment variable is not set" if not key else "this environment variable holds no key"
        raise SettingError("judge.key_env", settings.key_env, problem, "Export it where the actors start, or correct the name.")
    return {"Authorization": f"Bearer {key}"}


def verdict_of(text: str, pattern: str | None) -> Verdict | None:
    """Return the verdict in an answer; None where `pattern` finds no finite number."""
    if pattern is None:
        return Verdict(text)
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    try:
        score = float(matches[-1][min(1, matches[-1].re.groups)] or "")
    except ValueError:
        return None
    return Verdict(text, score) if math.isfinite(score) else None


def _retry_after_s(headers: httpx2.Headers) -> float | None:
    """Return the seconds that the header `Retry-After` asks to wait, as a number or a date; None where it asks for none."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,7}(\.\d{1,9})?", value):
        return float(value)
    try:
        # By the server's clock if it tells the time: this machine's may differ by more than the pause.
        now_s = parsedate_to_datetime(headers["Date"]).timestamp() if "Date" in headers else time.time()
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_s)
    except (ValueError, OverflowError):
        return None
