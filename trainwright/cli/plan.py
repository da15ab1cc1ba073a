"""`trainwright plan`: how a model should be trained on some hardware."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arguments import as_mesh
from ..artifacts import DEFAULT_IMBALANCE, Cluster, Plan, Refusal, UserError, parse_bytes
from ..collecting import rarely_collecting
from ..reports.frontier_figure import frontier_table
from ..reports.terminal import compare_table
from ..request import as_stages
from .errors import FAILED, OK
from .model import ModelOptions, takes_model
from .offering import OffersQuestion, PriceOption, SamplesOption, TokensOption, ask_for_offers, write_plans
from .optimizing import FormOption, OptionOption
from .output import HtmlOption, JsonOption, answer, quiet_stdout, remark, remarks, status
from .planned import named
from .planning import BatchSizeOption, GlobalBatchOption, Question, ask_for_batch, asked_with, fastest
from .pricing import (
    LinkOption,
    PricedSyncOption,
    ReplicasOption,
    SyncOptionOption,
    ask_for_sync,
    sync_as_json,
    sync_table,
)
from .streaming import BlocksOption, PlannedStreamOption, StorageOption, check_unstreamed, plan_streamed
from .tiers import PlannedTierOption, TierCommitOption, TierKeepOption, TierUpdateOption, TierWindowOption, policy_of

if TYPE_CHECKING:
    from ..models.targets import Loaded

PIPELINE_RECIPES = ("even", "balanced", "pipeline-dp", "joint")
"""What there is beside `--pipeline`."""
SOLVERS = ("joint", "two-stage", "ddp", "fsdp", "megatron")
MemoryOption = Annotated[
    str | None, typer.Option(metavar="M", help="Per device, the batch excluded: 40GiB, 512MiB. Default: 90 % of it.")
]


@takes_model
@rarely_collecting()
def plan(
    model: ModelOptions,
    hardware: Annotated[
        str,
        typer.Option(metavar="H[,H]", help="cpu:4, 8xh200, 2x8xh100, or a JSON file; of several, what each comes to."),
    ],
    batch_size: BatchSizeOption = None,
    global_batch: GlobalBatchOption = None,
    memory: MemoryOption = None,
    mesh: Annotated[str | None, typer.Option(metavar="AxB", help="Fix the mesh, outermost axis first.")] = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="With several, the fastest plan of all.")
    ] = "adamw",
    optimizer_option: OptionOption = None,
    optimizer_form: FormOption = None,
    solver: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(SOLVERS)}.")] = "joint",
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P",
            help="Hold a decision: 'h.*.mlp.c_fc=recompute', 'h.*.mlp.c_fc=shard(o)@cpu' (after @ an axis of the mesh: cpu; on "
            "GPUs gpu, node); repeatable.",
        ),
    ] = None,
    offload: Annotated[
        str,
        typer.Option(metavar="TIER", help="host, disk or none; auto: to the host of GPUs where that is faster."),
    ] = "auto",
    expert_imbalance: Annotated[
        str,
        typer.Option(
            metavar="X",
            help="By how much a rank's experts may get more rows than their even share: 1.25, worst, or measured:FILE, the "
            "--metrics of a run.",
        ),
    ] = str(DEFAULT_IMBALANCE),
    keep_graph: Annotated[
        bool, typer.Option("--keep-graph", help="Keep what a second backward needs, for --schedule lanczos.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Show what every solver reaches.")] = False,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Plans from the smallest to the fastest; -o names a folder for them.")
    ] = False,
    micro_batches: Annotated[
        str, typer.Option(metavar="K|auto", help="Parts of the batch, one after the other; auto: as memory asks for.")
    ] = "1",
    loss_chunks: Annotated[
        str,
        typer.Option(
            metavar="N|auto|free|none",
            help="Head and loss in N chunks of rows, logits never whole; auto: where nothing fits without; free: where faster.",
        ),
    ] = "auto",
    sampled: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Linear maps may keep this share of their rows for the gradients of their weights, which are then unbiased "
            "estimates: 0.3. Default: all gradients are exact.",
        ),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="P|auto",
            help="Stages of blocks, each on ranks of its own, of which --mesh is the mesh; auto: as many as pay.",
        ),
    ] = None,
    pipeline_schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The order in which stages work: 1f1b, interleaved (several pieces a stage), zero-bubble (split backward), auto.",
        ),
    ] = "auto",
    stream: PlannedStreamOption = None,
    stream_storage: StorageOption = None,
    stream_blocks: BlocksOption = None,
    tier: PlannedTierOption = None,
    tier_window: TierWindowOption = None,
    tier_keep: TierKeepOption = None,
    tier_update: TierUpdateOption = None,
    tier_commit_every: TierCommitOption = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="S", help="Further batch shapes within the memory: 'seq_len=128,512', '16x128,64x32'; repeatable."
        ),
    ] = None,
    sync: PricedSyncOption = None,
    sync_option: SyncOptionOption = None,
    replicas: ReplicasOption = None,
    link: LinkOption = None,
    price: PriceOption = None,
    tokens: TokensOption = None,
    samples: SamplesOption = None,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="On one device: torch compiles the blocks; the plan says how much each keeps."),
    ] = False,
    time_limit: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="Seconds for the search: what is best by then is taken.")
    ] = 30.0,
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan there.")] = None,
    json_path: JsonOption = None,
    html_path: HtmlOption = None,
) -> int:
    """Choose layout, recomputation and offloading of every tensor so that a step is fastest within the memory."""
    from ..optim.chosen import choose
    from ..optim.options import parse_options

    if stream is not None:
        return plan_streamed(
            model if batch_size is None else replace(model, batch_size=int(batch_size)), stream=stream, hardware=hardware,
            memory=memory, optimizer=optimizer, storage=stream_storage, blocks=stream_blocks, output=output, json_path=json_path,
            options=parse_options(optimizer_option),
        )  # fmt: skip
    check_unstreamed(stream_storage, stream_blocks, None, None)
    model, auto = ask_for_batch(model, batch_size, global_batch)
    several = ask_for_offers(hardware, price, tokens, samples)
    asked, cluster = ask_for_sync(sync, sync_option, link, replicas, several.first)
    question: dict[str, Any] = {
        "hardware": cluster,
        "memory": None if memory is None else parse_bytes(memory),
        "mesh": parse_mesh(mesh),
        "pins": tuple(pin or ()),
        "offload": offload,
        "time_limit_s": time_limit,
        "autocast": model.autocast,
        "micro_batches": parse_micro_batches(micro_batches),
        "loss_chunks": int(loss_chunks) if loss_chunks.strip().isdigit() else loss_chunks.strip().lower(),
        "sampled": sampled,
        "pipeline": as_stages(pipeline),
        "pipeline_schedule": pipeline_schedule,
        "optimizer_options": parse_options(optimizer_option),
        "optimizer_form": optimizer_form,
        "keep_graph": keep_graph,
        "compile": compile,
        "expert_imbalance": expert_imbalance,
        "tier": None if tier is None else policy_of(tier, tier_window, tier_keep, tier_update, tier_commit_every),
    }
    optimizers, solver = _names(optimizer), _solver(solver)
    for name in optimizers:
        choose(name, question["optimizer_options"], optimizer_form)
    _check_together(
        {"--compare": compare, "--frontier": frontier, "--sync": asked is not None, "--shapes": bool(shapes)},
        "several kinds of hardware, --price, --tokens or --samples" if several.is_asked else None,
        "--batch-size auto" if auto is not None else None,
    )
    ask = _ask_for_comparison if compare else _ask_for_frontier if frontier else _ask_for_plan
    with quiet_stdout(), status(f"planning {model.spec}") as tell:
        loaded = model.load()
        remarks(loaded.notes)
        several.check(loaded.batch)
        if shapes:
            question["shapes"] = [each.load().batch for text in shapes for each in parse_shapes(text, model)]
        asking = Question(model, loaded, {**question, "progress": tell}, optimizers, solver, auto)
        if not several.is_asked:
            with named(model, loaded):
                found = ask(asking)
            written = found.write(output) if output is not None else None
            if html_path is not None:
                _write_report(found, asking.loaded_for(found.plan), html_path, found.files(output))
    if several.is_asked:
        return _offer(several, asking, output, json_path, html_path)
    remarks(auto.batches.notes if auto is not None else ())
    if asked is None:
        answer(found.text(output), found.data, json_path)
    elif found.plan is not None:
        priced = asked.priced(found.plan, loaded.model)
        data = {"plan": json.loads(found.data()), "sync": sync_as_json(priced)}
        answer(f"{found.text(output)}\n{sync_table(priced, found.plan)}", lambda: data, json_path)
    if written is not None:
        remark(f"wrote {output}; {_next(found.plan, model.spec, written)}")
    if found.plan is None:
        remark("error: " + _why_none(found.comparison, solver))
    return OK if found.plan is not None else FAILED


def _offer(
    several: OffersQuestion, asking: Question, output: str | None, json_path: str | None, html_path: str | None
) -> int:
    """Plan on each hardware and answer with all of them."""
    with quiet_stdout(), status(f"planning {asking.model.spec}") as tell:

        def plan_of(cluster: Cluster) -> Plan:
            with named(asking.model, asking.loaded):
                return fastest(asking.on(cluster, lambda text: tell(f"{cluster.name}: {text}")))[0]

        offers = several.offers(plan_of)
        files = write_plans(offers, output) if output is not None else []
        if html_path is not None:
            offers.to_html(html_path)
    remarks(asking.auto.batches.notes if asking.auto is not None else ())
    answer(offers.table(), offers.to_json, json_path)
    if files:
        remark(f"wrote {', '.join(files)}; next: trainwright train {asking.model.spec} --plan {files[0]}")
    return OK


def _check_together(options: Mapping[str, bool], *others: str | None) -> None:
    """Raise `UserError` for options that ask questions of their own, of which one can be answered at a time.

    `--sync` goes with a batch size that is asked for, and not with the others.
    """
    given = [name for name, is_given in options.items() if is_given]
    asked = [name for name in others if name is not None and not (given == ["--sync"] and name.startswith("--batch"))]
    if len(given) > 1 or (given and asked):
        both = [*given, *asked]
        raise UserError(f"one of {' and '.join(both[:2])} is needed; got both; ask twice")


def _next(plan: Plan | None, spec: str, written: str) -> str:
    """What to do with a plan that was written: train, or why that would be refused."""
    from ..optim.chosen import check_runs, of_plan

    try:
        if plan is not None:
            check_runs(of_plan(plan), plan)
    except UserError as error:
        return f"train will not run it: {error}"
    where = "" if plan is None or plan.tier is None or plan.tier.place == "host" else " --tier DIR"
    return f"next: trainwright train {spec} --plan {written}{where}"


def parse_mesh(text: str | None) -> tuple[int, ...] | None:
    """Return the sizes of `2x4`.

    >>> parse_mesh("2x4")
    (2, 4)
    """
    return as_mesh(text)


def parse_shapes(text: str, model: ModelOptions) -> list[ModelOptions]:
    """Return `model` with each of the shapes in `text`: `seq_len=128,512`, `batch_size=4`, or rows × length, `16x128,64x32`.

    >>> [(each.batch_size, each.seq_len) for each in parse_shapes("8x128,4x512", ModelOptions("zoo:gpt2"))]
    [(8, 128), (4, 512)]
    """
    name, equals, values = text.partition("=")
    if equals and re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", values.strip()):
        sizes = [int(value) for value in values.split(",")]
        if name.strip() == "batch_size":
            return [replace(model, batch_size=size) for size in sizes]
        if name.strip() == "seq_len":
            return [replace(model, seq_len=size) for size in sizes]
    if re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", text.strip()):
        pairs = [tuple(int(size) for size in pair.split("x")) for pair in text.split(",")]
        return [replace(model, batch_size=rows, seq_len=length) for rows, length in pairs]
    raise UserError(
        f"--shapes needs seq_len=N,N or batch_size=N,N, or rows x length as in 16x128,64x32; got {text!r}; write one of these"
    )


def parse_micro_batches(text: str) -> int | str:
    """Return the number in `text`, or `auto`.

    >>> parse_micro_batches("4"), parse_micro_batches("auto")
    (4, 'auto')
    """
    if text.strip().lower() == "auto":
        return "auto"
    if not text.strip().isdigit() or int(text) < 1:
        raise UserError(f"a number of micro-batches is needed, 1 or more, or auto; got {text!r}; try auto")
    return int(text)


def compared_as_json(comparison: Mapping[str, Plan | Refusal], budget_bytes: int | None) -> dict[str, Any]:
    """Return what `plan --compare --json` writes; an infeasible recipe has nulls."""
    return {
        "plans": {name: _compared_row(found) for name, found in comparison.items()},
        "budget_bytes": budget_bytes,
    }


def _compared_row(found: Plan | Refusal) -> dict[str, Any]:
    names = ("step_s", "comm_s", "exposed_comm_s", "recompute_s", "peak_bytes", "fits_in_bytes")
    if not isinstance(found, Plan):
        return {"feasible": False, "fits_device": False, **dict.fromkeys((*names, "plan_s"))}
    predicted = {name: getattr(found.predicted, name) for name in names}
    return {"feasible": True, "fits_device": found.fits_device, **predicted, "plan_s": found.solver.plan_s}


@dataclass(frozen=True, eq=False)
class _Found:
    """The answer: what to print, what JSON says, and the plan, if there is one."""

    shown: str
    data: Callable[[], Any]
    plan: Plan | None
    comparison: Mapping[str, Plan | Refusal] | None = None
    frontier: Sequence[Plan] = ()

    def write(self, path: str) -> str | None:
        """Write the plan to `path`, or those of a frontier into a folder of that name; return the file of the plan."""
        if self.plan is None:
            return None
        if not self.frontier:
            self.plan.to_json(path)
            return path
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"a folder for the plans of a frontier is needed; {path} is none ({error.strerror}); name another"
            ) from None
        for name, plan in zip(self.files(path), self.frontier):
            plan.to_json(name)
        return self.files(path)[-1]

    def files(self, path: str | None) -> list[str]:
        """Return where the plans of a frontier are written, in order; none where they are not."""
        return [] if path is None else [f"{path}/plan-{place}.json" for place in range(1, len(self.frontier) + 1)]

    def text(self, path: str | None) -> str:
        """Return what to print; a frontier's table names the file of each plan."""
        return frontier_table(self.frontier, self.files(path)) if self.frontier else self.shown


def _ask_for_plan(question: Question) -> _Found:
    plan, beside = fastest(question)
    return _Found(beside + plan.table(), plan.to_json, plan)


def _ask_for_comparison(question: Question) -> _Found:
    import trainwright as tw

    if len(question.optimizers) > 1:
        raise UserError(f"one optimizer is needed for --compare; got {len(question.optimizers)}; name one")
    comparison = tw.compare(**asked_with(question, question.optimizers[0]))
    chosen = comparison[question.solver]
    return _Found(
        compare_table(comparison),
        lambda: compared_as_json(comparison, question.options["memory"]),
        chosen if isinstance(chosen, Plan) else None,
        comparison,
    )


def _ask_for_frontier(question: Question) -> _Found:
    import trainwright as tw

    if len(question.optimizers) > 1 or question.solver != "joint":
        raise UserError("one optimizer and the solver joint are needed for --frontier; leave the others out")
    points = tw.frontier(**asked_with(question, question.optimizers[0]))
    return _Found("", lambda: frontier_as_json(points), points[-1], frontier=points)


def frontier_as_json(points: Sequence[Plan]) -> dict[str, Any]:
    """Return what `plan --frontier --json` writes: a row a point, its whole plan in it."""
    names = ("step_s", "comm_s", "exposed_comm_s", "recompute_s", "peak_bytes", "fits_in_bytes")
    rows = [
        {name: getattr(plan.predicted, name) for name in names}
        | {
            "budget_bytes": plan.budget_bytes,
            "mesh": plan.mesh,
            "micro_batches": plan.micro_batches,
            "plan": json.loads(plan.to_json()),
        }
        for plan in points
    ]
    return {"points": rows}


def _why_none(comparison: Mapping[str, Plan | Refusal] | None, solver: str) -> str:
    return str((comparison or {}).get(solver, "no plan"))


def _write_report(found: _Found, loaded: Loaded, path: str, files: Sequence[str]) -> None:
    """Write the report, with the memory over the step simulated anew and the reasons for each decision."""
    from ..reports.html import write_plan

    if found.plan is None:
        raise UserError("a plan that fits is needed for --html; there is none; raise --memory")
    more = details(found.plan, loaded)
    write_plan(found.plan, path, comparison=found.comparison, frontier=found.frontier, files=files, **more)


def details(plan: Plan, loaded: Loaded) -> dict[str, Any]:
    """Return what a report shows beside the plan: the simulated step and the explanation."""
    import trainwright as tw

    from ..planner import schedule_of

    return {
        "schedule": schedule_of(plan),
        "simulation": tw.simulate_plan(plan, loaded.model, loaded.batch, loss_fn=loaded.loss_fn),
        "explanation": tw.explain(plan, loaded.model, loaded.batch, loss_fn=loaded.loss_fn),
    }


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError("the name of an optimizer is needed; got none; `trainwright optimizers` lists them")
    return names


def _solver(name: str) -> str:
    if name.lower() in ("pipeline", "pp"):
        raise UserError(
            f"a solver is one of {', '.join(SOLVERS)}; {name!r} is none; stages are asked for by --pipeline auto"
        )
    if name in PIPELINE_RECIPES:
        return name
    if name not in SOLVERS:
        raise UserError(f"a solver is needed, one of {', '.join(SOLVERS)}; got {name!r}")
    return name
