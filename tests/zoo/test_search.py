"""``train -optimize`` as a user runs it, what it leaves, and what it samples."""

import functools
import math
import shlex
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import gymnasium as gym
import optuna
import pandas as pd
import pytest
import yaml
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState
from rl_zoo3.hyperparams_opt import HYPERPARAMS_SAMPLER
from torch import nn
from torch.optim import AdamW

from sb3_ano import ANO
from sb3_ano._registry import ALGORITHMS
from sb3_ano.zoo.search import HYPERPARAMETERS, Search, merge, open_storage, trial_seed
from sb3_ano.zoo.search_spaces import convert_params
from tests.zoo.conftest import rejected, run, start_command

COMPLETE, FAIL, PRUNED = TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED
# A journal is quicker than the database that a search makes by default.
JOURNAL, DATABASE = "study.log", "sqlite:///study.db"
# Rollouts of 256 samples.
QUICK = "-n 512 --eval-episodes 1 --seed 3 -params n_envs:4 n_epochs:2 normalize:True"
TRAIN = "train --algo ano --env CartPole-v1"

pytestmark = [pytest.mark.usefixtures("zoo"), pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")]


def run_search(options: str = "", *, n_trials: int = 2, storage: str = JOURNAL) -> str:
    search_options = f"-optimize --n-trials {n_trials} --no-optim-plots --storage {storage}"
    return run(f"{TRAIN} {search_options} {options} {QUICK}").output


def study_of(name="CartPole-v1", storage=JOURNAL):
    return optuna.load_study(storage=open_storage(storage), study_name=name)


def config_of(number, algo="ano"):
    return dict(yaml.unsafe_load(Path(f"logs/{algo}/CartPole-v1_{number}/CartPole-v1/config.yml").read_text()))


@pytest.mark.parametrize("algo", [algo for algo in ALGORITHMS if "mask" not in algo])  # CartPole has no masks
def test_a_search_leaves_a_report_and_hyperparameters_that_train(algo):
    printed = run(f"train --algo {algo} --env CartPole-v1 -optimize --n-trials 2 {QUICK}").output.splitlines()
    assert [path.name for path in Path(f"logs/{algo}").iterdir()] == ["searches"], "no directory of a run"
    report = Path(f"logs/{algo}/searches/CartPole-v1")
    figures = {"best.yml": False, "history.png": True, "importances.png": True, "study.db": False, "trials.csv": False}
    assert {path.name: path.read_bytes().startswith(b"\x89PNG") for path in report.iterdir()} == figures
    study = study_of(storage=f"sqlite:///{report}/study.db")
    table = pd.read_csv(report / "trials.csv", float_precision="round_trip")
    assert table["value"].tolist() == [trial.value for trial in study.trials]
    assert table["params_clip_range"].tolist() == [trial.params["clip_range"] for trial in study.trials]
    best = study.best_trial.user_attrs[HYPERPARAMETERS]
    assert ("n_epochs" in study.best_params, best["n_epochs"]) == (False, 2), "-params sets it"
    assert yaml.safe_load((report / "best.yml").read_text()) == {"CartPole-v1": best}
    assert "2 of 2 trials are complete" in "".join(printed)
    trials = sorted(study.trials, key=lambda trial: -trial.value)
    radii = [trial.user_attrs[HYPERPARAMETERS]["clip_range_high"] for trial in trials]
    (row,) = (line.split()[1:] for line in printed if line.startswith("clip_range_high"))
    assert row == ["none" if radius is None else f"{radius:.4g}" for radius in radii]
    run(" ".join([*printed[-1].split()[3:], "-n 64 --eval-freq -1"]))
    assert config_of(1, algo) == best | {"n_timesteps": 64}


def test_any_trial_trains_with_its_hyperparameters_whatever_the_file_says_now():
    Path("file.yml").write_text("CartPole-v1: {policy: MlpPolicy, n_timesteps: 99, env_kwargs: {sutton_barto_reward: true}}")
    run_search("--study-name s -conf file.yml")
    assert not list(Path("logs/ano/searches/s").glob("*.png")), "--no-optim-plots"
    trials = [trial.user_attrs[HYPERPARAMETERS] | {"n_timesteps": 64} for trial in study_of("s").trials]
    assert trials[0]["env_kwargs"] == {"sutton_barto_reward": True}
    assert study_of("s").best_value <= 0, "the environments of the evaluation have these arguments, too"
    Path("other.yml").write_text("CartPole-v1: {policy: MlpPolicy, n_timesteps: 99, n_envs: 1, gamma: 0.5}")
    train = f"{TRAIN} --study-name s -conf other.yml -n 64 --eval-freq -1 --storage {JOURNAL} --trial-id"
    for options in ("0", "1", "1 -params gamma:0.25"):
        run(f"{train} {options}")
    configs = [config_of(number) for number in (1, 2, 3)]
    assert configs == [*trials, trials[1] | {"gamma": 0.25}], "the file gives way to the trial, the trial to the command line"
    for options, message in {
        f"-optimize --study-name s --storage {JOURNAL} -n 1024": "with 512 steps and 1 evaluations per trial, which cannot be",
        f"--study-name s --storage {JOURNAL} --trial-id 2": "--trial-id 2 of --study-name s is not in study.log",
    }.items():
        assert message in rejected(f"{TRAIN} {options}")


def test_the_printed_command_has_the_options_of_the_search(tmp_path, monkeypatch):
    """Trained in a new interpreter, it needs the package that registers the environment, and finds it by this command."""
    (tmp_path / "searched_envs.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gym.register('Searched-v0', lambda **options: CartPoleEnv(**options), max_episode_steps=9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    Path("file.yml").write_text("Searched-v0: {policy: MlpPolicy, n_timesteps: 99, gamma: 0.5}")
    typed = "--gym-packages searched_envs -f 'my logs' --device cpu --vec-env dummy -conf file.yml --eval-freq -1 --verbose 0"
    kwargs = "--env-kwargs sutton_barto_reward:True"
    search = "-optimize --n-trials 1 --no-optim-plots --sampler random"
    printed = run(f"train --algo ano --env Searched-v0 {search} {typed} {kwargs} {QUICK}").output.splitlines()[-1]
    words = shlex.split(printed)
    assert words[:4] == ["python", "-m", "sb3_ano.zoo", "train"]
    expected = {
        "--algo": "ano", "--env": "Searched-v0", "--gym-packages": "searched_envs", "--log-folder": "my logs", "--seed": "3",
        "--device": "cpu", "--vec-env": "dummy", "--eval-freq": "-1", "--verbose": "0", "--eval-episodes": "1",
        "--env-kwargs": "sutton_barto_reward:True", "--conf-file": "my logs/ano/searches/Searched-v0/best.yml",
    }  # fmt: skip
    assert dict(zip(words[4::2], words[5::2], strict=True)) == expected
    gym.registry.pop("Searched-v0")
    sys.modules.pop("searched_envs")
    run(shlex.join(words[3:]))
    config = yaml.unsafe_load(Path("my logs/ano/Searched-v0_1/Searched-v0/config.yml").read_text())
    assert (config["n_timesteps"], config["env_kwargs"]) == (99, {"sutton_barto_reward": True})
    gym.registry.pop("Searched-v0")


def test_classes_of_a_python_file_are_stored_by_their_names():
    entry = "dict(policy=ActorCriticPolicy, n_timesteps=99, env_wrapper=[{DelayedRewardWrapper: dict(delay=5)}])"
    imports = "from rl_zoo3.wrappers import DelayedRewardWrapper\nfrom stable_baselines3.ppo import MlpPolicy"
    text = f"{imports} as ActorCriticPolicy\nhyperparams = {{'CartPole-v1': {entry}}}"
    Path("file.py").write_text(text)
    run_search("-conf file.py", n_trials=1)
    stored = yaml.safe_load(Path("logs/ano/searches/CartPole-v1/best.yml").read_text())["CartPole-v1"]
    (wrapper,) = stored["env_wrapper"]
    assert stored["policy"] == "stable_baselines3.common.policies.ActorCriticPolicy"
    assert wrapper == {"rl_zoo3.wrappers.DelayedRewardWrapper": {"delay": 5}}
    run(f"{TRAIN} -conf logs/ano/searches/CartPole-v1/best.yml -n 64 --eval-freq -1")
    Path("file.py").write_text(
        text.replace("hyperparams =", "class ActorCriticPolicy(ActorCriticPolicy): pass\nhyperparams =")
    )
    assert "file.py: CartPole-v1: the class ActorCriticPolicy cannot be stored by its name" in rejected(
        f"{TRAIN} -optimize --n-trials 1 -conf file.py"
    )


def test_without_a_number_the_best_trial_of_a_study_is_trained():
    run_search("--study-name s")
    best = study_of("s").best_trial
    output = run(f"{TRAIN} --study-name s --storage {JOURNAL} -n 64 --eval-freq -1").output
    assert f"Trial {best.number} is the best one of study s" in output
    assert config_of(1) == best.user_attrs[HYPERPARAMETERS] | {"n_timesteps": 64}


WRONG_STUDIES = [
    ("--storage sqlite:///no.db --study-name s", "--storage sqlite:///no.db: there is no file no.db; -optimize makes one"),
    ("--storage no.log --study-name s --trial-id 0", "--storage no.log: there is no file no.log"),
    ("--study-name s", "there is no file logs/ano/searches/s/study.db"),
    ("--trial-id 0", "there is no file logs/ano/searches/CartPole-v1/study.db"),
    ("--storage {study} --study-name other", "--study-name other is not in"),
    ("--storage {study}", "--study-name CartPole-v1 is not in"),
    ("--storage {study} --study-name other --trial-id 0", "--trial-id 0 of --study-name other is not in"),
    (
        "--storage {study} --study-name empty",
        "--study-name empty in {study} has no complete trial; --trial-id takes another one",
    ),
    ("--storage {study} --study-name empty --trial-id 0", "--trial-id 0 of --study-name empty is not in"),
    ("--storage {study} --study-name elsewhere", "--trial-id 0 of --study-name elsewhere has no hyperparameters"),
    ("--storage {study} --study-name elsewhere --trial-id -1", "--trial-id -1 of --study-name elsewhere is not in"),
    ("--storage damaged.log --study-name s", "--storage damaged.log cannot be opened: "),
    ("--storage sqlite:///damaged.log.db --study-name s", "--storage sqlite:///damaged.log.db cannot be opened: "),
    ("--storage study.txt --study-name s", "--storage study.txt cannot be opened: Could not parse SQLAlchemy URL"),
    ("--algo ppo --storage {study}", "are loaded with both --storage and --study-name"),
    ("--algo ppo --storage {study} --study-name other --trial-id 0", "--trial-id 0 of --study-name other is not in"),
    ("--algo ppo --storage {study} --study-name elsewhere --trial-id 9", "--trial-id 9 of --study-name elsewhere is not in"),
    ("--algo ppo --storage sqlite:///no.db --study-name s --trial-id 1", "there is no file no.db"),
]


@pytest.mark.parametrize("study", [JOURNAL, DATABASE])
def test_a_study_or_trial_that_does_not_exist_is_one_line(study):
    storage = open_storage(study)
    optuna.create_study(storage=storage, study_name="empty")
    elsewhere = optuna.create_study(storage=storage, study_name="elsewhere")
    elsewhere.add_trial(optuna.trial.create_trial(value=1.0))  # of another program
    for name in ("damaged.log", "damaged.log.db"):
        Path(name).write_text("no study\n\nno study\n")
    before = set(Path().iterdir())
    for options, message in WRONG_STUDIES:
        assert message.format(study=study) in rejected(f"{TRAIN} -n 64 {options.format(study=study)}")
    assert set(Path().iterdir()) == before, "neither an empty study nor a run is left"


@pytest.mark.slow
def test_a_search_is_repeatable_in_one_go_and_in_parts():
    for options in ("whole --n-trials 3", "parts --n-trials 1", "parts --max-total-trials 3", "parts --max-total-trials 3"):
        run_search(f"--study-name {options}")
    whole, parts = ([(trial.params, trial.value) for trial in study_of(name).trials] for name in ("whole", "parts"))
    assert whole == parts, "the last search found the total there"
    assert len({params["learning_rate"] for params, _ in whole}) == 3
    assert "0 of 0 trials are complete" in run_search("--study-name none", n_trials=0)
    assert len({trial_seed(seed, number) for seed in (0, 1, 2**32 - 1) for number in range(100)}) == 300


def test_the_network_of_a_cnn_is_not_searched():
    manager = object.__new__(Search)
    vars(manager).update(algo="ano", n_actions=0, n_envs=1, n_timesteps=10_000, custom_hyperparams=None)
    for policy in ("CnnPolicy", "CnnLstmPolicy", "MlpPolicy", "MlpLstmPolicy"):
        manager._unsearched = {"policy": policy}
        assert ("policy_kwargs" in manager._sample(optuna.create_study().ask())) == policy.startswith("Mlp")


def test_a_space_of_ones_own_is_searched(monkeypatch):
    space = {"batch_size": 64}
    monkeypatch.setitem(HYPERPARAMS_SAMPLER, "ano", lambda trial, *_: space | {"gamma": trial.suggest_float("x", 0.5, 0.6)})
    run_search(n_trials=1)
    (trial,) = study_of().trials
    assert trial.params == {"x": trial.user_attrs[HYPERPARAMETERS]["gamma"]}


def test_jobs_share_the_budget_and_pruners_stop_trials_early():
    pruner = "--pruner median --n-evaluations 4 --n-startup-trials 1 --sampler random"
    run_search(f"--n-jobs 2 --optimization-log-path evaluated {pruner}", n_trials=8)
    evaluations = {(trial.state, len(trial.intermediate_values) < 4) for trial in study_of().trials}
    assert {(COMPLETE, False), (PRUNED, True)} <= evaluations
    assert len(list(Path("evaluated").glob("trial_*/best_model.zip"))) == 8
    assert len({trial.params["learning_rate"] for trial in study_of().trials}) == 8


def test_a_diverging_trial_is_pruned_an_interrupted_search_reports_and_rewards_have_the_trials_discount_factor(monkeypatch):
    learn, gammas = ANO.learn, []
    fail = mock.Mock(side_effect=[FloatingPointError("no finite loss"), None, KeyboardInterrupt()])

    def learn_or_raise(self, *args, **kwargs):
        gammas.append((self.gamma, self.get_vec_normalize_env().gamma))
        fail()
        return learn(self, *args, **kwargs)

    monkeypatch.setattr(ANO, "learn", learn_or_raise)
    output = run_search(n_trials=5)
    assert [trial.state for trial in study_of().trials] == [PRUNED, COMPLETE, FAIL]
    assert "trial 0 is pruned: no finite loss" in output
    assert "the same command resumes study CartPole-v1 in study.log" in output
    assert "1 of 3 trials are complete" in output
    shutil.rmtree("logs/ano/searches/CartPole-v1")
    assert "1 of 3 trials are complete" in run_search(n_trials=0), "the results of an unfinished search"
    table = pd.read_csv("logs/ano/searches/CartPole-v1/trials.csv")
    assert table["state"].tolist() == ["PRUNED", "COMPLETE", "FAIL"]
    assert table["value"].notna().tolist() == [False, True, False]
    assert table[["datetime_start", "datetime_complete", "params_clip_range", "user_attrs_hyperparameters"]].notna().all(None)
    assert Path("logs/ano/searches/CartPole-v1/best.yml").is_file()
    assert len(set(gammas)) == 3
    assert all(agent == rewards for agent, rewards in gammas)


@pytest.mark.slow
def test_the_trial_of_a_dead_process_is_run_again(monkeypatch):
    monkeypatch.setattr("sb3_ano.zoo.search.GRACE_SECONDS", 2)
    run_search(n_trials=0, storage=DATABASE)
    # Without a heartbeat of its own, because Optuna expects one of Study.optimize.
    dead = optuna.load_study(storage=DATABASE, study_name="CartPole-v1").ask()
    dead.suggest_float("ent_coef", 1e-8, 0.1, log=True)
    dead.study._storage.record_heartbeat(dead._trial_id)
    run_search("--max-total-trials 1", storage=DATABASE)
    assert len(study_of(storage=DATABASE).trials) == 1, "it counts while its process may live"
    time.sleep(3.5)  # the database counts whole seconds
    run_search("--max-total-trials 2", storage=DATABASE)
    trials = study_of(storage=DATABASE).trials
    assert [trial.state for trial in trials] == [FAIL, COMPLETE, COMPLETE]
    assert trials[1].params["ent_coef"] == dead.params["ent_coef"], "it is run again"


def test_a_process_that_has_slept_loses_its_trial_and_ends_with_an_error(monkeypatch):
    # As another process does once heartbeats have stopped
    monkeypatch.setattr(ANO, "learn", lambda *_, **__: study_of(storage=DATABASE).tell(0, state=FAIL))
    assert "Cannot tell a FAIL trial" in rejected(f"{TRAIN} -optimize --n-trials 2 --storage {DATABASE} {QUICK}")
    assert [trial.state for trial in study_of(storage=DATABASE).trials] == [FAIL]


def test_the_lock_of_a_journal_can_be_found_from_any_directory():
    open_storage("a/study.log")._backend._lock.acquire()  # by a process that never releases it
    assert Path("a/study.log.lock").exists(), "the link leads to the journal, so that the lock's age is known"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size:UserWarning")  # the zoo's spaces have some
def test_the_zoos_own_algorithms_are_searched_as_before():
    run("train --algo ppo --env CartPole-v1 -optimize --n-trials 2 -n 512 --eval-episodes 1 --seed 6")
    assert list(Path("logs/ppo").glob("report_CartPole-v1_2-trials-512-tpe-median_*.csv"))
    assert not Path("logs/ppo/searches").exists()


@pytest.mark.slow
@pytest.mark.parametrize("storage", [DATABASE, JOURNAL])
def test_a_killed_search_resumes_next_to_another_process(storage):
    start = functools.partial(start_command, f"{TRAIN} -optimize --max-total-trials 12 --storage {storage} {QUICK}")
    killed, other = start(), start()
    assert any("finished with value" in line for line in killed.stdout), "its first trial ended"
    killed.kill()
    killed.communicate()
    for process in (other, start()):
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
    ended = study_of(storage=storage).get_trials(states=[COMPLETE, PRUNED])
    rates = [trial.params["learning_rate"] for trial in ended]
    assert 11 <= len(rates) <= 13, "at most one more or fewer than asked for"
    assert len(set(rates)) == len(rates)


def sampled(algo, n_envs, count, seed=0, **additional_args):
    """Pairs of the sampler's hyperparameters and of the trial as the study stores it."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed), storage=optuna.storages.InMemoryStorage())
    for _ in range(count):
        trial = study.ask()
        hyperparameters = HYPERPARAMS_SAMPLER[algo](trial, 2, n_envs, additional_args)
        yield hyperparameters, study.tell(trial, 0.0)


def test_the_documented_space_is_searched():
    shared = {
        "learning_rate": (1e-5, 5e-3), "one_minus_gamma": (1e-4, 0.1), "one_minus_gae_lambda": (1e-3, 0.3),
        "ent_coef": (1e-8, 0.1), "max_grad_norm": (0.3, 2.0), "clip_range": (0.05, 2.0), "n_steps_pow": (5, 11),
        "lr_schedule": ("constant", "linear"), "n_epochs": (2, 5, 10, 20), "clip_range_high_factor": (None, 0.7, 1.4, 2.0),
        "net_arch": ("tiny", "small", "medium"), "activation_fn": ("tanh", "relu"), "n_minibatches_pow": (0, 5),
    }  # fmt: skip
    own = {"spo": {"desired_kl": (None, 0.01, 0.02, 0.05)}}
    own["ano"] = {"shaping": ("ano", "spo", "ppo"), **own["spo"]}
    own["papo"] = {"k": (1.0, 20.0), "omega1": (5e-4, 0.05), "omega2": (5e-4, 0.05), "max_epoch_kl": (0.02, 0.05, 0.1, None)}
    for algo in ALGORITHMS:
        ((_, trial),) = sampled(algo, 8, count=1)
        spaces = trial.distributions.items()
        found = {name: getattr(space, "choices", None) or (space.low, space.high) for name, space in spaces}
        assert found == shared | own[algo.partition("_")[0]]
        assert all(space.log for _, space in spaces if isinstance(space, FloatDistribution))


def test_a_conversion_worked_by_hand():
    params = {
        "n_steps_pow": 6, "n_minibatches_pow": 3, "learning_rate": 0.001, "lr_schedule": "linear",
        "one_minus_gamma": 0.25, "one_minus_gae_lambda": 0.125, "clip_range": 0.25, "clip_range_high_factor": 2.0,
        "net_arch": "small", "activation_fn": "relu", "shaping": "spo", "n_epochs": 5,
    }  # fmt: skip
    assert convert_params(params, n_envs=6) == {
        "n_steps": 64, "batch_size": 48,  # 6 x 64 samples in 8 minibatches
        "learning_rate": "lin_0.001", "gamma": 0.75, "gae_lambda": 0.875, "clip_range": 0.25, "clip_range_high": 0.5,
        "policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": nn.ReLU},
        "shaping": "spo", "n_epochs": 5,
    }  # fmt: skip
    symmetric = convert_params(params | {"clip_range_high_factor": None, "lr_schedule": "constant"}, n_envs=6)
    assert (symmetric["clip_range_high"], symmetric["learning_rate"]) == (None, 0.001)


@pytest.mark.parametrize("n_envs", [1, 6, 8, 100, 128])
def test_rollouts_and_minibatches_are_of_a_sensible_size(n_envs):
    rollouts = set()
    for n_timesteps in (1_000, 20_000, 10**7):
        for hyperparameters, _ in sampled("ano", n_envs, count=40, n_timesteps=n_timesteps):
            rollout = hyperparameters["n_steps"] * n_envs
            rollouts.add(rollout)
            assert rollout % hyperparameters["batch_size"] == 0
            assert 32 <= hyperparameters["batch_size"] <= rollout
            assert 256 <= rollout <= 16_384
            assert hyperparameters["n_steps"] >= 8
            assert math.log2(hyperparameters["n_steps"]).is_integer()
            assert 8 * rollout <= n_timesteps or rollout <= 1024, "a trial has eight rollouts, or they are the smallest"
    assert len(rollouts) >= 4


@pytest.mark.parametrize(
    "name", ["n_steps", "batch_size", "learning_rate", "gamma", "clip_range", "shaping", "desired_kl", "policy_kwargs"]
)
def test_what_is_fixed_is_not_searched(name):
    for hyperparameters, _ in sampled("ano", 4, count=20, fixed={name: 96}):
        assert hyperparameters.get(name, "not searched") == (96 if name == "n_steps" else "not searched")
        assert ("clip_range_high" in hyperparameters) == (name != "clip_range"), "it is a multiple of clip_range"
        assert name != "n_steps" or 96 * 4 % hyperparameters["batch_size"] == 0


@pytest.mark.parametrize("name", ["clip_range", "clip_range_high"])
def test_no_target_is_sampled_next_to_a_schedule(name):
    assert not any("desired_kl" in found for found, _ in sampled("ano", 4, count=20, fixed={name: "lin_0.3"}))


@pytest.mark.parametrize("as_text", [str, eval])
def test_policy_kwargs_of_the_file_that_are_not_searched_stay(as_text):
    networks = {"net_arch": {"pi": [64], "vf": [64]}, "activation_fn": nn.ReLU}
    given = as_text("dict(log_std_init=-2, activation_fn=nn.GELU, optimizer_kwargs=dict(eps=1e-5))")
    result = merge({"gamma": 0.9, "policy_kwargs": given}, {"policy_kwargs": networks, "clip_range": 0.3})
    assert (result["gamma"], result["clip_range"]) == (0.9, 0.3)
    assert eval(result["policy_kwargs"]) == networks | {"log_std_init": -2, "optimizer_kwargs": {"eps": 1e-5}}
    assert eval(merge({"policy_kwargs": given}, {})["policy_kwargs"])["log_std_init"] == -2
    with pytest.raises(ValueError, match="AdamW'>} holds classes that -optimize cannot write; allowed are those of torch.nn"):
        merge({"policy_kwargs": {"optimizer_class": AdamW}}, {})
