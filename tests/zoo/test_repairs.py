"""Each repair mends its fault while the installed zoo has it, and leaves a zoo alone that has been mended."""

import ast
import importlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import types
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import huggingface_sb3
import numpy as np
import pytest
import rl_zoo3.exp_manager
import rl_zoo3.load_from_hub
import rl_zoo3.utils
import torch
import yaml
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RemoteEntryNotFoundError
from huggingface_sb3 import EnvironmentName
from requests.exceptions import HTTPError

from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.zoo.repairs import (
    ALL,
    _source,
    apply_needed,
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

PLOTS = sys.modules["rl_zoo3.plots.plot_from_file"]
ALL_PLOTS = sys.modules["rl_zoo3.plots.all_plots"]
METADATA = sys.modules["huggingface_sb3.push_to_hub"]


@pytest.fixture(autouse=True)
def installed_zoo(monkeypatch):
    """The zoo as it is installed, whatever other tests have applied, and so again afterwards."""
    places = [
        (subprocess, "call"),
        (rl_zoo3.utils, "get_latest_run_id"),
        (rl_zoo3.utils, "get_saved_hyperparams"),
        (rl_zoo3.utils, "get_trained_models"),
        (huggingface_sb3, "load_from_hub"),
        (rl_zoo3.load_from_hub, "load_from_hub"),
        (rl_zoo3.exp_manager.ExperimentManager, "read_hyperparameters"),
        (PLOTS, "normalize_score"),
        (PLOTS, "plot_from_file"),
        (rl_zoo3.plots, "plot_from_file"),
        (PLOTS, "pickle"),
        (ALL_PLOTS, "all_plots"),
        (rl_zoo3.plots, "all_plots"),
    ]
    for owner, name in places:
        value = getattr(owner, name)
        while hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(PLOTS, "pickle", pickle)
    for name, module in list(sys.modules.items()):
        if name.startswith("rl_zoo3") and hasattr(module, "get_saved_hyperparams"):
            monkeypatch.setattr(module, "get_saved_hyperparams", rl_zoo3.utils.get_saved_hyperparams)
    monkeypatch.delattr(METADATA, "generate_metadata", raising=False)
    monkeypatch.delenv("TRUST_REMOTE_CODE", raising=False)
    monkeypatch.setenv("PATH", os.environ["PATH"])


@pytest.mark.parametrize("repair", [one for one in ALL if one is not missing_ffmpeg], ids=lambda one: one.__name__)
def test_the_fault_is_there_until_it_is_repaired(repair):
    assert repair.is_needed()
    assert apply_needed((repair,)) == [repair.__name__.rpartition(".")[2]]
    assert not repair.is_needed()


def show_mended(replacements: dict[str, str], repair, monkeypatch):
    """Have a repair see a module of the zoo in which the fault has been mended."""

    def syntax_tree(module: str) -> ast.Module:
        text = ast.unparse(_source.syntax_tree(module))
        for old, new in replacements.items():
            text = text.replace(old, new)
        return ast.parse(text)

    monkeypatch.setattr(repair, "syntax_tree", syntax_tree)


@pytest.mark.parametrize(
    ("repair", "replacements"),
    [
        (child_processes, {"['python',": "[sys.executable,"}),
        (hub_metadata, {"generate_metadata": "_generate_metadata"}),
        (single_runs, {"np.array(last_eval).squeeze()": "np.array(last_eval)"}),
        (score_normalization, {"env_key_to_env_id = {": "env_key_to_env_id = {'HalfCheetah-v5': 'HalfCheetah-v5', "}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_mended_source_is_left_alone(repair, replacements, monkeypatch):
    show_mended(replacements, repair, monkeypatch)
    assert not repair.is_needed()


def test_a_zoo_that_asks_for_trial_0_is_left_alone(monkeypatch):
    read = rl_zoo3.exp_manager.ExperimentManager.read_hyperparameters

    def mended_read(self):
        if self.trial_id == 0:
            self.load_trial(self.storage, self.study_name, 0)
        return read(self)

    monkeypatch.setattr(rl_zoo3.exp_manager.ExperimentManager, "read_hyperparameters", mended_read)
    assert not trial_zero.is_needed()


def test_trial_0_comes_after_the_file_and_before_the_command_line(tmp_path, capsys):
    trial_zero.apply()
    (tmp_path / "probe.yml").write_text("probe: {learning_rate: 1.0, gamma: 0.5, n_steps: 8}\n")
    experiment = types.SimpleNamespace(
        algo="probe",
        config=str(tmp_path / "probe.yml"),
        env_name=EnvironmentName("probe"),
        env_kwargs={},
        custom_hyperparams={"gamma": 0.7},
        storage="storage",
        study_name="study",
        trial_id=0,
        load_trial=lambda storage, study, trial: {"learning_rate": 2.0, "gamma": 0.6},
        _is_atari=False,
        verbose=0,
    )
    hyperparameters, _ = rl_zoo3.exp_manager.ExperimentManager.read_hyperparameters(experiment)
    assert hyperparameters == {"learning_rate": 2.0, "gamma": 0.7, "n_steps": 8}


def runs(folder: Path, *with_agent: bool) -> Path:
    for number, has_agent in enumerate(with_agent, 1):
        run = folder / "ano" / f"CartPole-v1_{number}"
        run.mkdir(parents=True)
        if has_agent:
            (run / "CartPole-v1.zip").touch()
    return folder


def model_in(folder: Path) -> str:
    return rl_zoo3.utils.get_model_path(0, str(folder), "ano", EnvironmentName("CartPole-v1"))[1]


def test_an_agent_is_found_in_the_latest_run_that_has_one(tmp_path, capsys):
    runs(tmp_path, True, True, False, False)
    with pytest.raises(ValueError, match="No model found"):
        model_in(tmp_path)
    empty_runs.apply()
    assert model_in(tmp_path).endswith("CartPole-v1_2/CartPole-v1.zip")
    assert "CartPole-v1_4 holds no agent" in capsys.readouterr().out
    assert rl_zoo3.exp_manager.get_latest_run_id(str(tmp_path / "ano"), "CartPole-v1") == 4, "training takes no number twice"


def test_without_any_agent_the_error_stays_the_zoos(tmp_path):
    empty_runs.apply()
    with pytest.raises(ValueError, match="No model found"):
        model_in(runs(tmp_path, False))


def test_a_zoo_that_skips_empty_runs_is_left_alone(monkeypatch):
    empty_runs.apply()
    once = rl_zoo3.utils.get_latest_run_id
    assert apply_needed((empty_runs,)) == []
    assert rl_zoo3.utils.get_latest_run_id is once


def settings(folder: Path, config: str, args: str = "env_kwargs: null\n") -> str:
    (folder / "config.yml").write_text(config)
    (folder / "args.yml").write_text(args)
    return str(folder)


HOSTILE = {
    "a call": "a: !!python/object/apply:os.mkdir [{target}]\n",
    "an object": "a: !!python/object/new:os.mkdir [{target}]\n",
    "a module": "a: !!python/module:antigravity\n",
    "a name": "a: !!python/name:os.system\n",
    "an expression": "normalize: \"__import__('os').mkdir('{target}') or {{}}\"\n",
    "a nested call": "a: [1, {{b: !!python/object/apply:os.mkdir [{target}]}}]\n",
    "a key": "? !!python/object/apply:os.mkdir [{target}]\n: 1\n",
    # safety H3: plain strings that the zoo imports and calls
    "wrappers": "env_wrapper: [builtins.repr, re.sub: {{repl: '', string: \"open('{target}','w')\"}}, builtins.eval]\n",
    "a wrapper's module": "env_wrapper: antigravity.Wrapper\n",
    "a wrapper of environments": "vec_env_wrapper: {{antigravity.Wrapper: {{}}}}\n",
    "a callback": "callback: [antigravity.Callback]\n",
    "a function of a library": "env_wrapper: rl_zoo3.utils.get_class_by_name\n",
    "a module that is a script": "env_wrapper: rl_zoo3.benchmark.Wrapper\n",
    "a name in a script": "a: !!python/name:rl_zoo3.benchmark.x\n",
    "a wrapper that writes": "env_wrapper: [stable_baselines3.common.monitor.Monitor: {{filename: '{target}'}}]\n",
}


@pytest.mark.parametrize(
    ("file", "kind"), [("config", kind) for kind in HOSTILE] + [("args", kind) for kind in HOSTILE if kind != "an expression"]
)
def test_settings_that_would_run_code_are_refused(file, kind, tmp_path):
    hostile = HOSTILE[kind].format(target=tmp_path / "made")
    unsafe_yaml.apply()
    folder = settings(tmp_path, *([hostile] if file == "config" else ["a: 1\n", hostile]))
    with pytest.raises(ValueError, match=rf"{file}\.yml.* use --trust-remote-code"):
        rl_zoo3.utils.get_saved_hyperparams(folder)
    assert not (tmp_path / "made").exists()
    assert not {"antigravity", "rl_zoo3.benchmark"} & set(sys.modules)


@pytest.mark.parametrize("content", ["", "[1]", "text", "1"])
@pytest.mark.parametrize("file", ["config", "args"])
def test_settings_without_keys_are_refused_in_one_line(file, content, tmp_path):
    """Review safety, unclear errors: the zoo's enjoy raised an AttributeError."""
    unsafe_yaml.apply()
    folder = settings(tmp_path, *([content] if file == "config" else ["a: 1\n", content]))
    with pytest.raises(ValueError, match=rf"{file}\.yml is not YAML as the zoo writes it"):
        rl_zoo3.utils.get_saved_hyperparams(folder)


def test_short_settings_do_not_stand_for_long_ones(tmp_path):
    """Review safety H8: 26 levels of merge keys did not end."""
    bomb = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 27))
    unsafe_yaml.apply()
    for content in (bomb, "a: " + "x" * 200_000):
        with pytest.raises(ValueError, match=r"more than 10 aliases|file of up to 100,000 bytes"):
            rl_zoo3.utils.get_saved_hyperparams(settings(tmp_path, content))


def test_the_unrepaired_zoo_runs_that_code(tmp_path):
    hostile = HOSTILE["a call"].format(target=tmp_path / "made")
    rl_zoo3.utils.get_saved_hyperparams(settings(tmp_path, hostile))
    assert (tmp_path / "made").exists()


def test_trusted_settings_are_read_as_they_are(tmp_path, monkeypatch):
    unsafe_yaml.apply()
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    hyperparameters, _ = rl_zoo3.utils.get_saved_hyperparams(settings(tmp_path, "a: !!python/name:os.getcwd\n"))
    assert hyperparameters["a"] is os.getcwd


def test_what_the_zoo_writes_is_read_as_before(tmp_path):
    written = OrderedDict(
        policy="MlpPolicy",
        policy_kwargs={"activation_fn": torch.nn.Tanh, "net_arch": (64, 64)},
        normalize="dict(norm_obs=True, norm_reward=False)",
        clip_range="lin_0.2",
        env_wrapper=[
            {"gymnasium.wrappers.TimeLimit": {"max_episode_steps": 5}},
            "sb3_contrib.common.wrappers.TimeFeatureWrapper",
            "stable_baselines3.common.atari_wrappers.AtariWrapper",
        ],
        vec_env_wrapper="stable_baselines3.common.vec_env.VecFrameStack",
    )
    folder = settings(tmp_path, yaml.dump(written), yaml.dump(OrderedDict(vars(Namespace(env_kwargs=None, env="x")))))
    before = rl_zoo3.utils.get_saved_hyperparams(folder)
    unsafe_yaml.apply()
    assert rl_zoo3.utils.get_saved_hyperparams(folder) == before
    assert before[0]["policy_kwargs"]["activation_fn"] is torch.nn.Tanh


def test_a_zoo_that_reads_settings_safely_is_left_alone(monkeypatch):
    def safe(stats_path, *args, **kwargs):
        return yaml.safe_load((Path(stats_path) / "config.yml").read_text()), stats_path

    monkeypatch.setattr(rl_zoo3.utils, "get_saved_hyperparams", safe)
    assert not unsafe_yaml.is_needed()


def test_metadata_for_a_card_are_what_the_zoo_saves():
    hub_metadata.apply()
    metadata = METADATA.generate_metadata("TRPO", "CartPole-v1", 51.7, 21.64)
    assert metadata["library_name"] == "stable-baselines3"
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["value"] == "51.70 +/- 21.64"


def test_a_missing_file_is_what_the_zoo_waits_for(monkeypatch):
    def missing(repo_id, filename):
        raise RemoteEntryNotFoundError("404", response=types.SimpleNamespace(headers={}, request=None, status_code=404))

    monkeypatch.setattr(huggingface_sb3, "load_from_hub", missing)
    hub_optional_files.apply()
    with pytest.raises(HTTPError, match="me/agent has no file vec_normalize.pkl"):
        rl_zoo3.load_from_hub.load_from_hub("me/agent", "vec_normalize.pkl")


def test_a_lost_connection_is_not_taken_for_a_missing_file(monkeypatch):
    def lost(repo_id, filename):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_sb3, "load_from_hub", lost)
    hub_optional_files.apply()
    with pytest.raises(LocalEntryNotFoundError):
        rl_zoo3.load_from_hub.load_from_hub("me/agent", "vec_normalize.pkl")


def test_a_zoo_that_waits_for_the_hubs_error_is_left_alone(monkeypatch):
    monkeypatch.setattr(rl_zoo3.load_from_hub, "HTTPError", HfHubHTTPError)
    assert not hub_optional_files.is_needed()


def test_children_of_the_zoo_are_started_through_our_command_line(monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "call", lambda command, **kwargs: started.append(command) or 0)
    child_processes.apply()
    subprocess.call(["python", "enjoy.py", "--algo", "ano"])
    subprocess.call(["python", "-m", "rl_zoo3.record_video", "--env", "x"])
    subprocess.call(["python", "-m", "http.server"])
    subprocess.call("python enjoy.py", shell=True)
    assert [command[0] for command in started[:2]] == [sys.executable] * 2
    assert [command[-3:] for command in started[:2]] == [["enjoy", "--algo", "ano"], ["record_video", "--env", "x"]]
    assert started[2:] == [["python", "-m", "http.server"], "python enjoy.py"]


def test_a_child_knows_our_algorithms(tmp_path, capfd):
    child_processes.apply()
    assert subprocess.call(["python", "enjoy.py", "--algo", "papo", "--env", "CartPole-v1", "-f", str(tmp_path)]) == 2
    assert f"error: The {tmp_path}/papo folder was not found" in capfd.readouterr().err


def test_ffmpeg_is_found_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_ffmpeg.is_needed()
    missing_ffmpeg.apply()
    assert not missing_ffmpeg.is_needed()
    assert subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True).stdout.startswith("ffmpeg version")


def test_an_ffmpeg_that_is_there_is_left_alone(monkeypatch, tmp_path):
    own = tmp_path / "ffmpeg"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert apply_needed((missing_ffmpeg,)) == []
    assert shutil.which("ffmpeg") == str(own)


@pytest.mark.parametrize(("runs", "episodes"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_the_last_evaluations_are_one_mean_of_each_run(runs, episodes, tmp_path, monkeypatch):
    returns = np.arange(runs * 2 * episodes, dtype=float).reshape(runs, 2, episodes)
    for number, results in enumerate(returns, 1):
        folder = tmp_path / "logs" / "ano" / f"CartPole-v1_{number}"
        folder.mkdir(parents=True)
        np.savez(folder / "evaluations.npz", timesteps=np.array([10, 20]), results=results)
    single_runs.apply()
    line = f"all_plots -a ano -e CartPole-v1 -f {tmp_path / 'logs'} -l logs -o {tmp_path / 'out'} --no-display"
    monkeypatch.setattr(sys, "argv", line.split())
    ALL_PLOTS.all_plots()
    kept = pickle.loads((tmp_path / "out.pkl").read_bytes())["CartPole-v1"]["ANO-logs"]["last_evals"]
    np.testing.assert_allclose(np.sort(kept), returns[:, 1].mean(axis=1))
    ALL_PLOTS.plt.close("all")


def test_results_of_one_run_get_the_returns_of_its_last_evaluation():
    single_runs.apply()
    evaluations = np.array([[1.0], [5.0]])
    results = {
        "results_table": {},
        "Hopper-v5": {
            "ANO-logs": {"last_evals": np.float64(5.0), "mean_per_eval": evaluations},
            "PPO-logs": {"last_evals": np.array([1.0, 2.0]), "mean_per_eval": np.ones((2, 2))},
        },
    }
    loaded = PLOTS.pickle.load(io.BytesIO(pickle.dumps(results)))
    assert loaded["Hopper-v5"]["ANO-logs"]["last_evals"].tolist() == [5.0]
    assert loaded["Hopper-v5"]["PPO-logs"]["last_evals"].tolist() == [1.0, 2.0]


def test_scores_are_normalised_by_reference_scores(monkeypatch, tmp_path):
    """What reaches rliable, for an environment that the zoo knows, one that it does not, and one that nobody does."""
    score_normalization.apply()
    evaluations = {"mean_per_eval": np.array([[100.0], [200.0]]), "timesteps": np.array([1, 2])}
    one = {"last_evals": np.array([200.0]), "mean": np.array([1.0, 2.0]), "std_error": np.zeros(2), **evaluations}
    results = {"results_table": {"headers": [], "value_matrix": []}}
    results |= {env: {"ANO-logs": dict(one)} for env in ("LunarLanderContinuous", "CartPole-v1", "Own-v0")}
    (tmp_path / "results.pkl").write_bytes(pickle.dumps(results))
    seen = []

    def stop(scores, *args, **kwargs):
        seen.append(scores)
        raise StopIteration

    monkeypatch.setattr(PLOTS.rly, "get_interval_estimates", stop)
    monkeypatch.setattr(sys, "argv", ["plot_from_file", "-i", str(tmp_path / "results.pkl"), "-r", "--skip-timesteps"])
    with pytest.warns(UserWarning, match="Own-v0 not found for normalizing"), pytest.raises(StopIteration):
        importlib.import_module("rl_zoo3.plots").plot_from_file()
    cartpole = ReferenceScores().find("CartPole-v1")[1]
    expected = [(200 + 200) / (250 + 200), (200 - cartpole.random) / (cartpole.player - cartpole.random), 200.0]
    np.testing.assert_allclose(seen[0]["ANO-logs"], [expected])
