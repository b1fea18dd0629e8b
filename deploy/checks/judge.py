"""The check of the judge: its key, its cache's folder, and whether its server answers."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from offbeat.common.errors import SettingError, one_line
from offbeat.common.settings.config import Config, JudgeSection
from offbeat.common.settings.judge_checks import is_address
from offbeat.deploy.checks.findings import Finding, mistake

ANSWER_S = 3.0
"""Longest wait for the server's list of models."""
_LONGEST_LIST = 1 << 22


def check_judge_server(config: Config) -> Iterator[Finding]:
    """Find a missing key and a cache that cannot be written; warn of a server that does not answer or lacks the model."""
    judge = config.judge
    # Other checks tell a wrong address.
    if not judge.url or not is_address(judge.url):
        return
    # Imported here: runs without a judge need no HTTP client.
    from offbeat.actor.judges.client import headers_of

    try:
        headers = headers_of(judge)
    except SettingError as error:
        yield Finding("mistake", str(error))
        return
    yield from _check_cache(judge)
    problem = _problem(judge, headers)
    if problem:
        yield Finding("warning", f"judge.url: {problem}. Rewards wait until it answers.")


def _check_cache(judge: JudgeSection) -> Iterator[Finding]:
    if not judge.cache:
        return
    folder = Path(judge.cache).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield mistake("judge.cache", judge.cache, f"it cannot be made ({error.strerror})", "Name another folder.")
        return
    if not os.access(folder, os.W_OK):
        yield mistake("judge.cache", judge.cache, "it cannot be written", "Name another folder.")


def _problem(judge: JudgeSection, headers: dict[str, str]) -> str | None:
    """Return why the server seems unable to judge; None when its list has the model, or it has no list."""
    import httpx2

    try:
        with httpx2.stream("GET", f"{judge.url.rstrip('/')}/models", headers=headers, timeout=ANSWER_S) as response:
            if response.status_code in (401, 403):
                return f"{urlsplit(judge.url).netloc} refuses the key (HTTP {response.status_code})"
            content = b""
            for part in response.iter_bytes():
                content += part
                if response.status_code != 200 or len(content) > _LONGEST_LIST:
                    return None
    except httpx2.HTTPError as error:
        return f"{urlsplit(judge.url).netloc} does not answer ({one_line(error)})"
    is_listed = f'"{judge.model}"'.encode() in content
    return None if is_listed or not content else f"its list of models has no {judge.model!r}"
