"""The proof before running: what it accepts, and what it says about each way to be wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.ir.errors import PlanError, VerifyError
from hetjax.ir.program import Task
from hetjax.passes.schedules import PipelineCosts, check_schedule, schedule


def costs(stages, microbatches, **more):
    return PipelineCosts((1.0,) * stages, (2.0,) * stages, microbatches, **more)


def lists(text):
    """Returns task lists from one line per device: "0:F0 0:F1 0:B0", stage first."""
    out = []
    for line in text.strip().splitlines():
        tasks = []
        for word in line.split():
            stage, name = word.split(":")
            tasks.append(Task(name[0], int(stage), int(name[1:])))
        out.append(tuple(tasks))
    return tuple(out)


@pytest.mark.quick
def test_1f1b_by_hand():
    made = schedule("1f1b", costs(3, 4))
    assert [" ".join(map(str, tasks)) for tasks in made] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert check_schedule(made, 4) == (3, 2, 1)


def test_gpipe_holds_everything():
    assert check_schedule(schedule("gpipe", costs(3, 4)), 4) == (4, 4, 4)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 20))
def test_every_plain_schedule_passes(stages, microbatches):
    for name, peak in (("gpipe", lambda s: microbatches), ("1f1b", lambda s: min(microbatches, stages - s))):
        made = schedule(name, costs(stages, microbatches))
        assert check_schedule(made, microbatches) == tuple(peak(s) for s in range(stages))


@pytest.mark.parametrize(("text", "words"), [
    ("0:B0 0:F0\n1:F0 1:B0", ["deadlock", "s0/B0", "s0/F0"]),
    ("0:F0 0:B0 0:F1 0:B1\n1:F0 1:F1 1:B0 1:B1", ["deadlock", "s0/F1", "s1/B0"]),
    ("0:F0 0:F1 0:B0 0:B1\n1:F0 1:B0 1:F1", ["stage 1 runs B1 never, expected once"]),
    ("0:F0 0:F0 0:F1 0:B0 0:B1", ["stage 0 runs F0 2 times"]),
    ("0:F0 0:F1 0:B1 0:B0", ["stage 0 runs B1 where B0 is due"]),
    ("0:F0 0:F1 0:F2 0:B0 0:B1 0:B2", ["microbatch(es) 2", "only 0 to 1"]),
    ("0:F0 0:F1 0:I0 0:I1 0:W1 0:W0", ["W1 where W0 is due"]),
    ("0:F0 0:F1 0:I0 0:B1 0:W0 0:B0", ["use one of them"]),
    ("0:F0 0:F1 0:B0 0:B1\n2:F0 2:F1 2:B0 2:B1", ["no device runs stage(s) 1"]),
    ("0:F0 0:F1 1:F0 1:F1\n1:B0 1:B1 0:B0 0:B1", ["stage 1 runs on device 0 and on 1"]),
])
def test_names_what_is_wrong(text, words):
    made = lists(text)
    with pytest.raises(VerifyError) as error:
        check_schedule(made, (max(t.microbatch for tasks in made for t in tasks if t.kind == "F") and 2) or 1)
    for word in words:
        assert word in str(error.value)


def test_declared_peak_is_held():
    made = schedule("1f1b", costs(3, 4))
    with pytest.raises(VerifyError, match="device 0 holds up to 3 activations at once, its limit is 2"):
        check_schedule(made, 4, max_in_flight=(2, 2, 1))
    with pytest.raises(PlanError, match="gpipe does not fit in memory"):
        schedule("gpipe", costs(2, 4, max_in_flight=(4, 3)))


def test_split_backward_holds_until_the_weight_gradient():
    made = lists("0:F0 0:I0 0:F1 0:W0 0:I1 0:W1")
    assert check_schedule(made, 2) == (2,)


def test_transfers_that_wait_for_each_other():
    """Two devices that both receive before they send: found though no F or B is out of place."""
    there, back = "x:s0>s1", "dx:s1>s0"
    good = (
        (Task("F", 0, 0), Task("send", 0, 0, there), Task("recv", 0, 0, back), Task("B", 0, 0)),
        (Task("recv", 1, 0, there), Task("F", 1, 0), Task("B", 1, 0), Task("send", 1, 0, back)),
    )
    assert check_schedule(good, 1) == (1, 1)
    bad = ((good[0][0], good[0][2], good[0][1], good[0][3]), good[1])
    with pytest.raises(VerifyError, match="s0/recv0 waits for s1/send0"):
        check_schedule(bad, 1)


def test_bad_costs_are_all_named():
    with pytest.raises(PlanError) as error:
        PipelineCosts((1.0, -1.0), (2.0,), 0, latency_s=(float("nan"),), max_in_flight=(1, 0), weight_share=2,
                      lines=(("up",),))
    text = str(error.value)
    for words in ("forward_s[1] is -1.0", "backward_s has 1 entries, expected 2", "num_microbatches is 0",
                  "latency_s[0] is nan", "max_in_flight[1] is 0", "weight_share is 2", "lines[0] is ('up',)"):
        assert words in text


def test_unknown_schedule_names_the_nearest():
    with pytest.raises(PlanError, match="did you mean gpipe"):
        schedule("gpip", costs(2, 2))
