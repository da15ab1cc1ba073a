"""Why a model could not be captured, in the user's words: which line of theirs, and what to try."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..artifacts import UserError
from ..torch_internals import private
from .dtypes import WrongTypes

TORCH_ROOT = str(Path(torch.__file__).parent)
OUR_ROOT = str(Path(__file__).parent.parent)
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


NO_MEMORY = (".numpy() is not supported for tensor subclasses", "access data pointer of Tensor")
"""What torch says where a tensor without memory is asked for its memory."""
OF_TYPES = re.compile(r"\bdtype|scalar type|data ?type|not implemented for '\w+'|tensors used as indices must be")
"""What torch says where a tensor's type is not what an op takes."""
MISCOUNTED = re.compile(r"takes .*positional arguments? but")


class ValuesNeeded(UserError):
    """The forward asks for the data's values (`if x.sum() > 0`, `.item()`), which tensors without memory lack."""


@contextmanager
def explained(model: nn.Module, batch: Any) -> Iterator[None]:
    """Turn whatever a run on fakes raises into a `UserError` that names the user's line, its module, and a remedy.

    It is a `ValuesNeeded` where the model would run on real tensors.
    """
    try:
        with _quiet():
            yield
    except UserError:
        raise
    except Exception as error:
        found = _user_error_within(error)
        if found is not None:
            raise found from None
        raise _kind(error)(explain(error, model, batch)) from None


@contextmanager
def transforms_refused() -> Iterator[None]:
    """Say of a forward that fails within a transform of torch.func, or after one, that it is that which a graph cannot hold."""
    lines: list[str] = []
    try:
        with private.watching_transforms(lambda: lines.extend(_places(traceback.extract_stack())[-1:])):
            yield
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if lines or any(private.is_within_a_transform(frame.filename) for frame in frames):
            raise _transform(user_line(error) or next(iter(lines), "the forward")) from None
        raise


def refuse_transforms(graph: fx.Graph) -> None:
    """Raise `UserError` where a transform of torch.func left its marks in a graph, which does not run without it."""
    marks = [node for node in graph.nodes if private.is_of_a_transform(node.target)]
    if marks:
        lines = [innermost_line(node.meta.get("stack_trace") or "") for node in marks]
        raise _transform(
            next((line for line in lines if line and not line.startswith(STANDARD_LIBRARY)), "the forward")
        )


def refuse_gradients(calls: list[fx.Node]) -> None:
    """Raise `UserError` where a gradient within the forward has calls that the graph cannot hold."""
    if calls:
        where = innermost_line(calls[0].meta.get("stack_trace") or "") or "the forward"
        raise UserError(
            "a gradient within the forward that goes through simple ops is needed (products, convolutions, "
            f"activations); {where} goes through {_name_of(calls[0])}, which reads what a norm, a dropout or another compound "
            "op has saved; write that op as simpler ones, such as nn.RMSNorm, or leave it out of what is differentiated"
        )


def _name_of(node: fx.Node) -> str:
    return private.packet(node.target) if isinstance(node.target, private.OpOverload) else node.name


def _transform(where: str) -> UserError:
    return UserError(
        f"a forward without transforms of torch.func (vmap, grad, jvp) is needed; {where} has one; write vmap as ops on the whole "
        "batch, and grad as torch.autograd.grad(…, create_graph=True)"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from writing half a graph, and a traceback, where the user looks for one sentence.

    What the user's own forward prints goes to standard error: standard output may be somebody's JSON.
    """
    before = logging.root.manager.disable
    written = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
            yield
        sys.stderr.write(written.getvalue())
    finally:
        logging.disable(before)


def explain(error: Exception, model: nn.Module, batch: Any) -> str:
    """Return *what is needed, what was found, what to try* for an export that failed."""
    text = _text(error)
    where = (user_line(error) or _loss_within(error) or type(model).__name__) + _in_module(error, model)
    wrong = next((each for each in _chain(error) if isinstance(each, WrongTypes)), None)
    if wrong is not None:
        return wrong.refused.message(wrong.target, where)
    if (
        "unexpected keyword argument" in text
        or ("missing" in text and "required positional argument" in text)
        or MISCOUNTED.search(text)
    ):
        return (
            f"a batch that fits the model's forward is needed; {_first_line(text)}; "
            f"the batch holds {describe(batch)}, {type(model).__name__}.forward takes {_signature(model)}"
        )
    if "DynamicCache" in text or "Cache in output" in text:
        return f"outputs that are tensors are needed; {_first_line(text)}; put use_cache=False in the batch"
    if "not a known type" in text or "unsupported type" in text.lower():
        return (
            f"a batch and an output of tensors, tuples, dicts and dataclasses are needed; {_first_line(text)}; "
            "return those, or only the loss"
        )
    if op := re.search(r"no fake impl registered for <CustomOpDef\(([^)]+)\)>", text):
        return (
            f"an op whose result has a known shape is needed; {op[1]}, called at {where}, has no fake implementation; "
            "register one with its register_fake"
        )
    if _is_data_dependent(error, text):
        return (
            f"a forward whose shapes and branches do not depend on the data's values is needed; {where} asks for a value; "
            + _without_values(_asking_line(error))
        )
    if ("on the same device" in text or "two different devices" in text) and "meta" in text:
        return (
            f"a model whose tensors are parameters, buffers, or in the batch is needed; {where} uses another one, made where "
            "the model was; register it as a buffer, take it from the batch, or build the model on the CPU"
        )
    if OF_TYPES.search(text):
        return (
            f"types that torch takes together are needed; at {where}, torch says: {_first_line(text)}; the batch holds "
            f"{describe(batch)}; convert an entry or the model with .to(dtype); class labels are int64"
        )
    return (
        f"a model that runs on the batch is needed; it failed at {where}: {type(error).__name__}: {_first_line(text)}; "
        f"the batch holds {describe(batch)}"
    )


def data_dependent(stack: str) -> ValuesNeeded:
    """The error for an op whose output's shape depends on values, at the source line `stack`."""
    return ValuesNeeded(
        "a forward whose shapes and branches do not depend on the data's values is needed; "
        f"{stack} asks for a value; {_without_values(stack)}"
    )


def _without_values(line: str) -> str:
    """Say what to try where `line` asks for a value: a line of somebody else's package is not the user's to change."""
    if package := package_of(line):
        return (
            f"that is done in {package} ({_file_of(line)}): look for an option of it that pads to fixed shapes and does not "
            "branch, or put a module of your own in its place"
        )
    return "use torch.where, masks or padding in place of `if`, `.item()`, boolean indexing and nonzero"


def package_of(line: str) -> str:
    """Return the installed package that a source line belongs to; empty for the user's own files.

    >>> package_of("/lib/python3.12/site-packages/torchvision/ops/poolers.py:270 (idx = torch.where(...))")
    'torchvision'
    """
    found = re.search(r"(?:site|dist)-packages/([^/:]+)", line)
    return found[1].removesuffix(".py") if found else ""


def _file_of(line: str) -> str:
    """Return `models/detection/rpn.py:270`: a package's file and line, without the place where it is installed."""
    return re.sub(r"^.*(?:site|dist)-packages/[^/:]+/?", "", line).partition(" (")[0] or line


def describe(batch: Any) -> str:
    """Return the batch's entries with their shapes, in a line."""
    named, _ = private.flatten_batch(batch)
    return ", ".join(f"{name}: {_entry(leaf)}" for name, leaf in named[:12]) or "nothing"


def _entry(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)[:40]


def user_line(error: BaseException) -> str | None:
    """Return `file:line (code)` of the innermost frame that is neither torch's, Python's nor ours."""
    places = _places(traceback.extract_tb(error.__traceback__))
    own = [place for place in places if not package_of(place)]
    return next(reversed(own or places), None) or _line_in_text(str(error))


def _asking_line(error: BaseException) -> str:
    """Return the innermost line that is neither torch's, Python's nor ours, whoever wrote it; empty where there is none."""
    places = _places(traceback.extract_tb(error.__traceback__))
    return next(reversed(places), None) or _line_in_text(str(error)) or ""


def _places(frames: traceback.StackSummary) -> list[str]:
    """Return `file:line (code)` of the frames that are neither torch's, Python's nor ours."""
    return [
        _place(frame)
        for frame in frames
        if not frame.filename.startswith((TORCH_ROOT, OUR_ROOT, STANDARD_LIBRARY + "/copy"))
        and frame.filename[:1] != "<"
        and (not frame.filename.startswith(STANDARD_LIBRARY) or package_of(frame.filename))
    ]


def _place(frame: traceback.FrameSummary) -> str:
    code = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} ({code})" if code else f"{frame.filename}:{frame.lineno}"


def _line_in_text(text: str) -> str | None:
    """The line that torch itself names: `(_export… ) File "x.py", line 3`."""
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    theirs = [place for place in places if not is_inside(place[0])]
    return f"{theirs[-1][0]}:{theirs[-1][1]}" if theirs else None


def is_inside(filename: str) -> bool:
    """Tell whether a source file is one of torch's or of this library's."""
    return filename.startswith((TORCH_ROOT, OUR_ROOT))


def innermost_line(stack_trace: str) -> str:
    """Return `file:line (code)` of the innermost frame outside torch in a node's stack trace."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n([^\n]*)', stack_trace)
    theirs = [frame for frame in frames if not is_inside(frame[0])] or frames
    return f"{theirs[-1][0]}:{theirs[-1][1]} ({theirs[-1][2].strip()})" if theirs else ""


def _kind(error: Exception) -> type[UserError]:
    text = _text(error)
    return ValuesNeeded if _is_data_dependent(error, text) or "no fake impl registered" in text else UserError


def _is_data_dependent(error: BaseException, text: str) -> bool:
    names = {type(each).__name__ for each in _chain(error)}
    return bool(
        names & {"GuardOnDataDependentSymNode", "UserErrorType"}
        or any(isinstance(each, private.VALUE_NEEDED) for each in _chain(error))
        or "data-dependent" in text.lower()
        or "unbacked" in text
        or any(words in text for words in NO_MEMORY)
    )


def _in_module(error: BaseException, model: nn.Module) -> str:
    """Return ` in encoder.layers.3`: the innermost module whose forward was running, by its path in `model`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    running = [frame.f_locals["self"] for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    root = next((module for module in running if type(module) is type(model)), None)  # a copy of the user's
    paths = {} if root is None else {id(module): path for path, module in root.named_modules()}
    path = next((paths[id(module)] for module in reversed(running) if id(module) in paths), "")
    return f" in {path}" if path else ""


def _loss_within(error: BaseException) -> str | None:
    """Return `the loss, CrossEntropyLoss`, where that was what ran."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "loss_of" and frame.f_locals.get("loss_fn") is not None:
            loss_fn = frame.f_locals["loss_fn"]
            return f"the loss, {getattr(loss_fn, '__name__', type(loss_fn).__name__)}"
    return None


def _user_error_within(error: BaseException) -> UserError | None:
    return next((each for each in _chain(error) if isinstance(each, UserError)), None)


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what it was raised from; not what was being handled where its author says `from None`."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _text(error: BaseException) -> str:
    return "\n".join(str(each) for each in _chain(error))


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0].partition(" If this type holds")[0][:300] if lines else "no message"


def _signature(model: nn.Module) -> str:
    return ", ".join(name for name in private.parameter_names(model.forward) if name != "self")
