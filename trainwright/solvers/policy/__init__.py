"""Policy gradients for vector environments: with implicit transport, with Hessian-vector products, and plain."""

from .baseline import LinearBaseline
from .harpg import HARPG
from .npg_igt import NPGIGT
from .policies import GaussianMLP, SoftmaxMLP
from .reinforce import REINFORCE
from .rollout import Trajectories, rollout
from .solve import PolicyResult, evaluate, learn

__all__ = [
    "HARPG",
    "NPGIGT",
    "REINFORCE",
    "GaussianMLP",
    "LinearBaseline",
    "PolicyResult",
    "SoftmaxMLP",
    "Trajectories",
    "evaluate",
    "learn",
    "rollout",
]
