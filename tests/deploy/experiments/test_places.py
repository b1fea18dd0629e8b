"""Claims about `deploy.experiments.sweep_runs`: runs at a time share no core and no GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.errors import SettingError
from offbeat.deploy.experiments.sweep_runs import MachinePart, divide
from offbeat.deploy.local.devices import Gpu


def gpus(number: int) -> list[Gpu]:
    return [Gpu(f"GPU-{index}", "H100", 80 << 30, 80 << 30) for index in range(number)]


def test_one_run_has_the_whole_machine_as_it_is() -> None:
    assert divide(1, gpus(4), range(8)) == [MachinePart()]
    assert MachinePart().environment == {}


def test_runs_get_equal_parts_of_the_gpus_and_any_core() -> None:
    first, second = divide(2, gpus(5), range(8))
    assert (first.gpus, second.gpus) == (("GPU-0", "GPU-1"), ("GPU-2", "GPU-3")), "the fifth is left over"
    assert first.environment == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}
    assert first.cores == ()


@given(num_runs=st.integers(2, 9), cores=st.sets(st.integers(0, 63), min_size=9))
def test_no_core_is_given_twice_and_parts_are_equal(num_runs: int, cores: set[int]) -> None:
    places = divide(num_runs, [], sorted(cores))
    given_out = [core for place in places for core in place.cores]
    assert len(set(given_out)) == len(given_out)
    assert set(given_out) <= cores
    assert {len(place.cores) for place in places} == {len(cores) // num_runs}
    assert len(places) == num_runs


@pytest.mark.parametrize(
    ("num_gpus", "said"), [(0, "a core of its own, and there are 2"), (3, "a GPU of its own, and there are 3")]
)
def test_more_runs_than_the_machine_has_parts_are_refused(num_gpus: int, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        divide(4, gpus(num_gpus), range(2))
