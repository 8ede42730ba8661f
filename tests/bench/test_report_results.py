"""What a report reads off the runs, against returns that rise in straight lines."""

import numpy as np
import pytest
from pyarrow import parquet

from sb3_ano.bench.report.contenders import contenders, rectangles, run_names, select
from sb3_ano.bench.report.results import load_results
from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.store import open_store
from tests.bench.synthetic_results import POINTS, write_results

REFERENCES = "task,random,expert\nA-v0,0,100\nB-v0,-100,100\nC-v0,,100\n"


@pytest.fixture
def references(tmp_path):
    (tmp_path / "scores.csv").write_text(REFERENCES)
    return ReferenceScores([str(tmp_path / "scores.csv")])


@pytest.fixture
def load(tmp_path, references):
    def load(runs, kind="evaluation", **options):
        (results,) = load_results(open_store(write_results(tmp_path / "results", runs, **options)), references, kind)
        return results

    return load


def run(env_id="A-v0", algorithm="ppo", seed=0, final=80.0, **more):
    return {"env_id": env_id, "algorithm": algorithm, "seed": seed, "final": final, **more}


def grid(algorithm, finals, env_ids=("A-v0", "B-v0"), seeds=(0, 1)):
    """Runs of an algorithm, their final returns by learning rate and clip range."""
    return [
        run(env_id, algorithm, seed, final, settings={"learning_rate": rate, "clip_range": clip_range})
        for (rate, clip_range), final in finals.items()
        for env_id in env_ids
        for seed in seeds
    ]


def test_final_scores_curves_and_areas_are_those_of_the_line(load):
    results = load([run(final=80.0), run("B-v0", final=50.0, start=-100.0), run("C-v0", final=7.0)])
    runs = results.runs.set_index("env_id")
    assert runs["final"].to_dict() == pytest.approx({"A-v0": 80.0, "B-v0": 50.0, "C-v0": 7.0})
    assert runs["score"][["A-v0", "B-v0"]].tolist() == pytest.approx([0.8, 0.75])
    assert np.isnan(runs["score"]["C-v0"])
    # Between the first evaluation, at a twentieth of the training, and the last.
    assert runs["area"]["A-v0"] == pytest.approx(80.0 * (1 / POINTS + 1) / 2)
    assert results.returns[0] == pytest.approx(80.0 * np.arange(1, POINTS + 1) / POINTS)
    assert results.scored_tasks == ["A-v0", "B-v0"]


def test_time_to_the_threshold_is_that_of_the_first_evaluation_there(load):
    results = load([run(final=80.0), run("B-v0", final=-50.0, start=-100.0)])
    # 0.8 x progress reaches 0.5 at 62.5 %, which the evaluation at 65 % is the first to see; a training takes 50 seconds.
    assert results.runs["seconds_to_threshold"].tolist() == pytest.approx([32.5, np.inf])


def test_training_returns_are_means_of_their_last_tenth(load):
    results = load([run(final=80.0)], kind="training", episodes=4000)
    assert results.returns.shape == (1, 50)
    assert results.runs["final"][0] == pytest.approx(80.0 * 0.95, abs=1.0)
    assert results.returns[0] == pytest.approx(80.0 * (np.arange(50) + 0.5) / 50, abs=4.0)


def test_diagnostics_are_means_in_windows_and_entropy_has_its_own_sign(load):
    results = load([run()])
    assert results.diagnostics["entropy"][0] == pytest.approx(3.0 - (np.arange(POINTS) + 0.75) / POINTS)
    assert set(results.diagnostics) == {"approx_kl", "ratio_max", "clip_fraction", "entropy"}


def test_suites_are_reported_apart(tmp_path, references):
    folder = write_results(tmp_path / "results", [run(suite="one"), run(suite="two", seed=1)])
    assert [results.name for results in load_results(open_store(folder), references)] == ["one", "two"]


def test_runs_without_an_evaluation_are_named_and_left_out(tmp_path, references):
    folder = write_results(tmp_path / "results", [run(), run(seed=1)])
    empty, whole = (next(folder.glob(f"runs/*seed{seed}")) for seed in (0, 1))
    table = empty / "evaluations.parquet"
    parquet.write_table(parquet.read_table(table).slice(0, 0), table)
    (results,) = load_results(open_store(folder), references)
    assert results.empty == (empty.name,)
    assert results.runs["run_id"].tolist() == [whole.name]


def test_a_store_without_runs_is_refused(tmp_path, references):
    with pytest.raises(ValueError, match="has no finished runs"):
        load_results(open_store(write_results(tmp_path / "results", [])), references)


def test_settings_of_a_tasks_preset_do_not_make_a_contender(load):
    one, other = {"learning_rate": 2e-3, "clip_range": 0.2}, {"learning_rate": 3e-4, "clip_range": 0.2}
    results = load([run("A-v0", settings=one), run("B-v0", settings=other)])
    (contender,) = contenders(results)
    assert contender.label == "ppo"
    assert contender.rows == (0, 1)


def test_contenders_differ_in_what_was_varied_and_come_in_the_papers_order(load):
    runs = grid("ano", {(3e-4, 0.2): 80.0, (1e-3, 0.2): 70.0}) + grid("ppo", {(3e-4, 0.1): 1.0, (3e-4, 0.2): 2.0})
    assert [one.label for one in contenders(load(runs))] == [
        "ppo clip_range=0.1",
        "ppo clip_range=0.2",
        "ano learning_rate=0.0003",
        "ano learning_rate=0.001",
    ]


def test_lengths_that_differ_make_contenders_apart(load):
    runs = [run(total_timesteps=1000), run(seed=1, total_timesteps=2000)]
    assert [one.label for one in contenders(load(runs))] == ["ppo total_timesteps=1000", "ppo total_timesteps=2000"]


def test_the_best_settings_at_the_lowest_learning_rate_are_chosen(load):
    results = load(grid("ano", {(3e-4, 0.1): 20.0, (3e-4, 0.2): 60.0, (3e-4, 0.3): 40.0, (1e-3, 0.1): 90.0}))
    (chosen,) = select(results, contenders(results))
    assert chosen.label == "ano clip_range=0.2 learning_rate=0.0003"
    assert chosen.alternatives == 3


def test_without_reference_scores_the_best_rank_is_chosen(load):
    runs = grid("ano", {(3e-4, 0.1): 5.0, (3e-4, 0.2): 6.0}, ["X-v0", "Y-v0"])
    runs += grid("ano", {(3e-4, 0.1): 900.0, (3e-4, 0.2): 1.0}, ["Z-v0"])
    results = load(runs)
    (chosen,) = select(results, contenders(results))
    assert chosen.value("clip_range") == 0.2  # better on two tasks of three, by however little


def test_aggregates_take_tasks_that_all_have_and_seeds_that_have_all_tasks(load):
    runs = [run(env_id, "ppo", seed) for env_id in ("A-v0", "B-v0", "C-v0") for seed in (0, 1, 2)]
    runs += [run(env_id, "ano", seed) for env_id in ("A-v0", "B-v0") for seed in (0, 1)] + [run("A-v0", "ano", 5)]
    results = load(runs)
    blocks, tasks = rectangles(results, contenders(results), results.tasks)
    assert tasks == ["A-v0", "B-v0"]
    assert [block.seeds for block in blocks] == [(0, 1, 2), (0, 1)]
    assert [results.runs["seed"][row] for row in blocks[1].left_out] == [5]
    for block in blocks:
        assert results.runs["env_id"].to_numpy()[block.rows].tolist() == [tasks] * len(block.seeds)
        assert results.runs["seed"].to_numpy()[block.rows].T.tolist() == [list(block.seeds)] * 2


def test_names_of_runs_are_shortened_without_loss():
    names = ["A__ppo__x=1__seed0", "A__ppo__x=1__seed2", "B__ppo__x=1__seed0", "something else"]
    assert run_names(names) == ["A__ppo__x=1__seed{0,2}", "B__ppo__x=1__seed0", "something else"]
