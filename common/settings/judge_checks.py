"""Checks of `[judge]`: an address that can be asked, and limits that fit the time that a reward or an episode has."""

import re
from urllib.parse import urlsplit

from offbeat.common.errors import SettingError
from offbeat.common.formats import MASK
from offbeat.common.settings.config import Config


def check_judge(config: Config) -> None:
    """Raise `SettingError` for a judge that cannot be asked."""
    judge = config.judge
    if not judge.url:
        return
    _check_address(judge.url)
    if not judge.model:
        raise SettingError("judge.model", "", "it is empty", "Name a model of the server at judge.url.")
    check_key_name(judge.key_env)
    if judge.options.get("stream") or judge.options.get("n", 1) != 1:
        raise SettingError("judge.options", judge.options, "one whole answer is read", "Remove `stream` and `n`.")
    _check_limits(config)


def check_key_name(name: str) -> None:
    """Raise `SettingError`, without the text, for one that cannot be a variable's name: it may be the key itself."""
    if name and not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        problem = "this is no name of an environment variable"
        raise SettingError("judge.key_env", MASK, problem, "Export the key as JUDGE_KEY, for example, and give that name.")


def is_address(url: str) -> bool:
    """Return whether a server can be asked at this address."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_address(url: str) -> None:
    if "@" in url:
        raise SettingError("judge.url", MASK, "it holds a name or a password", "Give the key by judge.key_env.")
    if not is_address(url) or "?" in url or "#" in url:
        raise SettingError("judge.url", url, "this is not an address", "Give one such as http://127.0.0.1:8000/v1.")
    if url.rstrip("/").endswith("/chat/completions"):
        raise SettingError("judge.url", url, "/chat/completions is added to it", "Give the part before it.")


def _check_limits(config: Config) -> None:
    """Refuse a time limit and a number of requests that do not suit the processes that ask."""
    if config.task.environment:
        ended_by, limit_s = "environment.turn_timeout_s", config.environment.turn_timeout_s
        of_processes, num_processes = "environment.workers", config.environment.workers
    else:
        ended_by, limit_s = "task.reward_timeout_s", config.task.reward_timeout_s
        of_processes, num_processes = "actor.reward_workers", config.actor.reward_workers
    if config.judge.timeout_s >= limit_s:
        problem = f"a call is ended before it, by {ended_by} = {limit_s:g}"
        raise SettingError("judge.timeout_s", config.judge.timeout_s, problem, f"Lower it, or raise {ended_by}.")
    if config.judge.max_concurrent < num_processes:
        problem = f"each of the {num_processes} processes of {of_processes} needs a share of at least one"
        raise SettingError("judge.max_concurrent", config.judge.max_concurrent, problem, f"Raise it, or lower {of_processes}.")
