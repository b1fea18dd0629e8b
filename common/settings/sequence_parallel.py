"""Checks of `train.sequence_parallel_size` against what it divides: the learner's processes and the model's heads."""

from offbeat.common.errors import SettingError

SETTING = "train.sequence_parallel_size"


def check_groups(size: int, *, num_processes: int) -> None:
    """Raise `SettingError` where so many learner processes cannot be divided into groups of `size`."""
    if num_processes % size:
        problem = f"{num_processes} learner processes (launch.learner_processes) cannot be divided into groups of {size}"
        raise SettingError(SETTING, size, problem, "Set it to a divisor of their number.")


def check_heads(size: int, *, num_heads: int, num_key_heads: int) -> None:
    """Raise `SettingError` for a model whose heads cannot be divided among `size` processes.

    Fewer heads of keys and values than processes are copied, if their number divides the processes'.
    """
    names = ("heads of keys and values", num_key_heads), ("heads", num_heads)
    for name, number in names:
        is_copied = number == num_key_heads < num_heads and size % number == 0
        if number % size and not is_copied:
            problem = (
                f"each process attends with as many heads, and the model has {number} {name}: {number} / {size} is not whole"
            )
            cure = f"Set it to a number that divides {num_heads} and {num_key_heads}."
            raise SettingError(SETTING, size, problem, cure)
