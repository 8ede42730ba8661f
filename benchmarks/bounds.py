"""Compare the time of each part of a step with a lower bound: ``python benchmarks/bounds.py`` reads docs/results/speed.

Acting and the update cannot be faster than their operations at the speed of a large matrix product, the update also not
than its memory traffic at the speed of a copy. These rates are measured, and the environments, which are not ours, by
themselves. Write ``bounds.md``; the times of the parts come from ``blocks.csv``.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from speed import CASES, make_model, timed
from torch.utils.flop_counter import FlopCounterMode

from sb3_ano._io import write_file
from sb3_ano._system import machine, versions

DEFAULT_CASES = ["defaults", "vec8", "paper", "pong", "cleanrl", "cleanrl-pong"]
# Vectors of the parameters' length that a minibatch must read or write: the parameters forward and backward, the gradient
# twice, and Adam's parameters and two averages, each read and written.
VECTORS = 10


def fastest(function: Callable[[], Any], seconds: float = 0.5) -> float:
    """Return the shortest time of a call, in seconds."""
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def rates(dtype: torch.dtype) -> tuple[float, float]:
    """Return operations per second of a matrix product, and bytes per second of a copy in the second-level cache."""
    matrix = torch.randn(1024, 1024).to(dtype)
    vector, target = torch.randn(2, 64 * 1024)
    return 2 * 1024**3 / fastest(lambda: matrix @ matrix), 8 * vector.numel() / fastest(lambda: target.copy_(vector))


def operations(function: Callable[[], Any]) -> int:
    """Return the multiplications and additions of matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def environment_seconds(env: Any, steps: int = 3000) -> float:
    """Return the seconds per step that the environments need by themselves, with random actions."""
    env.reset()
    batches = steps // env.num_envs
    actions = [np.array([env.action_space.sample() for _ in range(env.num_envs)]) for _ in range(batches)]
    spent = {"env": 0.0}
    wait = timed(env.step_wait, spent, "env")
    for action in actions:
        env.step_async(action)
        wait()
    return spent["env"] / (batches * env.num_envs)


def bounds(case: str, variant: str, threads: int) -> dict[str, float]:
    """Return lower bounds of the parts of a step, in microseconds."""
    torch.set_num_threads(threads)
    model = make_model({"case": case, "variant": variant, "threads": threads, "device": "cpu"})
    env, policy = model.get_env(), model.policy
    environment = environment_seconds(env.unwrapped)
    per_second, bandwidth = rates(torch.bfloat16 if variant.endswith("bfloat16") else torch.float32)
    observations = policy.obs_to_tensor(env.reset())[0]
    acting = operations(lambda: policy(observations)) / env.num_envs
    model.learn(model.n_steps * model.n_envs)
    batch = next(model.rollout_buffer.get(model.batch_size))

    def minibatch() -> None:
        values, log_prob, _ = policy.evaluate_actions(batch.observations, batch.actions)
        (values.mean() + log_prob.mean()).backward()

    update = model.n_epochs * operations(minibatch) / model.batch_size
    traffic = VECTORS * 4 * sum(p.numel() for p in policy.parameters()) * model.n_epochs / model.batch_size
    return {
        "environment": 1e6 * environment,
        "acting": 1e6 * acting / per_second,
        "update": 1e6 * max(update / per_second, traffic / bandwidth),
        "GFLOP/s": per_second / 1e9,
        "GB/s": bandwidth / 1e9,
        "MFLOP": (acting + update) / 1e6,
    }


def measured(blocks: pd.DataFrame) -> dict[str, float]:
    """Return the median microseconds per step of the parts."""
    total = 1e6 / blocks["steps_per_second"]
    parts = {"environment": total * blocks["env"] / 100.0, "update": total * blocks["update"] / 100.0}
    parts["acting"] = total - parts["environment"] - parts["update"]
    return {name: float(values.median()) for name, values in {**parts, "total": total}.items()}


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=DEFAULT_CASES, metavar="CASE", help="cases of speed.py")
    parser.add_argument("--results", type=Path, default=Path("docs/results/speed"), help="directory with blocks.csv")
    options = parser.parse_args()
    if not (options.results / "blocks.csv").is_file():
        parser.error(f"{options.results / 'blocks.csv'} is missing; benchmarks/speed.py writes it")
    blocks = pd.read_csv(options.results / "blocks.csv")
    lines = [
        "| case | variant | environment | acting and collection | update | step | GFLOP/s | GB/s | MFLOP per step |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (case, variant), rows in blocks[blocks["variant"].str.startswith("ano-")].groupby(["case", "variant"]):
        if case not in options.cases or variant == "ano-eager":
            continue
        now, least = measured(rows), bounds(case, variant, int(rows["threads"].median()))
        least["total"] = least["environment"] + least["acting"] + least["update"]
        cells = [f"{now[part]:,.1f} / {least[part]:,.1f}" for part in ("environment", "acting", "update", "total")]
        cells += [f"{least['GFLOP/s']:,.0f}", f"{least['GB/s']:,.0f}", f"{least['MFLOP']:,.1f}"]
        lines.append(f"| `{case}` | {variant.removeprefix('ano-')} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    head = "Microseconds per step: measured / lower bound.\n\n"
    write_file(options.results / "bounds.md", head + "\n".join(lines) + f"\n\n{machine()}; {versions()}\n")


if __name__ == "__main__":
    main()
