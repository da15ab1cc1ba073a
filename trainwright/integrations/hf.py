"""Hugging Face's Trainer around a planned model: `PlannedTrainer` in place of `Trainer`, with a plan.

The Trainer goes on to do what it does: loop, schedule, clipping, logging, callbacks, metrics, checkpoints, the best model.
What the plan decides it takes from the plan: layout, recomputation, precision, the batch. Every rank loads the whole batch
and computes its own part; losses, gradient norms and predictions are those of one process with the same batches.

    output_dir/checkpoint-N/   model.safetensors, config.json   the whole weights, for `from_pretrained`
                               planned/step-…/                  weights and optimizer in pieces, each rank its own
                               scheduler.pt, rng_state_R.pth    as the Trainer writes them
                               trainer_state.json               written last: without it a checkpoint is not complete

With `sync`, the processes are replicas of the plan that exchange by a method of `tw.sync`: each takes batches of its own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import Plan, UserError
from ..runtime import LossOutput
from .hf_arguments import check_arguments
from .label_counts import counted_labels, reads_num_items
from .planned import load_weights, plan_of, planned, skeleton, switch_parameters
from .replicated import Replication

try:
    from accelerate.utils import GradientAccumulationPlugin
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    from .accelerate import STATE, PlannedAccelerator
except ImportError as error:
    raise ImportError(
        f"transformers and accelerate are needed for this integration ({error}); install them: pip install 'trainwright[hf]'"
    ) from None

TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"


class PlannedTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's `Trainer` for a planned model; everything but the following is the Trainer's own.

    model: as it was built, on the CPU, or on the meta device with `weights`. plan: the plan, or the path of its file;
    `per_device_train_batch_size` times the number of processes is its batch. weights: files of which each rank reads its
    own part, as of `tw.parallelize`. loss_fn: the one that the plan was made with, if the loss is not the model's own.

    sync, sync_options: a method by which replicas of the plan exchange (`trainwright sync` lists them), as many as the
    processes make up, and whose batches together are those of a step. Losses and metrics in the log are of all replicas, each
    with its own parameters; all have the same when `train` returns, and `trainer.accelerator.sync` says what was sent. A
    checkpoint holds every replica's state under `planned/`, its `model.safetensors` replica 0's weights.

    Accumulated batches are weighed by their labels, as the Trainer weighs them for this model. `resume_from_checkpoint`
    goes on bit for bit under the same plan. `bf16` has to be said if the plan computes in bf16, and not otherwise.

    Raises `UserError` for arguments that do not go with a plan (`gradient_checkpointing`, `fsdp`, …), by name.

    >>> import tempfile, trainwright as tw
    >>> model, batch = tw.zoo.build("gpt2-tiny", device="cpu", batch_size=2, seq_len=8)
    >>> plan = tw.plan(model, batch, hardware="cpu:1")
    >>> data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     args = TrainingArguments(folder, use_cpu=True, per_device_train_batch_size=2, report_to="none", max_steps=2,
    ...                              save_strategy="no", disable_tqdm=True)
    ...     trainer = PlannedTrainer(model=model, args=args, plan=plan, train_dataset=data)
    ...     trainer.train().global_step
    {...}
    2
    """

    model: Any
    lr_scheduler: Any
    accelerator: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *rest: Any,
        plan: Plan | str | os.PathLike[str],
        weights: str | os.PathLike[str] | None = None,
        loss_fn: Any = None,
        sync: str | None = None,
        sync_options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.plan = plan_of(plan)
        self._how: dict[str, Any] = {"sync": sync, "sync_options": sync_options}
        replication = Replication(self.plan, sync, sync_options)
        args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        evaluates = keywords.get("eval_dataset") is not None
        _check_keywords(model, keywords)
        check_arguments(args, self.plan, evaluates, replication)
        assert model is not None
        if replication.number > 1:
            args.average_tokens_across_devices = False  # each replica's gradient is a mean of its own labels
        self._skeleton, self._has_loss_fn = skeleton(model), loss_fn is not None
        module = planned(model, self.plan, weights, loss_fn, args.seed, replication.number)
        super().__init__(model, args, *rest, **keywords)
        self._set_signature_columns_if_needed()  # of the user's class
        self._go_over(model, module)
        self._weigh(args)

    def _go_over(self, model: nn.Module, module: Any) -> None:
        """Put the planned module in the place of the model that the Trainer was made with."""
        module.main_input_name = getattr(model, "main_input_name", "input_ids")
        if self.optimizer is not None:
            switch_parameters(self.optimizer, model, module)
        self.model = self.model_wrapped = self.callback_handler.model = module
        self.accelerator.adopt(module, self._skeleton)

    def _weigh(self, args: TrainingArguments) -> None:
        """Find out how the stock Trainer weighs batches for this model."""
        if self._has_loss_fn:
            self.model_accepts_loss_kwargs = False
        self._counted = counted_labels(self.model.program) if not self._has_loss_fn else None
        self._reads_num_items = self.model_accepts_loss_kwargs and reads_num_items(self._skeleton, self.plan)
        if self._reads_num_items and self._counted is None and args.gradient_accumulation_steps > 1:
            raise UserError(
                "a loss that is a mean over the batch's labels is needed to weigh accumulated batches as the Trainer does; the "
                f"loss of {type(self._skeleton).__name__} has other terms; set gradient_accumulation_steps=1 and plan for the "
                f"larger batch, if need be with --micro-batches {args.gradient_accumulation_steps}"
            )

    # Where the Trainer asks for the user's model, not for what computes

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, of planned models."""
        super().create_accelerator_and_postprocess()
        made = self.accelerator
        self.accelerator = PlannedAccelerator(
            self.plan,
            dataloader_config=made.dataloader_config,
            gradient_accumulation_plugin=GradientAccumulationPlugin(**made.gradient_state.plugin_kwargs),
            **self._how,
        )
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each rank takes its part of it to its device."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that decay, by the user's own classes."""
        return super().get_decay_parameter_names(self._skeleton)

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Return this process's share of the operations that the Trainer counts for a batch."""
        main_input = inputs.get(self.model.main_input_name)
        if main_input is None or not hasattr(self._skeleton, "num_parameters"):
            return 0.0
        num_parameters = self._skeleton.num_parameters(exclude_embeddings=True)  # type: ignore[operator]
        return float(6 * main_input.numel() * num_parameters / self.args.world_size)

    # Losses and predictions

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of the whole batch, weighed as the stock Trainer weighs it."""
        outputs = model(**inputs)
        if isinstance(outputs, LossOutput):
            loss, own = outputs.loss, outputs.output
            outputs = {"loss": loss, **own} if isinstance(own, Mapping) else (loss, own)
        else:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        if num_items_in_batch is not None and self._reads_num_items and self._counted is not None:
            share = self._counted.count(inputs).double() / torch.as_tensor(num_items_in_batch).double()
            loss = loss * share.to(loss)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate a whole batch; without labels, which the planned step takes, with some that do not count."""
        filled = self._with_labels(inputs)
        loss, logits, labels = super().prediction_step(model, filled, prediction_loss_only, ignore_keys)
        if filled is not inputs:
            return None, logits, None
        # the loop repeats a loss for each example of one process, and it is that of all of a replica
        return loss.repeat(self.plan.num_ranks) if loss is not None else None, logits, labels

    def _with_labels(self, inputs: dict[str, Any]) -> dict[str, Any]:
        missing = {name: entry for name, entry in self.plan.batch.items() if name not in inputs}
        if not missing or not set(missing) <= set(self.label_names):
            return inputs
        given = next(value for value in inputs.values() if isinstance(value, Tensor))
        filled = {}
        for name, entry in missing.items():
            dtype = getattr(torch, entry.dtype)
            filled[name] = torch.full(
                _shape_beside(given, entry.shape), 0.0 if dtype.is_floating_point else -100, dtype=dtype
            )
        return {**inputs, **filled}

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole weights and the configuration for `from_pretrained`; a collective call."""
        weights = self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir if output_dir is not None else self.args.output_dir, state_dict=weights)
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.checkpointer(output_dir).save(self.state.global_step)
        if self.args.should_save:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer has to be saved too: it is
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def train(self, resume_from_checkpoint: Any = None, *rest: Any, **keywords: Any) -> Any:
        """Train as `Trainer.train` does; `resume_from_checkpoint=True` takes the newest checkpoint that is complete."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_checkpoint()
        trained = super().train(resume_from_checkpoint, *rest, **keywords)
        self.accelerator.finish()
        return trained

    def _newest_checkpoint(self) -> str:
        found = {}
        for state in Path(str(self.args.output_dir)).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE}"):
            number = state.parent.name.rpartition("-")[2]
            if number.isdigit() and (state.parent / STATE).is_dir():
                found[int(number)] = state.parent
        if not found:
            raise UserError(
                f"a complete checkpoint is needed to resume; {self.args.output_dir} has none; train without resume_from_checkpoint"
            )
        return str(found[max(found)])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Look whether a checkpoint can be resumed; it is read when the optimizer is there."""
        folder = Path(resume_from_checkpoint)
        for needed in (STATE, TRAINER_STATE):
            if not (folder / needed).exists():
                raise UserError(
                    f"a complete checkpoint of PlannedTrainer is needed to resume; {folder} lacks {needed}; take another one "
                    "(save_only_model leaves the optimizer out), or start from its weights with weights="
                )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.accelerator.restored(checkpoint)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as above
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True))

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        load_weights(self.model, self._skeleton, folder / STATE if (folder / STATE).is_dir() else folder)


def _shape_beside(given: Tensor, planned: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an entry beside `given`, which may have fewer rows and shorter sequences than planned."""
    return tuple(min(size, own) for size, own in zip(planned, (*given.shape, *planned[given.dim() :])))


def _check_keywords(model: Any, keywords: Mapping[str, Any]) -> None:
    if model is None or keywords.get("model_init") is not None:
        raise UserError(
            "a model is needed, which the plan was made for; build it and pass model= (model_init is not supported)"
        )
    if keywords.get("compute_loss_func") is not None:
        raise UserError(
            "a loss that is part of the plan is needed; got compute_loss_func; plan with it as a loss_fn(output, batch), and pass "
            "loss_fn="
        )
