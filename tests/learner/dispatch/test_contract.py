"""Actors that would bias or break a run are refused with the reason and the cure."""

from typing import Any

import msgspec
import pytest

from offbeat.learner.dispatch.contract import differences, objection, source_objection
from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from offbeat.protocols.messages import Hello
from tests.learner.dispatch.dispatch_desk import CONTRACT, ENGINE, HASHES, make_hello


def engine(**fields: Any) -> EngineInfo:
    return msgspec.structs.replace(ENGINE, **fields)


def hashes(**fields: Any) -> EngineInfo:
    return engine(hashes=msgspec.structs.replace(HASHES, **fields))


REFUSED: dict[str, tuple[Hello, tuple[str, ...]]] = {
    "run_id": (make_hello(run_id="other"), ("other", "run run", "hub.address")),
    "engine.hashes.config": (make_hello(engine=hashes(config="c1")), ("model config", "c1", "c0", "model.path")),
    "engine.hashes.tokenizer": (make_hello(engine=hashes(tokenizer="t1")), ("tokenizer", "t1", "t0", "model.path")),
    "engine.hashes.chat_template": (
        make_hello(engine=hashes(chat_template="x1")),
        ("chat template", "x1", "x0", "model.path"),
    ),
    "engine.dtype": (make_hello(engine=engine(dtype="bfloat16")), ("model.dtype", "bfloat16", "float32", "same config")),
    "engine.max_model_len": (make_hello(engine=engine(max_model_len=63)), ("63 tokens", "64", "model.max_length")),
    "temperature": (make_hello(temperature=0.8), ("rollout.temperature", "0.8", "0.7", "same config")),
    "reward": (make_hello(reward="rewards:other"), ("task.reward", "rewards:other", "rewards:solved", "same config")),
}
"""Hellos, and texts that their refusals must contain, by the field that differs."""

RECORDED: dict[str, tuple[Hello, tuple[str, ...]]] = {
    "software": (make_hello(software="0.9"), ("offbeat 0.9", "1.0")),
    "engine.max_model_len": (make_hello(engine=engine(max_model_len=65)), ("65 tokens", "64")),
    "engine.has_weight_files": (make_hello(engine=engine(has_weight_files=False)), ("starts without weights", "floor")),
    "engine.quantization": (
        make_hello(engine=engine(quantization="fp8 weights, fp8 KV cache")),
        ("fp8 weights, fp8 KV cache", "offbeat calibrate"),
    ),
}

WELCOME: dict[str, Hello] = {
    "actor": make_hello(actor="another"),
    "incarnation": make_hello(incarnation=9),
    "run_id": make_hello(run_id=CONTRACT.run_id),
    "lease_ids": make_hello(lease_ids=(1, 2)),
    # In the line that is recorded when the actor joins anyway.
    "engine.name": make_hello(engine=engine(name="transformers")),
    "engine.version": make_hello(engine=engine(version="2")),
    "engine.device": make_hello(engine=engine(device="cuda")),
    "engine.gpu": make_hello(engine=engine(gpu="GPU-1")),
    "engine.processor": make_hello(engine=engine(processor="EPYC")),
    "engine.takes_images": make_hello(engine=engine(takes_images=True)),
    # Compared with other actors' too, where the learner has no files.
    "sources": make_hello(sources={"rewards.py": "s0"}),
}


@pytest.mark.parametrize("field", REFUSED)
def test_field_that_would_bias_or_break_the_run_is_refused_with_both_values_and_the_cure(field: str) -> None:
    hello, words = REFUSED[field]
    reason = objection(CONTRACT, hello)
    assert reason is not None
    assert [word for word in words if word not in reason] == []


def test_all_differences_are_named_at_once() -> None:
    differing = make_hello(
        engine=engine(dtype="bfloat16", max_model_len=63, hashes=ModelHashes(config="c1", tokenizer="t1", chat_template="x1")),
        temperature=0.8,
        reward="rewards:other",
    )
    assert objection(CONTRACT, differing) == (
        "actor and learner differ in model config (c1, not c0), tokenizer (t1, not t0) and chat template (x1, not x0): give "
        "both the same model.path contents; "
        "actor and learner differ in model.dtype (bfloat16, not float32), rollout.temperature (0.8, not 0.7) and task.reward "
        "(rewards:other, not rewards:solved): give both the same config; "
        "the actor's engine takes 63 tokens, the run needs 64: give both the same model.max_length"
    )


@pytest.mark.parametrize("field", RECORDED)
def test_harmless_difference_is_recorded_and_not_refused(field: str) -> None:
    hello, words = RECORDED[field]
    assert objection(CONTRACT, hello) is None
    (line,) = differences(CONTRACT, hello)
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize("field", WELCOME)
def test_what_may_differ_is_neither_refused_nor_worth_a_line(field: str) -> None:
    assert objection(CONTRACT, WELCOME[field]) is None
    assert differences(CONTRACT, WELCOME[field]) == []


def test_every_field_of_the_hello_is_refused_or_recorded_or_may_differ() -> None:
    fields = {field.name for field in msgspec.structs.fields(Hello)} - {"engine"}
    fields |= {f"engine.{field.name}" for field in msgspec.structs.fields(EngineInfo)} - {"engine.hashes"}
    fields |= {f"engine.hashes.{field.name}" for field in msgspec.structs.fields(ModelHashes)}
    assert fields == REFUSED.keys() | RECORDED.keys() | WELCOME.keys()


def test_actor_that_takes_no_images_is_refused_by_a_run_that_has_some() -> None:
    contract = CONTRACT._replace(has_images=True)
    reason = objection(contract, make_hello())
    assert reason is not None
    assert "have images" in reason and "data.image_field" in reason
    assert objection(contract, make_hello(engine=engine(takes_images=True))) is None


def test_actor_that_has_worked_for_no_run_is_welcome_to_any() -> None:
    assert objection(CONTRACT._replace(run_id="any"), make_hello()) is None


def with_sources(**hashes: str) -> Hello:
    return make_hello(actor="-".join(hashes), sources={f"{name}.py": value for name, value in hashes.items()})


@pytest.mark.parametrize(
    ("learners", "others", "witness"),
    [
        pytest.param({"rewards.py": "s0", "rules.py": "r0"}, [], "the learner", id="learner"),
        pytest.param({}, [make_hello(), with_sources(rewards="s0", rules="r0")], "actor rewards-rules", id="actor"),
    ],
)
def test_other_code_of_the_reward_is_refused_with_file_hashes_and_cure(
    learners: dict[str, str], others: list[Hello], witness: str
) -> None:
    contract = CONTRACT._replace(sources=learners)
    reason = source_objection(contract, with_sources(rewards="s1", rules="r0", more="m"), others)
    assert reason is not None
    words = (f"code of rewards:solved is not that of {witness}", "rewards.py (hash s1, not s0)", "PYTHONPATH", "resume")
    assert [word for word in words if word not in reason] == []
    assert "rules.py" not in reason
    assert "rewards.py is not" not in reason
    assert source_objection(contract, with_sources(rewards="s0", more="m"), others) is None
    assert source_objection(contract, make_hello(), others) is None, "a built-in reward has no files of its own"
    package = source_objection(contract, make_hello(sources={"rewards/__init__.py": "s0"}), others)
    assert package is not None
    assert "rewards/__init__.py is not rewards.py" in package


def test_learners_code_decides_where_an_actor_has_other_code() -> None:
    contract = CONTRACT._replace(sources={"rewards.py": "s0"})
    assert source_objection(contract, with_sources(rewards="s0"), [with_sources(rewards="s1")]) is None
