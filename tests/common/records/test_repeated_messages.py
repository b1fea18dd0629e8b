"""Repeated warnings collapse into a count, and nothing else does."""

import logging

from offbeat.common.records.logs import MAX_MESSAGES, REPEAT_S, CollapsingHandler


class Shown(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.shown = Shown()
        self.handler = CollapsingHandler(self.shown, lambda: self.now)

    def log(self, message: str, *args: object, level: int = logging.WARNING, name: str = "offbeat.a") -> None:
        self.handler.handle(logging.LogRecord(name, level, "file.py", 1, message, args, None))

    def take(self) -> list[str]:
        texts, self.shown.texts = self.shown.texts, []
        return texts


def test_a_warning_that_differs_in_numbers_is_shown_once_and_counted_when_its_minute_is_over() -> None:
    bench = Bench()
    for lease_id in range(28):
        bench.log("reward_error lease %d: ValueError", lease_id)
    assert bench.take() == ["reward_error lease 0: ValueError"]
    bench.now = REPEAT_S
    bench.log("step 1", level=logging.INFO)
    assert bench.take() == ["27 more like this, the last one: reward_error lease 27: ValueError", "step 1"]
    bench.log("reward_error lease 99: ValueError")
    assert bench.take() == ["reward_error lease 99: ValueError"]


def test_other_texts_levels_loggers_and_infos_are_shown() -> None:
    bench = Bench()
    bench.log("a 1")
    bench.log("b 1")
    bench.log("a 2", level=logging.ERROR)
    bench.log("a 3", name="offbeat.b")
    for step in range(3):
        bench.log("step %d", step, level=logging.INFO)
    assert bench.take() == ["a 1", "b 1", "a 2", "a 3", "step 0", "step 1", "step 2"]


def test_counts_are_shown_at_the_end() -> None:
    bench = Bench()
    bench.log("a 1")
    bench.log("a 2")
    bench.log("b")
    bench.handler.close()
    assert bench.take() == ["a 1", "b", "1 more like this, the last one: a 2"]


def test_memory_is_bounded() -> None:
    bench = Bench()
    for index in range(MAX_MESSAGES + 5):
        bench.log("x" * (index + 1))
    bench.take()
    bench.log("x" * 6)
    bench.log("x")
    # The oldest five are forgotten; another one goes, with its count, to make room for the new "x".
    assert bench.take() == [f"1 more like this, the last one: {'x' * 6}", "x"]
