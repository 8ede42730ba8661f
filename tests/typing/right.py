"""A program that uses every public name rightly; it is checked, and not run."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env import VecNormalize as SB3VecNormalize

import sb3_ano
from sb3_ano import (
    ANO,
    PAPO,
    SPO,
    MaskableANO,
    MissingExtraError,
    RecurrentANO,
    RecurrentMaskableANO,
    accelerate,
    envs,
    explain,
    hub,
    llm,
    rllib,
    shaping,
    zoo,
)
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.bench import statistics
from sb3_ano.bench.report import Settings, write_report
from sb3_ano.bench.results import Results
from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.checkpoints import Checkpoint, TrainingCheckpoints, newest_checkpoint, read_checkpoint
from sb3_ano.envs.atari import AtariProtocol
from sb3_ano.envs.evaluation import evaluate_policy
from sb3_ano.envs.tensor import TensorStep
from sb3_ano.fast import Explanation, MaskablePPO, RecurrentPPO
from sb3_ano.fast.engine import Accelerated
from sb3_ano.fast.explanation import Path as Path_
from sb3_ano.fast.step import ClipRange, RolloutSamples
from sb3_ano.llm.grpo import TrainerOptions
from sb3_ano.policies import AsymmetricPolicy, CriticOnlyKeys
from sb3_ano.reference import ReferenceANO, shape
from sb3_ano.reference import surrogate as ano_surrogate


def bump(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x * torch.exp(-x.square() / 2), x)


def paper_f(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return torch.minimum(ratio, 1.0 + eps)


class Power(ShapedPolicyAlgorithm):
    """An algorithm of a user."""

    def __init__(self, env: gym.Env | VecEnv | str, power: float = 1.0, *, clip_range_high: float | None = None) -> None:
        super().__init__("MlpPolicy", env, learning_rate=1e-3, clip_range_high=clip_range_high)
        self.power = power

    def policy_loss(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, clip_range: ClipRange, samples: RolloutSamples
    ) -> torch.Tensor:
        return -((self.power * log_ratio).exp() * advantages * clip_range.low * samples.old_values.mean()).mean()


# Environments
cart_pole: VecEnv = envs.make_vec_env("CartPole-v1", n_envs=8, seed=0, backend="gymnasium", env_kwargs={"render_mode": None})
cheetah = envs.make_vec_env("HalfCheetah-v4", 64, 0, backend="envpool", num_threads=2)
single: gym.Env = envs.make_env("CartPole-v1", verbose=1)
direct = envs.DirectVecEnv([lambda: single])
normalized: SB3VecNormalize = envs.VecNormalize(cart_pole, gamma=0.98, norm_reward=False)
envs.register_atari("ALE/Pong-v5")
with envs.explained_missing_packages():
    backends = ", ".join(envs.BACKENDS)
protocol = AtariProtocol("Pong", frame_stack=4)

# Algorithms
model: ANO = ANO("MlpPolicy", "CartPole-v1", clip_range=0.2).learn(1_000, progress_bar=True)
model = ANO("MlpPolicy", single, 3e-4, 2048, 64, shaping=("ano", bump), clip_range_high="lin_0.28", desired_kl=None)
model = ANO("CnnPolicy", cheetah, torch_compile="auto", precision="bfloat16", check_finite=False, device=torch.device("cpu"))
evaluated = evaluate_policy(model, cart_pole, n_eval_episodes=10)
spo: SPO = SPO(
    "MlpPolicy", cart_pole, learning_rate=LinearSchedule(3e-4, 0.0, 1.0), clip_range=lambda progress: 0.2 * progress
)
papo: PAPO = PAPO("MlpPolicy", cart_pole, k=5.0, omega1=0.01, max_epoch_kl=None, rollout_buffer_class=RolloutBuffer)
masked: MaskableANO = MaskableANO("MlpPolicy", cart_pole, seed=1).learn(1_000, use_masking=False)
masked.predict(np.zeros(4), action_masks=np.ones(2, dtype=bool))
recurrent: RecurrentANO = RecurrentANO("MlpLstmPolicy", direct, policy_kwargs={"lstm_hidden_size": 16}, shaping=bump)
both: RecurrentMaskableANO = RecurrentMaskableANO("MlpLstmPolicy", cart_pole, n_steps=64, use_sde=False)
power: Power = Power("CartPole-v1", power=2.0).learn(1_000)
actions, states = model.predict(cart_pole.observation_space.sample(), deterministic=True)
model.save("model")
loaded: ANO = ANO.load(Path("model"), env="CartPole-v1", device="cpu", shaping=bump, learning_rate=1e-4)
fast_model: PPO = accelerate(PPO("MlpPolicy", "CartPole-v1"), torch_compile=False, precision="float32").learn(64)
explanation: Explanation = explain(fast_model)
path: Path_ = explanation.update
print(path.reason, MaskablePPO, RecurrentPPO, Accelerated)
simulator: envs.TensorVecEnv = envs.from_tensor_env(object())
step: TensorStep = simulator.step_tensors(torch.zeros(1))
processes: envs.ProcessVecEnv = envs.ProcessVecEnv([lambda: single], n_workers=1, timeout=10.0)
agents: VecEnv = envs.from_parallel_env(object())
returns: dict[str, list[float]] = envs.AgentReturns().returns
vectorized: VecEnv = envs.from_vector_env(gym.make_vec("CartPole-v1", num_envs=2))
asymmetric = ANO("AsymmetricPolicy", agents, policy_kwargs={"critic_only_keys": ["friction"]})
hiding: type[CriticOnlyKeys] = AsymmetricPolicy
directory: str = llm.model_path("smollm2-135m")
reference: ReferenceANO = ReferenceANO("MlpPolicy", "CartPole-v1", clip_range=0.2).learn(64)
objective: torch.Tensor = ano_surrogate(torch.zeros(3), torch.ones(3), shape, 0.2)
version: str = sb3_ano.__version__
missing: type[ImportError] = MissingExtraError

# Shapes
x: torch.Tensor = torch.linspace(-1.0, 1.0, 5)
of_pair: torch.Tensor = shaping.surrogate_of_pair(
    torch.zeros(3), torch.ones(3), shaping.as_pair("ano"), eps_low=0.2, eps_high=0.2, old_log_prob=None
)
values: torch.Tensor = shaping.surrogate(x, x, "ano", eps_low=0.2, eps_high=torch.tensor(0.2))
f, g = shaping.ratio_form(("ano", "spo"), eps_low=0.2, eps_high=0.3)
total: torch.Tensor = f(x) + g(x) + shaping.ano(x) + shaping.spo(x) + shaping.ppo(x) + shaping.identity(x)
known: shaping.Shaping | shaping.ShapingPair = shaping.SHAPINGS["ano"]
published: shaping.Objective = shaping.OBJECTIVES["cispo"]
named: torch.Tensor = shaping.resolve("ano")(x)
wrapped: shaping.Shaping = shaping.from_ratio(paper_f)
pair: shaping.ShapingPair = shaping.from_ratio(paper_f, g=paper_f)
weighted: shaping.ShapingPair = shaping.from_weight(lambda ratio, eps: torch.minimum(ratio, 1 + eps))
own: shaping.ShapingPair = shaping.with_radius("ppo", lambda old, advantages, low, high: high / old.exp())
properties: shaping.ShapeProperties = shaping.check("ano")
properties.require_trainable()
two: shaping.PairProperties = shaping.check(("ano", bump))
of_cispo: shaping.PairProperties = shaping.check("cispo")
table: str = shaping.property_table([properties, shaping.measure(bump), *two])
like: list[shaping.ShapingLike] = ["ano", bump, ("ano", bump), pair, shaping.as_pair(bump)]
texts: list[str | list[str]] = [shaping.name_of(pair), str(shaping.is_importable(bump)), str(shaping.fingerprint("ano"))]
flags: dict[str, bool] = properties.verdicts
more: shaping.Shape = shaping.Shape(paper_f, "ratio")
functions: tuple[shaping.RatioFunction, bool] = (paper_f, shaping.is_known(bump))


def radius(old: torch.Tensor, advantages: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.where(advantages >= 0, high, low) / old.exp()


per_sample: shaping.RadiusFunction = radius
limits: float = shaping.MAX_LOG_RATIO + shaping.MIN_RADIUS

# Checkpoints, zoo and Hub
model.learn(1_000, callback=TrainingCheckpoints("checkpoints", every=10_000, seconds=30.0, keep=2, resume=True, verbose=0))
newest: Checkpoint | None = newest_checkpoint("checkpoints")
steps: int = read_checkpoint(Path("checkpoints/checkpoint_1_steps.zip")).num_timesteps
zoo.register()
url: str = hub.push_to_hub(model, "me/ano-CartPole-v1", single, private=True, n_eval_episodes=5, video=False)
agent: ShapedPolicyAlgorithm = hub.load_from_hub("me/ano-CartPole-v1", env="CartPole-v1", revision="main", device="cpu")
folder: Path = hub.package(model, "agent", "me/ano-CartPole-v1", verbose=0)
run: Path = hub.download_run("me/ano-CartPole-v1", Path("logs/ano/CartPole-v1_1"), env_id="CartPole-v1")
saved: Path = hub.save_safe(model, "agent")
again: ShapedPolicyAlgorithm = hub.load_safe("agent", cart_pole, shaping=bump, custom_objects={"policy_kwargs": {}})
statistics_of_agent: SB3VecNormalize = hub.load_normalization("agent", cart_pole)
rejected: type[ValueError] = hub.SafeFormatError


# Experiments, RLlib and language models
def score(completions: list[str], **columns: object) -> list[float]:
    return [float(len(completion)) for completion in completions]


notes: list[str] = write_report(Path("results"), Path("report"), Settings(returns="training", last=3, reps=1000))
runs = Results("results").runs()
scores: np.ndarray = ReferenceScores(["mujoco"]).normalize("HalfCheetah-v4", 3000.0)
interval: statistics.Estimate = statistics.aggregate(scores)["IQM"]
config: rllib.ANOConfig = rllib.ANOConfig().training(shaping="spo", clip_range_high=0.3, desired_kl=0.02, lr=3e-4)
converted: ANO = rllib.to_sb3(Algorithm(), env="CartPole-v1", device="cpu")
grpo = llm.GANOConfig(output_dir="gano", learning_rate=1e-6, num_generations=4, epsilon=0.2, shaping="ano")
shaped = llm.ShapedGRPOConfig(output_dir="grpo", shaping="spo", kl_in="reward", beta=0.05, missing_eos_penalty=1.0)
critic = llm.ShapedPPOConfig(output_dir="ppo", gamma=0.99, lam=0.9, vf_coef=0.2, cliprange_value=0.1, push_critic=False)
trainer_options: TrainerOptions = {}
trainers = [
    llm.GANOTrainer("gpt2", score, args=grpo, **trainer_options),
    llm.ShapedGRPOTrainer("gpt2", score, args=shaped, shaping=bump),
    llm.ShapedPPOTrainer("gpt2", score, args=critic, value_model="critic", shaping="ano"),
    *(trainer("gpt2", "reward", args=critic) for trainer in (llm.ANOTrainer, llm.SPOTrainer, llm.PPOTrainer)),
]
reward = llm.LearnedReward.load("reward", tokenizer=None, device="cpu")
llm.train(["--algo", "gano"], "sb3-ano llm")
llm.compare(["A", "B"], "sb3-ano llm")
