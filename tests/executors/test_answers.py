"""Which errors of Ray mean that a process, a node or a value is lost."""

from __future__ import annotations

import pytest

from dataflow.errors import RewardFailed, RunError, ServiceLost
from dataflow.executors.ray import RayExecutor
from dataflow.executors.ray.answers import GONE, cause, died, last_words

pytestmark = pytest.mark.heavy

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:45726: Connection reset by peer."
NOT_MADE = """The actor died because of an error raised in its creation task, ray::trainer.__init__() (pid=1)
  File "host.py", line 1, in __init__
ModuleNotFoundError: No module named 'dataflow'
"""


def of_a_task(error: Exception, text: str = "") -> Exception:
    """The error as Ray raises it for a call."""
    from ray.exceptions import RayTaskError

    wrapped: Exception = RayTaskError("run", text or f"ray::run()\n{error}", error)
    return wrapped


class DistBackendError(RuntimeError):
    """Stands in for torch's, which NCCL raises."""


def test_a_broken_connection_between_ranks_is_a_death() -> None:
    for error in (RuntimeError(GLOO), DistBackendError("NCCL error in: remote process exited")):
        assert died(of_a_task(error))
        assert isinstance(cause(of_a_task(error)), ServiceLost)
    failed = DistBackendError("NCCL error in: c10d, unhandled cuda error\nLast error:\nFailed to CUDA calloc 24 bytes")
    assert str(cause(of_a_task(failed))).endswith("unhandled cuda error Last error: Failed to CUDA calloc 24 bytes")
    own = RuntimeError("CUDA out of memory")
    assert not died(of_a_task(own))
    assert cause(of_a_task(own)) is own
    assert own.__notes__ == ["ray::run()\nCUDA out of memory"]


def test_a_service_may_say_itself_that_it_is_lost_and_a_value_that_is_gone_is_a_lost_service() -> None:
    from ray.exceptions import ObjectLostError

    assert died(of_a_task(ServiceLost("its replica died")))
    error = ObjectLostError("0" * 56, "", "")
    for raised in (error, of_a_task(error)):
        assert not died(raised)  # the service that was called is well
        found = cause(raised)
        assert isinstance(found, ServiceLost)
        assert str(found) == GONE


def test_a_process_that_could_not_begin_says_why() -> None:
    from ray.exceptions import RayActorError

    assert str(cause(RayActorError(error_msg=NOT_MADE))) == (
        "its process could not begin: ModuleNotFoundError: No module named 'dataflow'; give all nodes the same Python "
        "environment."
    )
    assert last_words(RayActorError(error_msg="The actor died.\nMore.")) == "The actor died."


def test_the_traceback_of_a_sentence_of_ours_is_noted_only_if_it_has_frames_of_the_user() -> None:
    from dataflow import reward_agent

    ours = f'  File "{reward_agent.__file__}", line 7, in collect'
    for frames, kept in ((ours, False), (f'{ours}\n  File "/mine/reward.py", line 3, in score', True)):
        error = RewardFailed("sample 1 of group 2: 'score' returned a str")
        cause(of_a_task(error, f"\x1b[36mray::reward.run()\x1b[39m\n{frames}"))
        notes = getattr(error, "__notes__", [])
        assert bool(notes) is kept
        assert all("\x1b" not in note for note in notes)


def test_inputs_that_ray_does_not_take_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def full(value: object) -> None:
        raise ray.exceptions.ObjectStoreFullError("no room")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(RunError, match="Ray's object store does not take the run's inputs: no room"):
        RayExecutor().put(5)
