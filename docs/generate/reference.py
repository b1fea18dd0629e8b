"""The reference pages of `docs/`: metrics, settings, monitoring, resuming and health, written from the code's own tables.

python -m docs.generate.reference docs
"""

import inspect
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import get_args

import msgspec

from docs.generate.monitoring import alert_rules, exported_lines, grafana_dashboard, monitoring_page
from offbeat.actor.page import EXPORTED as OF_ACTOR
from offbeat.common.records import rows
from offbeat.common.records.exported import Exported
from offbeat.common.records.step_metrics import ROUTING_METRICS, STEP_METRICS, Metric
from offbeat.common.settings.loading import explanations, setting_names
from offbeat.common.settings.resume_rules import OUTCOMES, RULES, Outcome
from offbeat.common.settings.section import field_docstrings
from offbeat.learner.diagnostics.health import CLEAR_STEPS
from offbeat.learner.diagnostics.health import RULES as HEALTH_RULES
from offbeat.learner.dispatch.watchdog import CAUSES, LATE_FACTOR, LATE_S, NUM_WAITS
from offbeat.learner.reporting.exported import EXPORTED as OF_LEARNER

_WRITTEN = "<!-- Written by `python -m docs.generate.reference docs`; change the code's docstrings instead. -->"


def metrics_page() -> str:
    """Return `metrics.md`: the kinds of rows in `metrics.jsonl` and their fields, then the metrics of steps and routing."""
    parts = [
        _WRITTEN,
        "# Metrics",
        "A run appends one JSON object per line to `metrics.jsonl` in its folder. Every row has its `kind` and the `time` at "
        "which it was written, in seconds since the epoch. The numbers of `step` and `eval` rows also go to TensorBoard, and "
        "to Weights & Biases, MLflow and trackio where you ask for them ([monitoring](monitoring.md#trackers-of-experiments)). "
        "A field marked *optional* is absent where it does not apply.",
        "## Rows",
    ]
    for row_type in rows.ROW_TYPES:
        kind = row_type.__struct_config__.tag
        parts += [f"### `{kind}`", inspect.cleandoc(row_type.__doc__ or ""), _fields_table(row_type)]
    parts += [
        "### `ledger` of the final row",
        inspect.cleandoc(rows.LedgerSums.__doc__ or ""),
        _fields_table(rows.LedgerSums),
        "## Metrics of a step",
        "`<lag>` is a bucket of policy lags: `0`, `1`, `2`, `3-4`, `5-8` or `9+`. mu is the behavior policy, pi_old the "
        "proximal one, pi the current one and s a completion's sequence ratio, `exp(mean over its tokens of log pi/anchor)`.",
        _metrics_table(STEP_METRICS),
        "## Metrics of routing",
        "In `<lag>`, `3-4` is written `3_4`, `5-8` is `5_8` and `9+` is `9_up`.",
        _metrics_table(ROUTING_METRICS),
    ]
    return "\n\n".join(parts) + "\n"


def settings_page() -> str:
    """Return `settings.md`: every setting with the values it takes, its default and its meaning."""
    parts = [
        _WRITTEN,
        "# Settings",
        "Give settings in a TOML file, or as `section.key=value` on the command line, where the section may be left out if "
        "only one has the key: `num_steps=50`. `offbeat explain SETTING` prints the text of a setting or a section, "
        "`offbeat explain` all of them.",
    ]
    for section, settings in groupby(explanations(), key=lambda row: row.setting.partition(".")[0]):
        table = [(f"`{row.setting}`", f"`{row.default}`", row.type, row.text) for row in settings]
        parts += [f"## {section}", _table(("setting", "default", "values", "meaning"), table)]
    return "\n\n".join(parts) + "\n"


def resuming_page() -> str:
    """Return `resuming.md`: what may differ when a run is resumed. Raises `ValueError` for a setting without a rule."""
    if missing := [setting for setting in setting_names() if setting not in OUTCOMES]:
        raise ValueError(f"no rule of common/settings/resume_rules.py names {', '.join(missing)}")
    parts = [
        _WRITTEN,
        "# Resuming a run",
        "A run records its inputs in `identity.json` and `prompts.bin` in its folder, and in every checkpoint: all settings, "
        "the versions of the software, and hashes of the model, the tokenizer, the chat template, each prompt, and the source "
        "files of your own functions. `run.resume=true` compares all of it before anything is written.",
        "*refused*: the learner does not start, and names the setting, both values and the fix. *recorded*: the run continues, "
        "with a line in the log and a `resumed_with_changes` event in `metrics.jsonl` for each difference. *ignored*: nothing "
        "is reported.",
        "Weight files are hashed completely, which takes 0.1 s of CPU time per GB and reads what the learner loads next. For "
        "your own functions, offbeat hashes the file that they are in and the modules that it imports from the same folder "
        "tree. It does not hash installed packages, or modules that are imported by a name computed at run time.",
    ]
    for outcome in get_args(Outcome):
        lines = [(", ".join(f"`{name}`" for name in rule.names), rule.why) for rule in RULES if rule.outcome == outcome]
        parts += [f"## {outcome.capitalize()}", _table(("setting, or content", "reason"), lines)]
    return "\n\n".join(parts) + "\n"


def health_page() -> str:
    """Return `health.md`: the health rules of steps, and the reasons for which a batch can be late."""
    rules = [(f"`{rule.name}`", rule.condition, rule.hint) for rule in HEALTH_RULES]
    causes = [(f"`{name}`", cause.condition, cause.hint) for name, cause in CAUSES.items()]
    parts = [
        _WRITTEN,
        "# Health",
        "A run reports its own problems: once in the log, as a `health` event in `metrics.jsonl`, as a line in the terminal "
        "and in `offbeat status` while the problem lasts, and in the report. The event `health_cleared` ends it.",
        "## Steps",
        f"Checked after each optimizer step. A rule is cleared after {CLEAR_STEPS} steps in a row without its condition.",
        _table(("rule", "condition", "hint"), rules),
        "## Late batches",
        f"While the learner waits for a batch, it looks for the reason. It reports the reason after {LATE_S:g} s, but a common "
        f"one only once the wait also exceeds {LATE_FACTOR:g} times the mean of the last {NUM_WAITS} waits. If several "
        "reasons apply, it reports the first of this table. The next batch clears it. `run.no_actor_timeout_s` and "
        "`run.no_group_timeout_s` limit the wait, and then end the run with the reason.",
        _table(("reason", "condition", "hint"), causes),
    ]
    return "\n\n".join(parts) + "\n"


def write_pages(folder: Path) -> list[Path]:
    """Write all pages into `folder` and return their paths."""
    pages = {
        "metrics.md": metrics_page(),
        "settings.md": settings_page(),
        "resuming.md": resuming_page(),
        "health.md": health_page(),
        "monitoring.md": monitoring_page(_WRITTEN, _exported_table(OF_LEARNER), _exported_table(OF_ACTOR)),
        "monitoring/grafana.json": grafana_dashboard(),
        "monitoring/alerts.yaml": alert_rules(),
    }
    (folder / "monitoring").mkdir(exist_ok=True)
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in pages]


def _fields_table(struct: type[msgspec.Struct]) -> str:
    """Return the fields of a struct, without `time`, which every row has."""
    texts = field_docstrings(struct)
    lines = [
        (f"`{field.name}`", texts.get(field.name, ""), "" if field.required else "optional")
        for field in msgspec.structs.fields(struct)
        if field.name not in ("time", "metrics")
    ]
    if "metrics" in struct.__struct_fields__:
        lines.append(("`area/name`", "One field for each metric, see below.", ""))
    return _table(("field", "meaning", ""), lines)


def _exported_table(exported: Iterable[Exported]) -> str:
    return _table(("number", "label", "meaning"), exported_lines(exported))


def _metrics_table(metrics: Iterable[Metric]) -> str:
    lines: list[tuple[str, ...]] = []
    for metric in metrics:
        lines.append((f"`{metric.name}`", metric.unit, metric.meaning, metric.condition))
    return _table(("name", "unit", "meaning", "present where"), lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a bar within a cell is escaped."""
    cells = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
