"""Records of the optimizers that torch ships, with the bytes that its `foreach=False` implementations allocate.

Left out: `LBFGS` (its memory depends on its history, and it wants closures) and `SparseAdam` (sparse gradients).
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn, optim

from .heads import embeddings_and_heads
from .record import OptimizerRecord, Options, Shape, StateTensor, Temporaries, per_element, scalar

_BF16_BYTES = 2
_WORKSPACE_BYTES = 1 << 16


def records() -> tuple[OptimizerRecord, ...]:
    """Return the record of each of torch's optimizers that this release has."""
    return (*_sgd_family(), *_adaptive_family(), *_adam_family(), *_matrix_family())


def _sgd_family() -> tuple[OptimizerRecord, ...]:
    momentum = per_element("momentum_buffer", option="momentum")
    return (
        OptimizerRecord(
            "sgd", optim.SGD, "Plain gradient steps", (momentum,), _sgd_temporaries, left_copies=_sgd_left_copies
        ),
        OptimizerRecord(
            "sgd-momentum",
            optim.SGD,
            "Gradient steps with heavy-ball or (nesterov=True) Nesterov momentum",
            (momentum,),
            _sgd_temporaries,
            left_copies=_sgd_left_copies,
            defaults={"momentum": 0.9},
            paper="Sutskever et al. 2013, On the importance of initialization and momentum in deep learning",
        ),
        OptimizerRecord(
            "asgd",
            optim.ASGD,
            "SGD that also averages its iterates",
            (per_element("ax"), scalar("step"), scalar("eta"), scalar("mu")),
            _elementwise(0),
            reads_numbers=True,
            paper="Polyak & Juditsky 1992, Acceleration of stochastic approximation by averaging",
        ),
        OptimizerRecord(
            "rprop",
            optim.Rprop,
            "Step sizes from the signs of successive gradients; for full batches",
            (per_element("prev"), per_element("step_size"), scalar("step")),
            lambda shape, element_bytes, options: 3 * math.prod(shape) * element_bytes,
            left_copies=lambda options: int(bool(options.get("maximize"))),
            paper="Riedmiller & Braun 1993, A direct adaptive method for faster backpropagation learning",
        ),
    )


def _adaptive_family() -> tuple[OptimizerRecord, ...]:
    return (
        OptimizerRecord(
            "adagrad",
            optim.Adagrad,
            "Steps divided by the root of the summed squared gradients",
            (per_element("sum"), scalar("step")),
            _elementwise(1),
            left_copies=1,
            paper="Duchi, Hazan & Singer 2011, Adaptive subgradient methods",
        ),
        OptimizerRecord(
            "adadelta",
            optim.Adadelta,
            "Adagrad with decaying averages and units of its own; hardly needs a learning rate",
            (per_element("square_avg"), per_element("acc_delta"), scalar("step")),
            _elementwise(2),
            left_copies=1,
            paper="Zeiler 2012, arXiv:1212.5701",
        ),
        OptimizerRecord(
            "rmsprop",
            optim.RMSprop,
            "Steps divided by a decaying root mean square of the gradients",
            (
                per_element("square_avg"),
                per_element("momentum_buffer", option="momentum"),
                per_element("grad_avg", option="centered"),
                scalar("step"),
            ),
            _elementwise(1),
            left_copies=1,
            paper="Tieleman & Hinton 2012, Lecture 6.5; centered: Graves 2013, arXiv:1308.0850",
        ),
    )


def _adam_family() -> tuple[OptimizerRecord, ...]:
    moments = (per_element("exp_avg"), per_element("exp_avg_sq"), scalar("step"))
    with_amsgrad = (*moments, per_element("max_exp_avg_sq", option="amsgrad"))
    adam_paper = "Kingma & Ba 2015, arXiv:1412.6980"
    return (
        OptimizerRecord(
            "adam",
            optim.Adam,
            "Two moments, bias-corrected",
            with_amsgrad,
            _elementwise(2),
            left_copies=1,
            paper=adam_paper,
        ),
        OptimizerRecord(
            "adamw",
            optim.AdamW,
            "Adam with decoupled weight decay; the usual choice for transformers",
            with_amsgrad,
            _elementwise(2, decoupled=True),
            left_copies=1,
            paper="Loshchilov & Hutter 2019, arXiv:1711.05101",
        ),
        OptimizerRecord(
            "adamax",
            optim.Adamax,
            "Adam with the infinity norm for its second moment",
            (per_element("exp_avg"), per_element("exp_inf"), scalar("step")),
            _elementwise(1),
            paper=adam_paper,
        ),
        OptimizerRecord(
            "nadam",
            optim.NAdam,
            "Adam with Nesterov momentum",
            (*moments, scalar("mu_product")),
            _elementwise(2),
            left_copies=1,
            paper="Dozat 2016, Incorporating Nesterov momentum into Adam",
        ),
        OptimizerRecord(
            "radam",
            optim.RAdam,
            "Adam that waits until its second moment can be trusted",
            moments,
            _elementwise(5),
            paper="Liu et al. 2020, arXiv:1908.03265",
        ),
    )


def _matrix_family() -> tuple[OptimizerRecord, ...]:
    adafactor = OptimizerRecord(
        "adafactor",
        optim.Adafactor,
        "Second moment as one row and one column per matrix: nearly no state",
        (
            StateTensor("row_var", lambda shape, options: (*shape[:-1], 1) if len(shape) > 1 else None),
            StateTensor("col_var", lambda shape, options: (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None),
            StateTensor("variance", lambda shape, options: shape if len(shape) <= 1 else None),
            scalar("step"),
        ),
        _adafactor_temporaries,
        left_copies=1,
        reads="tensor",
        real_only=True,
        reads_numbers=True,
        whole_state=True,
        paper="Shazeer & Stern 2018, arXiv:1804.04235",
        departs="torch's own: no first moment, weight decay decoupled",
    )
    if not hasattr(optim, "Muon"):
        return (adafactor,)
    muon = OptimizerRecord(
        "muon",
        optim.Muon,
        "Momentum, orthogonalised by Newton-Schulz steps; for matrices only",
        (per_element("momentum_buffer"),),
        _muon_temporaries,
        reads="tensor",
        real_only=True,
        whole_state=True,
        groups=muon_groups,
        paper="Jordan et al. 2024, https://kellerjordan.github.io/posts/muon",
    )
    return (adafactor, muon)


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the hidden matrices of a model, for Muon, and what is AdamW's: embeddings, heads, biases, norms, kernels.

    Complex matrices, which torch's Muon refuses, are AdamW's too.

    >>> groups = muon_groups(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)))
    >>> [(len(group["params"]), group.get("optimizer")) for group in groups]
    [(1, None), (2, 'adamw')]
    """
    outside = embeddings_and_heads(model)
    params = [param for param in model.parameters() if param.requires_grad]
    inside = [param for param in params if param.dim() == 2 and not param.is_complex() and id(param) not in outside]
    hidden = {id(param) for param in inside}
    rest = [param for param in params if id(param) not in hidden]
    groups: list[dict[str, Any]] = [{"params": inside}, {"params": rest, "optimizer": "adamw"}]
    return [group for group in groups if group["params"]]


def _elementwise(num_copies: int, decoupled: bool = False) -> Temporaries:
    """Temporaries of an update that needs `num_copies` of the parameter at once, beside its changed gradient if any."""

    def temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
        if options.get("fused"):
            return 0
        copies = num_copies + _gradient_copies(options, decoupled)
        return max(copies, _copies_while_changing(options, decoupled)) * math.prod(shape) * element_bytes

    return temporaries


def _gradient_copies(options: Options, decoupled: bool = False) -> int:
    """Copies of the gradient held through the update: negated to maximise, or with weight decay added."""
    return int(bool(options.get("maximize")) or _adds_decay(options, decoupled))


def _copies_while_changing(options: Options, decoupled: bool) -> int:
    return int(bool(options.get("maximize"))) + int(_adds_decay(options, decoupled))


def _adds_decay(options: Options, decoupled: bool) -> bool:
    decoupled = decoupled or bool(options.get("decoupled_weight_decay"))
    return bool(options.get("weight_decay")) and not decoupled


def _sgd_temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
    return _elementwise(int(bool(options.get("nesterov"))))(shape, element_bytes, options)


def _sgd_left_copies(options: Options) -> int:
    """Return 1 where the negated gradient is all that a step takes, and stays until the next one replaces it."""
    return int(bool(options.get("maximize")) and not options.get("weight_decay") and not options.get("momentum"))


def _adafactor_temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
    """An upper bound: the update and, within reductions of low precision, up to as much again."""
    copies = 2 + _gradient_copies({"maximize": options.get("maximize")})
    return copies * math.prod(shape) * element_bytes + _WORKSPACE_BYTES


def _muon_temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
    """An upper bound: the update; in bf16 three copies of it, one more that a product may reorder, its Gram matrices."""
    num_elements, smaller = math.prod(shape), min(shape, default=1)
    iteration = _BF16_BYTES * (4 * num_elements + 2 * smaller * smaller)
    return num_elements * element_bytes + iteration + _WORKSPACE_BYTES
