"""An exact sampler: completions of given weights with the log-probs of the distributions that they were drawn from.

All completions of a batch grow together, one token at a time, over one key-value cache, in float32. There is no engine whose
numerics differ, unless noise is asked for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from offbeat.common.models.routing import record_routing
from offbeat.common.weights.flat import WeightBuffer

_COMPACT_SHARE = 0.5
"""Share of unfinished rows at which the finished ones are taken out of the batch."""


class Sampled(NamedTuple):
    """One completion."""

    token_ids: NDArray[np.int32]
    """The sampled tokens, the end of the completion included, `[num_tokens]`."""
    behavior_logprobs: NDArray[np.float32]
    """`[num_tokens]`."""
    is_ended: bool
    """The completion ended by itself; False: it was cut at the largest number of tokens."""


class ExactSampler:
    """Samples from a copy of the policy whose weights are set by `load`.

    `noise` is the standard deviation, in nats, of normal noise on every logit at every token. The noisy distribution is the one
    that is sampled from and whose log-probs are returned, as those of an engine with other numerics are: `E_mu[pi / mu] = 1`.
    """

    def __init__(self, model_path: str, *, noise: float = 0.0) -> None:
        transformers_logging.disable_progress_bar()
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._noise = noise

    @torch.no_grad()
    def load(self, weights: WeightBuffer) -> None:
        """Copy the weights, all of the model's by name."""
        parameters = dict(self._model.named_parameters())
        for name, weight in weights.views():
            parameters[name].copy_(weight)

    def texts(self, completions: Sequence[Sampled]) -> list[str]:
        """Return the completions as text, without special tokens."""
        return self._tokenizer.batch_decode([one.token_ids for one in completions], skip_special_tokens=True)

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[NDArray[np.int32]], *, num_each: int, max_new_tokens: int, generator: torch.Generator
    ) -> list[Sampled]:
        """Return `num_each` completions of each prompt, those of a prompt next to each other, sampled at temperature 1.

        Raises `FloatingPointError` where the weights give no distribution.
        """
        batch = _Batch(self._model, prompts, num_each=num_each, eos_token_id=self._tokenizer.eos_token_id)
        for _ in range(max_new_tokens):
            logits = batch.logits
            if not logits.isfinite().all():
                raise FloatingPointError("the weights give logits that are not finite")
            if self._noise:
                logits = logits + self._noise * torch.randn(logits.shape, generator=generator)
            logprobs = logits.log_softmax(dim=-1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
            batch.append(tokens, logprobs.gather(-1, tokens))
            if batch.is_done:
                break
            batch.advance()
        return batch.completions()

    @torch.inference_mode()
    def experts(self, prompt: NDArray[np.int32], completions: Sequence[Sampled]) -> NDArray[np.int64]:
        """Return the experts of a group's tokens as `protocols.payload.ExpertsMeta` orders them, `[tokens, layers, top_k]`.

        They are of one more pass over the completions, whose sums may round differently than those that sampled them.
        """
        lengths = [len(prompt) + len(one.token_ids) - 1 for one in completions]
        token_ids = torch.zeros(len(completions), max(lengths), dtype=torch.int64)
        mask = torch.zeros_like(token_ids)
        for index, (one, length) in enumerate(zip(completions, lengths, strict=True)):
            token_ids[index, :length] = torch.from_numpy(np.concatenate([prompt, one.token_ids[:-1]]).astype(np.int64))
            mask[index, :length] = 1
        with record_routing(self._model) as record:
            self._model(input_ids=token_ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
        routing = record.routing()
        assert routing is not None, "a dense model has no experts"
        of_rows = routing.experts.numpy().reshape(*token_ids.shape, *routing.experts.shape[1:])
        first = of_rows[0, : len(prompt)]
        return np.concatenate([first, *(row[len(prompt) : length] for row, length in zip(of_rows, lengths, strict=True))])


class _Batch:
    """The completions of one call, unfinished and finished."""

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[NDArray[np.int32]], *, num_each: int, eos_token_id: int
    ) -> None:
        self._model = model
        self._eos_token_id = eos_token_id
        longest = max(map(len, prompts))
        token_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for index, prompt in enumerate(prompts):
            # Padded on the left: the next token of every row is in the same column.
            token_ids[index, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[index, longest - len(prompt) :] = 1
        output = model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache: Any = output.past_key_values
        self._cache.batch_repeat_interleave(num_each)
        self._mask = mask.repeat_interleave(num_each, dim=0)
        self.logits: Tensor = output.logits[:, -1].float().repeat_interleave(num_each, dim=0)
        """Logits of the next token of every row that is still in the batch, `[rows, vocabulary]`."""
        num_rows = len(self._mask)
        self._rows = torch.arange(num_rows)
        """Completion that each row of the batch is."""
        self._is_alive = torch.ones(num_rows, dtype=torch.bool)
        self._columns: list[tuple[Tensor, Tensor, Tensor]] = []
        """One entry per step: the completions that got a token, the tokens, and their log-probs."""
        self._ended = torch.zeros(num_rows, dtype=torch.bool)
        self._last = torch.zeros(num_rows, 1, dtype=torch.int64)

    @property
    def is_done(self) -> bool:
        """Every completion has ended."""
        return not self._is_alive.any()

    def append(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Give each unfinished completion its next token, `[rows, 1]` each."""
        alive = self._is_alive
        self._columns.append((self._rows[alive], tokens[alive, 0], logprobs[alive, 0]))
        ends = alive & (tokens[:, 0] == self._eos_token_id)
        self._ended[self._rows[ends]] = True
        self._is_alive = alive & ~ends
        self._last = tokens

    def advance(self) -> None:
        """Compute the logits of the next token."""
        num_alive = int(self._is_alive.sum())
        if num_alive <= _COMPACT_SHARE * len(self._is_alive):
            kept = self._is_alive.nonzero()[:, 0]
            self._cache.batch_select_indices(kept)
            self._mask, self._rows, self._last = self._mask[kept], self._rows[kept], self._last[kept]
            self._is_alive = self._is_alive[kept]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=-1)
        output = self._model(
            input_ids=self._last,
            attention_mask=self._mask,
            position_ids=self._mask.sum(dim=-1, keepdim=True) - 1,
            past_key_values=self._cache,
            use_cache=True,
        )
        self.logits = output.logits[:, -1].float()

    def completions(self) -> list[Sampled]:
        """Return every completion, in the order of the prompts."""
        rows, tokens, logprobs = (torch.cat(parts) for parts in zip(*self._columns, strict=True))
        # Stable: the tokens of a completion stay in their order.
        order = rows.argsort(stable=True)
        lengths = torch.bincount(rows, minlength=len(self._ended)).tolist()
        of_tokens = tokens[order].to(torch.int32).split(lengths)
        of_logprobs = logprobs[order].split(lengths)
        ended = self._ended.tolist()
        return [
            Sampled(ids.numpy(), values.numpy(), is_ended)
            for ids, values, is_ended in zip(of_tokens, of_logprobs, ended, strict=True)
        ]
