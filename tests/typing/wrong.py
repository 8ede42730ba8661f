"""A program with a mistake in every line that ends with ``# wrong``, and no others; it is checked, and not run."""

from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import torch

from sb3_ano import ANO, PAPO, SPO, MaskableANO, RecurrentANO, RecurrentMaskableANO, envs, hub, llm, shaping
from sb3_ano.bench.report import Settings, write_report
from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint, read_checkpoint
from sb3_ano.envs.atari import AtariProtocol

env: gym.Env = gym.make("CartPole-v1")
x = torch.zeros(3)


def number(value: float) -> float:
    return value


# Constructors
ANO("MlpPolicy", env, n_step=3)  # wrong
ANO("MlpPolicy", env, learning_rate=[])  # wrong
ANO("MlpPolicy", env, shaping=3.0)  # wrong
ANO("MlpPolicy", env, shaping=number)  # wrong
ANO("MlpPolicy", env, clip_range=None)  # wrong
ANO("MlpPolicy", env, torch_compile="yes")  # wrong
ANO("MlpPolicy", env, precision="float16")  # wrong
ANO("MlpPolicy", env, policy_kwargs=[64, 64])  # wrong
ANO("MlpPolicy")  # wrong
ANO(env, "MlpPolicy")  # wrong
SPO("MlpPolicy", env, shaping="spo")  # wrong
SPO("MlpPolicy", env, desired_kl=[0.01])  # wrong
PAPO()  # wrong
PAPO("MlpPolicy", env, desired_kl=0.01)  # wrong
PAPO("MlpPolicy", env, max_epoch_kl="0.02")  # wrong
MaskableANO("MlpPolicy", env, use_sde=True)  # wrong
RecurrentANO("MlpLstmPolicy", env, rollout_buffer_class=None)  # wrong
RecurrentMaskableANO("MlpLstmPolicy", env, n_steps="128")  # wrong
RecurrentMaskableANO("MlpLstmPolicy", env, 3e-4, 128, 128, 10, 0.99, 0.95, 0.2, None, True, 0.0, 0.5, "0.5")  # wrong

# Methods
model = ANO("MlpPolicy", env)
model.learn("1000")  # wrong
model.learn(1000, use_masking=True)  # wrong
spo: SPO = model.learn(1000)  # wrong
ANO.load(3)  # wrong
loaded: PAPO = ANO.load("model", env="CartPole-v1")  # wrong
MaskableANO("MlpPolicy", env).predict(3)  # wrong
print(model.clip_rang)  # wrong

# Shapes
shaping.surrogate(x, x, "ano", 0.2, 0.2)  # wrong
shaping.surrogate(x, x, "ano", eps_low=0.2)  # wrong
shaping.ratio_form(3)  # wrong
shaping.from_ratio(lambda ratio: ratio)  # wrong
print(shaping.check("ano").argmx)  # wrong
single: Callable[[torch.Tensor], torch.Tensor] = shaping.resolve(("ano", "spo"))  # wrong
shaping.property_table(shaping.check("ano"))  # wrong

# Environments and checkpoints
envs.make_vec_env("CartPole-v1", n_env=8)  # wrong
envs.make_vec_env("CartPole-v1", n_envs="8")  # wrong
envs.make_vec_env("CartPole-v1", backend=3)  # wrong
envs.make_env(3)  # wrong
envs.DirectVecEnv(env)  # wrong
envs.VecNormalize(envs.make_vec_env("CartPole-v1"), gama=0.9)  # wrong
AtariProtocol(frame_stack=4)  # wrong
TrainingCheckpoints("checkpoints", "1000")  # wrong
TrainingCheckpoints("checkpoints", 1000, 60.0)  # wrong
print(newest_checkpoint("checkpoints").num_timesteps)  # wrong
print(read_checkpoint(Path("checkpoint")).steps)  # wrong

# Hub, experiments and language models
hub.push_to_hub("me/ano-CartPole-v1", model)  # wrong
hub.push_to_hub(model, "me/ano-CartPole-v1", n_episodes=5)  # wrong
hub.load_from_hub("me/ano-CartPole-v1", env=3)  # wrong
hub.load_from_hub("me/ano-CartPole-v1", "CartPole-v1", "main")  # wrong
hub.package(model, "agent")  # wrong
hub.save_safe(env, "agent")  # wrong
hub.load_safe("agent", shaping=3)  # wrong
write_report("results", "report")  # wrong
Settings(last="3")  # wrong
ReferenceScores("mujoco", 3)  # wrong
llm.GANOConfig(output_dir="gano", kl_in=3)  # wrong
llm.ShapedPPOConfig(output_dir="ppo", gamma="1.0")  # wrong
llm.train("--algo gano")  # wrong
