"""`offbeat samples --evaluation`: completions of held-out prompts, read from a run's rows."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EvalSampleRow
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.lab.samples import MAX_TEXT, Request, print_text, printable


def read_evaluation_samples(run: Path, request: Request) -> list[EvalSampleRow]:
    """Return at most `num_groups` samples of the run's evaluations; raise `SettingError` where there are none to return.

    `request.step` is the policy version that was evaluated. The newest evaluation comes first among equals.
    """
    file = run / ROWS_FILE
    if not file.is_file():
        raise SettingError("RUN", str(run), f"it has no {ROWS_FILE}", "Name the folder of a run.")
    rows = (row for row in read_rows(file) if isinstance(row, EvalSampleRow))
    # A version that was evaluated again after a restart is listed once.
    samples = {(row.policy_version, row.prompt_id): row for row in rows}
    found = [
        row
        for row in sorted(samples.values(), key=lambda row: (-row.policy_version, row.prompt_id))
        if request.step in (None, row.policy_version) and request.prompt_id in (None, row.prompt_id)
    ]
    if not found:
        cure = "Evaluations need task.eval_data and evaluation.interval. Ask for a version and a prompt that were evaluated."
        raise SettingError("RUN", str(run), "its rows have no sample of such an evaluation", cure)
    if request.order == "best":
        found.sort(key=lambda row: -row.reward)
    elif request.order == "worst":
        found.sort(key=lambda row: row.reward)
    return found[: request.num_groups]


def print_evaluation_samples(console: Console, samples: Sequence[EvalSampleRow], *, full: bool = False) -> None:
    """Print the samples. Texts are data: control characters are escaped, and markup stands as it is."""
    limit = None if full else MAX_TEXT
    for row in samples:
        of_set = "" if row.data_set is None else f" of {printable(row.data_set)}"
        console.rule(Text(f"evaluation at version {row.policy_version}  prompt {row.prompt_id}{of_set}"), align="left")
        print_text(console, row.prompt, limit, style="dim")
        ended = "cut at the limit" if row.finish_reason == "length" else "stopped"
        console.print(Text(f"reward {row.reward:g}  {row.num_tokens} tokens, {ended}", style="bold"))
        print_text(console, row.completion, limit)
        console.print()
