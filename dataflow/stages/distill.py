"""On-policy distillation: a teacher scores each token that the student sampled, in place of a reward.

    rollout -> responses -> teacher_log_prob (GPUs of its own) -> teacher_log_probs -> distill_advantage -> actor_update

``teacher_log_prob`` forms the parts of a step: while it scores one part, the student is updated on the part before.
"""

from __future__ import annotations

from dataflow.batch import Batch
from dataflow.engines.base import Teacher
from dataflow.graph import TaskInfo, stage
from dataflow.metrics import Mean
from dataflow.stages.advantage import check_finite
from dataflow.stages.rollout import token_metrics


@stage(writes="teacher_log_probs", on="teacher", role="collects")
def teacher_log_prob(responses: Batch, *, teacher: Teacher, together: int | None = None, task: TaskInfo) -> Batch:
    """Returns the teacher's log-probs of the next groups of the step by index, ``[rows of the part, R]``.

    Args:
        responses: columns of a rollout.
        teacher: scores them.
        together: groups that it scores at a time, which must divide those of a part; None for a part at a time. The
            last digits of a log-prob depend on the rows beside it, so that with a number every policy gets the same.
        task: gives the part.
    """
    groups = sorted(responses.ids)
    if task.take is not None:
        groups = groups[task.part * task.take : (task.part + 1) * task.take]
    size = len(groups) if together is None else together
    pieces = [groups[at : at + size] for at in range(0, len(groups), size)]
    return Batch.concat(teacher.log_probs(responses.select(piece)) for piece in pieces)


@stage(writes="advantages", on="controller", splittable=True)
def distill_advantage(responses: Batch, old_log_probs: Batch, teacher_log_probs: Batch, *, task: TaskInfo) -> Batch:
    """Turns log-probs into advantages: of each sampled token, how much likelier it is under the teacher.

    Its expectation over the student's own samples is the negative reverse KL divergence, KL(student || teacher), token
    by token; each token's advantage counts for that token alone (a discount of 0).

    Args:
        responses: columns of a rollout.
        old_log_probs: log-probs under the weights that the update starts from; or, with ``bypass_mode``, the responses
            with the rollout's own.
        teacher_log_probs: log-probs under the teacher; the same groups in the same order.
        task: takes ``distill/reverse_kl``, the estimated KL per token in nats, and ``distill/agreement``, the share of
            tokens that the teacher likes at least as much as the student.

    Returns:
        ``advantages`` and ``returns``, float32 ``[rows, R]``, 0 after the end of each response.

    Raises:
        DataError: a log-prob is not finite; with the sample.
    """
    task.log(token_metrics(responses))
    data = responses.merge(old_log_probs, teacher_log_probs)
    mask = data["response_mask"]
    own = data["old_log_probs" if "old_log_probs" in data else "rollout_log_probs"]
    for values, whose in ((data["teacher_log_probs"], "teacher"), (own, "student")):
        check_finite(values, f"the {whose}'s log-prob", responses, task, counts=mask)
    gain = (data["teacher_log_probs"] - own) * mask
    tokens = int(mask.sum())
    task.log(
        {
            "distill/reverse_kl": Mean(float(-gain.sum()) / max(1, tokens), tokens),
            "distill/agreement": Mean(float(((gain >= 0) * mask).sum()) / max(1, tokens), tokens),
        }
    )
    return responses.like(advantages=gain, returns=gain)
