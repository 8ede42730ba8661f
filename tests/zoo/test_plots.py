"""The zoo's plots: as files, with or without a display, of few results, and with the reason if they are empty."""

import pickle
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.image import imread

from sb3_ano.envs import make_vec_env
from sb3_ano.zoo.figures import figures, make_comparable
from tests.envs.backends import needs_envpool
from tests.hub.agents import Canary
from tests.zoo.conftest import rejected


@pytest.mark.parametrize("has_display", [True, False])
def test_figures_are_written_or_shown_or_a_line_says_what_to_do(has_display, tmp_path, monkeypatch, capsys):
    shown: list[list[int]] = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.get_fignums()))
    for suffix, start in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "": b""}.items():
        file = f"{tmp_path}/curve.{suffix}" if suffix else None
        with figures("all_plots", Namespace(), file, has_display=has_display):
            for label in ("one", "two"):
                plt.figure(label)
                plt.plot([1, 2, 3])
            plt.show()
        assert plt.get_fignums() == []
        for name in ("curve", "curve-2") if file else ():
            assert (tmp_path / f"{name}.{suffix}").read_bytes().startswith(start)
    output = capsys.readouterr().out
    assert output.startswith(f"one: {tmp_path / 'curve.png'}\n")
    assert (shown, "--figure FILE" in output) == (([[1, 2]], False) if has_display else ([], True))


@needs_envpool
def test_training_curves_read_the_monitor_file_of_a_batch(zoo, tmp_path):
    env = make_vec_env("Hopper-v5", 8, seed=0, backend="envpool", monitor_dir=tmp_path / "logs" / "ano" / "Hopper-v5_1")
    env.reset()
    for _ in range(200):
        env.step(np.zeros((8, 3)))
    env.close()
    zoo("plot_train -a ano -e Hopper-v5 -f logs -w 5 --figure curve.png")
    assert imread(tmp_path / "curve.png").std() > 0.01
    why = "no run of Hopper-v5 in logs/ano has 1000 episodes, over which reward is averaged; use a smaller -w"
    assert why in rejected("plot_train -a ano -e Hopper-v5 -f logs -w 1000 --figure empty.png")
    assert not Path("empty.png").exists()


def test_results_of_a_stranger_run_no_code(zoo):
    Path("results.pkl").write_bytes(pickle.dumps(Canary("canary")))
    Path("mine.pkl").write_bytes(pickle.dumps({"results_table": {}}))
    for files in ("-i results.pkl", "-i results", "-i mine.pkl --merge results.pkl"):
        assert "the file holds" in rejected(f"plot_from_file {files} --figure plot.png")
    assert not Path("canary").exists()


def evaluated(run: str, returns: np.ndarray) -> None:
    """Write evaluations as a training leaves them."""
    Path("logs/ano", run).mkdir(parents=True)
    np.savez(Path("logs/ano", run, "evaluations.npz"), timesteps=10 * np.arange(1, len(returns) + 1), results=returns)


@pytest.mark.parametrize(("runs", "episodes"), [(1, 2), (3, 2)])
def test_the_last_evaluations_are_one_mean_per_run(runs, episodes, zoo):
    returns = np.arange(runs * 2 * episodes, dtype=float).reshape(runs, 2, episodes)
    for number, results in enumerate(returns, 1):
        evaluated(f"CartPole-v1_{number}", results)
    zoo("all_plots -a ano -e CartPole-v1 -f logs -o out --figure out.png")
    content = pickle.loads(Path("out.pkl").read_bytes())
    (series,) = content["CartPole-v1"].values()
    np.testing.assert_allclose(np.sort(np.atleast_1d(series["last_evals"])), returns[:, 1].mean(axis=1))
    assert {type(value) for value in series.values()} <= {np.ndarray, np.float64}, "the file needs no class of ours"
    make_comparable(content, Namespace(skip_envs=[], iqm=True))
    np.testing.assert_allclose(np.sort(series["last_evals"]), returns[:, 1].mean(axis=1))


@pytest.mark.slow
def test_rliable_normalizes_the_tasks_that_the_zoo_knows_and_warns_of_others(zoo):
    for run in ("BipedalWalker-v3_1", "HopperBulletEnv-v0_1", "CartPole-v1_1"):
        evaluated(run, np.ones((3, 2)))
    zoo("all_plots -a ano -e BipedalWalker Hopper CartPole -f logs -o out --figure out.png")
    with pytest.warns(UserWarning, match="not found for normalizing|decorations") as caught:
        zoo("plot_from_file -i out.pkl -r --figure rliable.png")
    messages = [str(each.message) for each in caught]
    assert [each.split()[0] for each in messages if "not found for normalizing" in each] == ["CartPole"]
    assert Path("rliable-3.png").is_file()


def test_tasks_of_different_length_are_shown_and_empty_plots_say_why(zoo):
    for run, count in {"CartPole-v1_1": 4, "Pendulum-v1_1": 2, "Pendulum-v1_2": 2, "Acrobot-v1_1": 1}.items():
        evaluated(run, np.ones((count, 2)))
    zoo("all_plots -a ano -e CartPole-v1 Pendulum-v1 -f logs -o results --figure evaluations.png")
    zoo("plot_from_file -i results.pkl --figure results.png")
    for command, reason in {
        "plot_from_file -i results.pkl -r -iqm": "--iqm needs equal numbers of evaluations, but there are {",
        "plot_train -a ano -e NoSuch -f logs": "there is no run of NoSuch in logs/ano",
        "all_plots -a ano -e Acrobot-v1 -f logs": "no run of Acrobot-v1 in logs/ano has two evaluations; train with a smaller",
    }.items():
        assert reason in rejected(f"{command} --figure curves.png")
