"""The faults of environments: committed on the tools that the episodes of a round call, and on the processes that play them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from offbeat.common.processes import process_table as processes
from offbeat.common.settings.config import EnvironmentSection
from tests.process_ends import kill_and_wait

LOOK_S = 0.02
CALL_S = 30.0
"""Longest wait for a tool call that obeys a command."""
SLOW_S = 1.0
"""Seconds that a call takes in which its process is killed."""
END_S = 15.0
"""Seconds that a process may take to end once it should, beside the time limits of the run."""


class Struck(NamedTuple):
    """The outcome of a fault."""

    detail: str | None
    """The fault in words; None when no tool was called."""
    violations: tuple[str, ...] = ()
    has_hit: bool | None = None


class Tools:
    """The tools of a round, as its faults command them."""

    def __init__(self, folder: Path, limits: EnvironmentSection) -> None:
        self._folder = folder
        self._limits = limits
        folder.mkdir()

    def kill_caller(self, pause: Callable[[float], None]) -> Struck:
        """Kill an environment process in the middle of a tool call."""
        slow = self._command("slow", str(SLOW_S))
        try:
            words = self._await("called", pause)
        finally:
            slow.unlink(missing_ok=True)
        if words is None:
            return Struck(None)
        kill_and_wait(int(words[0]))
        return Struck("killed an environment process in a tool call", has_hit=True)

    def wedge(self, pause: Callable[[float], None]) -> Struck:
        """Let a tool block the event loop of its process, which must be replaced."""
        # Imported here: it imports torch, which the processes that play have no need of.
        from offbeat.actor.environments.episodes import CLOSE_TIMEOUT_S

        words = self._obeyed("wedge", "wedged", pause)
        if words is None:
            return Struck(None)
        limit_s = self._limits.turn_timeout_s + CLOSE_TIMEOUT_S + END_S
        left = self._outlive(words, limit_s, pause)
        violations = (f"a process whose loop was blocked was not replaced within {limit_s:g} s",) if left else ()
        return Struck("a tool blocked the event loop of its process", violations, has_hit=True)

    def leave_daemon(self, pause: Callable[[float], None]) -> Struck:
        """Let a tool leave a daemon behind, and kill its process; the daemon must end."""
        words = self._obeyed("daemon", "left", pause)
        if words is None:
            return Struck(None)
        worker, daemon = words
        kill_and_wait(int(worker))
        left = self._outlive([daemon], END_S, pause)
        violations = (f"a daemon that a tool had started outlived its process by {END_S:g} s",) if left else ()
        return Struck("a tool left a daemon behind, and its process was killed", violations, has_hit=True)

    def be_down(self, seconds: float, pause: Callable[[float], None]) -> Struck:
        """Let every call fail for a while."""
        down = self._command("down")
        try:
            pause(seconds)
        finally:
            down.unlink()
        has_hit = _take(self._folder / "refused") is not None
        return Struck(f"the tools were down for {seconds:.1f} s", has_hit=has_hit)

    def _command(self, name: str, text: str = "") -> Path:
        command = self._folder / name
        command.write_text(text)
        return command

    def _obeyed(self, command: str, answer: str, pause: Callable[[float], None]) -> list[str] | None:
        file = self._command(command)
        try:
            return self._await(answer, pause)
        finally:
            file.unlink(missing_ok=True)

    def _await(self, answer: str, pause: Callable[[float], None]) -> list[str] | None:
        """Return the words that a tool call has written; None when none was made in time."""
        for _ in range(round(CALL_S / LOOK_S)):
            if words := _take(self._folder / answer):
                return words
            pause(LOOK_S)
        return None

    def _outlive(self, words: Sequence[str], seconds: float, pause: Callable[[float], None]) -> bool:
        """Return whether a process still runs after so many seconds."""
        for _ in range(round(seconds / LOOK_S)):
            if all(processes.has_ended(int(word)) for word in words):
                return False
            pause(LOOK_S)
        return True


def _take(file: Path) -> list[str] | None:
    """Return the words in a file and delete it; None when it is not there."""
    try:
        words = file.read_text().split()
    except FileNotFoundError:
        return None
    file.unlink()
    return words
