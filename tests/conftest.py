"""Shared set-up: one thread a worker, because the tests run in parallel on small networks."""

import torch

torch.set_num_threads(1)
