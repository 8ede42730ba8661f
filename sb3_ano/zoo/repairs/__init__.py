"""What is broken in the installed RL Zoo, mended in memory while it is broken.

Every module is one fault, which its docstring names. ``is_needed()`` looks for the fault itself, whatever the version, and
``apply()`` mends it; a second call changes nothing.
"""

from types import ModuleType

from sb3_ano.zoo.repairs import (
    child_processes,
    empty_runs,
    hub_metadata,
    hub_optional_files,
    missing_ffmpeg,
    score_normalization,
    single_runs,
    trial_zero,
    unsafe_yaml,
)

# What a script that imports the zoo's functions meets too, and what only some commands meet.
LIBRARY: tuple[ModuleType, ...] = (trial_zero, empty_runs, unsafe_yaml, hub_metadata, hub_optional_files)
COMMANDS: dict[str, tuple[ModuleType, ...]] = {
    "benchmark": (child_processes,),
    "record_training": (child_processes, missing_ffmpeg),
    "push_to_hub": (missing_ffmpeg,),
    "all_plots": (single_runs,),
    "plot_from_file": (single_runs, score_normalization),
}
ALL: tuple[ModuleType, ...] = tuple(dict.fromkeys([*LIBRARY, *(one for some in COMMANDS.values() for one in some)]))


def apply_needed(repairs: tuple[ModuleType, ...]) -> list[str]:
    """Apply those of ``repairs`` whose fault is there.

    :return: their names
    """
    applied = []
    for repair in repairs:
        if repair.is_needed():
            repair.apply()
            applied.append(repair.__name__.rpartition(".")[2])
    return applied
