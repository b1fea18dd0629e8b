"""A reward function of every form (docs/rewards.md). Name one as `task.reward = "rewards:NAME"` beside this file."""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

from offbeat import RewardUnavailable, Sample

JUDGE = "http://127.0.0.1:8000/judge"


def exact(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return 1 for the right answer: a function of one completion."""
    return float(completion.strip() == str(row["answer"]))


def parts(sample: Sample) -> dict[str, float]:
    """Return two named parts; `task.reward_weights = { stopped = 0.1 }` makes the second one small."""
    return {"right": float(str(sample.row["answer"]) in sample.completion), "stopped": float(sample.finish_reason == "stop")}


def rarest(group: list[Sample]) -> list[float]:
    """Reward right answers, and more so those that few of the group have found: a function of a whole group."""
    is_right = [str(sample.row["answer"]) in sample.completion for sample in group]
    share = sum(is_right) / len(group)
    return [(2.0 - share) * right for right in is_right]


def batched(samples: list[Sample]) -> list[float]:
    """Return a score per completion from one call of a model that is fastest on many; here it counts words."""
    return [float(len(sample.completion.split())) for sample in samples]


async def judged(sample: Sample) -> float:
    """Ask a judge over HTTP. While it is down or busy, completions wait; they are not dropped."""
    body = json.dumps({"prompt": sample.prompt, "completion": sample.completion}).encode()
    request = urllib.request.Request(JUDGE, data=body, headers={"Content-Type": "application/json"})
    # An HTTP client of asyncio needs no thread.
    answer = await asyncio.to_thread(_read, request)
    if "score" not in answer:
        raise RewardUnavailable("the judge's queue is full")
    return float(answer["score"])


def _read(request: urllib.request.Request) -> dict[str, Any]:
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)
