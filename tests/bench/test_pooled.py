"""The pooled comparison: settings of the RL Zoo, and statistics that agree with SciPy's and with a hand-worked table."""

import importlib
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import rl_zoo3
import yaml
from scipy import stats

from sb3_ano.bench.algorithms import parse_algorithm
from sb3_ano.bench.suites import load_suite
from tests.common import ROOT

SUITE = ROOT / "benchmarks" / "pooled.yml"
# Defaults of SB3's PPO that the RL Zoo's file leaves out.
DEFAULTS = {
    "normalize": False,
    "n_envs": 1,
    "n_steps": 2048,
    "batch_size": 64,
    "n_epochs": 10,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "learning_rate": 3e-4,
    "clip_range": 0.2,
    "ent_coef": 0.0,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "use_sde": False,
    "sde_sample_freq": -1,
    "policy_kwargs": None,
    "env_wrapper": None,
}


@pytest.fixture
def pooled(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("pooled")


def test_every_setting_has_the_zoos_hyperparameters_of_ppo(pooled):
    file = Path(rl_zoo3.__file__).parent / "hyperparams" / "ppo.yml"
    zoo = yaml.safe_load(file.read_text())
    suite = load_suite(str(SUITE))
    assert len(suite.tasks) == 18

    for task in suite.tasks:
        for name, label in pooled.SETTINGS.items():
            resolved = suite.resolve(task, parse_algorithm(label))["hyperparameters"]
            expected = {**DEFAULTS, **zoo[task]}
            del expected["n_timesteps"]

            radius = str(expected.pop("clip_range"))
            factor = 2.5 if name.startswith("ANO,") else 1.0
            assert str(resolved.pop("clip_range")).startswith("lin_") == radius.startswith("lin_")
            given = suite.resolve(task, parse_algorithm(label))["hyperparameters"]["clip_range"]
            assert float(str(given).removeprefix("lin_")) == pytest.approx(factor * float(radius.removeprefix("lin_")))

            assert resolved.pop("desired_kl") is None
            resolved.pop("shaping", None)
            if expected["policy_kwargs"] is not None:
                expected["policy_kwargs"] = expected["policy_kwargs"].replace("dict( ", "dict(").replace(" )", ")")
            assert resolved == expected, (task, label)


def test_the_permutation_test_of_one_task_is_that_of_mann_and_whitney(pooled):
    rng = np.random.default_rng(0)
    ours = rng.normal(0.8, 1.0, (10, 1))
    theirs = rng.normal(0.0, 1.0, (10, 1))
    expected = stats.mannwhitneyu(ours[:, 0], theirs[:, 0], method="exact").pvalue
    assert pooled.permutation_test(ours, theirs, 20_000) == pytest.approx(expected, abs=0.01)


def test_corrected_p_values_are_holms(pooled):
    assert pooled.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_the_largest_fall_is_from_the_best_so_far(pooled):
    assert pooled.largest_fall(pd.Series([1.0, 5.0, 3.0, 6.0, 2.0, 9.0])) == 4.0


def test_only_complete_seeds_count_and_three_are_needed(pooled, tmp_path):
    def write(n_seeds):
        tasks = yaml.safe_load(SUITE.read_text())["tasks"]
        keys = list(itertools.product(tasks, pooled.SETTINGS.values(), range(20, 20 + n_seeds)))
        rows = pd.DataFrame(keys, columns=["env", "algorithm", "seed"]).assign(evaluation_return=1.0)
        # The last seed lacks one run.
        rows = rows.iloc[:-1]
        rows.to_csv(tmp_path / "runs.csv")
        rows.to_csv(tmp_path / "curves.csv")

    write(3)
    with pytest.raises(SystemExit, match="2 seeds are complete; the plan allows no look before there are 3"):
        pooled.read(tmp_path)
    write(4)
    found = pooled.read(tmp_path)
    assert sorted(set(found.index.get_level_values("seed"))) == [20, 21, 22]
    assert len(found) == 18 * 4 * 3
