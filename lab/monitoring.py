"""The page about monitoring, the Grafana dashboard and the alert rules, written from the table of exported numbers."""

from typing import NamedTuple

import msgspec

from offbeat.learner.live.exported import EXPORTED, Exported

_BY_NAME = {exported.name: exported for exported in EXPORTED}


class Panel(NamedTuple):
    """A plot of the dashboard."""

    title: str
    names: tuple[str, ...]
    """Exported numbers, drawn over each other."""
    unit: str
    """Grafana's name of the unit."""


class Alert(NamedTuple):
    """A condition that somebody should hear of."""

    name: str
    expression: str
    lasts: str
    """The time for which it must hold before it is told, in Prometheus's notation."""
    summary: str


PANELS = (
    Panel("Reward", ("offbeat_reward_mean",), "none"),
    Panel("Progress", ("offbeat_policy_version", "offbeat_target_version"), "none"),
    Panel("Policy lag", ("offbeat_policy_lag_mean", "offbeat_policy_lag_max", "offbeat_policy_lag_bound"), "none"),
    Panel("Clipped", ("offbeat_clipped_ratio",), "percentunit"),
    Panel("Spread of the log ratio", ("offbeat_log_ratio_std",), "none"),
    Panel("KL(behavior || policy)", ("offbeat_kl_behavior_nats",), "none"),
    Panel("Effective sample size", ("offbeat_effective_samples_ratio",), "percentunit"),
    Panel("Entropy", ("offbeat_entropy_nats",), "none"),
    Panel("Completion length", ("offbeat_completion_tokens_mean",), "none"),
    Panel("Cut off", ("offbeat_completions_cut_ratio",), "percentunit"),
    Panel("Gradient norm", ("offbeat_gradient_norm",), "none"),
    Panel(
        "Seconds of a step",
        ("offbeat_step_seconds", "offbeat_train_seconds", "offbeat_wait_rollouts_seconds", "offbeat_held_back_seconds"),
        "s",
    ),
    Panel("Actors", ("offbeat_actors",), "none"),
    Panel("Tokens per second", ("offbeat_actor_tokens_per_second",), "none"),
    Panel("Leases of actors", ("offbeat_actor_leases",), "none"),
    Panel("Lag of actors' weights", ("offbeat_actor_policy_lag",), "none"),
    Panel("Groups", ("offbeat_groups_ready", "offbeat_groups_generating"), "none"),
    Panel("Health rules and problems", ("offbeat_health_rules", "offbeat_problems"), "none"),
    Panel("Rollout log", ("offbeat_log_bytes",), "bytes"),
    Panel("MFU", ("offbeat_mfu_ratio",), "percentunit"),
)
ALERTS = (
    Alert("OffbeatLearnerGone", 'up{job="offbeat"} == 0', "2m", "The learner does not answer."),
    Alert("OffbeatNoActors", "sum(offbeat_actors) == 0 or absent(offbeat_actors)", "5m", "No actor is connected."),
    Alert(
        "OffbeatNoProgress",
        "delta(offbeat_policy_version[30m]) == 0 and offbeat_policy_version < offbeat_target_version",
        "5m",
        "No optimizer step for half an hour.",
    ),
    Alert("OffbeatUnhealthy", "offbeat_health_rules > 0", "10m", "A health rule holds; offbeat status tells which."),
    Alert("OffbeatProblem", "offbeat_problems > 0", "5m", "An operator should look; offbeat status tells why."),
    Alert(
        "OffbeatStarved",
        "offbeat_wait_rollouts_seconds / offbeat_step_seconds > 0.5",
        "30m",
        "The learner waits for rollouts half of its time: more actors, or a larger staleness.max_staleness.",
    ),
    Alert("OffbeatAllCut", "offbeat_completions_cut_ratio > 0.9", "15m", "Nearly all completions are cut off."),
)


def monitoring_page(written: str, table: str) -> str:
    """Return `monitoring.md`; `written` says by what it was made, `table` is `exported_lines` as Markdown."""
    parts = [
        written,
        "# Watching a run",
        "`offbeat train` and `offbeat learner` serve a page about the run while it goes on, and log its address: the report's "
        "curves as they grow, the actors, what the next batch waits for, health, the newest samples. It reads only, loads "
        "nothing from elsewhere, and old points of a long run are merged, so that it stays fast. A resumed run is found at the "
        "same address.",
        "The page is at `metrics.bind`, by default a free port of this machine's loopback address: other users of this machine "
        "can read it too, prompts and completions included. There are no keys; for another machine take "
        '`ssh -L 8080:127.0.0.1:PORT`, or bind an address of a network that you trust. `metrics.bind=""` turns it off.',
        "| path | answer |\n| --- | --- |\n"
        "| `/` | the page |\n"
        "| `/state.json` | everything that it shows |\n"
        "| `/metrics` | the numbers below, for Prometheus |\n"
        "| `/healthz` | 200 while the learner's hub works, else 503; unreachable actors are no illness of the learner |\n"
        "| `/readyz` | 200 once weights were published, else 503 |",
        "## Prometheus and Grafana",
        '```yaml\nscrape_configs:\n  - job_name: offbeat\n    static_configs:\n      - targets: ["learner:9400"]  '
        '# metrics.bind = "0.0.0.0:9400"\n```',
        "[monitoring/grafana.json](monitoring/grafana.json) is a dashboard of these numbers to import, "
        "[monitoring/alerts.yaml](monitoring/alerts.yaml) are rules to alert by. All are gauges; `offbeat_*` of a step are the "
        "newest step's.",
        table,
    ]
    return "\n\n".join(parts) + "\n"


def exported_lines() -> list[tuple[str, str, str]]:
    """Return name, label and meaning of each exported number."""
    return [(f"`{one.name}`", f"`{one.label}`" if one.label else "", one.meaning) for one in EXPORTED]


def grafana_dashboard() -> str:
    """Return the dashboard as JSON for Grafana's import."""
    panels = [
        {
            "id": index + 1,
            "type": "timeseries",
            "title": panel.title,
            "description": " ".join(_BY_NAME[name].meaning for name in panel.names),
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "gridPos": {"x": 8 * (index % 3), "y": 8 * (index // 3), "w": 8, "h": 8},
            "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
            "targets": [
                {
                    "refId": chr(ord("A") + number),
                    "expr": f'{name}{{instance=~"$run"}}',
                    "legendFormat": _legend(_BY_NAME[name]),
                }
                for number, name in enumerate(panel.names)
            ],
        }
        for index, panel in enumerate(PANELS)
    ]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"}
    run = {"name": "run", "type": "query", "datasource": {"type": "prometheus", "uid": "${source}"}, "label": "Learner"}
    run |= {"query": "label_values(offbeat_policy_version, instance)", "includeAll": True, "multi": True, "refresh": 2}
    dashboard = {
        "uid": "offbeat",
        "title": "offbeat",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, run]},
        "panels": panels,
    }
    return msgspec.json.format(msgspec.json.encode(dashboard)).decode() + "\n"


def alert_rules() -> str:
    """Return the alert rules as YAML for Prometheus."""
    lines = ["groups:", "  - name: offbeat", "    rules:"]
    for alert in ALERTS:
        lines += [f"      - alert: {alert.name}", f"        expr: {_quoted(alert.expression)}", f"        for: {alert.lasts}"]
        lines += ["        annotations:", f"          summary: {_quoted(alert.summary)}"]
    return "\n".join(lines) + "\n"


def _legend(exported: Exported) -> str:
    short = exported.name.removeprefix("offbeat_")
    return f"{{{{{exported.label}}}}}" if exported.label else short


def _quoted(text: str) -> str:
    """Return a YAML string; JSON's are."""
    return msgspec.json.encode(text).decode()
