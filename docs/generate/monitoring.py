"""The page about monitoring, the Grafana dashboard and the alert rules, written from the table of exported numbers."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from offbeat.actor.page import EXPORTED as OF_ACTOR
from offbeat.common.records.exported import TURNED_WITHIN_S, Exported
from offbeat.learner.reporting.exported import EXPORTED as OF_LEARNER

_BY_NAME = {exported.name: exported for exported in (*OF_LEARNER, *OF_ACTOR)}


class Panel(NamedTuple):
    """A plot of the dashboard."""

    title: str
    names: tuple[str, ...]
    """Exported numbers, drawn over each other."""
    unit: str
    """Grafana's name of the unit."""
    is_sum: bool = False
    """Draw counters by their values, instead of by their rates."""


class Alert(NamedTuple):
    """A condition that should alert somebody."""

    name: str
    expression: str
    lasts: str
    """The time for which it must hold before the alert fires, in Prometheus's notation."""
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
    Panel("Actors", ("offbeat_actors", "offbeat_actors_wanted"), "none"),
    Panel("Spare lease slots", ("offbeat_actor_spare_ratio",), "percentunit"),
    Panel("Hours of all actors", ("offbeat_actor_hours_total",), "none", is_sum=True),
    Panel("Tokens per second", ("offbeat_actor_tokens_per_second",), "none"),
    Panel("Leases of actors", ("offbeat_actor_leases",), "none"),
    Panel("Lag of actors' weights", ("offbeat_actor_policy_lag",), "none"),
    Panel("Groups", ("offbeat_groups_ready", "offbeat_groups_generating"), "none"),
    Panel("Health rules and problems", ("offbeat_health_rules", "offbeat_problems"), "none"),
    Panel("Rollout log", ("offbeat_log_bytes",), "bytes"),
    Panel("MFU", ("offbeat_mfu_ratio",), "percentunit"),
)
ACTOR_PANELS = (
    Panel("Actors: time of the loop", ("offbeat_actor_loop_seconds_total",), "percentunit"),
    Panel("Actors: tokens per second", ("offbeat_actor_generated_tokens_total",), "none"),
    Panel("Actors: groups per second", ("offbeat_actor_groups_total",), "none"),
    Panel("Actors: completions and leases", ("offbeat_actor_running_completions", "offbeat_actor_held_leases"), "none"),
    Panel("Actors: policy version", ("offbeat_actor_policy_version",), "none"),
    Panel("Actors: silence", ("offbeat_actor_silence_seconds", "offbeat_actor_reward_trouble_seconds"), "s"),
    Panel("Actors: judge's requests per second", ("offbeat_actor_judge_requests_total",), "none"),
    Panel("Actors: episodes", ("offbeat_actor_open_episodes",), "none"),
)
"""Plots of the numbers that actors serve themselves."""
ALERTS = (
    Alert("OffbeatLearnerGone", 'up{job="offbeat"} == 0', "2m", "The learner does not answer."),
    Alert("OffbeatNoActors", "sum(offbeat_actors) == 0 or absent(offbeat_actors)", "5m", "No actor is connected."),
    Alert(
        "OffbeatNoProgress",
        "delta(offbeat_policy_version[30m]) == 0 and offbeat_policy_version < offbeat_target_version",
        "5m",
        "No optimizer step for half an hour.",
    ),
    Alert("OffbeatUnhealthy", "offbeat_health_rules > 0", "10m", "A health rule reports a problem; see offbeat status."),
    Alert("OffbeatProblem", "offbeat_problems > 0", "5m", "A problem needs an operator; see offbeat status."),
    Alert(
        "OffbeatStarved",
        "offbeat_wait_rollouts_seconds / offbeat_step_seconds > 0.5",
        "30m",
        "The learner waits for rollouts half of its time: add actors, or raise staleness.max_staleness.",
    ),
    Alert("OffbeatActorHangs", "offbeat_actor_silence_seconds > 60", "2m", "The loop of an actor is stuck."),
    Alert("OffbeatActorAlone", "offbeat_actor_welcomed == 0", "10m", "An actor cannot find its learner."),
    Alert(
        "OffbeatNoRewards", "offbeat_actor_reward_trouble_seconds > 300", "5m", "An actor waits for rewards; its log says why."
    ),
    Alert("OffbeatAllCut", "offbeat_completions_cut_ratio > 0.9", "15m", "Nearly all completions are cut off."),
)


_TRACKERS = (
    "## Trackers of experiments",
    "The numbers of `step` and `eval` rows ([metrics](metrics.md)) also go to TensorBoard, in the run folder, and under the "
    "same names, plotted over `policy_version`, to each tracker that you select:",
    """\
| setting, and tracker | extra | where the numbers go |
| --- | --- | --- |
| `metrics.wandb_project`: [Weights & Biases](https://wandb.ai) | `wandb` | W&B's server, after `wandb login`; \
`WANDB_BASE_URL` names another server, `WANDB_MODE=offline` keeps the numbers in the run folder |
| `metrics.mlflow_experiment`: [MLflow](https://mlflow.org) | `mlflow` | `MLFLOW_TRACKING_URI`: a server, or a database such \
as `sqlite:////home/me/mlflow.db`; without it `mlflow.db` in the working directory |
| `metrics.trackio_project`: [trackio](https://github.com/gradio-app/trackio) | `trackio` | a database in `TRACKIO_DIR`, by \
default `~/.cache/huggingface/trackio`, or the one named by `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID` |""",
    'Install a tracker with its extra: `pip install "offbeat[mlflow]"`. '
    "Put names and passwords into the learner's environment, in "
    "the tracker's own variables. offbeat also sends the settings of the run, with secrets masked, and W&B gets a table of the "
    "newest samples. The run has the name of its folder, and in a sweep its values too: `max_staleness=4 seed=1`. The folder "
    "stores the run's id in the tracker, and a resumed run continues under it.",
    "Each tracker runs in a process alongside the learner, which never waits for it. If a tracker cannot be reached, or hangs, "
    "offbeat logs a warning and a `tracker_failed` event. Up to 1,000 rows wait; then the oldest are lost. At the end of the "
    "run trackers have 10 s for the last rows. Their output is in `logs/` in the run folder.",
)


def monitoring_page(written: str, learner_table: str, actor_table: str) -> str:
    """Return `monitoring.md`; `written` says by what it was made, the tables are Markdown of `exported_lines`."""
    parts = [
        written,
        "# Watching a run",
        "`offbeat train` and `offbeat learner` serve a live page about the run and log its address. It shows the "
        "state of the run every two seconds: the actors, what the next batch waits for, and health. Below is the content of "
        "`offbeat report`. While the page is open, another process rewrites it every ten seconds, or less often: on average it "
        "uses at most a tenth of a processor. The page is read-only and loads nothing from elsewhere. A resumed run keeps its "
        "address.",
        "The page is served at `metrics.bind`, by default on a free port of loopback. Other users of the machine can read it "
        "too, including prompts and completions, because it has no keys. To read it from another machine, use "
        '`ssh -L 8080:127.0.0.1:PORT`, or bind an address on a network that you trust. `metrics.bind=""` turns it off.',
        "| path | answer |\n| --- | --- |\n| `/` | the page |\n| `/state.json` | the state of the run |\n"
        "| `/report.html` | the newest report, without its head |\n"
        "| `/metrics` | the learner's numbers below, for Prometheus |\n"
        "| `/healthz` | 200 while the learner's hub works, otherwise 503; an unreachable actor does not make the learner "
        "unhealthy |\n"
        "| `/readyz` | 200 once weights were published, otherwise 503 |",
        "## Actors",
        "The page and `offbeat status` show every actor. With `metrics.actor_bind`, each actor also serves its own numbers to "
        "monitors, from the moment its engine is loaded. For several actors on one machine use port 0; each logs its address.",
        "| path | answer |\n| --- | --- |\n"
        "| `/metrics` | the actors' numbers below, as of the newest heartbeat |\n"
        f"| `/healthz` | 200 if the actor's loop ran within the last {TURNED_WITHIN_S:g} s, or loads weights within "
        "`weights.timeout_s`; otherwise 503. An unreachable learner does not make the actor unhealthy: it waits |\n"
        "| `/readyz` | 200 while the learner knows the actor and the actor has weights, otherwise 503 |",
        "## Prometheus and Grafana",
        '```yaml\nscrape_configs:\n  - job_name: offbeat\n    static_configs:\n      - targets: ["learner:9400"]  '
        '# metrics.bind = "0.0.0.0:9400"\n  - job_name: offbeat-actors\n    static_configs:\n'
        '      - targets: ["actor-0:9401", "actor-1:9401"]  # metrics.actor_bind = "0.0.0.0:9401"\n```',
        "Import [monitoring/grafana.json](monitoring/grafana.json) for a Grafana dashboard of these numbers, and load "
        "[monitoring/alerts.yaml](monitoring/alerts.yaml) for alerts. Numbers whose names end with `_total` are counters: of "
        "leases and actors' hours since the beginning of the run, of all else since the process started. All others "
        "are gauges. Numbers of a step are those of the newest step.",
        "Prometheus 2.42 has scraped a real run with these rules: 28 of the 30 panels had data, and the other two need a judge "
        "or an environment. Grafana itself has not shown the dashboard yet; Grafana's own library (`grafana-foundation-sdk`) "
        "reads the file without a loss.",
        "### Learner",
        learner_table,
        "### Actor",
        actor_table,
        *_TRACKERS,
        "## Logs",
        "Every service writes its log to stderr. `RUN/logs` keeps the logs of the learner and of all services that `offbeat "
        "train` starts. Each event is one line: `time level service message`, times in UTC. With the environment variable "
        "`OFFBEAT_LOG_FORMAT=json`, each event is a JSON object with `time`, `level`, `service`, `logger`, `message` and "
        "`exception`, for Loki and the like. `OFFBEAT_LOG_LEVEL` is `debug`, `info` (the default), `warning` or `error`.",
        "## Traces",
        "`offbeat trace RUN` writes `RUN/trace.json` for [Perfetto](https://ui.perfetto.dev): the 20 groups that took "
        "longest, or those of `--step N` or `--lease N`, together with the learner's waits, steps and weight updates. It "
        "reads the rollout log and `metrics.jsonl`, also of a running job. The stages of a group are *wait* (sending the "
        "lease, and waiting for weights), *generate*, *reward*, *queue* (in the learner's buffer) and *train*. All timestamps "
        "are the learner's: an actor reports durations, which are counted back from the moment its group arrived.",
        "`offbeat trace RUN --otlp http://collector:4318` sends the same spans to an OTLP collector (extra `otel`). Each "
        "group is a trace whose id is derived from run and lease. Set headers and certificates with "
        "`OTEL_EXPORTER_OTLP_HEADERS` and the like.",
    ]
    return "\n\n".join(parts) + "\n"


def exported_lines(exported: Iterable[Exported]) -> list[tuple[str, str, str]]:
    """Return name, label and meaning of each exported number."""
    return [(f"`{one.name}`", f"`{one.label}`" if one.label else "", one.meaning) for one in exported]


def grafana_dashboard() -> str:
    """Return the dashboard as JSON for Grafana's import."""
    chosen = [("run", panel) for panel in PANELS] + [("actor", panel) for panel in ACTOR_PANELS]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"}
    dashboard = {
        "uid": "offbeat",
        "title": "offbeat",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                source,
                _choice("run", "Run", "label_values(offbeat_build_info, run)"),
                _choice("actor", "Actor", "label_values(offbeat_actor_welcomed, instance)"),
            ]
        },
        "panels": [_panel(index, variable, panel) for index, (variable, panel) in enumerate(chosen)],
    }
    return msgspec.json.format(msgspec.json.encode(dashboard)).decode() + "\n"


def alert_rules() -> str:
    """Return the alert rules as YAML for Prometheus."""
    lines = ["groups:", "  - name: offbeat", "    rules:"]
    for alert in ALERTS:
        lines += [f"      - alert: {alert.name}", f"        expr: {_quoted(alert.expression)}", f"        for: {alert.lasts}"]
        lines += ["        annotations:", f"          summary: {_quoted(alert.summary)}"]
    return "\n".join(lines) + "\n"


def _choice(variable: str, label: str, query: str) -> dict[str, Any]:
    """Return a variable of the dashboard: the values that a query finds."""
    return {
        "name": variable,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "label": label,
        "query": query,
        "includeAll": True,
        "multi": True,
        "refresh": 2,
    }


def _panel(index: int, variable: str, panel: Panel) -> dict[str, Any]:
    """Return a plot of the processes that `variable` chooses."""
    return {
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
                "expr": _expression(name, variable, panel),
                "legendFormat": _legend(name, variable),
            }
            for number, name in enumerate(panel.names)
        ],
    }


def _expression(name: str, variable: str, panel: Panel) -> str:
    """Return the query of a number: a counter by its rate per second, a learner's numbers by the id of its run."""
    query = name if variable == "run" else f'{name}{{instance=~"${variable}"}}'
    if name.endswith("_total") and not panel.is_sum:
        query = f"rate({query}[$__rate_interval])"
    return query if variable == "actor" else f'{query} * on (job, instance) group_left (run) offbeat_build_info{{run=~"$run"}}'


def _legend(name: str, variable: str) -> str:
    label = _BY_NAME[name].label
    told = f"{{{{{label}}}}}" if label else name.removeprefix("offbeat_")
    return f"{{{{{'instance' if variable == 'actor' else 'run'}}}}} {told}"


def _quoted(text: str) -> str:
    """Return a YAML string; JSON's are."""
    return msgspec.json.encode(text).decode()
