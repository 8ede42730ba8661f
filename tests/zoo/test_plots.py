"""The zoo's plots: as files, with or without a display, of few results, and with the reason if they are empty."""

import pickle
from argparse import Namespace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.image import imread

from sb3_ano.envs import make_vec_env
from sb3_ano.zoo.figures import figures
from sb3_ano.zoo.fixes import make_comparable
from tests.envs.backends import needs_envpool
from tests.zoo.conftest import rejected

VALUES = Namespace(input="results.pkl")


@pytest.fixture(autouse=True)
def own_backend():
    backend = matplotlib.get_backend()
    yield
    matplotlib.use(backend)


def draw(*labels):
    for label in labels:
        plt.figure(label)
        plt.plot([1, 2, 3])
    plt.show()


@pytest.mark.parametrize("has_display", [True, False])
def test_figures_are_written_instead_of_shown(has_display, tmp_path, capsys):
    with figures("all_plots", VALUES, str(tmp_path / "curve.png"), has_display=has_display):
        draw("one", "two", "three")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve-2.png", "curve-3.png", "curve.png"]
    assert imread(tmp_path / "curve.png").std() > 0
    assert capsys.readouterr().out.startswith(f"one: {tmp_path / 'curve.png'}\n")
    assert plt.get_fignums() == []
    error = pytest.raises(ValueError, match="results.pkl holds no results for these options")
    with error, figures("plot_from_file", VALUES, str(tmp_path / "empty.png"), has_display=has_display):
        plt.figure("Training")
    assert not (tmp_path / "empty.png").exists()


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_is_the_format_also_without_show(suffix, start, tmp_path):
    with figures("all_plots", VALUES, str(tmp_path / f"curve.{suffix}"), has_display=False):
        plt.plot([1, 2])  # all_plots --no-display
    assert (tmp_path / f"curve.{suffix}").read_bytes().startswith(start)


def test_without_a_file_figures_are_shown_or_a_line_says_what_to_do(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.get_fignums()))
    with figures("all_plots", VALUES, None, has_display=True):
        draw("Training")
    assert (shown, capsys.readouterr().out) == ([[1]], "")
    with figures("all_plots", VALUES, None, has_display=False):
        draw("Training")
    assert "--figure FILE" in capsys.readouterr().out


@needs_envpool
def test_training_curves_read_the_monitor_file_of_a_batch(zoo, tmp_path):
    env = make_vec_env("Hopper-v5", 8, backend="envpool", monitor_dir=tmp_path / "logs" / "ano" / "Hopper-v5_1")
    env.reset()
    for _ in range(200):
        env.step(np.zeros((8, 3)))
    env.close()
    zoo("plot_train -a ano -e Hopper-v5 -f logs -w 5 --figure curve.png")
    assert imread(tmp_path / "curve.png").std() > 0.01
    assert "; use -w " in rejected("plot_train -a ano -e Hopper-v5 -f logs -w 1000 --figure empty.png")  # users Z8


def evaluated(run: str, returns: np.ndarray) -> None:
    """Write evaluations, of shape (n_evaluations, n_episodes), as a training leaves them."""
    Path("logs", run).mkdir(parents=True)
    np.savez(Path("logs", run, "evaluations.npz"), timesteps=10 * np.arange(1, len(returns) + 1), results=returns)


@pytest.mark.parametrize(("runs", "episodes"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_the_last_evaluations_are_one_mean_per_run(runs, episodes, zoo):
    returns = np.arange(runs * 2 * episodes, dtype=float).reshape(runs, 2, episodes)
    for number, results in enumerate(returns, 1):
        evaluated(f"ano/CartPole-v1_{number}", results)
    zoo("all_plots -a ano -e CartPole-v1 -f logs -o out --figure out.png")
    (series,) = pickle.loads(Path("out.pkl").read_bytes())["CartPole-v1"].values()
    np.testing.assert_allclose(np.sort(series["last_evals"]), returns[:, 1].mean(axis=1))
    assert {type(value) for value in series.values()} <= {np.ndarray, np.float64}, "the file needs no class of ours"
    zoo("plot_from_file -i out.pkl --figure again.png")


def test_results_of_rl_zoo3_itself_get_the_returns_of_their_last_evaluation():
    series = {"last_evals": np.float64(5.0), "mean_per_eval": np.array([[1.0], [5.0]]), "timesteps": np.array([1, 2])}
    several = {"last_evals": np.array([1.0, 2.0]), "mean_per_eval": np.ones((2, 2)), "timesteps": np.array([1, 2])}
    results = {"results_table": {}, "Hopper-v5": {"ANO": series, "PPO": several}}
    results = make_comparable(results, Namespace(skip_envs=[], iqm=True))
    assert results["Hopper-v5"]["ANO"]["last_evals"].tolist() == [5.0]
    assert results["Hopper-v5"]["PPO"]["last_evals"].tolist() == [1.0, 2.0]


def test_tasks_of_different_length_are_shown(zoo):  # users Z9
    evaluated("ano/CartPole-v1_1", np.ones((4, 2)))
    evaluated("ano/Pendulum-v1_1", np.ones((2, 2)))
    zoo("all_plots -a ano -e CartPole-v1 Pendulum-v1 -f logs -o results --figure evaluations.png")
    zoo("plot_from_file -i results.pkl --figure results.png")
    errors = rejected("plot_from_file -i results.pkl --figure results.png -r -iqm")
    assert "--iqm needs equal numbers of evaluations, but there are 4 of CartPole-v1, 2 of Pendulum-v1" in errors


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("plot_train -a ano -e NoSuch", "there is no run of NoSuch in logs/ano"),
        ("all_plots -a ano -e CartPole-v1", "no run of CartPole-v1 has two evaluations; train with a smaller --eval-freq"),
    ],
)
def test_an_empty_plot_says_why(command, reason, zoo):  # users Z8
    evaluated("ano/CartPole-v1_1", np.ones((1, 2)))
    assert reason in rejected(f"{command} -f logs --figure curves.png")
