"""What an op is stands in its entry in `trainwright/ops`: names of ops in other folders have a reason to be there."""

from __future__ import annotations

import ast
from pathlib import Path

from trainwright.ops import RULES, find

ROOT = Path(__file__).parents[2] / "trainwright"
FOLDERS = ("torch_internals", "capture", "program", "rank", "models", "planner", "profiler", "runtime", "integrations")
WORDS = frozenset(
    ("all", "any", "cat", "clip", "copy", "full", "gather", "index", "max", "mean", "min", "norm", "ones", "pad", "range",
     "scatter", "select", "sign", "slice", "split", "stack", "sum", "t", "take", "to", "view",
     "where")
)  # fmt: skip
"""Names of ops that are ordinary words as well."""
ALLOWED = {
    "capture/passes/": "a pass rewrites a pattern of ops into another",
    "torch_internals/private.py": "overloads that torch gives no other handle to",
    "capture/dtypes.py": "ops whose types torch decides below autograd, or gate by gate",
    "rank/randomness.py": "the mode of a run that leaves dropout out",
    "capture/stored.py": "an op of our own, which a stored program has to be given before it is read",
    "program/micro_batches.py": "a product and a quotient are linear in one operand only, which the place decides",
    "integrations/label_counts.py": "the ops through which labels reach a loss, followed backwards in a graph",
    "profiler/kernel_groups.py": "ops that exist only after decomposition, as inductor's scheduler sorts them",
    "profiler/gpu.py": "functions of torch.nn.functional, which the graph never sees",
    "runtime/verification/reference.py": "functions of torch.nn.functional, which the graph never sees",
    "profiler/kernels/": "kernels of ATen, oneDNN, cuBLAS or cuDNN, a formula each; most are backwards, without an entry",
    "profiler/tracker.py": "calls that autograd's engine makes itself, and makes in place where no mode is active",
    "profiler/values.py": "ops that fake tensors refuse, or whose masks decide a shape",
    "torch_internals/repeats.py": "the one op whose plain numbers decide its result's place in memory",
    "capture/description.py": "any op serves, to name the type of its packet",
    "capture/gradients.py": "a backward op that is a convolution, and those that read what a norm saves",
    "capture/own_backwards.py": "the op by which a constant enters a function",
    "planner/costs/update.py": "the lookups in the code tables of 8-bit optimizers, whose lines were measured",
}


def op_names(source: str) -> set[str]:
    """Return the names of ops in `source`, docstrings aside: as text, or as attributes of `torch.ops.aten`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in RULES.keys() - WORDS:
            found.add(node.value)
        elif isinstance(node, ast.Attribute) and "aten" in (getattr(node.value, key, "") for key in ("id", "attr")):
            found.add(node.attr)
    return found


def test_names_of_ops_stand_in_their_entries() -> None:
    assert len(RULES) > 200
    assert op_names("if op.name in ('embedding', 'sum'):\n    pass") == {"embedding"}
    assert op_names("known = (aten.mm.default, torch.ops.aten.bmm)") == {"mm", "bmm"}
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if names := op_names(path.read_text()):
                found[name] = names
    unknown = {name: names for name, names in found.items() if not name.startswith(tuple(ALLOWED))}
    assert not unknown, "say it in the op's entry (`ops/traits.py`), or give a reason here"
    assert all(any(name.startswith(allowed) for name in found) for allowed in ALLOWED), "a reason that nobody needs"


def test_an_entry_without_loops_keeps_its_facts() -> None:
    assert not find("rand_like").differentiable
    assert find("lift_fresh_copy").linear
    assert find("linear").fresh_gradient == 1
    assert find("linear").is_described
    assert find("take").reads_rows
    assert not find("take").is_described
    assert not find("no_such_op").is_described
