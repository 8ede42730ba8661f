"""The trained parameters of a policy and their Adam moments, as one vector each."""

import operator

import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.optim import Adam, Optimizer

from sb3_ano._compat import has_hooks
from sb3_ano.algorithms.policies import replaced_method

# Options of Adam that it reads, or that change its speed only; and the values that the others must have.
_FREE_OPTIONS = frozenset({"params", "lr", "initial_lr", "betas", "eps", "foreach", "fused"})
_PLAIN_OPTIONS = {
    "weight_decay": 0,
    "decoupled_weight_decay": False,
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
}
# Each tensor starts at a multiple of this many numbers: a cache line of float32, for aligned vector instructions.
_ALIGNMENT = 16


class FlatParameters:
    """The trained parameters of a policy in the order of one vector, and, after :meth:`share`, as views of it.

    :param policy: whose parameters those are
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        trained = [(name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in trained]
        self.tensors = [parameter for _, parameter in trained]
        self._sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in self.tensors]
        self.vector = torch.zeros(0)

    def share(self) -> None:
        """Make the parameters views of :attr:`vector`; their values stay."""
        self.vector = self.flattened([parameter.detach() for parameter in self.tensors])
        for parameter, view in zip(self.tensors, self.views(self.vector), strict=True):
            parameter.data = view

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """A vector like :attr:`vector` as tensors with the shapes of the parameters."""
        parts = vector.split(self._sizes)
        return [part[: like.numel()].view(like.shape) for part, like in zip(parts, self.tensors, strict=True)]

    def flattened(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Tensors with the shapes of the parameters as a vector like :attr:`vector`, its gaps filled with zeros."""
        parts = []
        for tensor, size in zip(tensors, self._sizes, strict=True):
            parts.append(tensor.reshape(-1))
            if size > tensor.numel():
                parts.append(tensor.new_zeros(size - tensor.numel()))
        return torch.cat(parts)

    def are_those_of(self, policy: ActorCriticPolicy) -> bool:
        """Whether the policy still trains these parameters."""
        trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
        return self.names == [*trained] and all(map(operator.is_, self.tensors, trained.values()))

    def are_shared(self) -> bool:
        """Whether the parameters are still views of :attr:`vector`."""
        views = self.views(self.vector)
        return all(
            (mine.data_ptr(), mine.stride()) == (view.data_ptr(), view.stride())
            for mine, view in zip(self.tensors, views, strict=True)
        )


def has_tied_parameters(module: torch.nn.Module) -> bool:
    """Whether two modules own the same parameter."""
    owned = [id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False)]
    return len(owned) > len(set(owned))


class FlatAdam:
    """The step of ``torch.optim.Adam`` on a :class:`FlatParameters`, whose state stays that of the optimizer it stands for.

    :param optimizer: one for which :meth:`obstacle` names nothing; its moments become views of the vectors here
    :param parameters: that it trains
    """

    @staticmethod
    def obstacle(optimizer: Optimizer, parameters: FlatParameters) -> str | None:
        """What keeps this class from an optimizer; None for a plain Adam of these parameters, with equally many steps each."""
        if type(optimizer) is not Adam:
            return f"its optimizer is not a plain torch.optim.Adam, but {type(optimizer).__name__}"
        name = replaced_method(optimizer)
        if name is not None:
            return f"policy.optimizer.{name} was replaced"
        if len(optimizer.param_groups) != 1:
            return "its optimizer has several groups of parameters"
        for name, value in optimizer.param_groups[0].items():
            if name not in _FREE_OPTIONS and not (name in _PLAIN_OPTIONS and value == _PLAIN_OPTIONS[name]):
                return f"its optimizer has {name}={value!r}"
        if has_hooks(optimizer):
            return "its optimizer has hooks"
        for name, parameter in zip(parameters.names, parameters.tensors, strict=True):
            if has_hooks(parameter):
                return f"policy.{name} has hooks"
        trained = [parameter for parameter in optimizer.param_groups[0]["params"] if parameter.requires_grad]
        if len(trained) != len(parameters.tensors) or not all(map(operator.is_, trained, parameters.tensors)):
            return "its optimizer has other parameters than the policy, or another order"
        if len({float(optimizer.state[each]["step"]) if optimizer.state.get(each) else 0.0 for each in trained}) != 1:
            return "some of its parameters were trained longer than others"
        kinds = {(type(each), each.dtype, each.device, each.layout) for each in trained}
        if kinds != {(torch.nn.Parameter, torch.float32, trained[0].device, torch.strided)}:
            return "its parameters are not float32 on one device"
        return None

    def __init__(self, optimizer: Optimizer, parameters: FlatParameters) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        group = optimizer.param_groups[0]
        self.beta1, self.beta2 = (float(beta) for beta in group["betas"])
        self.eps = float(group["eps"])
        device = parameters.vector.device
        self.learning_rate = torch.zeros((), dtype=torch.float64, device=device)
        steps: list[float] = []
        first: list[torch.Tensor] = []
        second: list[torch.Tensor] = []
        for parameter in parameters.tensors:
            state = optimizer.state.get(parameter) or {"step": 0.0, "exp_avg": None, "exp_avg_sq": None}
            steps.append(float(state["step"]))
            for moments, name in ((first, "exp_avg"), (second, "exp_avg_sq")):
                moments.append(torch.zeros_like(parameter.data) if state[name] is None else state[name])
        self.count = torch.tensor(max(steps), dtype=torch.float64, device=device)
        self.first, self.second = parameters.flattened(first), parameters.flattened(second)

    def begin(self) -> None:
        """Read the learning rate from the optimizer."""
        self.learning_rate.fill_(self._optimizer.param_groups[0]["lr"])

    def publish(self) -> None:
        """Let the optimizer's state show the moments and the number of steps."""
        parameters = self._parameters
        count = self.count.to(device="cpu", dtype=torch.float32)
        if not count:
            return
        moments = zip(parameters.tensors, parameters.views(self.first), parameters.views(self.second), strict=True)
        for parameter, first, second in moments:
            self._optimizer.state[parameter] = {"step": count.clone(), "exp_avg": first, "exp_avg_sq": second}

    def is_current(self) -> bool:
        """Whether the optimizer's state is still what was published, and its settings are unchanged."""
        group = self._optimizer.param_groups[0]
        if (self.beta1, self.beta2, self.eps) != (*map(float, group["betas"]), float(group["eps"])):
            return False
        states = [self._optimizer.state.get(parameter) or None for parameter in self._parameters.tensors]
        count = float(self.count.float())
        if count == 0.0:
            return not any(states)
        firsts, seconds = self._parameters.views(self.first), self._parameters.views(self.second)
        return all(
            state is not None
            and float(state["step"]) == count
            and state["exp_avg"].data_ptr() == first.data_ptr()
            and state["exp_avg_sq"].data_ptr() == second.data_ptr()
            for state, first, second in zip(states, firsts, seconds, strict=True)
        )

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, go: torch.Tensor) -> None:
        """One step of Adam (Kingma & Ba 2015, Algorithm 1), or none.

        :param gradient: of the parameters, a vector; finite where ``go``
        :param go: 0-d, 1 or 0 in float64; with 0 everything stays as it is
        """
        self.count += go
        count = self.count.clamp(min=1.0)
        gradient = torch.where(go > 0.0, gradient, 0.0)
        weight = ((1.0 - self.beta2) * go).float()
        self.first.lerp_(gradient, ((1.0 - self.beta1) * go).float())
        self.second.mul_(1.0 - weight).add_(weight * gradient * gradient)
        scale = (1.0 - self.beta2**count).sqrt().float()
        size = (go * self.learning_rate / (1.0 - self.beta1**count)).float()
        self._parameters.vector.sub_(size * self.first / (self.second.sqrt() / scale + self.eps))
