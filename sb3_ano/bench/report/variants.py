"""What a report compares: algorithms with the settings that their runs differ in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sb3_ano.bench.algorithms import CLASSES, Algorithm, number

LEARNING_RATE = "learning_rate"
#: Value of a setting whose suite has different values for its tasks.
OF_SUITE = "suite's"


@dataclass(frozen=True)
class Variant:
    """Describe the runs of one algorithm with equal settings, on all tasks.

    :param algorithm: label of the algorithm
    :param settings: values of the settings that the algorithm's runs differ in
    :param rows: row numbers in the table of runs
    :param changed: names of the settings that are not the suite's
    """

    algorithm: str
    settings: tuple[tuple[str, Any], ...]
    rows: tuple[int, ...]
    changed: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """Name of the algorithm with the settings."""
        texts = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in self.settings]
        return " ".join([title(self.algorithm), *texts])

    def value(self, name: str) -> float | None:
        """Return the value of a setting, or None if the runs do not differ in it, or it is not a number."""
        return number(dict(self.settings).get(name))

    def without(self, name: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Return the algorithm and all settings but one."""
        return self.algorithm, tuple(setting for setting in self.settings if setting[0] != name)


def title(algorithm: str) -> str:
    """Return the name of an algorithm for readers: ``"ANO (shaping=spo)"`` for ``"ano:shaping=spo"``."""
    name, _, options = algorithm.partition(":")
    name = name.upper() if name in CLASSES else name
    return f"{name} ({options.replace(',', ', ')})" if options else name


def find_variants(runs: pd.DataFrame) -> list[Variant]:
    """Return all algorithms with all settings that were run.

    :param runs: table of runs with ``env_id``, ``algorithm``, ``hyperparameters`` and ``changed``
    """
    made = []
    for algorithm, own in runs.groupby("algorithm", sort=False):
        default = Algorithm(str(algorithm).partition(":")[0]).default
        values = pd.DataFrame(index=own.index, dtype=object)
        for name in sorted(set().union(*own["hyperparameters"])):
            column = pd.Series([_plain(run.get(name, default(name))) for run in own["hyperparameters"]], own.index, object)
            if column.astype(str).groupby(own["env_id"]).nunique().max() > 1:
                of_suite = np.array([name not in changed for changed in own["changed"]])
                # Tasks may have different values in the suite; these are one setting all the same.
                values[name] = column.mask(of_suite, OF_SUITE) if column[of_suite].nunique() > 1 else column
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
        for row in sorted(values.index, key=lambda row: [(number(value) or 0.0, str(value)) for value in values.loc[row]]):
            groups.setdefault(tuple(values.loc[row].items()), []).append(row)
        for settings, rows in groups.items():
            changed = frozenset(name for row in rows for name in own["changed"][row])
            made.append(Variant(str(algorithm), settings, tuple(rows), changed))
    return made


def _plain(value: Any) -> Any:
    found = number(value)
    return found if found is not None else str(value)


def families(variants: Sequence[Variant], name: str) -> list[list[Variant]]:
    """Return the groups of variants that differ in one setting only, each in the order of its values.

    :param variants: variants to group
    :param name: name of the setting
    """
    groups: dict[Any, list[Variant]] = {}
    for variant in variants:
        if variant.value(name) is not None:
            groups.setdefault(variant.without(name), []).append(variant)
    return [sorted(group, key=lambda variant: variant.value(name) or 0.0) for group in groups.values() if len(group) > 1]
