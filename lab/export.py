"""`offbeat export`: a model's folder, or an adapter's, from a run's checkpoint; no service runs."""

from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.common.errors import SettingError
from offbeat.common.records.run_folder import CHECKPOINTS, read_run_config
from offbeat.common.settings.config import Config
from offbeat.lab.model_card import write_card
from offbeat.learner.training import checkpoints

if TYPE_CHECKING:
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
    weights = _read_weights(folder)
    partial = checkpoints.partial_folder(out)
    partial.mkdir(parents=True, exist_ok=True)
    (_write_adapter if only_adapter else _write_model)(config, weights, partial)
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


def _read_weights(folder: Path) -> "dict[str, Tensor]":
    # Imported here: torch takes a second, which a mistaken command line need not wait for.
    from safetensors.torch import load_file

    from offbeat.learner.training.trainer_state import WEIGHTS_FILE

    return load_file(folder / WEIGHTS_FILE)


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
