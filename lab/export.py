"""`offbeat export`: a model's folder, or an adapter's, from a run's checkpoint, with a model card; no service runs.

The card says what the model was trained on and how, and has its curve and the settings that make it again. It may be published,
so it has no addresses, no secrets, and of local paths their end alone.
"""

import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.common.errors import ServiceError, SettingError, one_line
from offbeat.common.formats import to_toml
from offbeat.common.records.run_folder import CHECKPOINTS, read_run_config, writing
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import resolved_toml
from offbeat.lab.history import RunHistory, fold_rows
from offbeat.lab.run_summary import RunSettings, parse_settings, read_settings
from offbeat.learner.training import checkpoints

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from torch import Tensor


def export(run: Path, *, step: int | None, out: Path | None, only_adapter: bool) -> Path:
    """Write the model of a run's checkpoint to `out`, and return that folder; `step` None: of the newest whole checkpoint.

    The model is in the layout of transformers, with an adapter merged into it. `only_adapter` writes the adapter alone, in the
    layout of peft. Both have a model card, README.md. Raises `SettingError` when that is not possible.
    """
    config = read_run_config(run)
    if only_adapter and not config.lora.rank:
        raise SettingError("--adapter", True, "the run trained all weights (lora.rank = 0)", "Leave it out.")
    folder = find_checkpoint(run, step)
    out = out or run / f"{'adapter' if only_adapter else 'model'}-{folder.name}"
    if out.exists():
        raise SettingError("--out", str(out), "it exists already", "Name another folder, or delete it.")
    # Imported here: torch takes a second, which a mistaken command line need not wait for.
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from offbeat.learner.training.trainer_state import WEIGHTS_FILE

    weights = load_file(folder / WEIGHTS_FILE)
    partial = checkpoints.partial_folder(out)
    with writing(out, "--out"):
        partial.mkdir(parents=True, exist_ok=True)
    try:
        (_write_adapter if only_adapter else _write_model)(config, weights, partial)
    # safetensors reports a full disk as this.
    except SafetensorError as error:
        raise ServiceError(f"the model cannot be written to {out} ({one_line(error)})") from error
    write_card(run, config, checkpoints.version_of(folder), partial, is_adapter=only_adapter)
    checkpoints.put_in_place(out)
    return out


def find_checkpoint(run: Path, step: int | None) -> Path:
    """Return the folder of a run's checkpoint; `step` None: the newest whole one. Raise `SettingError` where there is none."""
    root = run / CHECKPOINTS
    folders = sorted(checkpoints.whole(root), reverse=True)
    if step is None:
        found = next((folder for folder in folders if checkpoints.find_damage(folder) is None), None)
        if found is None:
            raise SettingError("RUN", str(run), "it has no whole checkpoint", "Set train.checkpoint_interval to have some.")
        return found
    folder = checkpoints.checkpoint_folder(root, step)
    if folder not in folders:
        kept = ", ".join(str(checkpoints.version_of(folder)) for folder in reversed(folders)) or "none"
        raise SettingError("--step", step, f"{root} has no checkpoint of this step", f"There are: {kept}.")
    damage = checkpoints.find_damage(folder)
    if damage is not None:
        raise SettingError("--step", step, f"the checkpoint is damaged: {damage}", "Export another step.")
    return folder


def _write_model(config: Config, weights: "dict[str, Tensor]", folder: Path) -> None:
    import torch

    from offbeat.learner.policy.loading import gather_policy, load_policy, write_policy

    module = load_policy(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    write_policy(module.policy, gather_policy(module.policy, is_keeper=True), folder, tokenizer=config.model.path)


def _write_adapter(config: Config, weights: "dict[str, Tensor]", folder: Path) -> None:
    from offbeat.learner.policy.lora import write_adapter

    write_adapter(weights, folder, rank=config.lora.rank, alpha=config.lora.alpha, base_model=config.model.path)


CARD_FILE = "README.md"
NUM_ROWS = 12
"""Largest number of steps in the table of the curve."""
OF_THE_MODEL = (
    *("model", "lora", "data", "task", "environment", "rollout", "staleness", "loss", "advantage", "correction", "critic"),
    *("kl", "reward", "train"),
)
"""Sections of settings that decide what is learned."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def write_card(run: Path, config: Config, version: int, folder: Path, *, is_adapter: bool) -> None:
    """Write the card of the checkpoint after `version` optimizer steps into the folder of its export."""
    history = fold_rows(read_rows(run / ROWS_FILE))
    parts = [_head(config, is_adapter=is_adapter), _facts(config, version, history.groups_by_lag)]
    if curve := list(_curve(history, version)):
        table = ["| step | reward | held-out reward | mean lag |", "|---|---|---|---|", *curve]
        parts.append("\n".join(["## Curve", "", *table]))
    settings = "\n".join(_changed_settings(read_settings(run)))
    command = "offbeat train run.toml"
    lead = f"Put these settings into `run.toml`, and run `{command}`. All others have their defaults."
    parts.append(f"## How to make it again\n\n{lead}\n\n```toml\n{settings}\n```")
    (folder / CARD_FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def push(folder: Path, name: str, api: "HfApi", *, is_private: bool) -> str:
    """Upload an export to the hub as the model `owner/name`, made where it is not there; return its address.

    Raises `ServiceError` where the hub cannot be reached, or refuses.
    """
    try:
        url = api.create_repo(name, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model trained with offbeat")
    except (OSError, ValueError, RuntimeError) as error:
        raise ServiceError(f"{folder} is written, but the hub did not take it ({one_line(error)})") from error
    return str(url)


def check_push(name: str, api: "HfApi") -> None:
    """Raise `SettingError` for a name that is no model's, and where the hub does not know who is asking."""
    if not _HUB_NAME.fullmatch(name):
        raise SettingError("--push", name, "it is not the name of a model on a hub", "Write owner/name.")
    try:
        api.whoami()
    except (OSError, ValueError, RuntimeError) as error:
        cure = "Run `hf auth login`, or set HF_TOKEN; HF_ENDPOINT names another hub."
        raise SettingError("--push", name, f"the hub cannot be asked who you are ({one_line(error)})", cure) from error


def _head(config: Config, *, is_adapter: bool) -> str:
    from huggingface_hub import ModelCardData

    base = config.model.path if _HUB_NAME.fullmatch(config.model.path) else None
    metadata = ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["offbeat", "reinforcement-learning", config.loss.objective.partition("(")[0]],
    )
    return f"---\n{metadata.to_yaml()}\n---"


def _facts(config: Config, version: int, groups_by_lag: Mapping[int, int]) -> str:
    staleness = config.staleness
    bound = f"at most {staleness.max_staleness} optimizer steps ({staleness.staleness_policy})"
    if groups_by_lag:
        mean = sum(lag * count for lag, count in groups_by_lag.items()) / sum(groups_by_lag.values())
        bound += f"; measured over the whole run: {mean:.2f} on average, {max(groups_by_lag)} at most"
    loss, train = config.loss, config.train
    facts = {
        "Base model": f"`{_public(config.model.path)}`",
        "Training data": f"`{_public(config.data.train_data)}`",
        "Reward": f"`{config.task.environment or config.task.reward}`",
        "Objective": f"{loss.objective}, anchored at the {loss.anchor} policy",
        "Age of the rollouts": bound,
        "Optimizer steps": f"{version} of {train.groups_per_step} groups with {config.rollout.group_size} completions each",
        "Learning rate": f"{train.learning_rate:g}" + (f", LoRA of rank {config.lora.rank}" if config.lora.rank else ""),
        "Made with": f"offbeat {importlib.metadata.version('offbeat')}",
    }
    lines = [f"| {name} | {value} |" for name, value in facts.items()]
    lead = "This model was trained with asynchronous reinforcement learning."
    return "\n".join([f"# {_public(config.model.path)}, trained with offbeat", "", lead, "", "| | |", "|---|---|", *lines])


def _curve(history: RunHistory, version: int) -> Iterator[str]:
    steps = {row.policy_version: row for row in history.steps if row.policy_version <= version}
    held_out = {at: reward for at, reward in history.held_out_rewards.items() if at <= version}
    evaluated = list(held_out)
    for at in _spread(evaluated if len(evaluated) > 2 else sorted({*steps, *evaluated})):
        row = steps.get(at)
        numbers = [row.number("reward/mean") if row else None, held_out.get(at), row.number("lag/mean") if row else None]
        yield f"| {at} | {' | '.join('' if number is None else f'{number:.3f}' for number in numbers)} |"


def _spread(versions: Sequence[int]) -> list[int]:
    """Return at most `NUM_ROWS` of the versions, the first and the last among them."""
    if len(versions) <= NUM_ROWS:
        return list(versions)
    last = len(versions) - 1
    return [versions[round(place * last / (NUM_ROWS - 1))] for place in range(NUM_ROWS)]


def _changed_settings(settings: RunSettings) -> Iterator[str]:
    """Yield the lines of a TOML file with the settings of the run that differ from their defaults."""
    defaults = parse_settings(resolved_toml(Config()))
    yield f"run.seed = {settings.setting('run', 'seed') or 0}"
    for section in OF_THE_MODEL:
        of_section = settings.sections.get(section)
        changed = {
            name: value
            for name, value in (of_section if isinstance(of_section, dict) else {}).items()
            if value != defaults.setting(section, name)
        }
        if changed:
            yield f"\n[{section}]"
        for name, value in changed.items():
            # Text, which may begin with a slash as Qwen3's /no_think does.
            yield f"{name} = {to_toml(value if name == 'system_prompt' else _public(value))}"


def _public(value: object) -> object:
    """Return a setting's value with the end of each absolute path in it, and all else as it is."""
    match value:
        case dict():
            return {key: _public(item) for key, item in value.items()}
        case list():
            return [_public(item) for item in value]
        case str() if Path(value).is_absolute():
            return "/".join(Path(value).parts[1:][-2:])
        case _:
            return value
