"""Register an environment, as packages of environments do when they are imported."""

import gymnasium as gym

gym.register("Own-v3", entry_point="gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=20)
