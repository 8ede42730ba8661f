"""``train -optimize`` as a user runs it, and what it leaves."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import optuna
import pandas as pd
import pytest
import yaml
from optuna.trial import TrialState
from rl_zoo3.exp_manager import ExperimentManager

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.zoo import cli, register
from sb3_ano.zoo.tuning import register_tuning, run_folder
from sb3_ano.zoo.tuning.figure import draw_search, importances
from sb3_ano.zoo.tuning.report import trials_table
from sb3_ano.zoo.tuning.studies import load_study

ALGORITHMS = {"ano": ANO, "spo": SPO, "papo": PAPO}
SEARCHES = Path("logs/ano/searches")
# Rollouts of 256 samples, and networks that take a moment.
QUICK = ["-n", "512", "--eval-episodes", "1", "--seed", "3", "-params", "n_envs:4", "n_epochs:2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The command line leaves its words there.
    monkeypatch.setattr(sys, "argv", ["zoo"])


def train(*arguments, algo="ano"):
    return cli.main(["train", "--algo", algo, "--env", "CartPole-v1", *arguments])


def search(*arguments, algo="ano", n_trials=2):
    return train("-optimize", "--n-trials", str(n_trials), *arguments, *QUICK, algo=algo)


def study_of(name, algo="ano"):
    return load_study(f"logs/{algo}/searches/{name}/study.log", name)


def config_of(run, algo="ano"):
    return dict(yaml.unsafe_load(Path(f"logs/{algo}/{run}/CartPole-v1/config.yml").read_text()))


def printed_command(output):
    (line,) = [line for line in output.splitlines() if line.startswith("python -m sb3_ano.zoo train ")]
    return shlex.split(line)[3:]


@pytest.mark.parametrize("algo", ["ano", "spo", "papo"])
def test_a_search_leaves_a_table_a_figure_and_a_command_that_trains_its_best_trial(algo, capsys):
    assert search(algo=algo) == 0
    assert [path.name for path in Path(f"logs/{algo}").iterdir()] == ["searches"], "no folder of a run"
    folder = Path(f"logs/{algo}/searches/CartPole-v1_1")
    assert {path.name for path in folder.iterdir()} == {"best.yml", "search.png", "study.log", "trials.csv"}
    study = study_of(folder.name, algo)
    table = pd.read_csv(folder / "trials.csv", float_precision="round_trip")
    assert table["return"].tolist() == [trial.value for trial in study.trials]
    assert table["clip_range"].tolist() == [trial.params["clip_range"] for trial in study.trials]

    output = capsys.readouterr().out
    assert f"trial {study.best_trial.number} is the best, with a return of {study.best_value:.2f}" in output
    best = study.best_trial.user_attrs["hyperparameters"]
    assert yaml.safe_load((folder / "best.yml").read_text()) == {"CartPole-v1": best}
    assert cli.main([*printed_command(output), "-n", "64", "--eval-freq", "-1"]) == 0
    assert config_of("CartPole-v1_1", algo) == best | {"n_timesteps": 64}
    trained = ALGORITHMS[algo].load(f"logs/{algo}/CartPole-v1_1/CartPole-v1.zip", device="cpu")
    assert (trained.n_steps, trained.batch_size) == (best["n_steps"], best["batch_size"])
    assert trained.clip_range(1.0) == study.best_params["clip_range"]
    assert trained.gamma == 1.0 - study.best_params["one_minus_gamma"]


def test_any_trial_of_a_named_study_trains_with_what_it_had_whatever_the_file_says_now(capsys):
    assert search("--study-name", "s", n_trials=3) == 0
    trials = study_of("s").trials
    Path("other.yml").write_text("CartPole-v1:\n  policy: MlpPolicy\n  n_timesteps: 99\n  n_envs: 1\n  gamma: 0.5\n")
    options = ["--study-name", "s", "-conf", "other.yml", "-n", "64", "--eval-freq", "-1"]
    for run, (trial_id, number) in enumerate([("0", 0), ("2", 2), ("best", study_of("s").best_trial.number)], start=1):
        assert train(*options, "--trial-id", trial_id) == 0
        assert config_of(f"CartPole-v1_{run}") == trials[number].user_attrs["hyperparameters"] | {"n_timesteps": 64}
    assert train(*options, "--trial-id", "1", "-params", "gamma:0.25") == 0
    assert config_of("CartPole-v1_4") == trials[1].user_attrs["hyperparameters"] | {"gamma": 0.25, "n_timesteps": 64}


def test_a_named_search_goes_on_and_an_unnamed_one_takes_the_next_name(capsys):
    assert search("--study-name", "s", n_trials=1) == 0
    assert search("--study-name", "s", "--max-total-trials", "3") == 0
    assert [trial.state for trial in study_of("s").trials] == [TrialState.COMPLETE] * 3
    assert "trial 2 (3 of 3): return " in capsys.readouterr().out
    assert search(n_trials=0) == 0
    assert search(n_trials=0) == 0
    assert sorted(path.name for path in SEARCHES.iterdir()) == ["CartPole-v1_1", "CartPole-v1_2", "s"]
    assert "no trial is complete, so there is no best one" in capsys.readouterr().out


def test_a_search_is_repeatable_as_a_whole():
    values = []
    for name in ("one", "other"):
        assert search("--study-name", name) == 0
        values.append([(trial.params, trial.value) for trial in study_of(name).trials])
    assert values[0] == values[1]


@pytest.mark.parametrize("pruner", ["median", "none"])
def test_pruners_stop_trials_early(pruner):
    options = ["--pruner", pruner, "--n-evaluations", "4", "--n-startup-trials", "1", "--sampler", "random"]
    assert search("--study-name", "s", *options, n_trials=3 if pruner == "none" else 8) == 0
    trials = study_of("s").trials
    evaluations = {state: {len(trial.intermediate_values) for trial in trials if trial.state == state} for state in TrialState}
    assert evaluations[TrialState.COMPLETE] == {4}
    if pruner == "none":
        assert not evaluations[TrialState.PRUNED]
    else:
        assert min(evaluations[TrialState.PRUNED]) < 4


def test_what_the_command_line_sets_is_not_searched():
    assert search("--study-name", "s") == 0
    for trial in study_of("s").trials:
        assert trial.user_attrs["hyperparameters"]["n_epochs"] == 2
        assert "n_epochs" not in trial.params


def test_rewards_are_normalised_with_the_discount_factor_of_the_trial(monkeypatch):
    seen = []

    def learn(self, *args, **kwargs):
        seen.append((self.gamma, self.get_vec_normalize_env().gamma))
        raise ValueError("enough")

    monkeypatch.setattr(ANO, "learn", learn)
    options = ["-params", "normalize:True", "n_envs:2"]
    assert train("-optimize", "--n-trials", "3", "-n", "512", "--study-name", "s", *options) == 0
    assert len({gamma for gamma, _ in seen}) == 3
    assert all(gamma == of_rewards for gamma, of_rewards in seen)


def test_trials_that_diverge_are_pruned_and_the_search_goes_on(monkeypatch, capsys):
    learn = ANO.learn

    def diverge_first(self, *args, **kwargs):
        if len(study_of("s").trials) == 1:
            raise FloatingPointError("no finite loss was left")
        return learn(self, *args, **kwargs)

    monkeypatch.setattr(ANO, "learn", diverge_first)
    assert search("--study-name", "s") == 0
    assert [trial.state for trial in study_of("s").trials] == [TrialState.PRUNED, TrialState.COMPLETE]
    output = capsys.readouterr().out
    assert "trial 0 cannot go on: no finite loss was left" in output
    assert "trial 0 (1 of 2): pruned before it was evaluated" in output


def test_an_interrupted_search_reports_and_says_how_to_go_on(monkeypatch, capsys):
    learn = ANO.learn

    def interrupt_second(self, *args, **kwargs):
        if len(study_of("s").trials) == 2:
            raise KeyboardInterrupt
        return learn(self, *args, **kwargs)

    monkeypatch.setattr(ANO, "learn", interrupt_second)
    assert search("--study-name", "s", n_trials=5) == 0
    output = capsys.readouterr().out
    assert "--storage logs/ano/searches/s/study.log --study-name s --n-trials 4 goes on" in output
    assert "2 trials: 1 complete, 1 failed" in output
    assert printed_command(output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trial-id", "best"], "--trial-id best needs the --study-name that it is in"),
        (["--trial-id", "best", "--study-name", "s"], "storage='logs/ano/searches/s/study.log' does not exist"),
        (["-optimize", "--storage", "study.txt"], "storage='study.txt' is not allowed; allowed are a journal file, FILE.log"),
        (["--storage"], "argument --storage: expected one argument"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert train(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_trials_of_different_budgets_are_not_mixed(capsys):
    assert search("--study-name", "s", n_trials=0) == 0
    assert train("-optimize", "--study-name", "s", "-n", "1024", "--n-trials", "1") == 2
    assert "study 's' is about n_timesteps=512, and cannot go on with n_timesteps=1024" in capsys.readouterr().err


def start(*arguments):
    command = [sys.executable, "-m", "sb3_ano.zoo", "train", "--algo", "ano", "--env", "CartPole-v1", "-optimize"]
    return subprocess.Popen([*command, "--study-name", "s", *arguments, *QUICK], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_share_a_study():
    processes = [start("--max-total-trials", "5", "--storage", "shared/study.log") for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    trials = [trial for trial in load_study("shared/study.log", "s").trials if "surplus" not in trial.user_attrs]
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 5
    assert len({trial.params["learning_rate"] for trial in trials}) == 5
    ran = [set(re.findall(r"^trial (\d+) \(", output, re.MULTILINE)) for output in outputs]
    assert sorted(map(int, ran[0] | ran[1])) == [trial.number for trial in trials]
    assert not ran[0] & ran[1]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["study.log", "sqlite:///study.db"])
def test_a_killed_search_goes_on_beside_another_one(storage):
    options = ["--max-total-trials", "12", "--storage", storage]
    killed, other = start(*options), start(*options)
    assert any(line.startswith("trial ") for line in killed.stdout), "its first trial ended"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    outputs = [process.communicate(timeout=300)[0] for process in (other, start(*options))]
    trials = load_study(storage, "s").trials
    ended = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert len(ended) == 12, outputs
    assert len({trial.params["learning_rate"] for trial in ended}) == 12
    assert not [trial for trial in trials if trial.state == TrialState.RUNNING]


@pytest.mark.slow
# The zoo's spaces have minibatches larger than the rollout.
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size:UserWarning")
@pytest.mark.parametrize("algo", ["ppo", "trpo"])
def test_the_zoos_own_algorithms_are_searched_and_trained_too(algo, capsys):
    # The zoo's spaces go up to rollouts of 32,768 in minibatches of 4; with this seed the first trials are small.
    few = ["--n-trials", "2", "-n", "512", "--eval-episodes", "1", "--seed", "6"]
    assert train("-optimize", *few, algo=algo) == 0
    command = printed_command(capsys.readouterr().out)
    assert cli.main([*command, "-n", "64", "--eval-freq", "-1"]) == 0
    best = study_of("CartPole-v1_1", algo).best_trial
    assert config_of("CartPole-v1_1", algo)["n_steps"] == 2 ** best.params["n_steps_pow"]
    assert train("--study-name", "CartPole-v1_1", "--trial-id", "0", "-n", "64", "--eval-freq", "-1", algo=algo) == 0


def test_a_fixed_zoo_would_be_left_alone(monkeypatch):
    register()
    register_tuning()
    assert not run_folder.is_needed(), "mended"
    monkeypatch.setattr(ExperimentManager, "setup_experiment", ExperimentManager.setup_experiment.__wrapped__)
    while hasattr(ExperimentManager.setup_experiment, "__wrapped__"):
        monkeypatch.setattr(ExperimentManager, "setup_experiment", ExperimentManager.setup_experiment.__wrapped__)
    assert run_folder.is_needed(), "as installed"

    def makes_none(self):
        self.read_hyperparameters()
        if not self.optimize_hyperparameters:
            self.create_log_folder()

    monkeypatch.setattr(ExperimentManager, "setup_experiment", makes_none)
    assert not run_folder.is_needed(), "as it could be"


def quadratic(n_trials):
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(0))

    def objective(trial):
        trial.suggest_float("gae_lambda", 0, 1)
        trial.suggest_int("n_envs", 4, 4)
        if trial.number == 1:
            trial.report(-5.0, 1)
            raise optuna.TrialPruned
        return -((trial.suggest_float("ent_coef", 0, 1) - 0.5) ** 2)

    study.optimize(objective, n_trials=n_trials)
    return study


def test_what_decides_the_value_is_important():
    shares = importances(quadratic(60))
    assert shares["ent_coef"] > 0.8
    assert set(shares) == {"ent_coef", "gae_lambda"}, "n_envs is no dimension of the search"
    assert importances(quadratic(5)) == {}


@pytest.mark.parametrize("n_trials", [3, 30])
def test_figures_are_drawn_with_few_and_with_many_trials(n_trials, tmp_path):
    draw_search(quadratic(n_trials), tmp_path / "search.png", title="title")
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")


def test_a_trial_that_was_never_wholly_sampled_is_in_the_table():
    register_tuning()
    study = quadratic(1)
    trial = study.ask()
    trial.suggest_categorical("net_arch", ["tiny"])
    study.tell(trial, state=TrialState.FAIL)
    assert trials_table(study, "spo")["state"].tolist() == ["complete", "failed"]
    assert trials_table(study, "ppo")["net_arch"].tolist()[1] == "tiny"


def test_the_table_has_a_row_for_each_trial_but_those_that_were_one_too_many():
    register_tuning()
    study = quadratic(3)
    surplus = study.ask()
    surplus.set_user_attr("surplus", True)
    study.tell(surplus, state=TrialState.FAIL)
    table = trials_table(study, "spo")
    assert table["trial"].tolist() == [0, 1, 2]
    assert table["state"].tolist() == ["complete", "pruned", "complete"]
    assert table["return"].tolist() == [study.trials[0].value, -5.0, study.trials[2].value]
    assert table["evaluations"].tolist() == [0, 1, 0]
    assert table["ent_coef"].isna().tolist() == [False, True, False]
    assert trials_table(optuna.create_study(), "spo").columns.tolist()[:3] == ["trial", "state", "return"]
