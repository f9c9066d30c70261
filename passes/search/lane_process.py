"""Lanes in processes of their own: `python -m hetjax.passes.search.lane_process` is one.

Parent and child speak over the child's standard input and output: a `Setting` first; then, if it is asked for, a lower
bound; then for every round the orders of the child's lanes, answered by what they did, or by the error that came up. A child whose parent is gone, however
it went, finds its input closed and ends at once. Ctrl-C is the parent's business.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import queue
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from hetjax.ir.errors import HetjaxError, PlanError
from hetjax.passes.search.evaluator import Evaluator, Stopped
from hetjax.passes.search.lanes import Done, Lane, Order, Setting, lanes_of
from hetjax.passes.search.relaxation import lower_bound_of

# A child's round may end so much later than the search before it is left behind.
_GRACE_S = 2.0
_POLL_S = 0.05


class LaneProcess:
    """A child with lanes.

    Args:
      setting: of the lanes.

    Raises:
      PlanError: the judge cannot be given to another process.
    """

    def __init__(self, setting: Setting):
        self.lanes = setting.lanes
        try:
            told = pickle.dumps(setting)
        except Exception as error:
            raise PlanError(
                f"this problem is searched in one process only: what judges its plans cannot be given to another "
                f"({type(error).__name__}: {error})"
            ) from None
        # No `multiprocessing`: a child of that kind would run the user's script again.
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hetjax.passes.search.lane_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._send(told)

    def ask_bound(self, simple: float) -> None:
        """Has a lower bound worked out, no less than one that is known."""
        self._send(pickle.dumps(simple))

    def bound(self, evaluator: Evaluator) -> float:
        """Returns the lower bound asked for; raises as `done`."""
        return self._answer(evaluator)

    def order(self, orders: Sequence[Order]) -> None:
        """Begins a round."""
        self._send(pickle.dumps(list(orders)))

    def done(self, evaluator: Evaluator) -> list[Done]:
        """Returns what the lanes did.

        Args:
          evaluator: whose stop and budget end the wait.

        Raises:
          Stopped: the search ended, and the child not in time.
          HetjaxError: what came up in the child, or that it ended.
        """
        return self._answer(evaluator)

    def _answer(self, evaluator: Evaluator) -> Any:
        while not select.select([self._output], [], [], _POLL_S)[0]:
            left_s = evaluator.left_s
            if evaluator.stop or (left_s is not None and left_s < -_GRACE_S):
                raise Stopped
        try:
            answer = pickle.load(self._output)
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None
        if not isinstance(answer, tuple):
            return answer
        error, text = answer
        if isinstance(error, HetjaxError):
            raise error
        raise HetjaxError(f"a process of the search failed:\n{text}")

    def close(self) -> None:
        """Ends the child."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):  # what was still to be told, a child that ended needs no more
                pipe.close()

    def _send(self, told: bytes) -> None:
        try:
            self._input.write(told)
            self._input.flush()
        except OSError:
            raise self._ended() from None

    def _ended(self) -> HetjaxError:
        code = self._process.wait()
        return HetjaxError(
            f"a process of the search ended (exit code {code}); it may have been killed for its memory. "
            "Search with fewer processes"
        )


def main() -> None:
    """Runs lanes for a parent until it is gone."""
    # What prints goes to the parent's terminal, not between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    told: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, told), daemon=True).start()
    lanes: list[Lane] = []
    setting: Setting = told.get()
    while True:
        orders = told.get()
        try:
            if not lanes:
                lanes = lanes_of(setting)
            if isinstance(orders, float):
                answer = lower_bound_of(lanes[0].view, orders)
            else:
                answer = [lane.work(order) for lane, order in zip(lanes, orders)]
        except Exception as error:
            answer = (error if isinstance(error, HetjaxError) else None, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


def _listen(source: io.BufferedReader, told: queue.SimpleQueue) -> None:
    """Passes on what the parent says; ends the process where it is gone."""
    try:
        while True:
            told.put(pickle.load(source))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
