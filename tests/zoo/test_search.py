"""``train -optimize`` for this package's algorithms: RL Zoo's search, and what it samples."""

from pathlib import Path
from unittest import mock

import optuna
import pytest
import rl_zoo3
import yaml
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER, sample_ppo_params

from sb3_ano import ANO
from sb3_ano._registry import ALGORITHMS
from tests.zoo.conftest import rejected, run

COMPLETE, FAIL, PRUNED = TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED
JOURNAL, DATABASE = "study.log", "sqlite:///study.db"
QUICK = "-n 512 --eval-episodes 1 --seed 3 --no-optim-plots -params n_envs:4 normalize:True"
TRAIN = "train --algo ano --env CartPole-v1"

pytestmark = [
    pytest.mark.usefixtures("zoo"),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:batch_size=.* does not divide:UserWarning"),  # the zoo's space has such sizes
]


def run_search(options: str = "", *, n_trials: int = 2, storage: str = JOURNAL, algo: str = "ano") -> str:
    study = f"--study-name s --storage {storage}"
    return run(f"train --algo {algo} --env CartPole-v1 -optimize --n-trials {n_trials} {study} {options} {QUICK}").output


def study_of(storage=JOURNAL):
    if storage.endswith(".log"):
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(storage))
    return optuna.load_study(storage=storage, study_name="s")


@pytest.mark.usefixtures("small_rollouts")
@pytest.mark.parametrize("algo", [algo for algo in ALGORITHMS if "mask" not in algo])  # CartPole has no masks
def test_a_search_leaves_the_zoos_report_and_trials_that_train(algo):
    run_search(algo=algo)
    (report,) = Path(f"logs/{algo}").glob("report_CartPole-v1_2-trials-512-tpe-median_*.csv")
    assert len(report.read_text().splitlines()) == 3
    assert not list(Path(f"logs/{algo}").glob("CartPole-v1_*")), "no directory of a run"
    assert rl_zoo3.ALGOS[algo] is ALGORITHMS[algo].algorithm

    for options, trial in (("--trial-id 0", study_of().trials[0]), ("", study_of().best_trial)):
        run(f"train --algo {algo} --env CartPole-v1 --study-name s --storage {JOURNAL} {options} -n 64 --eval-freq -1")
        newest = max(Path(f"logs/{algo}").glob("CartPole-v1_*"))
        config = dict(yaml.unsafe_load((newest / "CartPole-v1/config.yml").read_text()))
        sampled = HYPERPARAMS_CONVERTER[algo](trial.params)
        assert {name: config[name] for name in sampled} == sampled
        assert set(ALGORITHMS[algo].search_space) <= set(sampled)


WRONG_STUDIES = [
    ("--storage sqlite:///no.db --study-name s", "--storage sqlite:///no.db: there is no file no.db; -optimize makes one"),
    ("--storage no.log --study-name s --trial-id 0", "--storage no.log: there is no file no.log"),
    ("--storage {study}", "are loaded with both --storage and --study-name"),
    ("--trial-id 0", "are loaded with both --storage and --study-name"),
    ("--storage {study} --study-name other", "the best trial of --study-name other in --storage {study} cannot be loaded: "),
    ("--storage {study} --study-name empty", "the best trial of --study-name empty in --storage {study} cannot be loaded: "),
    ("--storage {study} --study-name empty --trial-id 0", "--trial-id 0 of --study-name empty in --storage {study} cannot be"),
    ("--storage damaged.log --study-name s", "the best trial of --study-name s in --storage damaged.log cannot be loaded: "),
    ("--storage study.txt --study-name s", "of --study-name s in --storage study.txt cannot be loaded: Could not parse"),
    ("--algo ppo --storage {study} --study-name other --trial-id 0", "--trial-id 0 of --study-name other in --storage"),
]


@pytest.mark.parametrize("study", [JOURNAL, DATABASE])
def test_a_study_or_trial_that_does_not_exist_is_one_line(study):
    storage = study
    if study == JOURNAL:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(study))
    optuna.create_study(storage=storage, study_name="empty")
    Path("damaged.log").write_text("no study\n\nno study\n")
    before = set(Path().iterdir())
    for options, message in WRONG_STUDIES:
        assert message.format(study=study) in rejected(f"{TRAIN} -n 64 {options.format(study=study)}")
    assert set(Path().iterdir()) == before, "neither an empty study nor a run is left"


@pytest.mark.usefixtures("small_rollouts")
def test_jobs_share_a_study_that_continues_and_pruners_stop_trials_early():
    options = "--n-jobs 2 --optimization-log-path evaluated --pruner median --n-evaluations 4 --n-startup-trials 1"
    for total in (4, 8):
        run_search(f"--max-total-trials {total} --sampler random {options}", storage=DATABASE)
    trials = study_of(DATABASE).trials
    # A thread that finds the total too late makes one trial more.
    assert 8 <= len(trials) <= 10
    assert {(COMPLETE, False), (PRUNED, True)} <= {(trial.state, len(trial.intermediate_values) < 4) for trial in trials}
    assert len(list(Path("evaluated").glob("trial_*/best_model.zip"))) == len(trials)


@pytest.mark.usefixtures("small_rollouts")
def test_a_diverging_trial_is_pruned_and_an_interrupted_search_reports(monkeypatch):
    learn = ANO.learn
    fail = mock.Mock(side_effect=[FloatingPointError("no finite loss"), None, KeyboardInterrupt()])

    def learn_or_raise(self, *args, **kwargs):
        fail()
        return learn(self, *args, **kwargs)

    monkeypatch.setattr(ANO, "learn", learn_or_raise)
    output = run_search(n_trials=5)
    assert [trial.state for trial in study_of().trials] == [PRUNED, COMPLETE, FAIL]
    assert "trial 0 is pruned: no finite loss" in output
    assert list(Path("logs/ano").glob("report_*.csv"))


def test_a_space_of_ones_own_is_searched(monkeypatch):
    space = {"batch_size": 64}
    monkeypatch.setitem(HYPERPARAMS_SAMPLER, "ano", lambda trial, *_: space | {"gamma": trial.suggest_float("x", 0.5, 0.6)})
    run_search(n_trials=1)
    (trial,) = study_of().trials
    assert set(trial.params) == {"x"}


def test_the_documented_space_is_searched():
    """The zoo's space of PPO, and the documented ranges of what PPO does not have."""
    own = {"spo": {"desired_kl": (None, 0.01, 0.02, 0.05)}}
    own["ano"] = {"shaping": ("ano", "spo", "ppo"), **own["spo"]}
    own["papo"] = {"k": (1.0, 20.0), "omega1": (5e-4, 0.05), "omega2": (5e-4, 0.05), "max_epoch_kl": (0.02, 0.05, 0.1, None)}
    study = optuna.create_study()
    of_ppo = study.ask()
    sample_ppo_params(of_ppo, 2, 8, {})

    for algo in ALGORITHMS:
        trial = study.ask()
        sampled = HYPERPARAMS_SAMPLER[algo](trial, 2, 8, {})
        assert HYPERPARAMS_CONVERTER[algo](trial.params) == sampled
        added = {name: space for name, space in trial.distributions.items() if name not in of_ppo.distributions}
        assert {**of_ppo.distributions, **added} == trial.distributions
        found = {name: getattr(space, "choices", None) or (space.low, space.high) for name, space in added.items()}
        assert found == own[algo.partition("_")[0]]
        assert all(space.log for space in added.values() if isinstance(space, FloatDistribution))
