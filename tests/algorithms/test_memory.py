"""Peak memory of whole trainings next to SB3's, over large spaces, networks, batches and numbers of environments."""

import sys

import pytest

from tests.algorithms.memory_program import CASES
from tests.common import needs_compiler, python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")

PROGRAM = "tests.algorithms.memory_program"
SB3 = "stable_baselines3:PPO"
#: What this package's code itself takes, in MB, and what PyTorch's compiler takes.
CONSTANT, COMPILER = 25.0, 200.0


def peak(kind: str, case: str, *flags: str) -> float:
    """Peak memory of a training in a process of its own, in MB."""
    return float(python("-m", PROGRAM, kind, case, *flags, check=True).stdout)


def require_little_more(ours: str, theirs: str, case: str, *flags: str, constant: float = CONSTANT) -> None:
    expected = peak(theirs, case, *(flag for flag in flags if flag != "compiled"))
    found = peak(ours, case, *flags)
    assert found <= 1.1 * expected + constant, f"{case}: {found:.0f} MB, SB3 takes {expected:.0f}"


def test_a_table_of_all_values_is_never_made():
    require_little_more("sb3_ano:ANO", SB3, "Discrete")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_training_takes_the_memory_of_sb3(case):
    require_little_more("sb3_ano:ANO", SB3, case, "files")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["Discrete", "Box of one environment", "wide layers", "images"])
def test_a_callback_that_may_change_the_policy_takes_no_memory(case):
    require_little_more("sb3_ano:ANO", SB3, case, "callback")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("case", ["Discrete", "Box", "wide layers", "one large batch", "many epochs", "images"])
def test_a_compiled_training_takes_the_memory_of_sb3_and_of_the_compiler(case):
    require_little_more("sb3_ano:ANO", SB3, case, "compiled", constant=COMPILER)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["Discrete, wide", "Dict", "many actions", "many environments"])
def test_masks_take_the_memory_of_sb3_contrib(case):
    require_little_more("sb3_ano:MaskableANO", "sb3_contrib:MaskablePPO", case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["Discrete, wide", "MultiBinary", "many environments", "many epochs"])
def test_sequences_take_the_memory_of_sb3_contrib(case):
    require_little_more("sb3_ano:RecurrentANO", "sb3_contrib:RecurrentPPO", case)
