"""Adam's step in fewer calls: PyTorch's fused kernel, and, for compiled code, one vector of all parameters."""

import inspect
from typing import Any

import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.optim import Adam, Optimizer
from torch.optim.adam import adam

from sb3_ano._compat import has_hooks, scale_all
from sb3_ano.algorithms.policy_evaluation import replaced_method

# Options of Adam that the steps below read, or that change its speed only. The others must have the defaults of PyTorch.
_FREE_OPTIONS = frozenset({"params", "lr", "initial_lr", "betas", "eps", "foreach", "fused"})
# Not those of an instance: the first optimizer imports PyTorch's compiler, which takes a second.
_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(Adam).parameters.items()}
# Each tensor starts at a multiple of this many numbers: a cache line of float32, for aligned vector instructions.
_ALIGNMENT = 16


def obstacle(optimizer: Optimizer, policy: ActorCriticPolicy) -> str | None:
    """Say why the optimizer's own ``step`` is needed; None if the steps below compute the same.

    :param optimizer: optimizer of the policy, of any class
    :param policy: actor and critic
    """
    group, *more = optimizer.param_groups
    options = {name: value for name, value in group.items() if name not in _FREE_OPTIONS}
    if type(optimizer) is not Adam or more or not options.items() <= _DEFAULTS.items():
        return "its optimizer is not a plain Adam"
    if replaced_method(optimizer) is not None or has_hooks(optimizer):
        return "its optimizer has hooks, or a method of it was replaced"

    named = [(name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad]
    for name, parameter in named:
        if has_hooks(parameter):
            return f"policy.{name} has hooks"
    trained = trained_parameters(optimizer)
    if [*map(id, trained)] != [id(parameter) for _, parameter in named]:
        return "its optimizer has other parameters than the policy, or another order"

    if len({_steps_of(optimizer, parameter) for parameter in trained}) != 1:
        return "some of its parameters were trained longer than others"
    kinds = {(type(part), part.dtype, part.device, part.layout) for part in trained}
    if kinds != {(torch.nn.Parameter, torch.float32, trained[0].device, torch.strided)}:
        return "its parameters are not float32 on one device"
    return None


def trained_parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of the first group that are not frozen."""
    return [parameter for parameter in optimizer.param_groups[0]["params"] if parameter.requires_grad]


def _steps_of(optimizer: Optimizer, parameter: torch.nn.Parameter) -> float:
    state = optimizer.state.get(parameter)
    return float(state["step"]) if state else 0.0


def _state_of(optimizer: Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the state of a parameter, made as Adam makes it before the first step."""
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    elif state["step"].dtype != torch.float32:
        # PyTorch counts in its default type, the fused kernel in float32 only.
        state["step"] = state["step"].to(torch.float32)
    return state


class FusedStep:
    """Clip gradients by norm and make the step of an Adam without :func:`obstacle` on the CPU, by PyTorch's fused kernel.

    It does what ``clip_grad_norm_`` and the optimizer's ``step`` do, with a tenth of the calls. One is made for each update.

    :param optimizer: optimizer of the policy
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = trained_parameters(optimizer)
        group = optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        self._options = {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": 0.0}
        # Parameters, first and second moments and steps of those that have had a gradient in this update.
        self._states: tuple[list[torch.Tensor], ...] | None = None

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that there are."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    @torch.no_grad()
    def __call__(self, gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: torch.Tensor) -> None:
        """Make a step; parameters without a gradient are left alone, as in PyTorch.

        :param gradients: gradients of the parameters
        :param norm: their norm
        :param max_norm: norm to which a longer gradient is scaled down
        """
        if bool(norm + 1e-6 > max_norm):
            scale_all(gradients, max_norm / (norm + 1e-6))

        if self._states is None or len(self._states[0]) != len(gradients) or len(gradients) < len(self._parameters):
            self._states = self._collect_states()
        parameters, first, second, steps = self._states
        adam(parameters, gradients, first, second, [], steps, fused=True, amsgrad=False, maximize=False, **self._options)

    def _collect_states(self) -> tuple[list[torch.Tensor], ...]:
        parameters: list[torch.Tensor] = []
        first: list[torch.Tensor] = []
        second: list[torch.Tensor] = []
        steps: list[torch.Tensor] = []
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            state = _state_of(self._optimizer, parameter)
            parameters.append(parameter)
            first.append(state["exp_avg"])
            second.append(state["exp_avg_sq"])
            steps.append(state["step"])
        return parameters, first, second, steps


class FlatVectors:
    """Parameters and their Adam moments as one vector each, so that compiled code gets three tensors instead of dozens.

    The vectors take memory between :meth:`attach` and :meth:`detach` only, during an update. Outside of it, parameters and
    optimizer are as without them.

    :param optimizer: Adam without :func:`obstacle`
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.tensors = trained_parameters(optimizer)
        self._sizes = [-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in self.tensors]
        self._attached = False

        kind: Any = {"dtype": torch.float32, "device": self.tensors[0].device}
        self.parameters = torch.zeros(sum(self._sizes), **kind)
        self.first = torch.zeros(sum(self._sizes), **kind)
        self.second = torch.zeros(sum(self._sizes), **kind)
        # The same memory, to differentiate by. Made here, because PyTorch 2.11 cannot trace its creation.
        self.leaf = self.parameters.detach().requires_grad_()
        self.steps = torch.zeros((), **kind)
        # Learning rate, betas and eps. A tensor, so that a schedule does not recompile a compiled step; float64 as in PyTorch.
        self.numbers = torch.zeros(4, dtype=torch.float64, device=kind["device"])
        self.learning_rate, self.beta1, self.beta2, self.eps = self.numbers.unbind()
        self._bytes = self.parameters.untyped_storage().nbytes()

    @torch.no_grad()
    def attach(self) -> None:
        """Copy parameters, moments and numbers of the optimizer to the vectors."""
        for vector in (self.parameters, self.first, self.second):
            vector.untyped_storage().resize_(self._bytes)
            vector.zero_()  # the gaps between tensors, too

        pairs = zip(self.tensors, self.views(self.parameters), self.views(self.first), self.views(self.second), strict=True)
        for tensor, parameter, first, second in pairs:
            state = _state_of(self._optimizer, tensor)
            parameter.copy_(tensor)
            first.copy_(state["exp_avg"])
            second.copy_(state["exp_avg_sq"])

        group = self._optimizer.param_groups[0]
        numbers = [float(group["lr"]), *group["betas"], group["eps"]]
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        self.steps.copy_(self._optimizer.state[self.tensors[0]]["step"])
        self._attached = True

    @torch.no_grad()
    def detach(self) -> None:
        """Copy the vectors to parameters and optimizer, and give their memory back."""
        if not self._attached:
            return
        pairs = zip(self.tensors, self.views(self.parameters), self.views(self.first), self.views(self.second), strict=True)
        steps = self.steps.item()
        for tensor, parameter, first, second in pairs:
            state = self._optimizer.state[tensor]
            tensor.copy_(parameter)
            state["exp_avg"].copy_(first)
            state["exp_avg_sq"].copy_(second)
            state["step"].fill_(steps)

        self._attached = False
        for vector in (self.parameters, self.first, self.second):
            vector.untyped_storage().resize_(0)

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
        # A factor instead of a branch, so that compiled code need not wait for the decision.
        self.steps.add_(apply.float())
        count = self.steps.double().clamp(min=1.0)
        gradient = torch.where(apply > 0.0, gradient, 0.0)
        weight = ((1.0 - self.beta2) * apply).float()
        self.first.lerp_(gradient, ((1.0 - self.beta1) * apply).float())
        self.second.mul_(1.0 - weight).add_(weight * gradient * gradient)
        scale = (1.0 - self.beta2**count).sqrt().float()
        size = (apply * self.learning_rate / (1.0 - self.beta1**count)).float()
        self.parameters.sub_(size * self.first / (self.second.sqrt() / scale + self.eps))
