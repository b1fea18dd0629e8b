"""Both engines report what a plain forward pass of the same weights computes."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.actor.engines.choice import make_engine
from offbeat.actor.engines.engine import Completion, Engine, EngineSettings
from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.models.routing import record_routing
from offbeat.learner.diagnostics.routing_metrics import routing_metrics
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import pack
from offbeat.protocols.message_parts import ModelHashes
from offbeat.protocols.messages import Sampling
from offbeat.protocols.payload import Segment
from tests.weights import buffer_of

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
MAX_MODEL_LEN = 256
EOS = 2
PROMPTS = [[5, 6, 7], [9, 8, 30, 31, 12], [20], [11, 12, 13, 14, 15, 16, 17, 18]]


def start(kind: str, folder: Path, *, records_experts: bool = False, **options: int) -> Engine:
    if kind == "own caches":
        # The model could have a paged cache; it gets those of other families.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offbeat.actor.engines.transformers_engine._choose_attention", lambda model: False)
            return start("transformers", folder, records_experts=records_experts)
    return make_engine(
        kind,  # pyright: ignore[reportArgumentType]
        str(folder),
        EngineSettings(
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            hashes=ModelHashes("", "", ""),
            seed=3,
            options=options,
            records_experts=records_experts,
        ),
    )


@pytest.fixture(scope="module", params=[pytest.param("vllm", marks=pytest.mark.vllm), "transformers", "own caches"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(kind: str, tiny_model: Path) -> Iterator[Engine]:
    """Yield one engine for all tests of the dense model; each test loads the weights that it needs."""
    engine = start(kind, tiny_model)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def references(tiny_model: Path) -> list[PreTrainedModel]:
    """Return the dense model with the weights on disk and with two others: policy versions 0, 1 and 2."""
    return [load_reference(tiny_model, seed) for seed in (None, 1, 2)]


def load_reference(folder: Path, seed: int | None) -> PreTrainedModel:
    """Return the model in `folder`; a seed moves its weights far enough to change every distribution."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def load(engine: Engine, reference: PreTrainedModel, policy_version: int, *, recompute_kv: bool = True) -> None:
    weights = [(name, parameter.data) for name, parameter in reference.named_parameters()]
    engine.load_weights(buffer_of(weights), policy_version, recompute_kv=recompute_kv)


@torch.inference_mode()
def reference_logprobs(
    reference: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Return log-probs `[len(completion)]` from one forward pass."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = reference(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


def finish(engine: Engine) -> dict[str, Completion]:
    finished: dict[str, Completion] = {}
    while engine.num_unfinished:
        for completion in engine.step():
            assert completion.request_id not in finished
            finished[completion.request_id] = completion
    return finished


def step(engine: Engine, num_steps: int) -> dict[str, Completion]:
    return {completion.request_id: completion for _ in range(num_steps) for completion in engine.step()}


def assert_logprobs(reference: PreTrainedModel, prompt: Sequence[int], completion: Completion) -> None:
    expected = reference_logprobs(reference, prompt, completion.token_ids.tolist())
    np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=TOLERANCE)


def test_logprobs_are_those_of_a_forward_pass_at_the_sampling_temperature(engine, references):
    load(engine, references[0], 0)
    temperatures = [1.0, 0.7, 1.3]
    for index in range(24):
        engine.submit([str(index)], PROMPTS[index % 4], Sampling(64, temperatures[index % 3]))
    finished = finish(engine)
    for index in range(24):
        completion = finished[str(index)]
        tokens = completion.token_ids.tolist()
        expected = reference_logprobs(references[0], PROMPTS[index % 4], tokens, temperatures[index % 3])
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=TOLERANCE)
        assert completion.token_ids.dtype == np.int32
        assert completion.behavior_logprobs.dtype == np.float32
        assert completion.segments == (Segment(0, 0),)
    assert {completion.finish_reason for completion in finished.values()} == {"stop", "length"}
    for completion in finished.values():
        assert (completion.token_ids[-1] == EOS) == (completion.finish_reason == "stop")
        assert EOS not in completion.token_ids[:-1]


def test_completions_of_a_group_are_sampled_apart_with_exact_logprobs(engine, references):
    load(engine, references[1], 1)
    ids = [f"7/{index}" for index in range(8)]
    engine.submit(ids, PROMPTS[1], Sampling(40, 0.7))
    assert engine.num_unfinished == 8
    finished = step(engine, 3)
    aborted = [request_id for request_id in ids if request_id not in finished][:2]
    engine.abort(aborted)
    finished |= finish(engine)
    assert sorted(finished) == sorted(set(ids) - set(aborted))
    assert len({tuple(completion.token_ids.tolist()) for completion in finished.values()}) == 6
    for completion in finished.values():
        expected = reference_logprobs(references[1], PROMPTS[1], completion.token_ids.tolist(), 0.7)
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=TOLERANCE)


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_vllm_processes_the_prompt_of_a_group_once(engine, references, monkeypatch):
    load(engine, references[0], 0)
    processor = engine._engine.input_processor
    process, prompts = processor.process_inputs, []
    monkeypatch.setattr(processor, "process_inputs", lambda *args: prompts.append(args[1]) or process(*args))
    engine.submit([str(index) for index in range(8)], PROMPTS[0], Sampling(2))
    assert len(finish(engine)) == 8
    assert len(prompts) == 1


def test_temperature_zero_takes_the_likeliest_token_beside_sampled_completions(engine, references):
    load(engine, references[1], 1)
    for index, prompt in enumerate(PROMPTS):
        engine.submit([f"greedy{index}"], prompt, Sampling(20, 0.0))
        engine.submit([f"sampled{index}"], prompt, Sampling(20, 1.0))
    finished = finish(engine)
    for index, prompt in enumerate(PROMPTS):
        tokens = finished[f"greedy{index}"].token_ids.tolist()
        logits = references[1](torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


def test_completions_end_at_the_longest_length(engine, references):
    load(engine, references[0], 0)
    prompt = [7] * (MAX_MODEL_LEN - 3)
    engine.submit(["long"], prompt, Sampling(50))
    completion = finish(engine)["long"]
    assert len(completion.token_ids) <= 3
    for num_tokens in (0, MAX_MODEL_LEN):
        with pytest.raises(ValueError, match=f"{num_tokens} tokens does not fit"):
            engine.submit(["impossible"], [7] * num_tokens, Sampling(50))
    assert engine.num_unfinished == 0


def test_score_is_a_forward_pass_and_loses_no_running_completion(engine, references):
    load(engine, references[2], 2)
    tokens = [5, 6, 7, 8, 30, 2, 9]
    for index in range(5):
        engine.submit([str(index)], PROMPTS[0], Sampling(1 + index))
    scored = engine.score(tokens)
    assert scored.routed_experts is None
    assert scored.logprobs.dtype == np.float32
    np.testing.assert_allclose(scored.logprobs, reference_logprobs(references[2], tokens[:1], tokens[1:]), atol=TOLERANCE)
    assert engine.num_unfinished == 5
    assert sorted(finish(engine)) == ["0", "1", "2", "3", "4"]


def test_segments_tell_which_weights_sampled_each_token(engine, references):
    load(engine, references[0], 0)
    for index in range(8):
        engine.submit([str(index)], PROMPTS[index % 4], Sampling(60))
    finished = step(engine, 10)
    load(engine, references[1], 1)
    finished |= step(engine, 12)
    load(engine, references[2], 2)
    finished |= finish(engine)
    assert engine.policy_version == 2
    for index in range(8):
        completion, prompt = finished[str(index)], PROMPTS[index % 4]
        starts = [segment.first_token for segment in completion.segments]
        assert [segment.policy_version for segment in completion.segments] == [0, 1, 2][: len(starts)]
        assert starts == [0, 10, 22][: len(starts)]
        for start_token, end_token, segment in zip(
            starts, [*starts[1:], len(completion.token_ids)], completion.segments, strict=True
        ):
            expected = reference_logprobs(references[segment.policy_version], prompt, completion.token_ids.tolist())
            np.testing.assert_allclose(
                completion.behavior_logprobs[start_token:end_token], expected[start_token:end_token], atol=TOLERANCE
            )
    assert any(len(completion.segments) == 3 for completion in finished.values())


def test_weights_that_sampled_no_token_have_no_segment(engine, references):
    load(engine, references[0], 0)
    engine.submit(["a"], PROMPTS[0], Sampling(8))
    load(engine, references[1], 1, recompute_kv=False)
    finished = step(engine, 3)
    load(engine, references[0], 2, recompute_kv=False)
    load(engine, references[2], 3, recompute_kv=False)
    finished |= finish(engine)
    assert finished["a"].segments in ((Segment(1, 0), Segment(3, 3)), (Segment(1, 0),))


def test_completions_go_on_exactly_after_the_engine_has_slept(kind, engine, references):
    if kind != "vllm":
        pytest.skip("only vLLM gives memory back")
    load(engine, references[0], 0)
    for index in range(8):
        engine.submit([str(index)], PROMPTS[index % 4], Sampling(60))
    finished = step(engine, 10)
    engine.sleep()
    num_tokens = engine.num_generated_tokens
    engine.submit(["meanwhile"], PROMPTS[0], Sampling(20))
    engine.abort(["0"])
    finished |= step(engine, 3)
    assert engine.num_generated_tokens == num_tokens, "it sampled in its sleep"
    engine.wake()
    load(engine, references[1], 1)
    finished |= finish(engine)
    assert set(finished) >= {"meanwhile", *"1234567"}
    assert_logprobs(references[1], PROMPTS[0], finished["meanwhile"])
    for index in range(1, 8):
        completion, prompt = finished[str(index)], PROMPTS[index % 4]
        for first, last, reference in ((0, 10, references[0]), (10, None, references[1])):
            expected = reference_logprobs(reference, prompt, completion.token_ids.tolist())
            np.testing.assert_allclose(completion.behavior_logprobs[first:last], expected[first:last], atol=TOLERANCE)


def test_new_prompts_never_start_from_keys_of_older_weights(engine, references):
    """Keys of running completions stay in the cache, and a later request may have the same prompt."""
    prompt = [5 + index % 30 for index in range(200)]
    load(engine, references[0], 0)
    engine.submit(["old"], prompt, Sampling(50))
    finished = step(engine, 5)
    load(engine, references[1], 1, recompute_kv=False)
    engine.submit(["new"], prompt, Sampling(5))
    finished |= finish(engine)
    assert finished["new"].segments == (Segment(1, 0),)
    assert_logprobs(references[1], prompt, finished["new"])
    expected = reference_logprobs(references[0], prompt, finished["old"].token_ids.tolist())
    np.testing.assert_allclose(finished["old"].behavior_logprobs[:5], expected[:5], atol=TOLERANCE)


def test_completions_that_wait_at_an_update_start_on_keys_of_the_new_weights(engine, references):
    """An engine takes in so many completions at once; the others' prompt is in the cache of those that run."""
    prompt = [5 + index % 30 for index in range(200)]
    load(engine, references[0], 0)
    engine.submit([f"a/{index}" for index in range(300)], prompt, Sampling(3))
    finished = step(engine, 2)
    load(engine, references[1], 1, recompute_kv=False)
    finished |= finish(engine)
    assert len(finished) == 300
    after = [completion for completion in finished.values() if completion.segments == (Segment(1, 0),)]
    for completion in after[::20]:
        assert_logprobs(references[1], prompt, completion)


@pytest.mark.parametrize("ended", ["restarted", "aborted"])
def test_completions_go_on_when_those_that_filled_the_cache_are_restarted_or_aborted(tiny_model, references, ended):
    engine = start("transformers", tiny_model, page_size=16, num_blocks=24, max_batch_tokens=64)
    load(engine, references[0], 0)
    batches = vars(engine)["_batches"]
    batches._eos_token_ids = []
    scheduler = batches._batches.scheduler
    engine.submit([str(index) for index in range(4)], PROMPTS[0], Sampling(200))
    while not scheduler.block_new_requests:
        assert step(engine, 1) == {}
    if ended == "restarted":
        load(engine, references[1], 1)
    else:
        engine.abort(list(scheduler.active_requests))
    engine.submit(["new"], PROMPTS[0], Sampling(2))
    num_left = engine.num_unfinished
    finished = step(engine, 1000)
    engine.close()
    assert len(finished) == num_left >= 2


def test_aborted_completions_are_never_returned(engine, references):
    load(engine, references[0], 0)
    for index in range(6):
        engine.submit([str(index)], PROMPTS[0], Sampling(30))
    finished = step(engine, 1)
    running = [str(index) for index in range(6) if str(index) not in finished]
    engine.submit(["queued"], PROMPTS[0], Sampling(30))
    engine.abort([*running[:2], "queued", "never submitted"])
    assert set(finish(engine)) == set(running[2:])
    engine.submit(["0"], PROMPTS[1], Sampling(2))
    assert list(finish(engine)) == ["0"]
    assert engine.step() == []


def test_hundreds_of_concurrent_completions_all_come_back_once(engine, references):
    load(engine, references[1], 1)
    num_tokens_before = engine.num_generated_tokens
    for index in range(600):
        engine.submit([str(index)], PROMPTS[index % 4], Sampling(1 + index % 6))
    assert engine.num_unfinished == 600
    finished = finish(engine)
    assert len(finished) == 600
    assert all(len(finished[str(index)].token_ids) <= 1 + index % 6 for index in range(600))
    num_tokens = sum(len(completion.token_ids) for completion in finished.values())
    assert engine.num_generated_tokens - num_tokens_before == num_tokens
    for index in range(0, 600, 7):
        assert_logprobs(references[1], PROMPTS[index % 4], finished[str(index)])


def test_tokens_of_running_and_aborted_completions_are_counted(engine, references):
    load(engine, references[0], 0)
    before = engine.num_generated_tokens
    engine.submit(["a"], PROMPTS[0], Sampling(100))
    finished = step(engine, 4)
    if not finished:
        assert engine.num_generated_tokens - before == 4
        engine.abort(["a"])
        assert engine.num_generated_tokens - before == 4


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_vllms_loader_runs_at_the_first_update_only_and_again_when_the_model_changed(engine, references, monkeypatch):
    worker = engine._engine.model_executor.driver_worker.worker
    reload, num_reloads = worker.reload_weights, []
    monkeypatch.setattr(worker, "reload_weights", lambda weights: num_reloads.append(1) or reload(weights))
    load(engine, references[0], 0)
    num_reloads.clear()
    tokens = [5, 6, 7, 8, 30, 2, 9]

    def assert_exact(reference: PreTrainedModel) -> None:
        expected = reference_logprobs(reference, tokens[:1], tokens[1:])
        np.testing.assert_allclose(engine.score(tokens).logprobs, expected, atol=TOLERANCE)

    for version in (1, 2):
        load(engine, references[version], version)
        assert_exact(references[version])
    assert not num_reloads
    norm = worker.model_runner.get_model().model.norm
    norm.weight.data = norm.weight.data.clone()
    for version in (0, 1):
        load(engine, references[version], 3 + version)
        assert_exact(references[version])
    assert len(num_reloads) == 2


@pytest.mark.parametrize("model", ["tiny_model", "tiny_untied_model", "tiny_moe_model"])
def test_every_update_reaches_scores_and_samples(kind, model, request):
    """Without our code vLLM on a CPU keeps old tied heads, and old experts from the second update on."""
    folder = request.getfixturevalue(model)
    if kind == "vllm" and model != "tiny_model":
        from vllm.distributed.parallel_state import destroy_model_parallel

        # A dense engine that lives in this process has made groups without experts, and vLLM makes them once.
        destroy_model_parallel()
    engine = request.getfixturevalue("engine") if model == "tiny_model" else start(kind, folder)
    tokens = [5, 6, 7, 8, 30, 2, 9]
    for policy_version in (1, 2, 3):
        reference = load_reference(folder, seed=10 + policy_version)
        load(engine, reference, policy_version)
        expected = reference_logprobs(reference, tokens[:1], tokens[1:])
        np.testing.assert_allclose(engine.score(tokens).logprobs, expected, atol=TOLERANCE)
        engine.submit(["a"], PROMPTS[1], Sampling(30))
        completion = finish(engine)["a"]
        assert completion.segments == (Segment(policy_version, 0),)
        assert_logprobs(reference, PROMPTS[1], completion)
    if model != "tiny_model":
        engine.close()


def test_experts_that_the_engine_tells_are_those_of_the_learners_pass(tiny_moe_model):
    """The transformers engine records experts on any machine, for as many tokens as it returns log-probs."""
    engine = start("transformers", tiny_moe_model)
    tokens = [5 + (7 * index) % 30 for index in range(40)]
    packed = pack([(tokens[:1], [tokens[1:]])])
    told = []
    for policy_version in (1, 2):
        reference = load_reference(tiny_moe_model, seed=10 + policy_version)
        load(engine, reference, policy_version)
        scored = engine.score(tokens)
        assert scored.routed_experts is not None
        assert scored.routed_experts.dtype == np.int32
        assert len(scored.routed_experts) == len(scored.logprobs) == 39
        module = CompletionLogprobs(reference)
        with torch.no_grad(), record_routing(reference) as record:
            module(packed.token_ids, packed.position_ids, packed.predictors, packed.targets, packed.spans, 1.0)
        routing = record.routing()
        assert routing is not None
        assert routing_metrics(routing.experts, torch.from_numpy(scored.routed_experts).long())["overlap"] == 1.0
        told.append(routing.experts)
    # The weights do not all route alike.
    assert routing_metrics(*told)["overlap"] < 1.0
    engine.close()


def routed(reference: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the experts that a forward pass sends these tokens to, `[tokens, layers, top_k]`, rising."""
    with torch.inference_mode(), record_routing(reference) as record:
        reference(torch.tensor([[*tokens]]))
    routing = record.routing()
    assert routing is not None
    return routing.experts.sort().values


@pytest.mark.parametrize("kind", ["transformers", "own caches"], indirect=True)
def test_completions_come_with_the_experts_that_sampled_them(kind, tiny_moe_model):
    """Of each version's tokens those of its weights; a restart under new weights replaces what was recorded before."""
    references = [load_reference(tiny_moe_model, seed) for seed in (11, 12)]
    engine = start(kind, tiny_moe_model, records_experts=True)
    for recompute_kv in (True, False):
        load(engine, references[0], 0)
        for index in range(8):
            engine.submit([str(index)], PROMPTS[index % 4], Sampling(40))
        finished = step(engine, 10)
        engine.abort(["7"])
        load(engine, references[1], 1, recompute_kv=recompute_kv)
        finished |= finish(engine)
        assert len({len(completion.segments) for completion in finished.values()}) == 2, "both kinds are there"
        for name, completion in finished.items():
            prompt, ids = PROMPTS[int(name) % 4], completion.token_ids.tolist()
            assert completion.experts is not None
            recorded = torch.from_numpy(np.sort(completion.experts.astype(np.int64), axis=-1))
            assert len(recorded) == len(prompt) + len(ids) - 1
            if len(completion.segments) == 1:
                assert torch.equal(recorded, routed(references[0], [*prompt, *ids[:-1]]))
            elif recompute_kv:
                assert torch.equal(recorded, routed(references[1], [*prompt, *ids[:-1]]))
            else:
                # The token that an update comes before is run under the new weights.
                before = len(prompt) + completion.segments[1].first_token - 1
                assert torch.equal(recorded[:before], routed(references[0], [*prompt, *ids[:-1]])[:before])
                assert not torch.equal(recorded[before:], routed(references[0], [*prompt, *ids[:-1]])[before:])
    assert finished["0"].experts is not None
    engine.close()


@pytest.mark.vllm
def test_engines_that_cannot_record_experts_are_refused(tiny_moe_model):
    with pytest.raises(SettingError, match=r'loss\.routing_replay = "sampled".* on GPUs only.*actor\.engine="transformers"'):
        start("vllm", tiny_moe_model, records_experts=True)


@pytest.mark.vllm
def test_vllms_record_is_cut_to_the_canary_and_to_the_layers_that_have_experts():
    """Only the shapes are tested, because vLLM records experts on GPUs only."""
    from offbeat.actor.engines.vllm_engine import _routed_experts

    recorded = np.array([[[0, 0], [1, 0], [0, 2]], [[0, 0], [3, 1], [0, 1]], [[0, 0], [2, 3], [1, 0]]], np.uint8)
    experts = _routed_experts(recorded, num_tokens=2)
    assert experts is not None
    assert experts.dtype == np.int32
    assert experts.tolist() == [[[1, 0], [0, 2]], [[3, 1], [0, 1]]]
    assert _routed_experts(None, num_tokens=2) is None


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=pytest.mark.vllm), "transformers"], indirect=True)
def test_unknown_and_reserved_options_are_refused(kind, tiny_model):
    own = {"vllm": "logprobs_mode", "transformers": "return_logprobs"}[kind]
    for options, message in (({own: 1}, "not an option, because"), ({"no_such_option": 1}, "no such option")):
        with pytest.raises(SettingError, match=message):
            make_engine(
                kind,
                str(tiny_model),
                EngineSettings(
                    dtype="float32",
                    max_model_len=64,
                    hashes=ModelHashes("", "", ""),
                    seed=0,
                    options=options,
                ),
            )


@pytest.mark.parametrize(
    ("weights", "cache", "said"),
    [
        (None, "auto", ""),
        (None, "bfloat16", ""),
        (None, "fp8", "fp8 KV cache"),
        ("fp8_per_channel", "auto", "fp8_per_channel weights"),
        ("fp8_per_tensor", "fp8_e4m3", "fp8_per_tensor weights, fp8_e4m3 KV cache"),
    ],
)
@pytest.mark.vllm
def test_numbers_of_fewer_bits_are_told_to_the_learner(weights, cache, said):
    from offbeat.actor.engines.vllm_engine import quantization_of

    config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=weights), cache_config=SimpleNamespace(cache_dtype=cache)
    )
    assert quantization_of(cast(Any, config)) == said


def test_vllm_asked_for_and_not_installed_is_said_at_once(monkeypatch, tiny_model):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="not installed"):
        make_engine(
            "vllm",
            str(tiny_model),
            EngineSettings(dtype="float32", max_model_len=64, hashes=ModelHashes("", "", ""), seed=0, options={}),
        )


@pytest.mark.vllm
def test_vllm_without_the_internals_that_the_actor_needs_is_refused_at_start():
    from offbeat.actor.engines.vllm_engine import check_internals

    class OtherEngine:
        output_processor = object()

    with pytest.raises(ServiceError, match=r"output_processor\.request_states.*install vLLM 0\.32 or 0\.33,"):
        check_internals(cast(Any, OtherEngine()))
