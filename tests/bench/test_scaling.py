"""Curves over the length of a run and the number of environments."""

import pytest

from sb3_ano.bench import scaling
from sb3_ano.bench.cases import ANO_COMPILED
from sb3_ano.bench.progress import Reporter
from sb3_ano.bench.scaling import ScalingFile, drift, length_curve, measure_scaling, n_envs_curve
from sb3_ano.bench.speed import Interpreters, Settings


def blocks(*microseconds):
    return [{"steps": 1000, "steps_done": 1000 * (i + 1), "seconds": cost / 1e3} for i, cost in enumerate(microseconds)]


def test_the_cost_of_a_step_is_in_microseconds():
    steps, cost = length_curve(blocks(50.0, 60.0))
    assert steps.tolist() == [1000, 2000]
    assert cost == pytest.approx([50.0, 60.0])
    numbers, collection, whole = n_envs_curve(
        {"8": {"collect": 0.2, "seconds": 1.0, "steps": 10_000}, "2": {"collect": 0.1, "seconds": 0.5, "steps": 1000}}
    )
    assert numbers.tolist() == [2, 8]
    assert collection == pytest.approx([100.0, 20.0])
    assert whole == pytest.approx([500.0, 100.0])


def test_drift_compares_the_last_quarter_with_the_first():
    assert drift(blocks(10, 10, 99, 99, 99, 99, 15, 15)) == pytest.approx(1.5)
    assert drift(blocks(10)) == 1.0


class FakeWorker:
    started = 0

    def __init__(self, spec, python):
        type(self).started += 1
        self.description = {"rss_bytes": 1, "versions": {}}

    def ask(self, do, iterations=0, parts=None):
        if do == "build":
            return {"device": "cpu", "steps_per_iteration": 100}
        reply = {"seconds": 0.1 * iterations, "steps": 100 * iterations, "rss_bytes": 2, "children_rss_bytes": 0}
        return reply | ({"collect": 0.04 * iterations} if do == "profile" else {})

    def close(self):
        pass


def test_points_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "started", 0)
    settings = Settings(block_seconds=1.0)

    def measure():
        file = ScalingFile(tmp_path / "scaling.json", settings, 2500, force=False)
        assert measure_scaling((ANO_COMPILED,), settings, file, Interpreters(), Reporter()) == []
        return file.content

    content = measure()
    assert [block["steps_done"] for block in content["length"]["ano-compiled"]] == [1000, 2000, 3000]
    assert list(content["n_envs"]["ano-compiled"]) == [str(number) for number in scaling.NUMBERS_OF_ENVS]
    assert FakeWorker.started == 1 + len(scaling.NUMBERS_OF_ENVS)
    text = scaling.markdown(content)
    assert "`ano-compiled`: 1000 us a step over 3,000 steps; the last quarter costs 1.00 times the first" in text
    assert "| ano-compiled | 256 | 400.0 | 1000.0 |" in text
    measure()
    assert FakeWorker.started == 1 + len(scaling.NUMBERS_OF_ENVS)
    with pytest.raises(ValueError, match="was measured with other settings"):
        ScalingFile(tmp_path / "scaling.json", settings, 9999, force=False)
    assert ScalingFile(tmp_path / "scaling.json", settings, 9999, force=True).content["length"] == {}
