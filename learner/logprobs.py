"""Log-probs of given tokens under a causal language model, without keeping the logits of a whole batch."""

import torch
import torch.nn.functional as F  # noqa: N812, torch's own convention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

MAX_CHUNK_LOGITS = 2**26
"""Logits alive at once, in float32 a quarter of a GiB: 441 tokens of a vocabulary of 152,000."""


def token_logprobs(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    *,
    temperature: float,
    max_chunk_logits: int = MAX_CHUNK_LOGITS,
) -> Tensor:
    """`log softmax((hidden_states @ weight.T + bias) / temperature)` at `token_ids`, float32 `[num_tokens]`.

    `hidden_states`: `[num_tokens, hidden_size]`, the states that predict the tokens; `weight`: `[vocab_size,
    hidden_size]`; `token_ids`: `[num_tokens]` int64. Logits are made in chunks of at most `max_chunk_logits` numbers
    and, where there is more than one chunk, made again in the backward pass instead of being kept.
    """
    chunk_size = max(1, max_chunk_logits // weight.shape[0])
    if len(token_ids) <= chunk_size:
        return _chunk_logprobs(hidden_states, weight, bias, token_ids, temperature)
    chunks = zip(hidden_states.split(chunk_size), token_ids.split(chunk_size), strict=True)
    return torch.cat(
        [
            checkpoint(_chunk_logprobs, hidden, weight, bias, ids, temperature, use_reentrant=False, preserve_rng_state=False)
            for hidden, ids in chunks
        ]
    )


def _chunk_logprobs(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: float
) -> Tensor:
    logits = F.linear(hidden_states, weight, bias).float() / temperature
    return logits.gather(-1, token_ids[:, None]).squeeze(-1) - logits.logsumexp(dim=-1)


class CompletionHead(nn.Module):
    """The policy's output layer, applied to the positions that predict completion tokens."""

    def __init__(self, output_layer: nn.Linear, max_chunk_logits: int) -> None:
        super().__init__()
        self.output_layer = output_layer
        self._max_chunk_logits = max_chunk_logits

    def forward(self, hidden_states: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        """See `token_logprobs`."""
        # The parameters are used here, not the layer: under ZeRO-3 calling it once per chunk would gather its weight as
        # often as there are chunks, which is a collective, and ranks do not have equally many chunks.
        return token_logprobs(
            hidden_states,
            self.output_layer.weight,
            self.output_layer.bias,
            token_ids,
            temperature=temperature,
            max_chunk_logits=self._max_chunk_logits,
        )


class CompletionLogprobs(nn.Module):
    """The policy as it is trained: rows of token ids in, log-probs of their completion tokens out."""

    def __init__(self, policy: PreTrainedModel, max_chunk_logits: int = MAX_CHUNK_LOGITS) -> None:
        super().__init__()
        output_layer = policy.get_output_embeddings()
        if not isinstance(output_layer, nn.Linear):
            raise TypeError(f"the policy's output layer is {type(output_layer).__name__}; only a plain Linear is supported")
        self.policy = policy
        self.head = CompletionHead(output_layer, max_chunk_logits)

    def forward(self, token_ids: Tensor, completion_mask: Tensor, temperature: float) -> Tensor:
        """Log-probs `[rows, tokens]` float32: the entry at t is that of token t given those before it.

        `token_ids`: `[rows, tokens]` int64, padded on the right, at least 2 tokens wide; `completion_mask`: the same
        shape, True on the tokens asked for, never on the first one. Where it is False the result is 0.

        There is no attention mask: a causal model's tokens never see the padding to their right, and nobody asks for
        the padding's own log-probs.
        """
        predicting = completion_mask[:, 1:]
        states = self.policy.base_model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
        logprobs = self.head(states[predicting], token_ids[:, 1:][predicting], temperature)
        scattered = logprobs.new_zeros(predicting.shape).masked_scatter(predicting, logprobs)
        return F.pad(scattered, (1, 0))
