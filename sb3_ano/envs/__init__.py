"""Environments by id, single and vectorized."""

from sb3_ano.envs.direct import DirectVecEnv
from sb3_ano.envs.make import explained_missing_packages, make_env, register_atari
from sb3_ano.envs.parallel import AgentReturns, from_parallel_env
from sb3_ano.envs.process import ProcessVecEnv
from sb3_ano.envs.tensor import TensorVecEnv, from_tensor_env
from sb3_ano.envs.vec_env import BACKENDS, make_vec_env
from sb3_ano.envs.vec_normalize import VecNormalize
from sb3_ano.envs.vector import from_vector_env

__all__ = [
    "BACKENDS",
    "AgentReturns",
    "DirectVecEnv",
    "ProcessVecEnv",
    "TensorVecEnv",
    "VecNormalize",
    "explained_missing_packages",
    "from_parallel_env",
    "from_tensor_env",
    "from_vector_env",
    "make_env",
    "make_vec_env",
    "register_atari",
]
