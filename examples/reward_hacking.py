"""Compare GRPO and GANO on a small task without downloads: does a policy exploit the errors of its reward model?

    python examples/reward_hacking.py --out llm-demo     # 8 minutes on two cores; the same command resumes

It fine-tunes a small model on careless summaries, trains a reward model on comparisons with mistakes (the proxy reward), and
trains policies against it. The task's rule (the gold reward) measures how good they really are, but trains nothing.
``report.md`` has the table, ``report.png`` the curves, ``report.json`` both.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import llm_task
import torch
from datasets import disable_progress_bars
from matplotlib.figure import Figure
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from sb3_ano._io import cores, read_json, replace_directory, versions, write_file, write_json
from sb3_ano.llm import GANOConfig, GANOTrainer, LearnedReward

#: Variants, as settings of GANOConfig. grpo is the loss of TRL before 1.10, which weighted the KL divergence by no ratio; clip
#: differs from it in the place of the KL divergence only.
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"shaping": "ppo", "kl_in": "loss", "use_bias_correction_kl": False},
    "gano": {"shaping": "ano", "kl_in": "reward"},
    "spo": {"shaping": "spo", "kl_in": "reward"},
    "clip": {"shaping": "ppo", "kl_in": "reward"},
}
COLORS = {"grpo": "#868e96", "gano": "#c2255c", "spo": "#1971c2", "clip": "#2f9e44"}
PLAN = {"posts": 20_000, "sft_steps": 1500, "comparisons": 3000, "generations": 250, "iterations": 3, "beta": 0.05}
QUICK = PLAN | {"posts": 256, "sft_steps": 4, "comparisons": 64, "generations": 2}
COMPLETIONS = 64
CPU: dict[str, Any] = {
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "report_to": "none",
}
#: TRL's names of the curves, and ours.
CURVES = {
    "rewards/gold/mean": "gold",
    "rewards/reward_model/mean": "proxy",
    "kl": "kl",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "ratio/outside_low": "outside_low",
    "ratio/outside_high": "outside_high",
    "ratio/max": "ratio_max",
}
PANELS = {
    "gold": "gold reward (rule; not trained on)",
    "proxy": "proxy reward (reward model)",
    "kl": "KL to the fine-tuned model, nats per token",
    "entropy": "entropy, nats per token",
}
QUICK_WARNING = "**Made with --quick: everything was tried out, and the numbers mean nothing.**\n\n"
REPORT = """\
# Reward hacking on a small summarization task

{warning}Settings and versions: {settings}.

Gold is the task's rule (1 is perfect, 0 an empty summary), proxy is the reward model that the policies are trained on; KL and
entropy are in nats. Mean ± standard deviation over seeds; at last is the median of the last tenth. "r below" and "r above" are
the fractions of ratios outside of the region from 0.8 to 1.2.

| | seeds | gold, at first | at best | at last | proxy | KL per token | entropy | tokens | r below, % | r above, % |
|---|---|---|---|---|---|---|---|---|---|---|
{rows}
"""


def make_start(out: Path, plan: dict[str, Any]) -> None:
    """Train what all policies start from, unless it exists: the directories ``sft`` and ``reward``."""
    disable_progress_bars()
    tokenizer = llm_task.make_tokenizer()
    common = CPU | {"lr_scheduler_type": "cosine"}
    if not (out / "sft").exists():
        torch.manual_seed(0)
        model = llm_task.make_model(tokenizer)
        steps = {"max_steps": plan["sft_steps"], "warmup_steps": 50, "learning_rate": 3e-3}
        config = SFTConfig(str(out / "logs"), per_device_train_batch_size=64, **steps, **common)
        _train(SFTTrainer(model, config, None, llm_task.make_posts(plan["posts"], seed=1), None, tokenizer), out / "sft")
    if not (out / "reward").exists():
        steps = {"num_train_epochs": 3, "learning_rate": 1e-3}
        config = RewardConfig(str(out / "logs"), per_device_train_batch_size=32, **steps, **common)
        pairs = llm_task.make_comparisons(plan["comparisons"], seed=2)
        _train(RewardTrainer(str(out / "sft"), config, None, pairs, None, tokenizer), out / "reward")


def _train(trainer: Any, directory: Path) -> None:
    trainer.train()
    with replace_directory(directory) as new:
        trainer.save_model(str(new))


def train_policy(out: Path, plan: dict[str, Any], variant: str, seed: int) -> None:
    """Train a policy and write its curves to ``runs/VARIANT_SEED.json``."""
    torch.set_num_threads(1)
    tokenizer = llm_task.make_tokenizer()
    proxy = LearnedReward.load(str(out / "reward"), tokenizer, "cpu")
    config = GANOConfig(
        str(out / "logs"),
        per_device_train_batch_size=COMPLETIONS,
        gradient_accumulation_steps=1,
        num_iterations=plan["iterations"],
        max_steps=plan["generations"] * plan["iterations"],
        max_completion_length=llm_task.MAX_SUMMARY,
        learning_rate=1e-3,
        beta=plan["beta"],
        missing_eos_penalty=1.0,
        temperature=1.0,
        reward_weights=[1.0, 0.0],  # the gold reward is logged, but not trained on
        logging_steps=1,
        seed=seed,
        **CPU,
        **VARIANTS[variant],
    )
    prompts = llm_task.make_posts(2000, seed=3).select_columns(["prompt"])
    trainer = GANOTrainer(str(out / "sft"), [proxy, llm_task.gold], config, prompts, None, tokenizer)
    _train(trainer, out / "policies" / f"{variant}_{seed}")
    write_json(out / "runs" / f"{variant}_{seed}.json", curves(trainer.state.log_history, plan["iterations"]))


def curves(history: list[dict[str, float]], iterations: int) -> dict[str, list[float]]:
    """Return one value per generation: rewards and lengths of its completions, means over its updates of the rest."""
    updates = [entry for entry in history if "loss" in entry]
    rounds = [updates[start : start + iterations] for start in range(0, len(updates), iterations)]
    result: dict[str, list[float]] = {"completions": [COMPLETIONS * (index + 1) for index in range(len(rounds))]}
    for metric, name in CURVES.items():
        values = [[entry[metric] for entry in entries if metric in entry] for entries in rounds]
        result[name] = [round(sum(logged) / len(logged), 5) for logged in values]
    return result


def write_report(out: Path, settings: dict[str, Any], variants: list[str]) -> str:
    """Write ``report.md``, ``report.json`` and ``report.png`` of the finished runs.

    :param out: directory of the runs
    :param settings: settings to state
    :param variants: variants to include
    :return: the report, as Markdown
    """
    paths = {name: sorted((out / "runs").glob(f"{name}_*.json")) for name in variants}
    runs = {name: [read_json(path) for path in found] for name, found in paths.items() if found}
    summary = {name: summarize(seeds) for name, seeds in runs.items()}
    rows = [
        f"| {name} | {len(runs[name])} | {' | '.join(map(_cell, columns.values()))} |" for name, columns in summary.items()
    ]
    report = REPORT.format(
        warning=QUICK_WARNING if settings["quick"] else "",
        settings=", ".join(f"{name} {value}" for name, value in settings.items()),
        rows="\n".join(rows),
    )
    write_file(out / "report.md", report)
    write_json(out / "report.json", {"settings": settings, "summary": summary, "runs": runs})
    _plot(runs, out / "report.png")
    return report


def summarize(seeds: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return mean and standard deviation over seeds of each column of the table; one seed has no deviation."""

    def last(curve: list[float]) -> float:
        return statistics.median(curve[-max(1, len(curve) // 10) :])

    values = {
        "first_gold": [run["gold"][0] for run in seeds],
        "best_gold": [max(_smooth(run["gold"])) for run in seeds],
        **{name: [last(run[name]) for run in seeds] for name in ("gold", "proxy", "kl", "entropy", "length")},
        **{f"{name}, %": [100 * statistics.fmean(run[name]) for run in seeds] for name in ("outside_low", "outside_high")},
    }
    return {
        name: [statistics.fmean(column), *([statistics.stdev(column)] if seeds[1:] else [])] for name, column in values.items()
    }


def _cell(value: list[float]) -> str:
    return f"{value[0]:.2f} ± {value[1]:.2f}" if value[1:] else f"{value[0]:.2f} ± \N{EN DASH}"


def _smooth(curve: list[float]) -> list[float]:
    """Return medians over windows of a tenth of the training; a single token can make an estimate of the KL huge."""
    width = max(1, len(curve) // 10)
    return [statistics.median(curve[start : start + width]) for start in range(len(curve) - width + 1)]


def _plot(runs: dict[str, list[dict[str, list[float]]]], path: Path) -> None:
    figure = Figure(figsize=(10.0, 6.4), layout="constrained")
    for axes, (curve, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name, seeds in runs.items():
            smooth = [_smooth(run[curve]) for run in seeds]
            steps = seeds[0]["completions"][-len(smooth[0]) :]
            for values in smooth:
                axes.plot(steps, values, color=COLORS[name], alpha=0.3, linewidth=0.8)
            mean = [statistics.fmean(values) for values in zip(*smooth, strict=True)]
            axes.plot(steps, mean, color=COLORS[name], linewidth=2.0, label=f"{name}, {len(seeds)} seed(s)")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("completions")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def _log_to_file(directory: Path) -> None:
    """Redirect the output of this process, which is a screen of progress bars per training."""
    directory.mkdir(exist_ok=True)
    sys.stdout = sys.stderr = open(directory / f"{os.getpid()}.log", "w")  # noqa: SIM115 (until it ends)


def main(arguments: list[str] | None = None) -> None:
    """Run the trainings that are missing in the output directory, and write the report after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("llm-demo"), help="directory of models, curves and report")
    parser.add_argument("--algos", nargs="+", choices=list(VARIANTS), default=["grpo", "gano", "spo"], help="variants")
    parser.add_argument("--seeds", type=int, choices=range(1, 101), metavar="N", default=3, help="number of seeds")
    parser.add_argument("--jobs", type=int, choices=range(1, 101), metavar="N", default=cores(), help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="try everything out; the numbers mean nothing")
    options = parser.parse_args(arguments)
    plan, out = QUICK if options.quick else PLAN, options.out.absolute()
    if (out / "plan.json").exists() and read_json(out / "plan.json") != plan:
        parser.error(f"{out} holds results of other settings; choose another --out")
    write_json(out / "plan.json", plan)
    settings = {"quick": options.quick, **plan, **versions(("sb3-ano", "trl", "transformers", "torch"))}
    # For the new processes: one thread each, because they train in parallel, and no downloads.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), _log_to_file, (out / "logs",)) as pool:
        print("fine-tuning, reward model ...", flush=True)
        pool.submit(make_start, out, plan).result()
        missing = [(name, seed) for seed in range(options.seeds) for name in options.algos]
        missing = [run for run in missing if not (out / "runs" / f"{run[0]}_{run[1]}.json").exists()]
        futures = {pool.submit(train_policy, out, plan, *run): run for run in missing}
        for finished in as_completed(futures):
            finished.result()
            print("finished:", *futures[finished], flush=True)
            write_report(out, settings, options.algos)
    print(write_report(out, settings, options.algos))


if __name__ == "__main__":
    main()
