"""Dashboard and alert rules use numbers that the services export, and every one of these is drawn."""

import json
import re

import yaml

from docs.generate.monitoring import ACTOR_PANELS, ALERTS, PANELS, alert_rules, grafana_dashboard
from offbeat.actor.page import EXPORTED as OF_ACTOR
from offbeat.learner.reporting.exported import EXPORTED as OF_LEARNER

LEARNERS = {one.name for one in OF_LEARNER}
ACTORS = {one.name for one in OF_ACTOR}
UNDRAWN = {"offbeat_published_version", "offbeat_uptime_seconds", "offbeat_activity_seconds", "offbeat_leases_total"}
UNDRAWN |= {
    "offbeat_epoch",
    "offbeat_refused_messages_total",
    "offbeat_build_info",
    "offbeat_reward_std",
    "offbeat_trained_tokens",
}
UNDRAWN |= {"offbeat_actor_welcomed", "offbeat_actor_judge_seconds_total", "offbeat_actor_episodes_total"}
UNDRAWN |= {"offbeat_actor_turns_total", "offbeat_actor_environment_seconds_total"}


def test_no_number_is_exported_by_both_services() -> None:
    assert LEARNERS.isdisjoint(ACTORS)


def test_dashboard_draws_exported_numbers() -> None:
    assert {name for panel in PANELS for name in panel.names} == LEARNERS - UNDRAWN
    assert {name for panel in ACTOR_PANELS for name in panel.names} == ACTORS - UNDRAWN
    dashboard = json.loads(grafana_dashboard())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(PANELS) + len(ACTOR_PANELS)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    of_actor = r'offbeat_\w+(?<!_total)\{instance=~"\$actor"\}'
    of_actor += r'|rate\(offbeat_\w+_total\{instance=~"\$actor"\}\[\$__rate_interval\]\)'
    # A learner is chosen by its run, which is a label of its build alone.
    of_run = r' \* on \(job, instance\) group_left \(run\) offbeat_build_info\{run=~"\$run"\}'
    for expression in expressions:
        name = re.findall(r"offbeat_\w+", expression)[0]
        assert re.fullmatch(rf"offbeat_\w+{of_run}" if name in LEARNERS else of_actor, expression)


def test_rules_ask_for_exported_numbers() -> None:
    rules = yaml.safe_load(alert_rules())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    for rule in rules:
        assert set(re.findall(r"offbeat_\w+", rule["expr"])) <= LEARNERS | ACTORS
        assert re.fullmatch(r"\d+m", rule["for"])
        assert rule["annotations"]["summary"].endswith(".")
