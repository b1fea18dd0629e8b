"""Dashboard and alert rules use numbers that the learner exports, and every one of these is drawn."""

import json
import re

import yaml

from offbeat.lab.monitoring import ALERTS, PANELS, alert_rules, grafana_dashboard
from offbeat.learner.live.exported import EXPORTED

NAMES = {one.name for one in EXPORTED}
UNDRAWN = {"offbeat_published_version", "offbeat_uptime_seconds", "offbeat_activity_seconds", "offbeat_leases"}
UNDRAWN |= {"offbeat_epoch", "offbeat_refused_messages", "offbeat_reward_std", "offbeat_trained_tokens"}


def test_dashboard_draws_exported_numbers() -> None:
    assert {name for panel in PANELS for name in panel.names} == NAMES - UNDRAWN
    dashboard = json.loads(grafana_dashboard())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(PANELS)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert all(re.fullmatch(r'offbeat_\w+\{instance=~"\$run"\}', expression) for expression in expressions)


def test_rules_ask_for_exported_numbers() -> None:
    rules = yaml.safe_load(alert_rules())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    for rule in rules:
        assert set(re.findall(r"offbeat_\w+", rule["expr"])) <= NAMES
        assert re.fullmatch(r"\d+m", rule["for"])
        assert rule["annotations"]["summary"].endswith(".")
