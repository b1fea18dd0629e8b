"""The plan gives each process its GPU and its share of the memory, on imaginary machines."""

import re
import shlex
from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.deploy.local.memory import at_rest, engine_need, learner_need, offloaded_bytes
from offbeat.deploy.local.model_sizes import ModelSizes, sizes_of
from offbeat.deploy.local.plan import DevicePlan, DeviceTurns, Engine, make_plan
from tests.deploy.local.machines import GIB, QWEN3_8B, QWEN3_600M, TINY, machine

ROOT = Path(__file__).parents[3]
README = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
FILES = {
    path.parent.name: path for path in [ROOT / "deploy/local/quickstart/quickstart.toml", *ROOT.glob("examples/*/run.toml")]
}
SIZES = {"Qwen/Qwen3-0.6B": sizes_of(QWEN3_600M), "Qwen/Qwen3-8B": sizes_of(QWEN3_8B)}
BASE = ["model.path=m", "data.train_data=d", "train.activation_checkpointing=true"]


def config_of(name: str, folder: Path) -> Config:
    if name != "README":
        return load(FILES[name])
    (toml,) = README
    (folder / "run.toml").write_text(toml)
    return load(folder / "run.toml")


def sizes_for(config: Config) -> ModelSizes:
    return SIZES.get(config.model.path, sizes_of(TINY))


def planned(*overrides: str, gpus: int, gib: float = 80.0, sizes: ModelSizes | None = SIZES["Qwen/Qwen3-0.6B"]) -> DevicePlan:
    return make_plan(load(None, [*BASE, *overrides]), machine(gpus, gib), sizes)


def assert_that_it_fits(plan: DevicePlan, config: Config, sizes: ModelSizes) -> None:
    """The sums of each GPU stay within it, and each actor has room for its model."""
    option = config.actor.engine_options.get("gpu_memory_utilization", 0.92)
    for index, gpu in enumerate(plan.gpus):
        shares = [actor.share or option for actor in plan.actors if index in actor.gpus]
        learner = learner_need(config, sizes).num_bytes if index in plan.learner else 0.0
        assert learner + sum(shares) * gpu.total_bytes <= gpu.free_bytes
        assert all(share * gpu.total_bytes >= engine_need(config, sizes).num_bytes for share in shares)


RUNS = [(1, 24.0), (1, 48.0), (1, 80.0), (2, 24.0), (2, 80.0), (8, 24.0), (8, 80.0)]


@pytest.mark.parametrize(("num_gpus", "gib"), RUNS)
@pytest.mark.parametrize("name", ["README", "quickstart", "gsm8k_1gpu", "gsm8k_cpu", "own_code", "rewards"])
def test_config_that_names_no_gpu_fits_every_machine_with_one(name: str, num_gpus: int, gib: float, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    sizes = sizes_for(config)
    plan = make_plan(config, machine(num_gpus, gib), sizes)
    assert_that_it_fits(plan, config, sizes)
    assert plan.warnings == ()
    assert len(plan.actors) == config.launch.num_actors
    used = [*plan.learner, *(gpu for actor in plan.actors for gpu in actor.gpus)]
    assert len(set(used)) == min(num_gpus, len(used)), "nothing is shared while a GPU is idle"
    assert plan.can_use_nccl == (len(set(used)) == len(used))


@pytest.mark.parametrize("name", ["gsm8k_8gpu", "gspo_roll", "long_32k"])
def test_config_for_eight_gpus_fits_those_of_80_gb_and_is_refused_by_others(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    sizes = sizes_for(config)
    plan = make_plan(config, machine(8), sizes)
    assert_that_it_fits(plan, config, sizes)
    assert (plan.learner, [actor.gpus for actor in plan.actors]) == ((0, 1, 2, 3), [(4,), (5,), (6,), (7,)])
    assert (plan.learner_bytes, plan.can_use_nccl) == (None, True)
    with pytest.raises(SettingError, match=r"launch.learner_gpus = \[0, 1, 2, 3\].*has 2 GPUs.*no GPU 2"):
        make_plan(config, machine(2), sizes)
    with pytest.raises(SettingError, match=r"a learner process needs weights .* = [0-9.]+ GiB, and the GPU has 24.0 GiB free"):
        make_plan(config, machine(8, 24), sizes)


def test_learner_comes_first_and_actors_get_the_rest_in_turn() -> None:
    plan = planned("launch.num_actors=3", "launch.learner_processes=2", "train.zero_stage=1", gpus=4)
    assert plan.learner == (0, 1)
    assert [actor.gpus for actor in plan.actors] == [(2,), (3,), (2,)]
    # Two on one GPU divide what is not kept back; the one alone has the engine's own share.
    assert [actor.share for actor in plan.actors] == [0.47, None, 0.47]
    assert plan.learner_bytes is None, "no actor is beside a learner process"
    assert [plan.sharers(index) for index in range(3)] == [(False, (2,)), (False, ()), (False, (0,))]


def test_actors_share_the_learners_gpu_only_where_there_is_no_other() -> None:
    plan = planned("launch.num_actors=2", gpus=1, gib=48)
    need = learner_need(load(None, BASE), SIZES["Qwen/Qwen3-0.6B"]).num_bytes
    assert plan.learner_bytes == int(need)
    # (48 - 16.0 - 5% of 48) / 2 = 14.8 of 48, rounded down
    assert [actor.share for actor in plan.actors] == [0.3, 0.3]
    assert [plan.sharers(index) for index in range(2)] == [(True, (1,)), (True, (0,))]


def test_gpu_too_small_for_both_at_once_is_used_in_turns() -> None:
    settings = ["train.micro_batch_tokens=16384", "model.max_length=16384"]
    parts = [*settings, "launch.gpu_sharing=parts"]
    with pytest.raises(SettingError, match="GPU 0"):
        planned(*parts, gpus=1, gib=24)
    config, sizes = load(None, [*BASE, *settings]), SIZES["Qwen/Qwen3-0.6B"]
    plan = planned(*settings, gpus=1, gib=24)
    assert plan.has_turns
    assert plan.learner_bytes is None, "nothing is kept free for the learner but what it has between two batches"
    (place,) = plan.actors
    need, kept = learner_need(config, sizes), at_rest(learner_need(config, sizes))
    assert place.share is not None
    assert need.num_bytes + engine_need(config, sizes).num_bytes > 0.95 * 24 * GIB
    assert 0.94 < kept.num_bytes / (24 * GIB) + place.share <= 0.95, "the engine has all that the learner does not keep"
    assert any("work in turns (launch.gpu_sharing)" in note for note in plan.notes)
    assert not planned(*parts, gpus=1, gib=80).has_turns
    assert not planned(*settings, gpus=1, gib=80).has_turns
    assert planned(*settings, "launch.gpu_sharing=turns", gpus=1, gib=80).has_turns


@pytest.mark.parametrize(
    ("gpus", "sizes", "engine", "said"),
    [
        (2, SIZES["Qwen/Qwen3-0.6B"], "vllm", "turns are for one GPU that the learner and all actors share"),
        (1, SIZES["Qwen/Qwen3-0.6B"], "transformers", "only vLLM gives a GPU's memory back"),
        (1, None, "vllm", "the model's sizes are not known"),
    ],
)
def test_turns_that_there_cannot_be_are_refused(gpus: int, sizes: ModelSizes | None, engine: Engine, said: str) -> None:
    config = load(None, [*BASE, "launch.gpu_sharing=turns"])
    with pytest.raises(SettingError, match=f'launch.gpu_sharing = "turns": .*{said}'):
        make_plan(config, machine(gpus, 24), sizes, engine)


def test_tensor_parallel_actors_take_neighbors_and_the_learners_gpu_last() -> None:
    two = "actor.engine_options.tensor_parallel_size=2"
    assert [actor.gpus for actor in planned(two, "launch.num_actors=3", gpus=8).actors] == [(1, 2), (3, 4), (5, 6)]
    shared = planned(two, gpus=2)
    assert [actor.gpus for actor in shared.actors] == [(0, 1)]
    assert shared.actors[0].share is not None
    assert shared.sharers(0) == (True, ())


def test_gpus_that_settings_name_are_those_that_are_used_and_the_others_are_dealt_out_around_them() -> None:
    given = planned("launch.num_actors=2", "launch.learner_gpus=[3]", gpus=4)
    assert (given.learner, [actor.gpus for actor in given.actors]) == ((3,), [(0,), (1,)])
    given = planned("launch.num_actors=2", "launch.actor_gpus=[[0],[1]]", gpus=4)
    assert (given.learner, [actor.gpus for actor in given.actors]) == ((2,), [(0,), (1,)])
    both = planned("launch.num_actors=2", "launch.learner_gpus=[1]", "launch.actor_gpus=[[1],[1]]", gpus=2)
    assert (both.learner, [actor.gpus for actor in both.actors]) == ((1,), [(1,), (1,)])


def test_share_that_the_user_sets_is_not_replaced_and_what_is_surely_too_much_is_refused() -> None:
    plan = planned("actor.engine_options.gpu_memory_utilization=0.4", gpus=1)
    assert [actor.share for actor in plan.actors] == [None]
    assert plan.warnings == ()
    (warning,) = planned("actor.engine_options.gpu_memory_utilization=0.4", gpus=1, gib=24).warnings
    assert "on GPU 0 the learner's 16.0 + 1 x 9.6 for actors = 25.6 GiB, and 24.0 GiB are free" in warning
    with pytest.raises(
        SettingError, match=r"gpu_memory_utilization = 0.9.*the learner's 16.0 \+ 1 x 21.6 .* 24.0 GiB are free"
    ):
        planned("actor.engine_options.gpu_memory_utilization=0.9", gpus=1, gib=24)
    with pytest.raises(
        SettingError, match=r"gpu_memory_utilization = 0.01: it is 0.8 GiB of GPU 0, and an actor needs weights"
    ):
        planned("actor.engine_options.gpu_memory_utilization=0.01", gpus=1)


@pytest.mark.parametrize(
    ("overrides", "gpus", "gib", "arithmetic", "cure"),
    [
        (
            ["train.activation_checkpointing=false"],
            1,
            24,
            r"a learner process needs weights 1.1 \+ optimizer 6.7 \+ gradients 3.3 \+ activations 32.5 \+ CUDA 1.0 = 44.7 GiB",
            "Set train.activation_checkpointing=true. To start all the same",
        ),
        (
            ["launch.num_actors=2", "launch.gpu_sharing=parts"],
            1,
            24,
            r"2 on GPU 0 get 3.4 GiB each \(24.0 GiB free, less the learner's 16.0 and a reserve\), and each needs weights 1.1",
            "Set launch.num_actors=1.",
        ),
        (
            ["launch.num_actors=2", "launch.actor_gpus=[[0], [0]]", "launch.gpu_sharing=parts"],
            1,
            24,
            "2 on GPU 0 get 3.4 GiB each",
            "Set launch.num_actors=1, launch.actor_gpus=[[0]].",
        ),
        (["model.dtype=float32"], 2, 16, "17.4 GiB, and the GPU has 16.0", "Set train.micro_batch_tokens=4096. To start"),
        (
            ["train.activation_checkpointing=false", "model.max_length=65536", "actor.engine_options.tensor_parallel_size=2"],
            3,
            16,
            "139.8 GiB, and the GPU has 16.0",
            'Set train.activation_checkpointing="offload", train.deepspeed.zero_optimization.offload_optimizer.device=cpu.',
        ),
        (
            [
                *("launch.num_actors=4", "launch.actor_gpus=[[0, 1], [0, 1], [0, 1], [0, 1]]", "launch.gpu_sharing=parts"),
                "actor.engine_options.tensor_parallel_size=2",
            ],
            2,
            24,
            "4 on GPU 0 get 1.7 GiB each",
            "Set launch.num_actors=1, launch.actor_gpus=[[0,1]].",
        ),
    ],
)
def test_plan_that_cannot_fit_is_refused_with_the_arithmetic_and_settings_that_fit(
    overrides: list[str], gpus: int, gib: float, arithmetic: str, cure: str
) -> None:
    with pytest.raises(SettingError, match=arithmetic) as refused:
        planned(*overrides, gpus=gpus, gib=gib)
    assert cure in str(refused.value)
    settings = str(refused.value).partition("Set ")[2].split(". ")[0].removesuffix(".").split(", ")
    typed = [word for setting in settings for word in shlex.split(setting)]
    assert planned(*overrides, *typed, gpus=gpus, gib=gib) is not None, "the cure works as it is typed into a shell"


def test_cure_of_the_learner_fits_the_gpu_with_the_least_memory() -> None:
    gpus = (*machine(1, 24), *machine(1, 10), *machine(1, 80))
    settings = ["model.path=m", "data.train_data=d", "launch.learner_processes=2", "train.zero_stage=2"]
    settings += ["train.deepspeed.zero_optimization.reduce_bucket_size=50000000"]
    with pytest.raises(SettingError) as refused:
        make_plan(load(None, settings), gpus, SIZES["Qwen/Qwen3-0.6B"])
    assert 'the GPU has 10.0 GiB free. Set train.activation_checkpointing="offload".' in str(refused.value)
    cured = load(None, [*settings, "train.activation_checkpointing=offload"])
    assert make_plan(cured, gpus, SIZES["Qwen/Qwen3-0.6B"]).learner == (0, 1)


def test_cure_of_a_learner_beside_sleeping_engines_counts_them() -> None:
    settings = ["launch.gpu_sharing=turns", "train.zero_stage=2", "launch.num_actors=4"]
    offloaded = "train.deepspeed.zero_optimization.offload_optimizer.device=cpu"
    with pytest.raises(SettingError, match=r"sleeping engines 6.0 = 9.[0-9] GiB.* Set launch.num_actors=1\."):
        planned(*settings, offloaded, gpus=1, gib=8, sizes=sizes_of(TINY))
    assert planned(*settings, offloaded, "launch.num_actors=1", gpus=1, gib=8, sizes=sizes_of(TINY)).has_turns


def test_shared_and_offloaded_sequences_keep_less_on_each_gpu() -> None:
    long = ["model.dtype=bfloat16", "model.max_length=32768", "train.zero_stage=3", "launch.learner_processes=4"]

    def activations(*overrides: str) -> float:
        need = learner_need(load(None, [*BASE, *long, *overrides]), SIZES["Qwen/Qwen3-8B"])
        return next(part.num_bytes for part in need.parts if part.name == "activations")

    kept = 32768 * 4096 * 36 * 2
    assert activations() - activations("train.activation_checkpointing=offload") == kept
    # The head and its gradient are not divided.
    head = 2 * 151936 * 4096 * 2 + 0.25 * GIB
    assert activations("train.sequence_parallel_size=2") - head == (activations() - head) / 2
    offloaded = [*long, "launch.num_actors=4", "train.activation_checkpointing=offload", "train.sequence_parallel_size=2"]
    plan = planned(*offloaded, gpus=8, sizes=SIZES["Qwen/Qwen3-8B"])
    # The last norm's inputs are one block like a layer's, and two of twice its size.
    host = f"each learner process, in the host's memory for the backward pass: {kept / 2 * 41 / 36 / GIB:.1f} GiB"
    assert host in plan.notes


def test_offloaded_inputs_of_a_layer_take_a_power_of_two_of_the_hosts_memory() -> None:
    settings = ["model.dtype=bfloat16", "model.max_length=34816", "train.activation_checkpointing=offload"]
    # 36 layers and a norm of 285 MB, each in a block of 512 MiB, and two copies of 570 MB.
    assert offloaded_bytes(load(None, [*BASE, *settings]), SIZES["Qwen/Qwen3-8B"]) == 37 / 2 * GIB + 2 * GIB


def test_engine_in_fp8_has_half_the_weights_but_for_the_embeddings_and_half_the_cache() -> None:
    sizes = SIZES["Qwen/Qwen3-8B"]
    options = ["actor.engine_options.quantization=fp8_per_channel", "actor.engine_options.kv_cache_dtype=fp8"]
    whole, fp8 = (
        {part.name: part.num_bytes for part in engine_need(load(None, [*BASE, "model.dtype=bfloat16", *given]), sizes).parts}
        for given in ([], options)
    )
    assert whole["KV cache"] == 2 * fp8["KV cache"]
    assert whole["weights"] - fp8["weights"] == sizes.num_parameters - 2 * 151936 * 4096


def test_actor_that_its_own_gpu_cannot_hold_is_offered_more_of_them() -> None:
    # 22.4 of 24 GiB, and vLLM takes 0.92 of them, 22.1.
    settings = ["model.path=m", "data.train_data=d", "model.max_length=16384", "lora.rank=8", "launch.learner_gpus=[2]"]
    gpus = (*machine(2, 24), *machine(1, 640))
    with pytest.raises(SettingError, match=r"GPU 0 get 22.1 GiB .*\. Give each actor more GPUs"):
        make_plan(load(None, settings), gpus, SIZES["Qwen/Qwen3-8B"])
    cured = load(None, [*settings, "actor.engine_options.tensor_parallel_size=2"])
    assert make_plan(cured, gpus, SIZES["Qwen/Qwen3-8B"]).actors[0].gpus == (0, 1)


def test_actor_has_room_on_each_of_its_gpus() -> None:
    gpus = (*machine(2, 16), *machine(1, 80), *machine(1, 16))
    settings = [*BASE, "actor.engine_options.tensor_parallel_size=2", "launch.learner_gpus=[3]", "model.dtype=bfloat16"]
    two = [*settings, "launch.num_actors=2", "launch.actor_gpus=[[0, 2], [1, 2]]"]
    with pytest.raises(SettingError, match=r"on GPU 2 2 x 72.0 for actors = 144.0 GiB, and 80.0 GiB are free"):
        make_plan(load(None, [*two, "actor.engine_options.gpu_memory_utilization=0.9"]), gpus, SIZES["Qwen/Qwen3-0.6B"])
    six = [*settings, "launch.num_actors=6", "launch.actor_gpus=[[0, 2], [1, 2], [2, 4], [2, 5], [2, 6], [2, 7]]"]
    with pytest.raises(SettingError, match=r"1 on GPU 0 get 2.4 GiB each"):
        make_plan(load(None, [*six, "model.max_length=32768"]), (*gpus, *machine(4, 16)), SIZES["Qwen/Qwen3-0.6B"])


def test_model_too_large_for_every_cure_gets_an_honest_one() -> None:
    with pytest.raises(SettingError, match=r"Train on more GPUs .*or a smaller model"):
        planned(gpus=1, gib=24, sizes=SIZES["Qwen/Qwen3-8B"])


def test_gpu_that_the_user_names_is_tried_when_only_estimates_exceed_it() -> None:
    many = "train.activation_checkpointing=false"
    (warning,) = planned(many, "launch.learner_gpus=[0]", gpus=2, gib=24).warnings
    assert "44.7 GiB, and the GPU has 24.0 GiB free; the sum is partly an estimate" in warning
    with pytest.raises(SettingError, match="weights"):
        planned("launch.learner_gpus=[0]", gpus=2, gib=8)


@pytest.mark.parametrize("wanted", [["scale.actors=3"], ["scale.auto=true", "scale.max=3"]])
def test_actors_that_the_plan_has_no_place_for_are_warned_about(wanted: list[str]) -> None:
    (warning,) = planned(*wanted, gpus=4).warnings
    assert warning.startswith("launch.num_actors = 1")
    assert "Set launch.num_actors=3," in warning
    assert planned(*wanted, "launch.num_actors=3", gpus=4).warnings == ()


def test_memory_that_others_hold_is_not_dealt_out() -> None:
    config = load(None, BASE)
    gpus = machine(2, 80, free=0.5)
    plan = make_plan(config, gpus, SIZES["Qwen/Qwen3-0.6B"])
    # 40 free of 80, less a fiftieth of the GPU.
    assert [actor.share for actor in plan.actors] == [0.48]
    assert "40.0 of 80.0 GiB free" in plan.notes[0]


def test_model_without_known_sizes_is_placed_and_nothing_is_refused() -> None:
    plan = planned("launch.num_actors=2", gpus=1, gib=1, sizes=None)
    assert plan.learner_bytes == GIB // 2
    assert [actor.share for actor in plan.actors] == [0.22, 0.22]
    assert "the model's sizes are not known here, so the plan has no sums" in plan.notes


def test_the_other_engine_gets_its_share_by_its_own_option(tmp_path: Path) -> None:
    shared = make_plan(load(None, BASE), machine(1, 24), SIZES["Qwen/Qwen3-0.6B"], "transformers")
    assert shared.actors == make_plan(load(None, BASE), machine(1, 24), SIZES["Qwen/Qwen3-0.6B"]).actors
    share = shared.actors[0].share
    assert DeviceTurns(shared, tmp_path).actor_settings(0) == [f"actor.engine_options.max_memory_percent={share:g}"]
    alone = make_plan(load(None, BASE), machine(2, 24), SIZES["Qwen/Qwen3-0.6B"], "transformers")
    assert DeviceTurns(alone, tmp_path).actor_settings(0) == []
    options = [*BASE, "actor.engine_options.max_memory_percent=0.3"]
    given = make_plan(load(None, options), machine(1, 24), SIZES["Qwen/Qwen3-0.6B"], "transformers")
    assert DeviceTurns(given, tmp_path).actor_settings(0) == []
    assert any("actor-0 7.2 GiB (0.3)" in note for note in given.notes)


@pytest.mark.parametrize(
    ("overrides", "gpus", "said"),
    [
        (["launch.learner_processes=3"], 2, "launch.learner_processes = 3: each needs its own GPU, and there are 2"),
        (
            ["actor.engine_options.tensor_parallel_size=4"],
            1,
            "tensor_parallel_size = 4: an actor needs as many GPUs, and there is 1",
        ),
        (["weights.backend=nccl"], 1, 'weights.backend = "nccl": NCCL takes one process to a GPU'),
        (["launch.actor_gpus=[[5]]"], 2, "launch.actor_gpus = [5]: this run has 2 GPUs, counted from 0, and no GPU 5"),
    ],
)
def test_places_that_there_are_not_are_refused(overrides: list[str], gpus: int, said: str) -> None:
    with pytest.raises(SettingError) as refused:
        planned(*overrides, gpus=gpus)
    assert str(refused.value).startswith(said) or said in str(refused.value)


def test_instances_of_a_gpu_take_one_process_each_and_no_nccl() -> None:
    instances = tuple(gpu._replace(entry=f"MIG-{index}") for index, gpu in enumerate(machine(2, 40)))
    plan = make_plan(load(None, BASE), instances, SIZES["Qwen/Qwen3-0.6B"])
    assert (plan.entries(plan.learner), plan.entries(plan.actors[0].gpus), plan.can_use_nccl) == ("MIG-0", "MIG-1", False)
    with pytest.raises(SettingError, match=r"launch.learner_processes = 2: the GPUs are instances \(MIG\)"):
        make_plan(load(None, [*BASE, "launch.learner_processes=2"]), instances, SIZES["Qwen/Qwen3-0.6B"])


def test_plan_is_told_gpu_by_gpu_with_the_sums() -> None:
    assert planned(gpus=1, gib=48).notes == (
        "GPU 0 (H100, 48.0 of 48.0 GiB free): learner 16.0 GiB, actor-0 29.3 GiB (0.61)",
        "each learner process, estimated: weights 1.1 + optimizer 6.7 + gradients 3.3 + activations 3.9 + CUDA 1.0 = 16.0 GiB",
        "each actor, on each of its GPUs, at least: weights 1.1 + KV cache 0.88 + engine 2.7 = 4.6 GiB",
        "actors start when the learner has taken its memory, those of one GPU one after the other",
        "weights travel by gloo: NCCL takes one process to a GPU",
    )
    assert planned(gpus=3).notes[:3] == (
        "GPU 0 (H100, 80.0 of 80.0 GiB free): learner 16.0 GiB",
        "GPU 1 (H100, 80.0 of 80.0 GiB free): actor-0",
        "GPU 2 (H100, 80.0 of 80.0 GiB free): nobody",
    )
