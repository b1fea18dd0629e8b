"""Published claims held to the rows: a sentence says "confirmed" only where every interval is on the claim's side of 0."""

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.lab.study.trials import LEAST_WIDTH, StudyRow
from offbeat.lab.sweep.estimates import SIGNIFICANT, Comparison, compare_pairs, holm


class Side(NamedTuple):
    """The runs of one method on one task at one lag, without noise."""

    task: str
    method: str
    lag: int


class Contrast(NamedTuple):
    """A difference of final rewards that a claim says is above 0, by seed: `first` minus `second`, minus the same of `less`."""

    first: Side
    second: Side
    less: tuple[Side, Side] | None = None

    def __str__(self) -> str:
        task, method, lag = self.first
        where = f"`{task}`, lag {lag}" if self.less is None else f"`{task}` less `{self.less[0].task}`, lag {lag}"
        other = self.second.method if self.second.method != method else f"itself at lag {self.second.lag}"
        return f"{where}: `{method}` minus {other if other.startswith('itself') else f'`{other}`'}"


class Claim(NamedTuple):
    """A claim and the differences that it is about."""

    text: str
    differences: tuple[Contrast, ...]


class TestedContrast(NamedTuple):
    """One difference as measured."""

    difference: Contrast
    compared: Comparison
    """The paired comparison. It has no interval if fewer than two seeds are in both, or all differences are equal."""
    adjusted_p: float | None
    """After Holm's correction for the claim's differences that have a p-value; None for the others."""

    @property
    def sign(self) -> int:
        """1 where the whole interval is above 0, -1 where it is below, and 0 where it holds 0 or there is none."""
        low, high = self.compared.low, self.compared.high
        if low is None or high is None or self.adjusted_p is None or self.adjusted_p >= SIGNIFICANT:
            return 0
        return (low > 0) - (high < 0)


def _over(method: str, other: str, *places: tuple[str, int]) -> tuple[Contrast, ...]:
    return tuple(Contrast(Side(task, method, lag), Side(task, other, lag)) for task, lag in places)


_LATE = tuple((task, lag) for task in ("reversal", "reversal_moe", "progression") for lag in (16, 64))

CLAIMS = (
    Claim("Sequence ratios tolerate a high lag better than token ratios do (GSPO)", _over("gspo", "grpo", *_LATE)),
    Claim(
        "The same of weights without a clip",
        _over("reinforce + sequence_tis", "reinforce + token_tis", *_LATE),
    ),
    Claim("Tapering by the whole completion (TOPR) tolerates a high lag better than `gspo`", _over("topr", "gspo", *_LATE)),
    Claim("`topr` is better than `vespo` at a high lag", _over("topr", "vespo", *_LATE)),
    Claim(
        "A mixture of experts needs sequence ratios more than a dense model does (GSPO, section 5.3)",
        tuple(
            Contrast(
                Side("reversal_moe", "gspo", lag),
                Side("reversal_moe", "grpo", lag),
                (Side("reversal", "gspo", lag), Side("reversal", "grpo", lag)),
            )
            for lag in (16, 64)
        ),
    ),
    Claim(
        "A range of 0.3 / length is better than 0.05 on completions of 54 tokens",
        _over("gspo", "gspo + band 0.05", *(("progression", lag) for lag in (1, 4, 16, 64))),
    ),
    Claim(
        "A range of 0.3 / length is better than 0.005 on completions of 6 tokens",
        _over("gspo", "gspo + band 0.005", *(("reversal", lag) for lag in (1, 4, 16, 64))),
    ),
    Claim(
        "Token clips lose reward from lag 4 on (AReaL, table 3)",
        tuple(
            Contrast(Side(task, "grpo", 0), Side(task, "grpo", lag))
            for task in ("reversal", "reversal_moe", "progression")
            for lag in (4, 16, 64)
        ),
    ),
    Claim(
        "On long completions weights are better than masks (reports of practitioners)",
        _over("reinforce + sequence_tis", "reinforce + sequence_mask", ("progression", 16), ("progression", 64))
        + _over("reinforce + token_tis", "reinforce + icepop", ("progression", 16), ("progression", 64)),
    ),
    Claim(
        "The sampler's routing improves GSPO (against GSPO, section 5.3)",
        _over("gspo + engine routing", "gspo", *(("reversal_moe", lag) for lag in (0, 1, 4, 16, 64))),
    ),
)


def find(claim: Claim, rows: Sequence[StudyRow]) -> list[TestedContrast]:
    """Return the differences of the claim that have a seed on every side."""
    found: list[tuple[Contrast, Comparison]] = []
    for difference in claim.differences:
        compared = _compare(difference, rows)
        if compared is not None:
            found.append((difference, compared))
    tested = [compared.p_value for _, compared in found if compared.p_value is not None]
    adjusted = iter(holm(tested))
    return [TestedContrast(*one, None if one[1].p_value is None else next(adjusted)) for one in found]


def verdict(findings: Sequence[TestedContrast]) -> str:
    """Return the sentence that the intervals allow."""
    signs = [finding.sign for finding in findings]
    above, below, num = signs.count(1), signs.count(-1), len(signs)
    if not num:
        return "no runs"
    if above == num:
        return "confirmed"
    if below == num:
        return "contradicted: the opposite holds"
    if not above and not below:
        return f"not told: none of {num} differences is told from 0"
    parts = [f"{count} of {num} {text}" for count, text in ((above, "for it"), (below, "against it")) if count]
    return f"not as a rule: {', '.join(parts)}, {num - above - below} not told from 0"


def _compare(difference: Contrast, rows: Sequence[StudyRow]) -> Comparison | None:
    first, second = _rewards(difference.first, rows), _rewards(difference.second, rows)
    if difference.less is not None:
        more, less = (_rewards(side, rows) for side in difference.less)
        seeds = first.keys() & second.keys() & more.keys() & less.keys()
        first = {seed: first[seed] - second[seed] for seed in seeds}
        second = {seed: more[seed] - less[seed] for seed in seeds}
    compared = compare_pairs(second, first)
    return None if compared is None else compared.wider_than(LEAST_WIDTH)


def _rewards(side: Side, rows: Sequence[StudyRow]) -> dict[int, float]:
    return {row.seed: row.final_reward for row in rows if Side(row.task, row.method, row.lag) == side and not row.noise}
