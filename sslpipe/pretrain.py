"""Pretraining: images become views, views become embeddings, embeddings become a loss."""

from collections.abc import Generator
from pathlib import Path

import torch

from sslpipe.data.loader import batches
from sslpipe.data.pipeline import Batch
from sslpipe.distributed import all_gather_rows
from sslpipe.run.contract import PretrainingPartsT, PretrainingPlan
from sslpipe.run.health import embedding_health
from sslpipe.run.opening import open_run
from sslpipe.run.run import Run


def pretrain(
    plan: PretrainingPlan[PretrainingPartsT],
    run_dir: Path,
    parts: PretrainingPartsT | None = None,
) -> int:
    """Pretrain up to the plan's steps, resuming at run_dir's last checkpoint. Collective.

    Leaves DONE, PREEMPTED or FAILED in run_dir.

    Args:
        plan: What `sslpipe.plan.Pretraining.make` returned, for this run directory.
        run_dir: Where the run lives; the same one resumes.
        parts: What is trained; None: what the plan builds.

    Returns:
        The last step done: fewer than the recipe's where a stop was requested.

    Raises:
        UserError: For what the user can mend: launch, memory, a directory in use.
    """
    # processes, lock and watchdog; parts on the device, resumed at the last checkpoint; the log
    with open_run(plan, run_dir, parts) as run:
        loss_fn = run.parts.loss
        # the plan has counted them: a batch without is chance, its step teaches nothing
        loss_fn.had_negatives = True

        for step, batch in run.steps(open_batches(plan, run)):  # sets the learning rate; all ranks
            views = run.augment(batch)  # 2 x (B, 3, S, S), made as the model takes them
            z_a, z_b = run.model(views).chunk(2)  # 2 x (B, D), one forward, or micro-batches
            loss = loss_fn(z_a, z_b, **views.batch.loss_arguments)  # (), over all ranks
            with run.step(batch, loss):  # backward, clip, optimizer; a non-finite one is skipped
                plan.follow(run.parts, step)  # a momentum encoder, an average
            if run.is_log_step(step):  # all ranks compute, rank 0 writes
                health = embedding_health(z_a, z_b) if loss_fn.embeds else {}
                run.log({**health, **loss_fn.stats(), **partner_shares(batch)})
            run.after(step)  # evaluate, save, stop: where due
        return run.finish()


def partner_shares(batch: Batch) -> dict[str, float]:
    """Return whose second view is a partner's in the global batch, and who has none. Collective.

    Shares of the batch, `partners` and `without_partner`; nothing without [pairs].
    """
    if batch.pairs is None:
        return {}
    ids = batch.pairs.ids
    lonely = batch.pairs.lonely
    flags = all_gather_rows(torch.stack([ids[:, 0] != ids[:, 1], lonely], dim=1))  # (N, 2)
    partners, without = flags.double().mean(0).tolist()
    return {"partners": partners, "without_partner": without}


def open_batches(
    plan: PretrainingPlan[PretrainingPartsT], run: Run[PretrainingPartsT]
) -> Generator[Batch]:
    """Open this rank's part of every global step left, its views planned."""
    recipe = plan.recipe
    augment = run.parts.augment

    def plan_views(step: int, batch: Batch) -> Batch:  # in the loader's threads
        # their parameters are a function of (seed, epoch, sample, view)
        return augment.prepare(batch, seed=recipe.seed, number=batch.epoch)

    if recipe.run.cache == "device":
        run.reporter.say(
            f"decoding {plan.order.samples} images into the {run.device.type}'s memory"
        )
    return batches(
        split=plan.split if plan.pairing is None else plan.pairing.split,
        order=plan.order,
        run=recipe.run,
        process=run.process,
        canvas_px=recipe.data.canvas_px,
        first_step=run.first_step,
        device=run.device,
        on_bad=run.quarantine.add,
        prepare=plan_views,
        pairing=plan.pairing,
    )
