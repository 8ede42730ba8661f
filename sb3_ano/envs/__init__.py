"""Environments by id, single and vectorized."""

from sb3_ano.envs.direct import DirectVecEnv
from sb3_ano.envs.make import explained_missing_packages, make_env, register_atari
from sb3_ano.envs.tensor import TensorVecEnv, from_tensor_env
from sb3_ano.envs.vec_env import BACKENDS, make_vec_env
from sb3_ano.envs.vec_normalize import VecNormalize

__all__ = [
    "BACKENDS",
    "DirectVecEnv",
    "TensorVecEnv",
    "VecNormalize",
    "explained_missing_packages",
    "from_tensor_env",
    "make_env",
    "make_vec_env",
    "register_atari",
]
