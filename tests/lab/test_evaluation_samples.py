"""`offbeat samples --evaluation` shows samples of evaluations as data, the newest first."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EvalSampleRow
from offbeat.common.records.writer import MetricsWriter
from offbeat.deploy.cli.main import make_app
from offbeat.lab.samples import SamplesRequest, print_samples, read_evaluation_samples


def sample(version: int, prompt_id: int, reward: float, completion: str = "ab") -> EvalSampleRow:
    return EvalSampleRow(
        time=float(version),
        policy_version=version,
        prompt_id=prompt_id,
        reward=reward,
        finish_reason="length",
        num_tokens=2,
        prompt="p",
        completion=completion,
    )


def run_with(folder: Path, *samples: EvalSampleRow) -> Path:
    with MetricsWriter(folder) as metrics:
        for row in samples:
            metrics.write(row)
    return folder


def chosen(run: Path, request: SamplesRequest) -> list[tuple[int, int]]:
    return [(row.policy_version, row.prompt_id) for row in read_evaluation_samples(run, request)]


def test_samples_are_chosen_by_order_version_and_prompt(tmp_path: Path) -> None:
    run = run_with(tmp_path, sample(0, 0, 0.5), sample(0, 4, 0.0), sample(10, 4, 0.25), sample(10, 0, 1.0))
    assert chosen(run, SamplesRequest()) == [(10, 0), (10, 4), (0, 0), (0, 4)]
    assert chosen(run, SamplesRequest(order="best", num_groups=2)) == [(10, 0), (0, 0)]
    assert chosen(run, SamplesRequest(order="worst", num_groups=2)) == [(0, 4), (10, 4)]
    assert chosen(run, SamplesRequest(step=0)) == [(0, 0), (0, 4)]
    assert chosen(run, SamplesRequest(prompt_id=4)) == [(10, 4), (0, 4)]


def test_version_that_was_evaluated_again_after_a_restart_is_listed_once(tmp_path: Path) -> None:
    run = run_with(tmp_path, sample(10, 0, 0.0, "first"), sample(10, 0, 1.0, "again"))
    assert [row.completion for row in read_evaluation_samples(run, SamplesRequest())] == ["again"]


def test_run_without_such_samples_says_how_to_have_some(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"it has no metrics\.jsonl"):
        read_evaluation_samples(tmp_path, SamplesRequest())
    with pytest.raises(SettingError, match=r"evaluation\.interval"):
        read_evaluation_samples(run_with(tmp_path, sample(0, 0, 0.0)), SamplesRequest(step=7))


def test_text_of_a_model_is_printed_as_data() -> None:
    output = io.StringIO()
    row = msgspec.structs.replace(sample(3, 1, 0.5, "[bold]a[/bold]\x1b[2J"), data_set="ma\x07th")
    print_samples(Console(file=output, width=200, force_terminal=True, color_system=None), [row])
    shown = output.getvalue()
    assert "evaluation at version 3  prompt 1 of ma\\x07th" in shown
    assert "reward 0.5  2 tokens, cut at the limit" in shown
    assert "[bold]a[/bold]\\x1b[2J" in shown and "\x1b[2J" not in shown and "\x07" not in shown


def test_command_prints_samples_of_evaluations_as_text_and_json(tmp_path: Path) -> None:
    run = run_with(tmp_path, sample(0, 0, 0.5), sample(10, 0, 1.0, "newest"))
    result = CliRunner().invoke(make_app(), ["samples", str(run), "--evaluation", "--groups", "1"])
    assert "evaluation at version 10" in result.output and "newest" in result.output
    result = CliRunner().invoke(make_app(), ["samples", str(run), "--evaluation", "--step", "0", "--json"])
    assert msgspec.json.decode(result.output, type=list[EvalSampleRow]) == [sample(0, 0, 0.5)]


def test_json_on_a_terminal_commands_nothing_and_is_the_same_json(tmp_path: Path) -> None:
    text = "a\x9b2J\u202eb\U000e0001 ä 漢"
    run = run_with(tmp_path, sample(0, 0, 0.5, text))
    output = CliRunner().invoke(make_app(), ["samples", str(run), "--evaluation", "--json"]).output
    assert all(line.isprintable() for line in output.split("\n")) and "ä 漢" in output
    assert msgspec.json.decode(output, type=list[EvalSampleRow]) == [sample(0, 0, 0.5, text)]
