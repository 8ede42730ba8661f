"""Adam on one vector: the optimizer that replaces ``torch.optim.Adam`` when a policy is built."""

import inspect

import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.optim import Adam, Optimizer
from torch.optim.adam import adam

from sb3_ano._compat import has_hooks
from sb3_ano.algorithms.policy_evaluation import replaced_method

# Options of Adam that the flat step reads, or that change its speed only. The others must have the defaults of PyTorch.
_FREE_OPTIONS = frozenset({"params", "lr", "initial_lr", "betas", "eps", "foreach", "fused"})
# Not those of an instance: the first optimizer imports PyTorch's compiler, which takes a second.
_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(Adam).parameters.items()}
# Each tensor starts at a multiple of this many numbers: a cache line of float32, for aligned vector instructions.
_ALIGNMENT = 16


class FlatVectors:
    """Parameters and their Adam moments as one vector each, so that a step costs the same for any number of layers.

    This is a plain class, because ``torch.compile`` treats attributes of optimizers in its own way.

    :param tensors: trained parameters, float32 and on one device
    """

    def __init__(self, tensors: list[torch.nn.Parameter]) -> None:
        self.tensors = tensors
        self._sizes = [-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        device = tensors[0].device
        self.parameters, self.first, self.second = (torch.zeros(sum(self._sizes), device=device) for _ in range(3))
        # The same memory, to differentiate by. Made here, because PyTorch 2.11 cannot trace its creation.
        self.leaf = self.parameters.detach().requires_grad_()
        self.steps = torch.zeros(len(tensors), device=device)
        # Learning rate, betas and eps. A tensor, so that a schedule does not recompile a compiled step; float64 as in PyTorch.
        self.numbers = torch.zeros(4, dtype=torch.float64, device=device)
        self.learning_rate, self.beta1, self.beta2, self.eps = self.numbers.unbind()

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Split a vector like :attr:`parameters` into tensors with the shapes of the parameters."""
        parts = vector.split(self._sizes)
        return [part[: like.numel()].view(like.shape) for part, like in zip(parts, self.tensors, strict=True)]

    def flattened(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Join tensors with the shapes of the parameters to a vector, with zeros in the gaps."""
        parts = []
        for tensor, size in zip(tensors, self._sizes, strict=True):
            parts.append(tensor.reshape(-1))
            if size > tensor.numel():
                parts.append(tensor.new_zeros(size - tensor.numel()))
        return torch.cat(parts)

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, apply: torch.Tensor) -> None:
        """Make one step of Adam (Kingma & Ba 2015, Algorithm 1), or none.

        :param gradient: gradient of the loss by :attr:`parameters`, finite if ``apply`` is 1
        :param apply: 0-d float64, 1 or 0; with 0, parameters, moments and steps stay as they are
        """
        if not torch.compiler.is_compiling() and gradient.device.type == "cpu":
            # PyTorch's own kernel passes once over the memory; a vector of a large network does not fit the cache.
            count, (lr, beta1, beta2, eps) = self.steps[:1].clone(), self.numbers.tolist()
            vectors = [self.parameters], [gradient], [self.first], [self.second]
            options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": 0.0}
            adam(*vectors, [], [count[0]], fused=True, found_inf=1.0 - apply.float(), amsgrad=False, maximize=False, **options)
            self.steps.copy_(count.expand_as(self.steps))
            return
        # A factor instead of a branch, so that compiled code need not wait for the decision.
        self.steps.add_(apply.float())
        count = self.steps[0].double().clamp(min=1.0)
        gradient = torch.where(apply > 0.0, gradient, 0.0)
        weight = ((1.0 - self.beta2) * apply).float()
        self.first.lerp_(gradient, ((1.0 - self.beta1) * apply).float())
        self.second.mul_(1.0 - weight).add_(weight * gradient * gradient)
        scale = (1.0 - self.beta2**count).sqrt().float()
        size = (apply * self.learning_rate / (1.0 - self.beta1**count)).float()
        self.parameters.sub_(size * self.first / (self.second.sqrt() / scale + self.eps))


class FlatAdam(Adam):
    """``torch.optim.Adam`` with a second way to make a step: on one vector, see :attr:`vectors`.

    Its state has the format of Adam's, as views of the vectors, so that either way continues where the other stopped. Saved
    files are those of a ``torch.optim.Adam``.
    """

    vectors: FlatVectors | None = None

    @staticmethod
    def install(policy: ActorCriticPolicy) -> None:
        """Replace the optimizer of a new policy if it is a plain ``torch.optim.Adam``; keep others."""
        optimizer = policy.optimizer
        if type(optimizer) is Adam:
            flat = FlatAdam(optimizer.param_groups, **optimizer.defaults)
            if not has_hooks(optimizer) and FlatAdam.obstacle(flat, policy) is None and replaced_method(optimizer) is None:
                policy.optimizer = flat
                flat.flatten()

    @staticmethod
    def obstacle(optimizer: Optimizer, policy: ActorCriticPolicy) -> str | None:
        """Say why the optimizer's own ``step`` is needed; None if a step on vectors computes the same.

        :param optimizer: optimizer of the policy, of any class
        :param policy: actor and critic
        """
        group, *more = optimizer.param_groups
        options = {name: value for name, value in group.items() if name not in _FREE_OPTIONS}
        if type(optimizer) is not FlatAdam or more or not options.items() <= _DEFAULTS.items():
            return "its optimizer is not the plain Adam that the model has made"
        if replaced_method(optimizer) is not None or has_hooks(optimizer):
            return "its optimizer has hooks, or a method of it was replaced"
        named = [(name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad]
        for name, parameter in named:
            if has_hooks(parameter):
                return f"policy.{name} has hooks"
        trained = optimizer.trained()
        if [*map(id, trained)] != [id(parameter) for _, parameter in named]:
            return "its optimizer has other parameters than the policy, or another order"
        if len({float(optimizer.state[each]["step"]) if optimizer.state.get(each) else 0.0 for each in trained}) != 1:
            return "some of its parameters were trained longer than others"
        kinds = {(type(each), each.dtype, each.device, each.layout) for each in trained}
        if kinds != {(torch.nn.Parameter, torch.float32, trained[0].device, torch.strided)}:
            return "its parameters are not float32 on one device"
        return None

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are not frozen."""
        return [parameter for parameter in self.param_groups[0]["params"] if parameter.requires_grad]

    def flatten(self) -> FlatVectors:
        """Make parameters and state views of :attr:`vectors` if they are not, and read the numbers of the parameter group.

        They are not after a file was loaded, and after parameters were frozen or assigned by ``parameter.data``.
        """
        trained = self.trained()
        vectors = self.vectors
        if vectors is None or [*map(id, trained)] != [*map(id, vectors.tensors)] or vectors.steps.device != trained[0].device:
            vectors = self.vectors = FlatVectors(trained)
        group = self.param_groups[0]
        vectors.numbers.copy_(torch.tensor([group["lr"], *group["betas"], group["eps"]], dtype=torch.float64))
        states = (vectors.views(vectors.first), vectors.views(vectors.second), vectors.steps.unbind())
        for parameter, view, *moments in zip(trained, vectors.views(vectors.parameters), *states, strict=True):
            parameter.data = _moved(parameter.data, view)
            state = self.state[parameter]
            for name, place in zip(("exp_avg", "exp_avg_sq", "step"), moments, strict=True):
                state[name] = _moved(state.get(name), place)
        return vectors


def _moved(tensor: torch.Tensor | None, view: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to a view unless it is that view, or zeros for None; return the view."""
    if tensor is None:
        return view.zero_()
    if (tensor.data_ptr(), tensor.stride()) == (view.data_ptr(), view.stride()):
        return tensor
    return view.copy_(tensor)
