"""`offbeat simulate`: figures from simulated batches, times from options, and what it says."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import ActorSection, Config, DataSection, ModelSection, RolloutSection, StalenessSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.common.settings.loading import resolved_toml
from offbeat.deploy.cli.main import make_app
from offbeat.lab.simulation.account import Totals
from offbeat.lab.simulation.predict import (
    Prediction,
    Source,
    fitted_times,
    given_times,
    predict,
    print_predictions,
    simulate,
    simulate_batches,
    steady_batches,
)
from offbeat.lab.simulation.simulation import SimulatedBatch
from offbeat.lab.simulation.timings import Timings

CONFIG = Config(
    model=ModelSection(path="none"),
    data=DataSection(train_data="none"),
    rollout=RolloutSection(group_size=2),
    staleness=StalenessSection(max_staleness=1),
    train=TrainSection(num_steps=40, groups_per_step=10),
    actor=ActorSection(max_inflight_groups=5),
)
ALIKE = Source(Timings(np.array([[3.0, 3.0]]), np.array([2.0]), np.array([0.5])), 100.0, None, "made up")


def test_prediction_is_of_what_happened_between_the_first_batch_and_the_last() -> None:
    batches = [
        SimulatedBatch(10, 100.0, 9.0, {9: 10}, 9, Totals(dropped=5, generated_s=100.0, open_s=50.0)),
        SimulatedBatch(11, 110.0, 4.0, {0: 4, 1: 6}, 0, Totals(dropped=5, generated_s=150.0)),
        SimulatedBatch(
            12,
            120.0,
            1.0,
            {1: 9, 3: 1},
            1,
            Totals(
                dropped=8,
                aborted=2,
                generated_s=200.0,
                wasted_s=25.0,
                wait_leases_s=8.0,
                wait_weights_s=4.0,
                slots_s=150.0,
                open_s=350.0,
            ),
        ),
    ]
    found = predict(batches, CONFIG, num_actors=2, tokens_per_group=100.0)
    assert (found.num_actors, found.max_staleness, found.num_steps, found.simulated_s) == (2, 1, 2, 20.0)
    assert (found.groups_per_s, found.tokens_per_s, found.steps_per_h) == (1.0, 100.0, 360.0)
    assert found.learner_waits == 5 / 20
    assert (found.actors_wait_leases, found.actors_wait_weights, found.slots_used) == (0.2, 0.1, 0.75)
    assert found.mean_lag == (6 + 9 + 3) / 20
    assert found.law_lag == 300 / 20 / 10
    assert (found.p99_lag, found.max_lag, found.lags) == (3, 3, {0: 4, 1: 15, 3: 1})
    assert found.over_bound == 1 / 20
    assert (found.dropped, found.aborted, found.wasted) == (3 / 25, 2 / 25, 0.25)


def test_beginning_and_end_of_a_run_are_not_steady() -> None:
    batches = [SimulatedBatch(version, float(version), 0.0, {0: 1}, 0, Totals()) for version in range(1, 41)]
    assert [batch.policy_version for batch in steady_batches(batches, CONFIG)] == list(range(5, 39))
    # One that was cut off has no end.
    assert [batch.policy_version for batch in steady_batches(batches[:30], CONFIG)] == list(range(4, 31))


def test_every_number_of_actors_is_simulated_with_every_bound() -> None:
    predictions = simulate(CONFIG, ALIKE, actors=[1, 2], staleness=[0, 1], seconds=1e6, seed=0)
    assert [(one.num_actors, one.max_staleness) for one in predictions] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    # Ten groups: twice five of 3 seconds with one actor, at once with two; 2 to train and 0.5 for the weights.
    seconds = [one.simulated_s / one.num_steps for one in predictions]
    assert seconds[:2] == pytest.approx([8.5, 5.5])
    # Overlapped, the actors are the bottleneck: 6 with one, 3 with two.
    assert seconds[2:] == pytest.approx([6.0, 3.0], rel=0.1)


def test_shares_of_a_synchronous_step_are_those_of_its_parts() -> None:
    five_each = replace(CONFIG, train=replace(CONFIG.train, num_steps=8))
    (found,) = simulate(five_each, ALIKE, actors=[2], staleness=[0], seconds=1e6, seed=0)
    # 0.5 s for the weights, 3 to generate on all slots, 2 to train.
    shares = (found.learner_waits, found.actors_wait_leases, found.actors_wait_weights, found.slots_used, found.law_lag)
    assert shares == pytest.approx((3.5 / 5.5, 2 / 5.5, 0.5 / 5.5, 3 / 5.5, 3 / 5.5))


def test_bound_that_the_config_cannot_have_is_refused() -> None:
    two_steps = replace(CONFIG, train=replace(CONFIG.train, steps_per_batch=2))
    with pytest.raises(SettingError, match="max_staleness"):
        simulate(two_steps, ALIKE, actors=[1], staleness=[0], seconds=1e6, seed=0)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(SettingError, match="--minutes"):
        simulate(CONFIG, ALIKE, actors=[1], staleness=[0], seconds=15.0, seed=0)


def test_run_is_simulated_with_its_own_settings() -> None:
    dropping = replace(CONFIG, staleness=StalenessSection(max_staleness=1, staleness_policy="drop"))
    spread = Source(Timings(np.array([[1.0], [40.0]]), np.array([2.0]), np.array([0.0])), None, None, "made up")
    gated, dropped = (simulate_batches(one, spread, num_actors=2, seconds=1e6, seed=0) for one in (CONFIG, dropping))
    assert max(max(batch.lags) for batch in gated) > 1
    assert max(max(batch.lags) for batch in dropped) == 1
    assert dropped[-1].totals.dropped > 0 == gated[-1].totals.dropped


# Times


def test_given_times_have_their_mean_and_spread() -> None:
    source = given_times(CONFIG, 2.0, sigma=0.5, train_s=7.0, sync_s=1.0, cores=None)
    logs = np.log(source.timings.completions_s)
    assert source.timings.completions_s.shape[1] == 2
    assert source.timings.completions_s.mean() == pytest.approx(2.0, rel=0.02)
    assert logs.std() == pytest.approx(0.5, rel=0.02)
    assert (source.timings.train_s.tolist(), source.timings.sync_s.tolist()) == ([7.0], [1.0])
    assert (source.cores, source.tokens_per_group) == (None, None)


@pytest.mark.parametrize(("completion_s", "train_s"), [(None, 7.0), (2.0, None), (0.0, 7.0)])
def test_without_times_there_is_no_simulation(completion_s: float | None, train_s: float | None) -> None:
    with pytest.raises(SettingError, match="--fit RUN"):
        given_times(CONFIG, completion_s, sigma=0.5, train_s=train_s, sync_s=1.0, cores=None)


def test_times_of_another_batch_size_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[train]\ngroups_per_step = 20\n[rollout]\ngroup_size = 2\n")
    with pytest.raises(SettingError, match=r"train.groups_per_step = 10: .* had 20"):
        fitted_times(CONFIG, [tmp_path], None)


# The command


def test_command_says_what_it_predicts_and_what_it_assumes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(resolved_toml(CONFIG))
    times = ["--completion-s", "3", "--sigma", "0", "--train-s", "2", "--sync-s", "0.5"]
    command = ["simulate", str(tmp_path / "run.toml"), "--actors", "1,2", "--staleness", "0", *times]
    told = json.loads(CliRunner().invoke(make_app(), [*command, "--json"], catch_exceptions=False).stdout)
    assert [round(3600 / one["steps_per_h"], 6) for one in told["predictions"]] == [8.5, 5.5]
    assert "lognormal, mean 3 s, sigma 0" in told["times"]
    shown = CliRunner().invoke(make_app(), command, catch_exceptions=False).stdout
    assert all(assumption.split()[0] in shown for assumption in told["assumptions"])
    # 3600 / 8.5 steps an hour, and 3600 / 5.5.
    assert "424" in shown
    assert "655" in shown


@pytest.mark.parametrize("option", ["--seed", "--sigma", "--sync-s", "--start-s", "--minutes", "--cores"])
def test_command_refuses_numbers_below_0(option: str) -> None:
    told = CliRunner().invoke(make_app(), ["simulate", option, "-1"])
    assert told.exit_code == 2
    assert option in told.stderr


def test_each_figure_stands_under_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    made_up = Prediction(
        num_actors=3,
        max_staleness=4,
        num_steps=50,
        simulated_s=100.0,
        groups_per_s=5.5,
        tokens_per_s=6006.0,
        steps_per_h=707.0,
        learner_waits=0.08,
        actors_wait_leases=0.09,
        actors_wait_weights=0.10,
        slots_used=0.11,
        mean_lag=1.25,
        law_lag=1.75,
        p99_lag=13,
        max_lag=14,
        lags={1: 1},
        over_bound=0.15,
        dropped=0.16,
        aborted=0.17,
        wasted=0.18,
    )
    dropping = replace(CONFIG, staleness=StalenessSection(max_staleness=4, staleness_policy="drop"))
    print_predictions([made_up], ALIKE, dropping, as_json=False)
    assert columns_of(capsys.readouterr().out) == {
        "actors": "3",
        "max_ staleness": "4",
        "groups/s": "5.5",
        "tokens/s": "6,006",
        "steps/h": "707",
        "learner waits": "8%",
        "wait for leases": "9%",
        "wait for weights": "10%",
        "slots used": "11%",
        "mean lag": "1.25",
        "L/B": "1.75",
        "p99": "13",
        "max": "14",
        "over bound": "15.0%",
        "dropped": "16.0%",
        "aborted": "17.0%",
        "wasted": "18.0%",
    }


def columns_of(printed: str) -> dict[str, str]:
    """Return the first row of a right-aligned table by heading; a heading may have two lines."""
    lines = printed.splitlines()
    row = next(index for index, line in enumerate(lines) if line.split()[:2] == ["3", "4"])
    columns: dict[str, str] = {}
    start = 0
    for value in re.finditer(r"\S+", lines[row]):
        heading = " ".join(line[start : value.end()].strip() for line in lines[row - 2 : row]).strip()
        columns[heading] = value.group()
        start = value.end()
    return columns
