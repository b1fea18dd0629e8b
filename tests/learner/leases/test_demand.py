"""The automatic number of actors moves as its rules say, and never leaves its range."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.settings.config import ScaleSection
from offbeat.learner.leases.demand import PATIENCE_S, SKIPPED_STEPS, WINDOW_STEPS, Demand, DemandDecision, Use

FIRST = SKIPPED_STEPS + WINDOW_STEPS
"""Steps until the first growth can be decided."""
LATER = FIRST + WINDOW_STEPS
"""Steps until the first shrink can be decided."""


def use(*, starved: float = 0.0, spare: float = 0.15, seconds: float = 10.0, num_actors: int = 4, **others: Any) -> Use:
    """Return a step in which all is well, unless the arguments differ."""
    values = {"num_new": 0, "waits": 0.0, "enough": 64, **others}
    return Use(seconds=seconds, waited_s=starved * seconds, num_actors=num_actors, spare=spare, **values)


class Run:
    """A `Demand`, and the wanted number that its decisions set."""

    def __init__(self, wanted: int = 4, **scale: Any) -> None:
        self.demand = Demand(scale.pop("hours", 0.0))
        self.scale = ScaleSection(**{"auto": True, "max": 64, **scale})
        self.wanted = wanted

    def see(self, times: int = 1, **values: Any) -> list[DemandDecision]:
        """Observe steps of a fleet that has as many actors as are wanted, unless `num_actors` differs."""
        decisions: list[DemandDecision] = []
        for _ in range(times):
            step = use(**{"num_actors": self.wanted, **values})
            decision = self.demand.observe(step, self.wanted, self.scale)
            if decision is not None:
                decisions.append(decision)
                self.wanted = decision.actors or self.wanted
        return decisions

    def numbers(self, times: int, **values: Any) -> list[int | None]:
        return [decision.actors for decision in self.see(times, **values)]


STARVED = {"starved": 0.4, "spare": 0.0}


def test_growth_waits_for_a_full_window_and_goes_to_what_keeps_the_learner_busy() -> None:
    run = Run()
    assert run.numbers(FIRST - 1, **STARVED) == []
    assert run.numbers(1, **STARVED) == [7]  # 4 / 0.6, rounded up


def test_growth_at_most_doubles() -> None:
    assert Run().numbers(FIRST, starved=0.9, spare=0.0) == [8]


def test_shrink_waits_twice_as_long_and_keeps_a_tenth_of_room() -> None:
    run = Run(wanted=20)
    assert run.numbers(LATER - 1, spare=0.5) == []
    assert run.numbers(1, spare=0.5) == [11]  # 20 * 0.5 * 1.1
    assert Run(wanted=20).numbers(LATER, spare=0.3) == [16]


@pytest.mark.parametrize(
    "values",
    [{}, {"starved": 0.1, "spare": 0.0}, {"spare": 0.25}, {"starved": 0.09, "spare": 0.2}],
    ids=["well", "starves-little", "spare-little", "both-little"],
)
def test_small_shares_move_nothing(values: dict[str, float]) -> None:
    assert Run().see(3 * LATER, **values) == []


def test_next_decision_waits_for_the_actors_that_were_asked_for() -> None:
    run = Run()
    assert run.numbers(FIRST, **STARVED) == [7]
    assert run.see(20, num_actors=4, **STARVED) == []
    assert run.numbers(FIRST - 1, seconds=6.0, **STARVED) == []
    assert run.numbers(1, seconds=6.0, **STARVED) == [12]


def test_next_decision_rests_for_twice_the_time_that_actors_take_to_start() -> None:
    run = Run(wanted=2)
    run.see(FIRST, seconds=10.0, **STARVED)
    # These take 295 s, so the next move is followed by a rest of 590 s.
    run.see(29, num_actors=2, **STARVED)
    assert run.numbers(FIRST, seconds=5.0, **STARVED) == [7]
    assert run.see(589, seconds=1.0, **STARVED) == []
    assert run.numbers(1, seconds=1.0, **STARVED) == [12]


def test_actors_that_never_come_are_waited_for_and_then_named() -> None:
    run = Run()
    run.see(FIRST, **STARVED)
    assert run.see(int(PATIENCE_S / 10), num_actors=4, seconds=10.0, **STARVED) == []
    (advice,) = run.see(FIRST, num_actors=4, seconds=6.0, **STARVED)
    assert advice.actors is None
    assert "of 7 wanted actors 4.0 are there" in advice.reason
    # Fewer may still be too many, but four were too few.
    assert run.numbers(3 * LATER, num_actors=4, spare=0.5)[-1] == 5


def test_number_that_was_too_small_is_not_tried_again_for_long() -> None:
    run = Run(wanted=4)
    run.see(FIRST, **STARVED)
    assert run.numbers(LATER, spare=0.6) == [5]
    assert run.see(40, spare=0.6) == []
    assert run.numbers(100, spare=0.6)[0] == 3


def test_doubling_that_makes_no_step_faster_is_undone_and_not_repeated() -> None:
    run = Run(wanted=2)
    assert run.numbers(FIRST, starved=0.9, spare=0.0) == [4]
    (undone,) = run.see(FIRST + 1, starved=0.9, spare=0.0, seconds=9.7)
    assert undone.actors == 2
    assert undone.reason == "4 actors make a step no faster than 2: 9.7 s, before 10 s"
    (advice,) = run.see(100, starved=0.9, spare=0.0)
    assert advice.actors is None
    assert "more than 2 actors made no step faster" in advice.reason


def test_doubling_that_helps_stays() -> None:
    run = Run(wanted=2)
    run.see(FIRST, starved=0.9, spare=0.0)
    assert run.numbers(2 * FIRST, starved=0.8, spare=0.0, seconds=9.4) == [8]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"starved": 0.4, "spare": 0.3}, "widen staleness.max_staleness; more actors would help less"),
        ({"starved": 0.4, "spare": 0.3, "enough": 4}, "widen staleness.max_staleness; more actors will not help"),
        ({**STARVED, "enough": 4}, "the bound admits no more leases: widen staleness.max_staleness"),
        ({**STARVED, "waits": 0.6}, "raise actor.max_inflight_groups"),
        ({**STARVED, "waits": 0.6, "enough": 4}, "raise actor.max_inflight_groups"),
    ],
    ids=["room-at-the-actors", "room-and-enough", "enough", "tools", "tools-before-bound"],
)
def test_where_actors_would_not_help_it_is_said_once_what_would(values: dict[str, Any], said: str) -> None:
    (advice,) = Run().see(5 * LATER, **values)
    assert advice.actors is None
    assert said in advice.reason


def test_advice_is_told_again_after_all_was_well() -> None:
    run = Run()
    assert len(run.see(LATER, starved=0.4, spare=0.3)) == 1
    assert run.see(2 * LATER) == []
    assert len(run.see(LATER, starved=0.4, spare=0.3)) == 1


def test_more_actors_than_the_bound_has_leases_for_are_let_go_even_while_the_learner_starves() -> None:
    assert Run(wanted=12).numbers(LATER, starved=0.3, spare=0.4, enough=8) == [8]


def test_growth_stops_at_the_maximum_and_says_so() -> None:
    run = Run(max=5)
    assert run.numbers(FIRST, **STARVED) == [5]
    (advice,) = run.see(3 * FIRST, **STARVED)
    assert advice.reason.endswith("scale.max = 5 is reached")


def test_number_outside_of_the_limits_is_brought_inside_at_once() -> None:
    assert Run(wanted=12, max=8).numbers(1) == [8]
    assert Run(wanted=1, min=3).numbers(1) == [3]
    assert Run(wanted=20, min=15).numbers(LATER, spare=0.9) == [15]


def test_spent_actor_hours_bring_the_minimum_whatever_the_demand() -> None:
    run = Run(max_actor_hours=1.0, hours=0.5)
    # 4 actors use half an hour of actors' time in 450 s.
    assert run.see(11) == []
    run.see(33)
    decisions = Run(max_actor_hours=1.0, hours=0.99).see(50, starved=0.9, spare=0.0)
    assert [decision.actors for decision in decisions] == [1, None]
    assert "scale.max_actor_hours = 1" in decisions[0].reason


def test_actor_hours_are_counted_without_auto_too() -> None:
    run = Run(auto=False)
    assert run.see(90, **STARVED) == []
    assert run.demand.actor_hours == pytest.approx(1.0)


@pytest.mark.parametrize("trouble", [{"is_troubled": True}, {"num_new": 1}], ids=["quarantine", "new-actor"])
def test_steps_that_say_nothing_about_demand_do_not_count(trouble: dict[str, Any]) -> None:
    run = Run()
    assert run.see(3 * LATER, **STARVED, **trouble) == []


def test_number_that_a_person_sets_is_where_the_policy_goes_on() -> None:
    run = Run()
    run.see(FIRST - 1, **STARVED)
    run.wanted = 10
    assert run.numbers(FIRST - 1, **STARVED) == []
    assert run.numbers(1, **STARVED) == [17]


def test_actors_of_others_do_work_that_need_not_be_wanted_twice() -> None:
    # 4 wanted ones and 4 of a user: 8 / 0.6 = 14 do the work, 10 of them wanted.
    assert Run().numbers(FIRST, num_actors=8, **STARVED) == [10]
    assert Run().numbers(LATER, num_actors=8, spare=0.5) == [1]


@given(
    steps=st.lists(
        st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 40), st.integers(1, 40), st.booleans()),
        max_size=120,
    ),
    low=st.integers(1, 5),
    more=st.integers(0, 20),
)
def test_wanted_number_stays_within_its_limits(steps: list[tuple], low: int, more: int) -> None:
    run = Run(wanted=low, min=low, max=low + more)
    for starved, spare, waits, num_actors, enough, is_troubled in steps:
        decisions = run.see(
            4, starved=starved, spare=spare, waits=waits, num_actors=num_actors, enough=enough, is_troubled=is_troubled
        )
        assert low <= run.wanted <= low + more
        assert all(decision.reason for decision in decisions)
